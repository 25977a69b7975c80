"""Sets of rows: which offsets of which queue of which topic of one broker. Pure.

A row's name never changes: no offset of a queue is given twice, whatever is written again, expires or comes back. But a
topic of which nothing was left, and that the journal forgot, begins at 0 when it is made anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from neve.archive.catalog.queue_runs import without

Span = tuple[int, int]  # first offset, last offset
Queues = Mapping[int, Sequence[Span]]
Rows = Mapping[str, Queues]  # topic -> queue -> spans in order, which do not touch; nothing is there empty


def joined(spans: Iterable[Sequence[int]]) -> list[Span]:
    """All that they hold, in order; what touches becomes one."""
    found: list[Span] = []
    for first, last in sorted((one[0], one[1]) for one in spans):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def rows_of(runs: Iterable[tuple[str, int, int, int]]) -> Rows:
    """Of (topic, queue, first, last) in any order."""
    found: dict[str, dict[int, list[Span]]] = {}
    for topic, queue, first, last in runs:
        if first <= last:
            found.setdefault(topic, {}).setdefault(queue, []).append((first, last))
    return {topic: {queue: joined(spans) for queue, spans in sorted(found[topic].items())} for topic in sorted(found)}


def runs_of(rows: Rows) -> Iterator[tuple[str, int, int, int]]:
    """(topic, queue, first, last) in order."""
    for topic, queues in rows.items():
        for queue, spans in queues.items():
            for first, last in spans:
                yield topic, queue, first, last


def count(rows: Rows) -> int:
    """How many offsets."""
    return sum(last - first + 1 for _, _, first, last in runs_of(rows))


def union(*several: Rows) -> Rows:
    """What is in any of them."""
    return rows_of(run for rows in several for run in runs_of(rows))


def minus(rows: Rows, others: Rows) -> Rows:
    """What is not in the others."""
    return rows_of(
        (topic, queue, *left)
        for topic, queue, first, last in runs_of(rows)
        for left in without(first, last, others.get(topic, {}).get(queue, ()))
    )


def taken(rows: Rows, most: int) -> Rows:
    """At most so many of them: of each queue its share, from the lowest offset on."""
    queues = [(topic, queue, spans) for topic, of in rows.items() for queue, spans in of.items()]
    shares = share(most, [sum(last - first + 1 for first, last in spans) for _, _, spans in queues])
    return rows_of(
        (topic, queue, *span)
        for (topic, queue, spans), some in zip(queues, shares, strict=True)
        for span in _first_of(spans, some)
    )


def share(most: int, wanted: Sequence[int]) -> list[int]:
    """What each gets of `most`: all that it wants where that is enough, otherwise in proportion."""
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
