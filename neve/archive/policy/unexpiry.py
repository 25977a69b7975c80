"""Decide which expired objects return to the readers' view: the reverse of `expiry`. Pure.

An UNEXPIRE entry returns objects to view and sets the minimums of their queues, which no other entry lowers. In each
topic the objects are examined from the newest expired one down. Those return that have not expired by the current TTL
and time, down to the first that has expired or is deleted, and not below a hole in a queue.

An object that a REPLACE removed stays out, because its rows are in another object, live or expired. The other object is
recognized by its key: its range contains this one's, and its rewrite number is higher. An object that an ERASE removed
stays out as well; some of its rows are in a gap with an erasure as its reason.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import CommittedObject, Gap
from neve.archive.format.keys import parse_data_key
from neve.archive.policy.erasure import holds
from neve.archive.policy.expiry import expired_ends

Minimums = dict[str, dict[int, int]]


class Undo(NamedTuple):
    """The content of an UNEXPIRE entry."""

    keys: list[str]
    minimums: Minimums


def plan_unexpiry(
    catalog: Catalog,
    local: Mapping[str, Mapping[int, int]],
    ttl_ms: Callable[[str], int | None],
    now_ms: int,
    exists: Callable[[str], bool],
) -> Undo:
    """Plan an UNEXPIRE.

    Args:
        catalog: the catalog.
        local: topic -> queue -> the first offset in the local log.
        ttl_ms: returns the TTL of a topic.
        now_ms: the current time.
        exists: returns whether the store has an object.
    """
    keys: list[str] = []
    minimums: Minimums = {}
    for topic in sorted({*catalog.topics(), *catalog.expiring_topics(), *local}):
        tombstone = catalog.topic_entry(topic)
        hidden = dict(tombstone.minimums) if tombstone is not None else {}
        live = catalog.objects(topic)
        expiring = [name for _, name in catalog.topic(topic).expiring_names()]
        left = _not_erased(_not_replaced(expiring, live), catalog.gaps(topic))
        back = _back(left, hidden, ttl_ms(topic), now_ms, exists)
        names = sorted([*back, *live], key=lambda name: name.start)
        # A queue without objects has a minimum in the archive if its messages expired before a round archived them.
        lower = {**local.get(topic, {}), **_minimums(catalog, topic, names, ttl_ms(topic), now_ms)}
        for queue, offset in lower.items():
            if (offset := max(offset, hidden.get(queue, 0))) < catalog.recorded_minimum(topic, queue):
                minimums.setdefault(topic, {})[queue] = offset
        keys += [name.key for name in back]
    return Undo(keys, minimums)


def _not_replaced(expiring: list[CommittedObject], live: Iterable[CommittedObject]) -> list[CommittedObject]:
    """Return the objects whose rows are in no object that a rewrite made from them."""
    made: dict[str, list[tuple[int, CommittedObject]]] = {}
    for name in (*expiring, *live):
        if number := _rewrite_of(name):
            made.setdefault(name.day, []).append((number, name))
    return [
        name
        for name in expiring
        if not any(
            one.start <= name.start and name.end <= one.end and number > _rewrite_of(name)
            for number, one in made.get(name.day, ())
        )
    ]


def may_come_back(catalog: Catalog, name: CommittedObject) -> bool:
    """Return whether an object may return to view: no rewrite replaced it and none of its rows was erased."""
    left = _not_replaced([name], catalog.topic(name.topic).around(name))  # an object made from it contains its range
    return bool(_not_erased(left, catalog.gaps(name.topic)))


def stays_out(catalog: Catalog, name: CommittedObject) -> bool:
    """Return whether an object stays out of view for good, because some of its rows were erased."""
    return not _not_erased([name], catalog.gaps(name.topic))


def _not_erased(expiring: list[CommittedObject], gaps: Iterable[Gap]) -> list[CommittedObject]:
    """Return the objects without erased rows; a row in view would override the gap of its erasure."""
    erased: dict[int, list[tuple[int, int]]] = {}
    for gap in gaps:
        if gap.is_erased:
            erased.setdefault(gap.queue, []).append((gap.first, gap.last))
    spans = {queue: sorted(of_queue) for queue, of_queue in erased.items()}
    return [name for name in expiring if not holds(name, spans)]


def _rewrite_of(name: CommittedObject) -> int:
    """Return the rewrite number in the key; 0 for an object of an offload round."""
    parts = parse_data_key(name.key)
    return 0 if parts is None else parts.rewrite


def _back(
    names: Iterable[CommittedObject],
    hidden: Mapping[int, int],
    ttl_ms: int | None,
    now_ms: int,
    exists: Callable[[str], bool],
) -> list[CommittedObject]:
    back = []
    for name in sorted(names, key=lambda name: name.start, reverse=True):
        if all(last < hidden.get(queue, 0) for queue, (_, last, _) in name.queues.items()):
            continue  # its topic was deleted
        expired = ttl_ms is not None and all(group.has_expired(ttl_ms, now_ms) for group in name.row_groups)
        if expired or not exists(name.key):
            break
        back.append(name)
    return back


def _minimums(
    catalog: Catalog, topic: str, names: list[CommittedObject], ttl_ms: int | None, now_ms: int
) -> dict[int, int]:
    """Return for each queue the first offset that has not expired and has no hole above it."""
    first_alive: dict[int, int] = {}
    settled: set[int] = set()
    spans: dict[int, list[tuple[int, int]]] = {}
    for name in names:
        ends = {} if ttl_ms is None else expired_ends(name, ttl_ms, now_ms)
        for queue, first, last in name.runs:
            spans.setdefault(queue, []).append((first, last))  # erased rows are between the runs
        for queue, (first, last, _) in name.queues.items():
            if queue not in settled:
                first_alive[queue] = max(first, ends.get(queue, first))
                if first_alive[queue] <= last:
                    settled.add(queue)
    for gap in catalog.gaps(topic):
        if gap.queue in spans:
            spans[gap.queue].append((gap.first, gap.last))
    return {queue: max(alive, _without_hole(spans[queue])) for queue, alive in first_alive.items()}


def _without_hole(spans: list[tuple[int, int]]) -> int:
    """Return the first offset of the contiguous spans at the end."""
    lowest: int | None = None
    for first, last in sorted(spans, reverse=True):
        if lowest is not None and last + 1 < lowest:
            break
        lowest = first if lowest is None else min(lowest, first)
    assert lowest is not None
    return lowest
