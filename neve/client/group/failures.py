"""The errors that keep a consumer from receiving messages.

Pulls, pops and rebalances are retried until they succeed. A permanent error is also raised to the application: it
lasts until a permission, a group or a filter is changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from neve.errors import BrokerError, NeveError
from neve.remoting.codes import ResponseCode

log = logging.getLogger(__name__)

PERMANENT = frozenset(
    {ResponseCode.NO_PERMISSION, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, ResponseCode.SUBSCRIPTION_PARSE_FAILED}
)


class Failures:
    """The failing operations of one consumer. `wake` wakes the callers that wait for a message."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._failing: dict[str, NeveError] = {}  # by operation; the latest last
        self._permanent: dict[str, NeveError] = {}  # those that are not yet raised
        self._crash: BaseException | None = None

    @property
    def latest(self) -> NeveError | None:
        """The latest error of an operation that has not succeeded since."""
        return next(reversed(self._failing.values()), None)

    def record(self, operation: str, error: NeveError) -> None:
        """Record that an operation failed and is retried; log it as a warning unless it was failing already."""
        level = logging.INFO if operation in self._failing else logging.WARNING
        log.log(level, "%s failed, retrying: %s", operation, error)
        self._failing.pop(operation, None)
        self._failing[operation] = error
        if isinstance(error, BrokerError) and error.code in PERMANENT:
            self._permanent[operation] = error
            self._wake()

    def resolve(self, operation: str) -> None:
        """Record that an operation succeeded or is no longer tried."""
        if self._failing:
            self._failing.pop(operation, None)
            self._permanent.pop(operation, None)

    def watch(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Return a task of the consumer; if it ends with an error, that error is raised to the application."""
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash = error
            self._wake()

    def raise_permanent(self) -> None:
        """Raise a permanent error, once for each failed attempt, or the error that ended a task of the consumer."""
        if self._crash is not None:
            raise self._crash
        if self._permanent:
            raise self._permanent.pop(next(iter(self._permanent)))
