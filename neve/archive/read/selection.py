"""Select the objects and row groups of a topic that a reader has to open, from the catalogs. Pure.

A row group that may contain a requested row is selected. The reader filters out the expired and the unrequested rows of
selected row groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import NamedTuple

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import CommittedObject, RowGroup
from neve.units import datetime_ms, parse_instant_ms

Instant = datetime | int | str


class Selection(NamedTuple):
    """The requested rows of a topic: store time in [start, end) in milliseconds, queues, offsets in [first, last]."""

    start: int | None = None
    end: int | None = None
    queues: frozenset[int] | None = None
    first: int | None = None
    last: int | None = None


class Chosen(NamedTuple):
    """An object that may contain requested rows."""

    broker: str
    name: CommittedObject
    groups: list[int]  # indexes of the row groups to read
    minimums: dict[int, int]  # queue -> the offset below which rows of these row groups have expired


def choose(catalogs: Mapping[str, Catalog], topic: str, selection: Selection) -> Iterator[Chosen]:
    """Yield the objects of a topic with requested rows; `catalogs` are by broker."""
    for broker, catalog in sorted(catalogs.items()):
        minimums = {queue: catalog.recorded_minimum(topic, queue) for queue in catalog.queues(topic)}
        is_of_any_time = selection.start is None and selection.end is None
        within = None if is_of_any_time else catalog.topic(topic).names_within(selection.start, selection.end)
        for name in catalog.objects(topic) if within is None else list(within):
            groups = [at for at, group in enumerate(name.row_groups) if _may_hold(group, minimums, selection)]
            if groups:
                yield Chosen(broker, name, groups, _cut(name, groups, minimums))


def _may_hold(group: RowGroup, minimums: Mapping[int, int], selection: Selection) -> bool:
    """Return whether a row group may contain a requested row; a row of unknown time matches any time."""
    if selection.start is not None and 0 <= group.newest_ms < selection.start:
        return False
    if selection.end is not None and group.oldest_ms >= selection.end:
        return False
    for queue, first, last in group.runs:
        lowest = max(minimums.get(queue, 0), selection.first or 0)
        if last < lowest or (selection.last is not None and first > selection.last):
            continue
        if selection.queues is None or queue in selection.queues:
            return True
    return False


def _cut(name: CommittedObject, groups: list[int], minimums: Mapping[int, int]) -> dict[int, int]:
    runs = (run for at in groups for run in name.row_groups[at].runs)
    return {queue: minimums[queue] for queue, first, _ in runs if first < minimums.get(queue, 0)}


def instant_ms(value: Instant | None) -> int | None:
    """Convert a datetime, ISO 8601 text or milliseconds to milliseconds since 1970; without a zone it is UTC."""
    if value is None or isinstance(value, int):
        return value
    return parse_instant_ms(value) if isinstance(value, str) else datetime_ms(value)
