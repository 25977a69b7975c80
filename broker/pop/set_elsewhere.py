"""Offset resets of groups that pop: the pop book follows them, and waiting pops are woken."""

from __future__ import annotations

from broker.long_polling.pop_long_polling import PopLongPolling
from broker.pop.pop_book import PopBook


class SetElsewhere:
    """Listener of the offset table."""

    def __init__(self, pops: PopBook, polling: PopLongPolling) -> None:
        self._pops, self._polling = pops, polling

    def set(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Move a group that pops to `offset`."""
        if self._pops.set_elsewhere(group, topic, queue_id, offset):
            self._polling.wake(group, topic, queue_id)
