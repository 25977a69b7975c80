"""Merge of objects, and the check whether the merged object has their rows, each once.

Two kinds of rows are left out: rows `below` an offset of their queue, which can't become visible again, and `erased`
ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from neve.archive.catalog.queue_runs import touching, without
from neve.archive.format.journal import CommittedObject

Spans = Mapping[int, Sequence[tuple[int, int]]]  # queue -> (first, last), in order
NOTHING: Final[Spans] = {}


class Merge(NamedTuple):
    """Objects to merge, in log order, and the rows to leave out."""

    inputs: tuple[CommittedObject, ...]
    below: dict[int, int]
    erased: Spans = NOTHING

    @property
    def topic(self) -> str:
        return self.inputs[0].topic

    @property
    def day(self) -> str:
        return self.inputs[0].day

    @property
    def start(self) -> int:
        return self.inputs[0].start

    @property
    def end(self) -> int:
        return self.inputs[-1].end

    @property
    def size(self) -> int:
        return sum(name.size for name in self.inputs)

    @property
    def queues(self) -> dict[int, tuple[int, int]]:
        """Queue -> (first, last) of the remaining rows."""
        return {queue: (spans[0][0], spans[-1][1]) for queue, spans in _spans(self)[0].items()}


def mismatch(merge: Merge, made: CommittedObject, minimum: Mapping[int, int]) -> str:
    """Return why the merged object must not replace its inputs; empty if it has their rows, each once.

    `minimum`: the recorded minimum of each queue now. An expiry may have been undone since the rows were chosen.
    """
    if (made.topic, made.day, made.start, made.end) != (merge.topic, merge.day, merge.start, merge.end):
        return f"it is of {made.topic}, {made.day}, {made.start}-{made.end}"
    shown = sorted(queue for queue, end in merge.below.items() if minimum.get(queue, 0) < end)
    if shown:
        return f"rows of queue {shown[0]} that were excluded may be visible again"
    wanted, dropped = _spans(merge)
    held, _ = _spans(Merge((made,), {}))
    if wanted != held:
        return f"it holds {held}, its inputs {wanted}"
    facts = [(sum(n.rows for n in merge.inputs) - dropped, made.rows)]
    if not dropped:
        facts += [
            (sum(name.wire_bytes for name in merge.inputs), made.wire_bytes),
            (max(name.max_time for name in merge.inputs), made.max_time),
            (min((name.min_time for name in merge.inputs if name.min_time >= 0), default=-1), made.min_time),
        ]
    return "" if all(ours == its for ours, its in facts) else f"its inputs say {facts}"


def _spans(merge: Merge) -> tuple[dict[int, list[tuple[int, int]]], int]:
    """Return queue -> (first, last) of rows without a hole by the row groups, and the number of dropped rows.

    Rows that occur twice remain separate spans.
    """
    spans: dict[int, list[tuple[int, int]]] = {}
    dropped = 0
    runs = sorted(run for name in merge.inputs for run in name.runs)
    for queue, first, last in runs:
        dropped += last - first + 1
        for begin, end in rows_left(first, last, merge.below.get(queue, 0), merge.erased.get(queue, ())):
            dropped -= end - begin + 1
            held = spans.setdefault(queue, [])
            if held and held[-1][1] + 1 == begin:
                held[-1] = held[-1][0], end
            else:
                held.append((begin, end))
    return spans, dropped


def rows_left(first: int, last: int, below: int, erased: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the remaining parts of a run. `erased` spans are disjoint and in order."""
    begin = max(first, below)
    return without(begin, last, touching(erased, begin, last)) if begin <= last else []
