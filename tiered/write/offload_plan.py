"""Plan of an offload round: a pure function of the hot log, the catalog and the range of the round.

It has one object per topic and UTC day of the store time, in log order. A topic's range ends with the segment of its
first unarchived record, so that each run of a queue is whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from neve.archive.catalog.catalog import Catalog
from neve.archive.format import keys
from neve.archive.format.journal import Gap, PlannedObject
from tiered.write.entry_run import EntryRun

DAY_MS = 86_400_000


class TopicUnreadable(Exception):
    """The local files of a topic contradict each other, or can't be read."""


class TopicRange(msgspec.Struct, frozen=True, gc=False):
    """CommitLog offsets [start, end) of a topic for a round."""

    topic: str
    start: int
    end: int


class FoundEntries(NamedTuple):
    """The entries of a range in the log."""

    runs: Mapping[int, EntryRun]  # by queue, only queues with entries in the range
    oldest_ms: int = -1  # store time of the first record; below 0: unknown, or not requested


class HotLog(Protocol):
    """The local log as a round reads it. Methods with a topic raise TopicUnreadable."""

    def entries(self, topic: str, start: int, end: int) -> Mapping[int, EntryRun]: ...

    def entries_of(
        self, ranges: Sequence[TopicRange], *, timed: bool = False
    ) -> Iterator[FoundEntries | TopicUnreadable]:
        """Yield the entries of each range in order. Small ranges are looked up in batches, ahead of the consumer."""
        ...

    def files(self, start: int, end: int) -> Sequence[tuple[str, int, int]]: ...

    def store_time(self, topic: str, queue: int, offset: int) -> int: ...


@dataclass(frozen=True, slots=True)
class KeyParts:
    """The parts of object keys that are the same for all names of a round."""

    prefix: str
    broker: str
    epoch: int


def plan_topic(
    hot: HotLog, catalog: Catalog, wanted: TopicRange, found: FoundEntries, key_parts: KeyParts
) -> tuple[list[PlannedObject], list[Gap]]:
    """Plan the objects and gaps of one topic. `found`: the range's entries, with the time of the first one."""
    runs = found.runs
    if not runs:
        return [], []
    _refuse_restarted_topic(catalog, wanted, runs)
    names = []
    start = wanted.start
    borders = _day_borders(hot, wanted.topic, found)
    for index, (day, _) in enumerate(borders):
        end = borders[index + 1][1] if index + 1 < len(borders) else wanted.end
        queues = _bounds(runs, start, end)
        key = keys.data_key(
            key_parts.prefix, wanted.topic, day, key_parts.broker, start=start, end=end, epoch=key_parts.epoch
        )
        names.append(PlannedObject(key, wanted.topic, day, start, end, queues))
        start = end
    return names, _gaps(catalog, wanted.topic, runs)


def _refuse_restarted_topic(catalog: Catalog, wanted: TopicRange, runs: Mapping[int, EntryRun]) -> None:
    """Raise TopicUnreadable if a queue begins below archived offsets: an archive can't have an offset twice.

    Offsets rise with the log, except in a copy of an Apache master's log: a topic that is deleted and created again
    there begins at 0.
    """
    for queue, run in sorted(runs.items()):
        older = [
            one.last
            for one in catalog.queue(wanted.topic, queue).runs(run.first_offset)
            if one.name.end <= wanted.start
        ]
        if older:
            raise TopicUnreadable(restarted_text(wanted.topic, queue, max(older)))


def restarted_text(topic: str, queue: int, last: int) -> str:
    """Return the reason text for operators."""
    return (
        f"queue {queue} of {topic} was recreated: the archive has offsets up to {last} of one that was deleted; "
        "the topic is no longer archived here, and its segments stay"
    )


def _bounds(runs: Mapping[int, EntryRun], start: int, end: int) -> dict[int, tuple[int, int]]:
    bounds = {}
    for queue, run in runs.items():
        low, high = np.searchsorted(run.physical, [start, end])
        if low < high:
            bounds[queue] = (run.first_offset + int(low), run.first_offset + int(high) - 1)
    return bounds


def _gaps(catalog: Catalog, topic: str, runs: Mapping[int, EntryRun]) -> list[Gap]:
    """Return the offsets between the archived end of each queue and the run's first offset: their loss is recorded."""
    named = catalog.named_offsets(topic)
    found = []
    for queue, run in sorted(runs.items()):
        expected = named[queue] + 1 if queue in named else run.first_offset
        if run.first_offset > expected:
            reason = "not in the local log when its round was planned"
            found.append(Gap(topic=topic, queue=queue, first=expected, last=run.first_offset - 1, reason=reason))
    return found


def _day_borders(hot: HotLog, topic: str, found: FoundEntries) -> list[tuple[str, int]]:
    """Return (day, CommitLog offset of its first record) in log order.

    Store times decrease only if the clock was set back; later records then stay with the later day.
    """
    runs = found.runs
    physical = np.concatenate([run.physical for run in runs.values()])
    queues = np.concatenate([np.full(len(run.physical), queue, np.int64) for queue, run in runs.items()])
    offsets = np.concatenate([run.first_offset + np.arange(len(run.physical)) for run in runs.values()])
    order = np.argsort(physical, kind="stable")
    last_known = 0

    def day_at(position: int) -> int:
        nonlocal last_known
        row = order[position]
        time = hot.store_time(topic, int(queues[row]), int(offsets[row])) if position else found.oldest_ms
        if time < 0:  # a damaged record stays with the last day found; its time column is null
            return last_known
        last_known = time // DAY_MS
        return last_known

    borders = []
    position, count = 0, len(order)
    while position < count:
        day = day_at(position)
        borders.append((_day_name(day), int(physical[order[position]])))
        # Find the first record of a later day by bisection. Mostly there is none, which the last record shows.
        low, high = position + 1, count
        if low < high and 0 <= hot.store_time(topic, int(queues[order[-1]]), int(offsets[order[-1]])) // DAY_MS <= day:
            break
        while low < high:
            middle = (low + high) // 2
            last_known = day
            if day_at(middle) > day:
                high = middle
            else:
                low = middle + 1
        position = low
    return borders


def _day_name(day: int) -> str:
    return datetime.fromtimestamp(day * 86_400, UTC).strftime("%Y-%m-%d")
