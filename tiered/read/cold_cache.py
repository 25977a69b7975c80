"""Decoded row groups in memory, bounded in bytes, and in how many of them are mappings: each holds a descriptor.

A group is read in many pulls, front to back: that is one use. It is used again when somebody reads a queue in it at or
below a place that was read before; only then is it protected from the next scan.
"""

from dataclasses import dataclass, field

from tiered.worker.client import DecodedGroup
from tiered.worker.segmented_lru import SegmentedLru

Key = tuple[str, int]  # object, row group


@dataclass(slots=True)
class _Cached:
    group: DecodedGroup
    ahead: bool  # fetched for a reader that has not come yet
    highest: dict[int, int] = field(default_factory=dict)  # queue -> the highest offset a read began at


class GroupCache:
    """Not thread-safe: the reader locks."""

    def __init__(self, capacity: int, mapped_max: int = 1024) -> None:
        self._held: SegmentedLru[Key, _Cached] = SegmentedLru(capacity)
        self._mapped_max = mapped_max
        self.mapped = 0
        # Bytes fetched ahead that no reader has reached: read-ahead stops before it evicts its own work.
        self.ahead_bytes = 0

    @property
    def capacity(self) -> int:
        return self._held.capacity

    @property
    def nbytes(self) -> int:
        return self._held.nbytes

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def get(self, key: Key, queue: int, offset: int) -> DecodedGroup | None:
        """For a read that begins at an offset of a queue."""
        cached = self._held.peek(key)
        if cached is None:
            return None
        highest = cached.highest.get(queue, -1)
        self._held.use(key, again=offset < highest)
        cached.highest[queue] = max(highest, offset)
        self._reached(cached)
        return cached.group

    def put(self, key: Key, group: DecodedGroup, *, ahead: bool) -> None:
        self.ahead_bytes += group.nbytes if ahead else 0
        self.mapped += group.is_mapped
        for _, evicted in self._held.put(key, _Cached(group, ahead), group.nbytes):
            self._dropped(evicted)
        while self.mapped > self._mapped_max and (oldest := self._held.oldest()) is not None:
            gone = self._held.pop(oldest)
            assert gone is not None
            self._dropped(gone)

    def _dropped(self, cached: _Cached) -> None:
        self.mapped -= cached.group.is_mapped
        self._reached(cached)

    def _reached(self, cached: _Cached) -> None:
        if cached.ahead:
            cached.ahead = False
            self.ahead_bytes -= cached.group.nbytes
