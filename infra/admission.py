"""How many connections a server lets in: what it is set to, and what its process can hold."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class Admission:
    """Who comes when it is full is refused, and counted; told each time the count has doubled."""

    def __init__(self, configured: int, room: Callable[[], int] | None = None, *, with_tls: bool = False) -> None:
        """`room`: how many the process has descriptors for now; None: as many as are configured."""
        self._configured, self._room = configured, room
        self._with_tls = with_tls
        self.refused = 0

    @property
    def most(self) -> int:
        """How many connections there may be now."""
        return self._all - self.undecided

    @property
    def undecided(self) -> int:
        """A quarter is for those that have not said yet whether they speak TLS, or shake hands."""
        return max(1, self._all // 4) if self._with_tls else 0

    @property
    def _all(self) -> int:
        return self._configured if self._room is None else min(self._configured, self._room())

    def admits(self, remote: tuple[str, int], count: int) -> bool:
        """Whether there may be one more than there are."""
        if count < self.most:
            return True
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            log.warning("refusing %s:%d: %d connections already", *remote, count)
        return False
