"""Epochs of a log, which show which master wrote which part of it: (epoch, start), ascending. Pure.

An entry ends where the next one starts. Two logs are equal up to a point if both have the same epoch with the same
start: up to the nearer end of the two entries, all bytes were written by one master.

A master that wrote nothing leaves an entry with the same start as the next one, which replaces it. Otherwise the next
master's bytes would be filed under the former epoch, and would pass for the former master's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Entry = tuple[int, int]


class EpochConflict(ValueError):
    """An epoch that can't follow the existing ones."""


class EpochCache:
    """Epochs of one log. Invariant: epochs and starts ascend strictly."""

    __slots__ = ("_epochs", "_starts")

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        for epoch, start in entries:
            self.assign(epoch, start)

    def __len__(self) -> int:
        return len(self._epochs)

    def entries(self) -> tuple[Entry, ...]:
        """Return all entries, oldest first."""
        return tuple(zip(self._epochs, self._starts, strict=True))

    @property
    def last_epoch(self) -> int:
        """Return the last epoch; -1: there is none."""
        return self._epochs[-1] if self._epochs else -1

    @property
    def last_start(self) -> int:
        """Return the start of the last epoch; 0: there is none."""
        return self._starts[-1] if self._starts else 0

    def start_of(self, epoch: int) -> int | None:
        """Return the start of an epoch; None: it is unknown."""
        return self._starts[self._epochs.index(epoch)] if epoch in self._epochs else None

    def at(self, offset: int) -> tuple[int, int, int | None] | None:
        """Return (epoch, start, end) of the entry that contains an offset; the end of the last one is None."""
        index = bisect_right(self._starts, offset) - 1
        if index < 0:
            return None
        following = index + 1
        end = self._starts[following] if following < len(self._starts) else None
        return self._epochs[index], self._starts[index], end

    def assign(self, epoch: int, start: int) -> bool:
        """Record that `epoch` begins at `start`. Return whether that is new. Raise EpochConflict."""
        if epoch < 0 or start < 0:
            raise EpochConflict(f"epoch {epoch} from {start} on")
        if self._epochs:
            last, last_start = self._epochs[-1], self._starts[-1]
            if (epoch, start) == (last, last_start):
                return False
            if epoch <= last or start < last_start:
                raise EpochConflict(f"epoch {epoch} from {start} on, after epoch {last} from {last_start} on")
            if start == last_start:
                self._epochs.pop()
                self._starts.pop()
        self._epochs.append(epoch)
        self._starts.append(start)
        return True

    def truncate(self, end: int) -> bool:
        """Drop the entries at or above `end`, which have no bytes after a truncation. Return whether there were any."""
        keep = len(self._starts)
        while keep and self._starts[keep - 1] >= end:
            keep -= 1
        return self._keep(keep)

    def drop_above(self, end: int) -> bool:
        """Drop the entries above the end of the log. Return whether there were any.

        At a start, such an entry never had a byte, or has lost all of them.
        """
        return self._keep(bisect_right(self._starts, end))

    def _keep(self, count: int) -> bool:
        dropped = count < len(self._starts)
        del self._epochs[count:], self._starts[count:]
        return dropped

    def forget_below(self, offset: int) -> bool:
        """Drop the entries that end at or below `offset`, where the log begins now. Return whether there were any."""
        dropped_count = max(bisect_right(self._starts, offset) - 1, 0)
        del self._epochs[:dropped_count], self._starts[:dropped_count]
        return dropped_count > 0


# -- divergence of two logs


def consistent_point(local: Sequence[Entry], local_end: int, master: Sequence[Entry], master_end: int) -> int | None:
    """Return the offset up to which two logs are surely equal; None: there is none."""
    masters = {epoch: index for index, (epoch, _) in enumerate(master)}
    for index in reversed(range(len(local))):
        epoch, start = local[index]
        at = masters.get(epoch)
        if at is not None and master[at][1] == start:
            point = min(_end(local, index, local_end), _end(master, at, master_end))
            if point >= start:
                return point
    # Both lists go back to the start of the log and differ from there on. Bytes of different first masters are never
    # equal.
    return 0 if local and master and local[0][1] == master[0][1] == 0 else None


def _end(entries: Sequence[Entry], index: int, log_end: int) -> int:
    return entries[index + 1][1] if index + 1 < len(entries) else log_end


def truncation_point(
    local: Sequence[Entry],
    local_end: int,
    master: Sequence[Entry],
    master_end: int,
    *,
    master_epoch: int,
    followed_epoch: int,
    last_confirm: int,
) -> int | None:
    """Return the offset to which a slave truncates its log before it follows a master; None: the logs share nothing.

    `master_epoch` is the epoch for which the controller elected the master. RocketMQ's master keeps the former epoch if
    it was elected without a write in between, and continues under it. Equal epochs prove nothing above the confirm
    offset then. Once the log was truncated for this master (`followed_epoch`), all bytes are the master's, and a
    reconnection truncates nothing. The slave may have acknowledged these bytes while its own confirm offset lags
    behind.
    """
    point = consistent_point(local, local_end, master, master_end)
    if point is None:
        return None
    if followed_epoch != master_epoch and all(epoch != master_epoch for epoch, _ in master):
        return min(point, last_confirm)
    return point
