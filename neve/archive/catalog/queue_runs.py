"""The offsets of one queue: runs inside row groups, gaps, and the minimum below which everything has expired.

An existing message beats a gap: a broker whose log lacked a message may record a gap for it, while an older copy of its
disk still has the message and archives it later. So no gap contains an offset of a run, and gaps are disjoint.

The runs are packed in the topic's blocks. This module knows which block has which offsets, so one block is unpacked to
find an offset.

One thread writes, any number of threads read without a lock: a broker's loop reads at each pull, and an entry may
change a hundred thousand runs. Blocks and spans are immutable; a change makes new ones. A list of gaps is only appended
to in place.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from neve.archive.catalog.name_blocks import ABOVE, Block, Run
from neve.archive.format.journal import CommittedObject, RowGroup


class Location(NamedTuple):
    """A run: consecutive offsets of one queue inside one row group."""

    name: CommittedObject
    row_group: int
    queue: int
    first: int
    last: int

    @property
    def group(self) -> RowGroup:
        return self.name.row_groups[self.row_group]


class GapHit(NamedTuple):
    """A gap that contains the requested offset; reading continues at `next_offset`."""

    first: int
    next_offset: int


class Spans:
    """The blocks with offsets of a queue, ordered by first offset. Immutable except for a cached result."""

    __slots__ = ("blocks", "end", "firsts", "is_tiled", "lasts", "lowest")

    def __init__(self, firsts: "array[int]", lasts: "array[int]", blocks: list[Block], *, is_tiled: bool) -> None:
        self.firsts, self.lasts, self.blocks = firsts, lasts, blocks
        self.is_tiled = is_tiled  # the ranges do not overlap, as is usual for a log
        self.end = max(lasts) + 1 if lasts and not is_tiled else lasts[-1] + 1 if lasts else 0
        self.lowest: tuple[int, int | None] = (-1, None)  # cache: a minimum, and the lowest offset from it on

    def with_more(self, more: Sequence[tuple[int, int, Block]], before: Block | None) -> "Spans":
        """Return spans with further blocks, whose objects start above all others.

        The first of them replaces the block `before` that it extends; None if that has nothing of this queue.
        """
        is_last = bool(self.blocks) and self.blocks[-1] is before
        keep = len(self.blocks) - is_last
        if not self.is_tiled or (before is not None and not is_last and before in self.blocks):
            rest = zip(self.firsts, self.lasts, self.blocks, strict=True)
            return spans_of([*(one for one in rest if one[2] is not before), *more])
        firsts, lasts = self.firsts[:keep], self.lasts[:keep]
        is_tiled = True
        for first, last, _ in more:
            is_tiled = is_tiled and (not lasts or lasts[-1] < first)
            firsts.append(first)
            lasts.append(last)
        blocks = [*self.blocks[:keep], *(block for _, _, block in more)]
        return (
            Spans(firsts, lasts, blocks, is_tiled=True)
            if is_tiled
            else spans_of(zip(firsts, lasts, blocks, strict=True))
        )

    def exchanged(
        self, removed: Sequence[tuple[int, int, Block]], inserted: Iterable[tuple[int, int, Block]]
    ) -> "Spans":
        """Return spans without the blocks `removed` and with the blocks `inserted`.

        An entry usually exchanges neighbours for neighbours; all other ranges are then copied as slices.
        """
        more = sorted(inserted, key=_first)
        if self.is_tiled:
            places = sorted(bisect_left(self.firsts, first) for first, _, _ in removed)
            begin = places[0] if places else bisect_left(self.firsts, more[0][0]) if more else 0
            end = begin + len(places)
            between = [*self._edge(begin - 1), *((first, last) for first, last, _ in more), *self._edge(end)]
            if places == list(range(begin, end)) and _are_tiled(between):
                firsts = self.firsts[:begin] + array("q", (one[0] for one in more)) + self.firsts[end:]
                lasts = self.lasts[:begin] + array("q", (one[1] for one in more)) + self.lasts[end:]
                blocks = [*self.blocks[:begin], *(one[2] for one in more), *self.blocks[end:]]
                return Spans(firsts, lasts, blocks, is_tiled=True)
        without_these = {id(block) for _, _, block in removed}
        rest = zip(self.firsts, self.lasts, self.blocks, strict=True)
        return spans_of([*(one for one in rest if id(one[2]) not in without_these), *more])

    def _edge(self, index: int) -> Iterator[tuple[int, int]]:
        if 0 <= index < len(self.firsts):
            yield self.firsts[index], self.lasts[index]

    # ---- runs of the queue in these blocks

    def run_at(self, queue: int, offset: int) -> Run | None:
        """Return the run that contains an offset."""
        index = bisect_right(self.firsts, offset) - 1
        while index >= 0:
            if self.lasts[index] >= offset and (run := self.blocks[index].run_at(queue, offset)) is not None:
                return run
            if self.is_tiled:
                return None
            index -= 1
        return None

    def runs_from(self, queue: int, offset: int, newest_ms: int | None = None) -> Iterator[Run]:
        """Yield the runs that contain an offset at or above `offset`, ordered by first offset.

        With `newest_ms`, blocks without a row group stored at or after that time are skipped.
        """
        if not self.is_tiled:
            runs = [run for block in self.blocks for run in block.runs(queue) if run[1] >= offset]
            yield from sorted(runs, key=_first)
            return
        for index in range(bisect_left(self.lasts, offset), len(self.blocks)):
            if newest_ms is None or self.blocks[index].newest_ms >= newest_ms:
                for run in self.blocks[index].runs(queue):
                    if run[1] >= offset:
                        yield run

    def lowest_from(self, queue: int, minimum: int) -> int | None:
        """Return the lowest offset at or above the minimum; cached, because each pull asks for it."""
        known = self.lowest
        if known[0] != minimum:
            known = self.lowest = minimum, self._lowest_from(queue, minimum)
        return known[1]

    def _lowest_from(self, queue: int, minimum: int) -> int | None:
        if self.end <= minimum:
            return None
        if self.firsts[0] >= minimum:
            return self.firsts[0]
        run = next(self.runs_from(queue, minimum), None)
        return None if run is None else max(run[0], minimum)  # the minimum itself may be in a gap


def spans_of(spans: Iterable[tuple[int, int, Block]]) -> Spans:
    """Make spans from (first, last, block) in any order."""
    ordered = sorted(spans, key=_first)
    firsts, lasts = array("q", (one[0] for one in ordered)), array("q", (one[1] for one in ordered))
    is_tiled = _are_tiled((first, last) for first, last, _ in ordered)
    return Spans(firsts, lasts, [one[2] for one in ordered], is_tiled=is_tiled)


def _are_tiled(spans: Iterable[tuple[int, int]]) -> bool:
    """Return whether no range overlaps the one before it."""
    return all(before[1] < following[0] for before, following in pairwise(spans))


def _first(span: Sequence[int] | Run | tuple[int, int, Block]) -> int:
    return span[0]


NO_SPANS = spans_of(())


class HasBlocks(Protocol):
    """A topic."""

    @property
    def blocks(self) -> Sequence[Block]: ...


class QueueRuns:
    """The runs, gaps and minimum of a queue, and the highest offset that any entry named (None if none did)."""

    __slots__ = ("_found", "_laid", "gaps", "minimum", "named", "queue")

    def __init__(self, queue: int, of: "HasBlocks | None" = None) -> None:
        """With `of`, the spans are searched in the current blocks of that topic when they are needed."""
        self.queue = queue
        self._laid: Spans | HasBlocks = NO_SPANS if of is None else of
        self._found: tuple[Sequence[Block], Spans] | None = None  # the spans found in these blocks
        self.gaps: list[tuple[int, int]] = []  # ordered; appended to in place, any other change makes a new list
        self.minimum = 0  # only an UNEXPIRE lowers it
        self.named: int | None = None

    def copy(self, of: "HasBlocks") -> "QueueRuns":
        """Return a copy for another topic with the same blocks."""
        made = QueueRuns(self.queue, of)
        made.gaps, made.minimum, made.named = list(self.gaps), self.minimum, self.named
        return made

    @property
    def spans(self) -> Spans:
        """The blocks with offsets of this queue."""
        laid = self._laid
        if isinstance(laid, Spans):
            return laid
        blocks, found = laid.blocks, self._found
        if found is None or found[0] is not blocks:
            mine = (
                (first, last, block) for block in blocks for queue, first, last in block.queues() if queue == self.queue
            )
            found = self._found = blocks, spans_of(mine)
        return found[1]

    @spans.setter
    def spans(self, spans: Spans) -> None:
        self._laid, self._found = spans, None

    # ---- writing

    def cut_gaps(self, first: int, last: int) -> bool:
        """Remove the offsets of a new run from the gaps; return whether that changed one."""
        if not touching(self.gaps, first, last):
            return False
        self.gaps = [rest for gap in self.gaps for rest in without(*gap, [(first, last)])]
        return True

    def add_gap(self, first: int, last: int) -> list[tuple[int, int]]:
        """Add a gap; return the parts of it that are new, in no run and in no gap."""
        return self.add_gaps([(first, last)], self._runs_touching(first, last))

    def add_gaps(self, spans: Iterable[tuple[int, int]], live: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Add gaps; return the parts of them that are new, in none of the `live` runs and in no gap."""
        held = united(live)
        added = [part for first, last in spans for part in self.uncovered(first, last, held)]
        added.sort()
        if not added or not self.gaps or self.gaps[-1][1] < added[0][0]:
            self.gaps += added
        else:
            self.gaps = sorted([*self.gaps, *added])
        return added

    def uncovered(self, first: int, last: int, held: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the parts of first-last that are in no gap and in none of the ordered, disjoint `held` spans."""
        return without(first, last, touching(held, first, last) + touching(self.gaps, first, last))

    def join_gaps_at(self, offset: int) -> None:
        """Join the gap that starts at an offset with the one that ends right before it."""
        index = bisect_right(self.gaps, (offset, -1))
        (first, end), (begin, last) = self.gaps[index - 1], self.gaps[index]
        assert end + 1 == begin == offset, "the gaps are adjacent"
        self.gaps = [*self.gaps[: index - 1], (first, last), *self.gaps[index + 1 :]]

    def forget_gaps(self, below: int) -> None:
        """Drop the gaps that end below an offset."""
        if self.gaps and self.gaps[0][1] < below:
            self.gaps = [gap for gap in self.gaps if gap[1] >= below]

    def _runs_touching(self, first: int, last: int) -> list[tuple[int, int]]:
        found = []
        for run in self.spans.runs_from(self.queue, first):
            if run[0] > last:
                break
            found.append((run[0], run[1]))
        return found

    # ---- reading

    def find(self, offset: int) -> Location | GapHit | None:
        """Return the location of an offset, or the gap that contains it; None if the archive has neither."""
        if offset < self.minimum:
            return None
        gaps = self.gaps  # read before the spans: a run is added before its offsets leave a gap
        run = self.spans.run_at(self.queue, offset)
        if run is not None:
            return self._location(run)
        # Read again after the spans: an erasure adds its gap before the run is removed.
        return _gap_at(gaps, offset) or _gap_at(self.gaps, offset)

    def by_time(self, time_ms: int) -> Location | None:
        """Return the first run whose row group has a store time at or above `time_ms`."""
        # Not a binary search, because a row group with damaged records only has no time (-1).
        for run in self.spans.runs_from(self.queue, self.minimum, time_ms):
            if run[2].row_groups[run[3]].newest_ms >= time_ms:
                return self._location(run)
        return None

    def min_offset(self) -> int | None:
        """Return the lowest offset in the archive; None if there is none."""
        return self.spans.lowest_from(self.queue, self.minimum)

    def max_offset(self) -> int | None:
        """Return one above the highest offset in the archive; None if there is none."""
        return self.spans.end or None

    def has_all(self, first: int, end: int) -> bool:
        """Return whether every offset of [first, end) is in the archive."""
        if first >= end:
            return True
        for run in self.spans.runs_from(self.queue, first):
            if run[0] > first:
                return False
            first = max(first, run[1] + 1)
            if first >= end:
                return True
        return False

    def count_existing(self, first: int, end: int) -> int:
        """Return the number of offsets of [first, end) outside gaps: messages in either tier."""
        return max(0, end - first) - sum(_overlaps(self.gaps, first, end))

    def gap_spans(self) -> list[tuple[int, int]]:
        """Return (first, last) of each gap, ordered."""
        return list(self.gaps)

    def runs(self, offset: int = 0) -> Iterator[Location]:
        """Yield the runs that contain an offset at or above `offset`, in order."""
        return map(self._location, self.spans.runs_from(self.queue, offset))

    def runs_in_view(self) -> Iterator[Location]:
        """Yield the runs from the minimum on, in order."""
        return self.runs(self.minimum)

    def _location(self, run: Run) -> Location:
        return Location(run[2], run[3], self.queue, run[0], run[1])


def _gap_at(gaps: Sequence[tuple[int, int]], offset: int) -> GapHit | None:
    index = bisect_right(gaps, (offset, ABOVE)) - 1
    if index >= 0 and gaps[index][1] >= offset:
        return GapHit(gaps[index][0], gaps[index][1] + 1)
    return None


def without(first: int, last: int, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of first-last outside these spans."""
    left = []
    for low, high in sorted(spans):
        if first < low:
            left.append((first, min(low - 1, last)))
        first = max(first, high + 1)
        if first > last:
            break
    return [*left, (first, last)] if first <= last else left


def united(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of spans as sorted, disjoint spans."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def touching(spans: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Return those of the sorted, disjoint spans that contain an offset of first-last."""
    if not spans or spans[-1][1] < first:
        return []
    low, high = bisect_right(spans, (first, ABOVE)), bisect_right(spans, (last, ABOVE))
    return [span for span in spans[max(low - 1, 0) : high] if span[1] >= first]


def _overlaps(spans: Sequence[tuple[int, int]], first: int, end: int) -> Iterable[int]:
    """Yield how many offsets of [first, end) each of the sorted, disjoint spans contains."""
    index = max(bisect_right(spans, (first, ABOVE)) - 1, 0)
    for low, last in spans[index:]:
        if low >= end:
            break
        covered = min(last + 1, end) - max(low, first)
        if covered > 0:
            yield covered
