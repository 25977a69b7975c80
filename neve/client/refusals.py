"""What a broker refuses to a consumer, which asks again and again: told as a warning once, then quietly."""

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

    def note(self, what: object, error: NeveError) -> None:
        code = error.code if isinstance(error, BrokerError) and error.code in LASTING else None
        level = logging.INFO if code is None or code in self._told else logging.WARNING
        if code is not None:
            self._told.add(code)
        self._log.log(level, "%s: %s", what, error)
