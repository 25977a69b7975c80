"""Selection of objects to merge: a pure decision, shared by the compaction job and its dry run.

Rows of a topic are in log order from object to object, and within an object by queue and offset. So neighbours are
merged by concatenating the rows of each queue. The inputs of a merge have one topic and one day, no queue has a hole
between them, and all of their range is settled. So a merged object covers exactly the range of its inputs.

    sizes        A merged object has `target` stored bytes, and `ceiling` at most. An object with GAINED of the target
                 is not merged again. So a byte is written a few times, and not with every new object.
    when         The day has ended a grace ago, or at least OPEN_DAY_INPUTS inputs reach GAINED of the target.
                 Neighbours are not merged if one has nearly all of their bytes: a growing day would be written
                 again and again.
    TTL          Objects that expire within twice the grace are not merged: the replaced inputs are kept that long.
    rows left    All rows that may become visible again. Rows are dropped below a tombstone, or if they expired a
    out          grace ago: until then an expiry can be undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import CommittedObject
from neve.archive.policy.expiry import expired_ends
from tiered.write.merge import Merge

DAY_MS = 86_400_000
GAINED = 0.75
OPEN_DAY_INPUTS = 8
# If one of two neighbours has more than this share of their bytes, it is not worth writing it again.
NEARLY_ALL = 7 / 8


class Sizes(NamedTuple):
    """Limits of a merged object. Those of wire bytes and inputs limit the work, the footer and the journal entry."""

    target: int = 128 << 20
    ceiling: int = 256 << 20
    wire: int = 1 << 30
    inputs: int = 1000


SIZES = Sizes()


@dataclass(frozen=True, slots=True)
class When:
    """Time, grace and TTL of a decision. With `at_once`, an operator asks, and days need not have ended."""

    now_ms: int
    grace_ms: int
    ttl_ms: int | None = None
    at_once: bool = False

    def has_ended(self, day: str) -> bool:
        """Whether the day ended long enough ago for all of its objects to exist."""
        return self.at_once or _end_ms(day) + self.grace_ms <= self.now_ms

    def keeps(self, name: CommittedObject) -> bool:
        """Whether an object lives longer than the grace of the inputs that it would replace."""
        if self.ttl_ms is None or name.max_time < 0:
            return True
        return name.max_time + self.ttl_ms > self.now_ms + 2 * self.grace_ms


def settled_below(catalog: Catalog, topic: str) -> int:
    """Return the CommitLog offset below which no round will publish an object of the topic."""
    through = catalog.through(topic) or 0
    open_names = (name for names in catalog.rounds.open_intents().values() for name in names)
    return min([name.start for name in open_names if name.topic == topic] + [through])


def plan_topic(catalog: Catalog, topic: str, when: When, sizes: Sizes = SIZES) -> list[Merge]:
    """Return the merges of a topic that are due, in log order."""
    merges = []
    for inputs in plan_merges(catalog.topic(topic).names(), settled_below(catalog, topic), when, sizes):
        merge = Merge(tuple(inputs), droppable(catalog, topic, inputs, when))
        if merge.queues:
            merges.append(merge)
    return merges


def plan_merges(
    objects: Iterable[CommittedObject], settled: int, when: When, sizes: Sizes = SIZES
) -> Iterator[list[CommittedObject]]:
    """Yield the due groups of inputs, for objects of one topic of one broker in log order."""
    for neighbours in _neighbours(objects, settled, when, sizes):
        if _is_due(neighbours, when, sizes):
            yield neighbours


def droppable(catalog: Catalog, topic: str, inputs: Iterable[CommittedObject], when: When) -> dict[int, int]:
    """Return the offset of each queue below which all rows are hidden for good."""
    tombstone = catalog.topic_entry(topic)
    ends: dict[int, int] = dict(tombstone.minimums) if tombstone is not None else {}
    if when.ttl_ms is not None:
        for name in inputs:
            for queue, end in expired_ends(name, when.ttl_ms, when.now_ms - when.grace_ms).items():
                ends[queue] = max(ends.get(queue, 0), end)
    hidden = {queue: min(end, catalog.recorded_minimum(topic, queue)) for queue, end in ends.items()}
    return {queue: end for queue, end in hidden.items() if end > 0}


def _neighbours(
    objects: Iterable[CommittedObject], settled: int, when: When, sizes: Sizes
) -> Iterator[list[CommittedObject]]:
    """Yield runs of objects that may be merged, each as long as the size limits allow."""
    run: list[CommittedObject] = []
    ends: dict[int, int] = {}
    size = wire = 0
    for name in objects:
        if name.end > settled:
            break
        fits = size + name.size <= sizes.ceiling and wire + name.wire_bytes <= sizes.wire and len(run) < sizes.inputs
        if run and not (size < sizes.target and fits and _follows(run[-1], ends, name)):
            yield run
            run, ends, size, wire = [], {}, 0, 0
        if name.size >= GAINED * sizes.target or name.wire_bytes >= GAINED * sizes.wire or not when.keeps(name):
            if run:
                yield run
            run, ends, size, wire = [], {}, 0, 0
            continue
        run.append(name)
        ends |= {queue: last for queue, (_, last, _) in name.queues.items()}
        size, wire = size + name.size, wire + name.wire_bytes
    if run:
        yield run


def _follows(before: CommittedObject, ends: Mapping[int, int], name: CommittedObject) -> bool:
    """Whether an object has the same day, is above in the log, and continues each queue without a hole."""
    if name.day != before.day or name.start < before.end:
        return False
    return all(first == ends.get(queue, first - 1) + 1 for queue, (first, _, _) in name.queues.items())


def _is_due(run: list[CommittedObject], when: When, sizes: Sizes) -> bool:
    size = sum(name.size for name in run)
    if len(run) >= OPEN_DAY_INPUTS and size >= GAINED * sizes.target:
        return True
    if len(run) < 2 or not when.has_ended(run[0].day):
        return False
    return len(run) >= OPEN_DAY_INPUTS or max(name.size for name in run) <= NEARLY_ALL * size


def _end_ms(day: str) -> int:
    return int(datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).timestamp() * 1000) + DAY_MS
