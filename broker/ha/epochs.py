"""Which master wrote which part of the log: (epoch, start), ascending. An entry ends where the next one starts. Pure.

Two logs are equal up to where the same epoch, from the same start, ends in the first of them: its bytes came from
one master. A master that wrote nothing leaves an entry with the next one's start, which the next one replaces: else the
next one's bytes went under the old name, and a former master's own bytes would pass for them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Entry = tuple[int, int]


class EpochConflict(ValueError):
    """An epoch that can't follow the ones that are there."""


class EpochCache:
    """The entries. Invariant: both numbers ascend, strictly."""

    __slots__ = ("_epochs", "_starts")

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        for epoch, start in entries:
            self.assign(epoch, start)

    def __len__(self) -> int:
        return len(self._epochs)

    def entries(self) -> tuple[Entry, ...]:
        """Oldest first."""
        return tuple(zip(self._epochs, self._starts, strict=True))

    @property
    def last_epoch(self) -> int:
        """-1: none."""
        return self._epochs[-1] if self._epochs else -1

    @property
    def last_start(self) -> int:
        """Of the last epoch; 0: there is none."""
        return self._starts[-1] if self._starts else 0

    def start_of(self, epoch: int) -> int | None:
        """Where an epoch starts, if it is here."""
        return self._starts[self._epochs.index(epoch)] if epoch in self._epochs else None

    def at(self, offset: int) -> tuple[int, int, int | None] | None:
        """Epoch, start and end of the entry that holds an offset; the last one has no end."""
        index = bisect_right(self._starts, offset) - 1
        if index < 0:
            return None
        following = index + 1
        end = self._starts[following] if following < len(self._starts) else None
        return self._epochs[index], self._starts[index], end

    def assign(self, epoch: int, start: int) -> bool:
        """From `start` on the log is written in this epoch. Whether that is news; raises EpochConflict."""
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
        """The log was cut to `end`, or ends there: what starts there has no bytes. Whether that dropped any."""
        keep = len(self._starts)
        while keep and self._starts[keep - 1] >= end:
            keep -= 1
        return self._keep(keep)

    def drop_above(self, end: int) -> bool:
        """At a start: what begins above the log's end never had a byte, or lost them all. Whether there was any."""
        return self._keep(bisect_right(self._starts, end))

    def _keep(self, count: int) -> bool:
        dropped = count < len(self._starts)
        del self._epochs[count:], self._starts[count:]
        return dropped

    def forget_below(self, offset: int) -> bool:
        """The log begins at `offset` now: entries that end there or below hold nothing. Whether there was any."""
        gone = max(bisect_right(self._starts, offset) - 1, 0)
        del self._epochs[:gone], self._starts[:gone]
        return gone > 0


# -- where two logs part


def consistent_point(local: Sequence[Entry], local_end: int, master: Sequence[Entry], master_end: int) -> int | None:
    """Up to where two logs are surely equal; None: nowhere that can be told."""
    masters = {epoch: index for index, (epoch, _) in enumerate(master)}
    for index in reversed(range(len(local))):
        epoch, start = local[index]
        at = masters.get(epoch)
        if at is not None and master[at][1] == start:
            point = min(_end(local, index, local_end), _end(master, at, master_end))
            if point >= start:
                return point
    # Both lists go back to where a log begins, and part there: the first master's bytes were never anybody else's.
    return 0 if local and master and local[0][1] == master[0][1] == 0 else None


def _end(entries: Sequence[Entry], index: int, log_end: int) -> int:
    return entries[index + 1][1] if index + 1 < len(entries) else log_end


def cut_point(
    local: Sequence[Entry],
    local_end: int,
    master: Sequence[Entry],
    master_end: int,
    *,
    master_epoch: int,
    followed_epoch: int,
    last_confirm: int,
) -> int | None:
    """To where a slave cuts its log before it follows this master; None: the two have nothing in common.

    `master_epoch` is the one for which the controller elected the master. RocketMQ's master keeps the former epoch as
    long as it was elected without a write in between, and goes on under it: then equal names prove nothing above what
    was confirmed. Once its log was cut for this master (`followed_epoch`), all that a slave has is from it, and a mere
    reconnection cuts nothing: it may be what the slave has acknowledged, and its own confirm lags behind.
    """
    point = consistent_point(local, local_end, master, master_end)
    if point is None:
        return None
    if followed_epoch != master_epoch and all(epoch != master_epoch for epoch, _ in master):
        return min(point, last_confirm)
    return point
