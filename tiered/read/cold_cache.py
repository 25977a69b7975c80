"""Cache of decoded row groups in memory, limited in bytes and in mappings, each of which holds file descriptors.

    put ahead ──▶ coming ──reached──▶ used once ──used again──▶ protected      (the last two: a segmented LRU)
    put ──────────────────────────────▲

A group that was fetched ahead waits for its reader outside the LRU. There it would be older than groups that readers
have finished, and would be evicted first. A reader may never reach it, so it is evicted when twice the cache's
capacity has been put after it.

A reader pulls a group many times, front to back, which counts as one use. It is used again when a read of a queue
begins at or below an earlier one. Only then is it protected from the next scan.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from tiered.worker.client import DecodedGroup
from tiered.worker.segmented_lru import SegmentedLru

Key = tuple[str, int]  # key of the object, index of the row group
_WAITS = 2  # multiple of the capacity that is put until a group fetched ahead is evicted


@dataclass(slots=True)
class _Cached:
    group: DecodedGroup
    highest: dict[int, int] = field(default_factory=dict)  # queue -> highest offset at which a read began


class _Prefetched(NamedTuple):
    group: DecodedGroup
    until: int  # the group is evicted when `_put_bytes` exceeds it


class GroupCache:
    """The cache. Not thread-safe: the caller locks."""

    def __init__(self, capacity: int, mapped_max: int = 1024) -> None:
        self._held: SegmentedLru[Key, _Cached] = SegmentedLru(capacity)
        self._prefetched: OrderedDict[Key, _Prefetched] = OrderedDict()
        self._mapped_max = mapped_max
        self._put_bytes = 0
        self.mapped = 0
        # Bytes fetched ahead that no reader has reached; read-ahead is limited by them.
        self.ahead_bytes = 0

    @property
    def capacity(self) -> int:
        return self._held.capacity

    @property
    def nbytes(self) -> int:
        return self._held.nbytes + self.ahead_bytes

    def __contains__(self, key: Key) -> bool:
        return key in self._prefetched or key in self._held

    def get(self, key: Key, queue: int, offset: int) -> DecodedGroup | None:
        """Return a group for a read that begins at an offset of a queue; None if it is not cached."""
        if key in self._prefetched:
            self._keep(key, self._reached(key))
        cached = self._held.peek(key)
        if cached is None:
            return None
        highest = cached.highest.get(queue, -1)
        self._held.use(key, again=offset < highest)
        cached.highest[queue] = max(highest, offset)
        return cached.group

    def put(self, key: Key, group: DecodedGroup, *, ahead: bool) -> None:
        self._put_bytes += group.nbytes
        if key in self:
            return
        self.mapped += group.is_mapped
        if ahead:
            self._prefetched[key] = _Prefetched(group, self._put_bytes + _WAITS * self.capacity)
            self.ahead_bytes += group.nbytes
        else:
            self._keep(key, group)
        self._shrink()

    def forget(self, key: Key) -> None:
        if key in self._prefetched:
            self.mapped -= self._reached(key).is_mapped
        elif (removed := self._held.pop(key)) is not None:
            self.mapped -= removed.group.is_mapped

    def _reached(self, key: Key) -> DecodedGroup:
        group, _ = self._prefetched.pop(key)
        self.ahead_bytes -= group.nbytes
        return group

    def _keep(self, key: Key, group: DecodedGroup) -> None:
        for _, removed in self._held.put(key, _Cached(group), group.nbytes):
            self.mapped -= removed.group.is_mapped

    def _shrink(self) -> None:
        while self._prefetched and next(iter(self._prefetched.values())).until < self._put_bytes:
            self._drop_prefetched()
        while self.nbytes > self.capacity or self.mapped > self._mapped_max:
            oldest = self._held.oldest()
            if oldest is None:
                self._drop_prefetched()
            elif (removed := self._held.pop(oldest)) is not None:
                self.mapped -= removed.group.is_mapped

    def _drop_prefetched(self) -> None:
        self.mapped -= self._reached(next(iter(self._prefetched))).is_mapped
