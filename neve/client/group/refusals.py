"""What keeps a consumer from its messages, which it asks for again and again.

What lasts is told as a warning once, all else quietly; the application may ask what it is now.
"""

from __future__ import annotations

import logging

from neve.errors import BrokerError, NeveError
from neve.remoting.codes import ResponseCode

#: Time alone does not mend these.
LASTING = frozenset(
    {ResponseCode.NO_PERMISSION, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, ResponseCode.SUBSCRIPTION_PARSE_FAILED}
)


class Refusals:
    """Of one consumer."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: set[int] = set()
        self._open: dict[object, NeveError] = {}  # what fails, and why; the latest last

    @property
    def latest(self) -> NeveError | None:
        """Of what has not succeeded since."""
        return next(reversed(self._open.values()), None)

    def note(self, what: object, error: NeveError) -> None:
        """`what` failed."""
        code = error.code if isinstance(error, BrokerError) and error.code in LASTING else None
        level = logging.INFO if code is None or code in self._told else logging.WARNING
        if code is not None:
            self._told.add(code)
        self._open.pop(what, None)
        self._open[what] = error
        self._log.log(level, "%s: %s", what, error)

    def over(self, what: object) -> None:
        """`what` succeeded, or is not tried any more."""
        if self._open:
            self._open.pop(what, None)
