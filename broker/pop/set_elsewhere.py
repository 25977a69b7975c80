"""A group that pops is sent elsewhere by a commit or a reset: its book follows, and who waits looks again."""

from __future__ import annotations

from broker.long_polling.pop_long_polling import PopLongPolling
from broker.pop.pop_book import PopBook


class SetElsewhere:
    """Told by the table of positions."""

    def __init__(self, pops: PopBook, polling: PopLongPolling) -> None:
        self._pops, self._polling = pops, polling

    def set(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """The group goes on there."""
        if self._pops.set_elsewhere(group, topic, queue_id, offset):
            self._polling.wake(group, topic, queue_id)
