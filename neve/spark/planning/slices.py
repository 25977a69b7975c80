"""The row groups that contain some rows, divided into tasks. Pure.

Rows are found in their present object: a live one or, if they have expired meanwhile, one that is kept for the grace
period. Erased rows are not found, even if their object is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from neve.archive.catalog.queue_runs import Location, without
from neve.archive.format.journal import ERASED
from neve.spark.planning.rows import Queues, Rows, Span, joined, rows_of

if TYPE_CHECKING:
    from neve.archive.catalog.catalog import Catalog
    from neve.archive.format.journal import CommittedObject, RowGroup

#: The cost of opening an object, in bytes that could be read in that time.
OPENING_BYTES = 256 << 10


class Cut(NamedTuple):
    """Rows of one row group, as (first, last) row numbers from 0, in order."""

    group: int
    wire_bytes: int
    spans: tuple[Span, ...]


class Slice(NamedTuple):
    """The rows of one object that a task reads."""

    key: str
    topic: str
    day: str
    broker: str
    cuts: tuple[Cut, ...]

    @property
    def wire_bytes(self) -> int:
        return sum(cut.wire_bytes for cut in self.cuts)


class Found(NamedTuple):
    """Slices with rows; `lost` are rows that are in no object and were not erased."""

    slices: list[Slice]
    lost: Rows


MayHold = Callable[["CommittedObject", "RowGroup"], bool]


def in_view(catalog: Catalog, topic: str, may_hold: MayHold) -> Queues:
    """Return the rows of a topic in view, with erased rows between them, which `found_in` does not find."""
    found: dict[int, list[Span]] = {}
    erased: dict[int, list[Span]] = {}
    for gap in catalog.gaps(topic):
        if gap.reason.startswith(ERASED):
            erased.setdefault(gap.queue, []).append((gap.first, gap.last))
    for queue in catalog.queues(topic):
        minimum = catalog.recorded_minimum(topic, queue)
        live = [
            (max(run.first, minimum), run.last)
            for run in catalog.queue(topic, queue).runs_in_view()
            if may_hold(run.name, run.group)
        ]
        if live:
            low, high = live[0][0], max(last for _, last in live)
            between = [span for span in erased.get(queue, ()) if low < span[0] and span[1] < high]
            found[queue] = joined([*live, *between])
    return found


def found_in(catalog: Catalog, broker: str, rows: Rows, may_hold: MayHold) -> Found:
    """Return slices of the row groups that `may_hold` wanted rows, objects in log order."""
    slices: list[Slice] = []
    lost: list[tuple[str, int, int, int]] = []
    for topic, queues in rows.items():
        places = _Places()
        missing: dict[int, list[Span]] = {}
        for queue, spans in queues.items():
            unplaced = list(_place_live(catalog, topic, queue, spans, places))
            gaps = catalog.queue(topic, queue).gap_spans() if unplaced else []
            rest = [left for span in unplaced for left in without(*span, gaps)]
            if rest:
                missing[queue] = rest
        if missing:
            lost += [(topic, *one) for one in _place_expiring(catalog, topic, missing, places)]
        slices += places.slices(broker, may_hold)
    return Found(slices, rows_of(lost))


class _Places:
    """The rows that were found, by object and row group."""

    def __init__(self) -> None:
        self._names: dict[str, CommittedObject] = {}
        self._spans: dict[str, dict[int, list[Span]]] = {}

    def add(self, run: Location, first: int, last: int) -> None:
        """Add the offsets first ... last of a run."""
        row = 0
        for queue, begin, end in run.group.runs:
            if (queue, begin, end) == (run.queue, run.first, run.last):
                break
            row += end - begin + 1
        self._names.setdefault(run.name.key, run.name)
        spans = self._spans.setdefault(run.name.key, {}).setdefault(run.row_group, [])
        spans.append((row + first - run.first, row + last - run.first))

    def slices(self, broker: str, may_hold: MayHold) -> Iterator[Slice]:
        for key, name in sorted(self._names.items(), key=_begin):
            cuts = []
            for index, spans in sorted(self._spans[key].items()):
                group = name.row_groups[index]
                if may_hold(name, group):
                    whole = joined(spans)
                    some = sum(last - first + 1 for first, last in whole)
                    cuts.append(Cut(index, group.wire_bytes * some // max(group.rows, 1), tuple(whole)))
            if cuts:
                yield Slice(key, name.topic, name.day, broker, tuple(cuts))


def _begin(item: tuple[str, CommittedObject]) -> tuple[int, str]:
    return item[1].start, item[0]


def _place_live(catalog: Catalog, topic: str, queue: int, spans: Sequence[Span], places: _Places) -> Iterator[Span]:
    """Add rows that are in a live object, and yield the others."""
    for first, last in spans:
        position = first
        for run in catalog.queue(topic, queue).runs(first):
            if run.first > last or position > last:
                break
            if run.last < position:
                continue  # another object contained these
            if run.first > position:
                yield position, run.first - 1
                position = run.first
            end = min(run.last, last)
            places.add(run, position, end)
            position = end + 1
        if position <= last:
            yield position, last


def _place_expiring(
    catalog: Catalog, topic: str, missing: dict[int, list[Span]], places: _Places
) -> Iterator[tuple[int, int, int]]:
    """Add rows in expired objects that are not deleted yet, and yield (queue, first, last) of the others."""
    for _, name in catalog.topic(topic).expiring_names():
        for index, group in enumerate(name.row_groups):
            for queue, begin, end in group.runs:
                left: list[Span] = []
                for first, last in missing.get(queue, ()):
                    low, high = max(first, begin), min(last, end)
                    if low <= high:
                        places.add(Location(name, index, queue, begin, end), low, high)
                    left += without(first, last, [(begin, end)])
                if queue in missing:
                    missing[queue] = left
    for queue, spans in missing.items():
        for span in spans:
            yield queue, *span


def tasks_of(slices: Iterable[Slice], most_bytes: int, least: int) -> list[list[Slice]]:
    """Divide slices between row groups into tasks of about the same number of bytes.

    Args:
        most_bytes: maximum of a task, unless one row group exceeds it.
        least: minimum number of tasks, if there are as many row groups.
    """
    pieces = [Slice(one.key, one.topic, one.day, one.broker, (cut,)) for one in slices for cut in one.cuts]
    if not pieces:
        return []
    total = sum(_cost(piece, pieces[index - 1] if index else None) for index, piece in enumerate(pieces))
    number = min(max(-(-total // most_bytes), least, 1), len(pieces))
    tasks: list[list[Slice]] = [[]]
    done = 0
    for index, piece in enumerate(pieces):
        cost = _cost(piece, pieces[index - 1] if index else None)
        # By its middle: a large piece belongs to the task that has most of it.
        to_come = len(pieces) - index
        is_due = (done + cost // 2) * number >= total * len(tasks) or to_come <= number - len(tasks)
        if tasks[-1] and len(tasks) < number and is_due:
            tasks.append([])
        done += cost
        _add(tasks[-1], piece)
    return tasks


def _cost(piece: Slice, before: Slice | None) -> int:
    is_open = before is not None and before.key == piece.key
    return piece.wire_bytes + (0 if is_open else OPENING_BYTES)


def _add(task: list[Slice], piece: Slice) -> None:
    if task and task[-1].key == piece.key:
        task[-1] = task[-1]._replace(cuts=(*task[-1].cuts, *piece.cuts))
    else:
        task.append(piece)
