"""Decoded row groups in memory, bounded in bytes, and in how many of them are mappings: each holds descriptors.

    put ahead ──▶ coming ──reached──▶ used once ──used again──▶ protected      (the last two: a segmented LRU)
    put ──────────────────────────────▲

What was fetched ahead waits for its reader apart: by time alone it is older than what readers have done with since, and
would go first. Nobody may come for it, so it goes when twice the cache's bytes have been put behind it.

A group is read in many pulls, front to back: that is one use. It is used again when somebody reads a queue in it at or
below a place that was read before; only then is it protected from the next scan.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from tiered.worker.client import DecodedGroup
from tiered.worker.segmented_lru import SegmentedLru

Key = tuple[str, int]  # object, row group
_WAITS = 2  # times the cache's bytes that are put meanwhile


@dataclass(slots=True)
class _Cached:
    group: DecodedGroup
    highest: dict[int, int] = field(default_factory=dict)  # queue -> the highest offset a read began at


class _Coming(NamedTuple):
    group: DecodedGroup
    until: int  # so many bytes have been put


class GroupCache:
    """Not thread-safe: the reader locks."""

    def __init__(self, capacity: int, mapped_max: int = 1024) -> None:
        self._held: SegmentedLru[Key, _Cached] = SegmentedLru(capacity)
        self._coming: OrderedDict[Key, _Coming] = OrderedDict()
        self._mapped_max = mapped_max
        self._put_bytes = 0
        self.mapped = 0
        # Bytes fetched ahead that no reader has reached: read-ahead stops where these would be too many.
        self.ahead_bytes = 0

    @property
    def capacity(self) -> int:
        return self._held.capacity

    @property
    def nbytes(self) -> int:
        return self._held.nbytes + self.ahead_bytes

    def __contains__(self, key: Key) -> bool:
        return key in self._coming or key in self._held

    def get(self, key: Key, queue: int, offset: int) -> DecodedGroup | None:
        """For a read that begins at an offset of a queue."""
        if key in self._coming:
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
            self._coming[key] = _Coming(group, self._put_bytes + _WAITS * self.capacity)
            self.ahead_bytes += group.nbytes
        else:
            self._keep(key, group)
        self._shrink()

    def forget(self, key: Key) -> None:
        if key in self._coming:
            self.mapped -= self._reached(key).is_mapped
        elif (gone := self._held.pop(key)) is not None:
            self.mapped -= gone.group.is_mapped

    def _reached(self, key: Key) -> DecodedGroup:
        group, _ = self._coming.pop(key)
        self.ahead_bytes -= group.nbytes
        return group

    def _keep(self, key: Key, group: DecodedGroup) -> None:
        for _, gone in self._held.put(key, _Cached(group), group.nbytes):
            self.mapped -= gone.group.is_mapped

    def _shrink(self) -> None:
        while self._coming and next(iter(self._coming.values())).until < self._put_bytes:
            self._drop_coming()
        while self.nbytes > self.capacity or self.mapped > self._mapped_max:
            oldest = self._held.oldest()
            if oldest is None:
                self._drop_coming()
            elif (gone := self._held.pop(oldest)) is not None:
                self.mapped -= gone.group.is_mapped

    def _drop_coming(self) -> None:
        self.mapped -= self._reached(next(iter(self._coming))).is_mapped
