"""A hot log with requests for one range at a time, without concurrent requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from lifecycle.hot_store import Aged
from tiered.write.entry_run import EntryRun
from tiered.write.offload_plan import FoundEntries, TopicRange, TopicUnreadable


class OneByOne(Protocol):
    """`entries_of` and `aged`, implemented with single requests."""

    def entries(self, topic: str, start: int, end: int) -> Mapping[int, EntryRun]: ...

    def store_time(self, topic: str, queue: int, offset: int) -> int: ...

    def queues_of(self, topic: str) -> Sequence[int]: ...

    def min_offset(self, topic: str, queue: int) -> int: ...

    def offset_by_time(self, topic: str, queue: int, time_ms: int, upper: bool) -> int: ...

    def entries_of(
        self, ranges: Sequence[TopicRange], *, timed: bool = False
    ) -> Iterator[FoundEntries | TopicUnreadable]:
        for wanted in ranges:
            try:
                runs = self.entries(wanted.topic, wanted.start, wanted.end)
                queue = min(runs, key=lambda queue: int(runs[queue].physical[0]), default=None)
                oldest_ms = -1
                if timed and queue is not None:
                    oldest_ms = self.store_time(wanted.topic, queue, runs[queue].first_offset)
            except TopicUnreadable as error:
                yield error
            else:
                yield FoundEntries(runs, oldest_ms)

    def aged(self, before: Mapping[str, int]) -> Iterator[tuple[str, Aged | TopicUnreadable]]:
        """Return the ends of expired messages by queue; other messages are checked again."""
        for topic, time_ms in before.items():
            ends = {queue: self.offset_by_time(topic, queue, time_ms, False) for queue in self.queues_of(topic)}
            yield topic, Aged({queue: end for queue, end in ends.items() if end > self.min_offset(topic, queue)}, -1)
