"""Segmented LRU cache, limited in bytes, which a scan cannot flush.

    put ──▶ probation ──used again──▶ protected (at most 3/4 of the bytes)
               │ ▲                        │
     evicted ◀─┘ └──── pushed out ◀───────┘

Entries that were used once are evicted first, oldest first. A protected entry is pushed out only if it is the least
recently used one and the protected part is full. It then returns to probation. Not thread-safe: the caller locks.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_PROTECTED_SHARE = 0.75


class SegmentedLru(Generic[K, V]):
    """A mapping limited by the sum of its values' sizes. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self._probation: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._protected: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._protected_bytes = 0
        self._protected_max = int(capacity * _PROTECTED_SHARE)

    def __contains__(self, key: K) -> bool:
        return key in self._probation or key in self._protected

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def peek(self, key: K) -> V | None:
        """Return the value without changing its order."""
        held = self._protected.get(key) or self._probation.get(key)
        return held[0] if held is not None else None

    def oldest(self) -> K | None:
        """Return the key that would be evicted next."""
        return next(iter(self._probation or self._protected), None)

    def use(self, key: K, *, again: bool) -> V | None:
        """Return the value and make it the most recent of its segment. `again`: move it to the protected part."""
        if key in self._protected:
            self._protected.move_to_end(key)
        elif key in self._probation:
            self._probation.move_to_end(key)
            if again:
                self._protect(key)
        return self.peek(key)

    def put(self, key: K, value: V, nbytes: int) -> list[tuple[K, V]]:
        """Add a value. Returns the evicted entries, or the value itself if it is too large or already present."""
        if nbytes > self.capacity or key in self:
            return [(key, value)]
        self._probation[key] = (value, nbytes)
        self.nbytes += nbytes
        removed = []
        while self.nbytes > self.capacity:
            oldest = next(iter(self._probation))
            victim = oldest if oldest != key else next(iter(self._protected))
            dropped = self.pop(victim)
            assert dropped is not None
            removed.append((victim, dropped))
        return removed

    def pop(self, key: K) -> V | None:
        held = self._probation.pop(key, None)
        if held is None:
            held = self._protected.pop(key, None)
            if held is None:
                return None
            self._protected_bytes -= held[1]
        self.nbytes -= held[1]
        return held[0]

    def _protect(self, key: K) -> None:
        held = self._probation.pop(key)
        self._protected[key] = held
        self._protected_bytes += held[1]
        while self._protected_bytes > self._protected_max and len(self._protected) > 1:
            oldest, pushed = self._protected.popitem(last=False)
            self._protected_bytes -= pushed[1]
            self._probation[oldest] = pushed
