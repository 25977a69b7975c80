"""Objects that become one, and whether the one that was made holds their rows, each once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from neve.archive.journal import CommittedName


class Merge(NamedTuple):
    """Objects that become one, in log order, and the offsets of their queues below which rows are left out."""

    inputs: tuple[CommittedName, ...]
    below: dict[int, int]

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
        """queue -> (first, last) of the rows that are left."""
        found: dict[int, tuple[int, int]] = {}
        for name in self.inputs:
            for queue, (first, last, _) in name.queues.items():
                begin = max(found.get(queue, (first,))[0], self.below.get(queue, 0))
                if begin <= last:
                    found[queue] = begin, last
        return found


def mismatch(merge: Merge, made: CommittedName, minimum: Mapping[int, int]) -> str:
    """Why the made object must not take the place of its inputs; empty: it holds their rows, each once.

    `minimum`: what is recorded of each queue now. An expiry may have been taken back since the rows were chosen.
    """
    if (made.topic, made.day, made.start, made.end) != (merge.topic, merge.day, merge.start, merge.end):
        return f"it is of {made.topic}, {made.day}, {made.start}-{made.end}"
    shown = sorted(queue for queue, end in merge.below.items() if minimum.get(queue, 0) < end)
    if shown:
        return f"rows of queue {shown[0]} that were left out may be seen again"
    wanted, dropped = _spans(merge.inputs, merge.below)
    held, _ = _spans([made], {})
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


def _spans(names: Iterable[CommittedName], below: Mapping[int, int]) -> tuple[dict[int, list[tuple[int, int]]], int]:
    """queue -> (first, last) of what follows without a hole, as the row groups have it, and how many rows are dropped.

    What comes twice stays apart.
    """
    spans: dict[int, list[tuple[int, int]]] = {}
    dropped = 0
    runs = sorted(run for name in names for group in name.row_groups for run in group.runs)
    for queue, first, last in runs:
        begin = max(first, below.get(queue, 0))
        dropped += min(begin, last + 1) - first
        if begin > last:
            continue
        held = spans.setdefault(queue, [])
        if held and held[-1][1] + 1 == begin:
            held[-1] = held[-1][0], last
        else:
            held.append((begin, last))
    return spans, dropped
