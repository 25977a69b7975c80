"""Sets of rows of one broker: offsets by topic and queue. Pure.

Offsets are not reused, with one exception: a topic that is created again after all of the old one has expired, and the
journal no longer has it, begins at 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from neve.archive.catalog.queue_runs import without

Span = tuple[int, int]  # first offset, last offset
Queues = Mapping[int, Sequence[Span]]
Rows = Mapping[str, Queues]  # topic -> queue -> spans in order, which are not adjacent; none is empty


def joined(spans: Iterable[Sequence[int]]) -> list[Span]:
    """Return the spans in order, with adjacent and overlapping ones joined."""
    found: list[Span] = []
    for first, last in sorted((one[0], one[1]) for one in spans):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def rows_of(runs: Iterable[tuple[str, int, int, int]]) -> Rows:
    """Return the set of runs (topic, queue, first, last), which may be in any order."""
    found: dict[str, dict[int, list[Span]]] = {}
    for topic, queue, first, last in runs:
        if first <= last:
            found.setdefault(topic, {}).setdefault(queue, []).append((first, last))
    return {topic: {queue: joined(spans) for queue, spans in sorted(found[topic].items())} for topic in sorted(found)}


def runs_of(rows: Rows) -> Iterator[tuple[str, int, int, int]]:
    """Yield (topic, queue, first, last) in order."""
    for topic, queues in rows.items():
        for queue, spans in queues.items():
            for first, last in spans:
                yield topic, queue, first, last


def count(rows: Rows) -> int:
    """Return the number of offsets."""
    return sum(last - first + 1 for _, _, first, last in runs_of(rows))


def union(*several: Rows) -> Rows:
    """Return the offsets in any of the sets."""
    return rows_of(run for rows in several for run in runs_of(rows))


def minus(rows: Rows, others: Rows) -> Rows:
    """Return the offsets that are not in the others."""
    return rows_of(
        (topic, queue, *left)
        for topic, queue, first, last in runs_of(rows)
        for left in without(first, last, others.get(topic, {}).get(queue, ()))
    )


def taken(rows: Rows, most: int) -> Rows:
    """Return at most `most` offsets: a share of each queue, its lowest offsets."""
    queues = [(topic, queue, spans) for topic, of in rows.items() for queue, spans in of.items()]
    shares = share(most, [sum(last - first + 1 for first, last in spans) for _, _, spans in queues])
    return rows_of(
        (topic, queue, *span)
        for (topic, queue, spans), some in zip(queues, shares, strict=True)
        for span in _first_of(spans, some)
    )


def share(most: int, wanted: Sequence[int]) -> list[int]:
    """Divide `most` among wishes: each in full if the sum allows it, otherwise in proportion."""
    total = sum(wanted)
    if total <= most:
        return list(wanted)
    shares = [most * one // total for one in wanted]
    rest = most - sum(shares)
    for index, one in enumerate(wanted):
        if rest and shares[index] < one:
            shares[index] += 1
            rest -= 1
    return shares


def _first_of(spans: Sequence[Span], most: int) -> Iterator[Span]:
    for first, last in spans:
        if most <= 0:
            return
        yield first, min(last, first + most - 1)
        most -= last - first + 1
