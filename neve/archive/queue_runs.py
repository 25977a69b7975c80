"""Where the offsets of one queue are: runs inside row groups, gaps, and the minimum below which all has expired.

A message that exists beats a gap: a gap is told by a broker whose log lacked what an older copy of its disk may still
have, and archive later. So no gap holds what a run holds, and gaps lie apart.

One thread writes, any number read, and readers take no lock: a broker's loop asks at each pull, and an entry of the
journal may change a hundred thousand runs. A reader takes a list once; a list that it may hold only grows at its end,
any other change makes a new one.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from neve.archive.journal import CommittedName, RowGroup

Run = tuple[int, int, CommittedName, int]  # first, last, object, row group
_ABOVE = 1 << 63  # with an offset before it, a key above each run or gap that begins there


class Location(NamedTuple):
    """The run of one queue inside one row group."""

    name: CommittedName
    row_group: int
    queue: int
    first: int
    last: int

    @property
    def group(self) -> RowGroup:
        return self.name.row_groups[self.row_group]


class GapHit(NamedTuple):
    """The offset exists nowhere; reading goes on at `next_offset`."""

    first: int
    next_offset: int


class QueueRuns:
    """Runs and gaps are sorted by their first offsets."""

    __slots__ = ("gaps", "minimum", "queue", "runs")

    def __init__(self, queue: int) -> None:
        self.queue = queue
        self.runs: list[Run] = []
        self.gaps: list[tuple[int, int]] = []
        self.minimum = 0  # recorded: moves back only where an expiry is taken back

    # ---- writing

    def enter(self, first: int, last: int, name: CommittedName, row_group: int) -> bool:
        """Whether it took something out of a gap."""
        run = (first, last, name, row_group)
        if not self.runs or self.runs[-1][0] <= first:
            self.runs.append(run)
        else:
            index = bisect_right(self.runs, (first, _ABOVE))
            self.runs = [*self.runs[:index], run, *self.runs[index:]]
        if not _touching(self.gaps, first, last):
            return False
        self.gaps = [rest for gap in self.gaps for rest in without(*gap, [(first, last)])]
        return True

    def drop(self, gone: set[str], count: int) -> None:
        """Take out the runs of these objects, so many: as a rule the lowest, and then no other is looked at."""
        runs, lowest = self.runs, 0
        while lowest < len(runs) and runs[lowest][2].key in gone:
            lowest += 1
        rest = runs[lowest:]
        self.runs = rest if lowest == count else [run for run in rest if run[2].key not in gone]

    def swap(self, gone: set[str], runs: Iterable[Run]) -> None:
        """Take out the runs of these objects and put in others that hold the same offsets: seen in one step."""
        self.runs = sorted([*(run for run in self.runs if run[2].key not in gone), *runs], key=_first)

    def add_gap(self, first: int, last: int) -> list[tuple[int, int]]:
        """The parts of it that no run holds and no gap has told."""
        added = without(first, last, _touching(self.runs, first, last) + _touching(self.gaps, first, last))
        if not self.gaps or self.gaps[-1][1] < first:
            self.gaps += added
        else:
            self.gaps = sorted([*self.gaps, *added])
        return added

    # ---- asking

    def find(self, offset: int) -> Location | GapHit | None:
        if offset < self.minimum:
            return None
        gaps, runs = self.gaps, self.runs  # in this order: a run is entered before its offsets leave a gap
        index = bisect_right(runs, (offset, _ABOVE)) - 1
        if index >= 0 and runs[index][1] >= offset:
            return self._location(runs[index])
        index = bisect_right(gaps, (offset, _ABOVE)) - 1
        if index >= 0 and gaps[index][1] >= offset:
            return GapHit(gaps[index][0], gaps[index][1] + 1)
        return None

    def by_time(self, time_ms: int) -> Location | None:
        minimum = self.minimum
        # Not a binary search: a group whose records are all damaged has no time (-1) and would mislead it.
        for run in self.runs:
            if run[1] >= minimum and run[2].row_groups[run[3]].newest_ms >= time_ms:
                return self._location(run)
        return None

    def min_offset(self) -> int | None:
        runs, minimum = self.runs, self.minimum
        if not runs or runs[-1][1] < minimum:
            return None
        index = bisect_right(runs, (minimum, _ABOVE)) - 1
        if index >= 0 and runs[index][1] >= minimum:
            return minimum
        return runs[index + 1][0]  # not the recorded minimum, where that lies in a gap

    def max_offset(self) -> int | None:
        runs = self.runs
        return runs[-1][1] + 1 if runs else None

    def has_all(self, first: int, end: int) -> bool:
        runs = self.runs
        index = bisect_right(runs, (first, _ABOVE)) - 1
        while first < end:
            if not 0 <= index < len(runs) or not runs[index][0] <= first <= runs[index][1]:
                return False
            first, index = runs[index][1] + 1, index + 1
        return True

    def count_existing(self, first: int, end: int) -> int:
        """How many offsets of [first, end) lie in no gap."""
        return max(0, end - first) - sum(_overlaps(self.gaps, first, end))

    def locations(self) -> Iterator[Location]:
        return map(self._location, tuple(self.runs))

    def locations_from(self, offset: int) -> Iterator[Location]:
        """Those that hold an offset from this one on, made as they are asked for."""
        runs = self.runs
        begin = max(bisect_right(runs, (offset, _ABOVE)) - 1, 0)
        return (self._location(runs[index]) for index in range(begin, len(runs)) if runs[index][1] >= offset)

    def _location(self, run: Run) -> Location:
        return Location(run[2], run[3], self.queue, run[0], run[1])


def without(first: int, last: int, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is left of first-last outside these spans."""
    left = []
    for low, high in sorted(spans):
        if first < low:
            left.append((first, min(low - 1, last)))
        first = max(first, high + 1)
        if first > last:
            break
    return [*left, (first, last)] if first <= last else left


def _first(run: Run) -> int:
    return run[0]


def _touching(spans: Sequence[Run] | Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Those of the sorted spans, which do not overlap, that hold an offset of first-last."""
    if not spans or spans[-1][1] < first:
        return []
    low, high = bisect_right(spans, (first, _ABOVE)), bisect_right(spans, (last, _ABOVE))
    return [(span[0], span[1]) for span in spans[max(low - 1, 0) : high] if span[1] >= first]


def _overlaps(spans: list[tuple[int, int]], first: int, end: int) -> Iterable[int]:
    """How much of [first, end) each of the sorted spans covers, which do not overlap."""
    index = max(bisect_right(spans, (first, _ABOVE)) - 1, 0)
    for low, last in spans[index:]:
        if low >= end:
            break
        covered = min(last + 1, end) - max(low, first)
        if covered > 0:
            yield covered
