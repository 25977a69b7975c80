"""Which objects of a topic become one: a pure decision, for the job that acts on it and the dry run that shows it.

Rows of a topic are in log order from object to object, and inside an object by queue and offset; so neighbours are
merged by putting each queue's rows behind one another. What is merged is one topic's, one day's, without a hole in any
queue, and nothing can come between: all of it is settled. So a merged object covers its inputs' range and no more.

    sizes        an object is made of `target` bytes as they are stored, of `ceiling` at most. One that has GAINED of
                 the target is not touched again: a byte is written again a few times, not each time something comes
    when         its day has ended a grace ago, or an OPEN_DAY_INPUTS of them gain GAINED of the target. Neighbours of
                 which one is nearly all are left as they are: a day that still grows would be written again and again
    TTL          nothing that expires within twice the grace: the old ones are to be kept for that long
    rows left    all that might be seen again. Dropped are those below a tombstone, and those that expired a grace ago:
    out          until then an expiry can be taken back
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
# Of two neighbours, one of which has more than this of both: not worth writing it again.
NEARLY_ALL = 7 / 8


class Sizes(NamedTuple):
    """Bounds of a merged object. Those of its wire bytes and inputs bound the work, its footer and its entries."""

    target: int = 128 << 20
    ceiling: int = 256 << 20
    wire: int = 1 << 30
    inputs: int = 1000


SIZES = Sizes()


@dataclass(frozen=True, slots=True)
class When:
    """`at_once`: somebody asks for it, days need not have ended."""

    now_ms: int
    grace_ms: int
    ttl_ms: int | None = None
    at_once: bool = False

    def has_ended(self, day: str) -> bool:
        """Long enough ago for its last objects to be there."""
        return self.at_once or _end_ms(day) + self.grace_ms <= self.now_ms

    def keeps(self, name: CommittedObject) -> bool:
        """For longer than its inputs will be there."""
        if self.ttl_ms is None or name.max_time < 0:
            return True
        return name.max_time + self.ttl_ms > self.now_ms + 2 * self.grace_ms


def settled_below(catalog: Catalog, topic: str) -> int:
    """The CommitLog offset below which no round will publish anything of the topic any more."""
    through = catalog.through(topic) or 0
    open_names = (name for names in catalog.rounds.open_intents().values() for name in names)
    return min([name.start for name in open_names if name.topic == topic] + [through])


def plan_topic(catalog: Catalog, topic: str, when: When, sizes: Sizes = SIZES) -> list[Merge]:
    """What of a topic in a broker's catalog is to become one now, in log order."""
    merges = []
    for inputs in plan_merges(catalog.topic(topic).names(), settled_below(catalog, topic), when, sizes):
        merge = Merge(tuple(inputs), droppable(catalog, topic, inputs, when))
        if merge.queues:
            merges.append(merge)
    return merges


def plan_merges(
    objects: Iterable[CommittedObject], settled: int, when: When, sizes: Sizes = SIZES
) -> Iterator[list[CommittedObject]]:
    """For the objects of one topic of one broker, in log order."""
    for neighbours in _neighbours(objects, settled, when, sizes):
        if _is_due(neighbours, when, sizes):
            yield neighbours


def droppable(catalog: Catalog, topic: str, inputs: Iterable[CommittedObject], when: When) -> dict[int, int]:
    """For each queue, where what may be seen again begins; below it all is hidden for good."""
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
    """Runs of objects that may become one, each as long as the sizes let it be."""
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
    """Whether it is of the same day, above in the log, and goes on in each queue where the run ends."""
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
