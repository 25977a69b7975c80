"""Decide which objects and rows of a topic have expired; the broker's sweep and its dry run share this decision. Pure.

Objects are examined in log order, up to the first with a live row. Store times decrease in a log only after the clock
was set back; objects behind one with a too high time are kept longer. Times are milliseconds. A negative time is
unknown, and a row of unknown time never expires.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import NamedTuple

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import CommittedObject


class TopicExpiry(NamedTuple):
    """The keys of fully expired objects, and the new minimums of queues, which may also cut into the next object."""

    keys: list[str]
    minimums: dict[int, int]


def expire_topic(catalog: Catalog, topic: str, ttl_ms: int | None, now_ms: int, most: int | None = None) -> TopicExpiry:
    """Decide the expiry of a topic in a broker's catalog.

    Args:
        catalog: the catalog.
        topic: the topic.
        ttl_ms: its TTL; None if it is unlimited.
        now_ms: the current time.
        most: stop after about this many objects.
    """
    if ttl_ms is None or not catalog.topic(topic).may_expire(now_ms - ttl_ms):
        return TopicExpiry([], {})
    blocks = catalog.topic(topic).blocks
    keys: list[str] = []
    minimums: dict[int, int] = {}
    whole = 0
    for expired in takewhile(bool, (block.expired(now_ms - ttl_ms) for block in blocks)):
        assert expired is not None
        whole += 1
        keys += expired[0]
        _raise(minimums, expired[1])
        if most is not None and len(keys) >= most:
            return TopicExpiry(keys, minimums)
    names = (name for block in blocks[whole:] for name in block.names())
    rest = plan_expiry(names, ttl_ms, now_ms, functools.partial(catalog.recorded_minimum, topic))
    _raise(minimums, rest.minimums)
    return TopicExpiry(keys + rest.keys, minimums)


def plan_expiry(
    objects: Iterable[CommittedObject], ttl_ms: int, now_ms: int, minimum: Callable[[int], int] = lambda queue: 0
) -> TopicExpiry:
    """Decide the expiry of the objects of one topic of one broker.

    Args:
        objects: the objects in log order; consumed up to the first that has not expired.
        ttl_ms: the TTL.
        now_ms: the current time.
        minimum: returns the recorded minimum of a queue.
    """
    keys: list[str] = []
    minimums: dict[int, int] = {}
    for name in objects:
        if name.row_groups and all(group.has_expired(ttl_ms, now_ms) for group in name.row_groups):
            keys.append(name.key)
            _raise(minimums, {queue: last + 1 for queue, (_, last, _) in name.queues.items()})
            continue
        ends = expired_ends(name, ttl_ms, now_ms)
        _raise(minimums, {queue: end for queue, end in ends.items() if end > minimum(queue)})
        break
    return TopicExpiry(keys, minimums)


def plan_dropped(objects: Iterable[CommittedObject], minimums: Mapping[int, int]) -> list[str]:
    """Return the keys of the first objects whose offsets are all below the minimums of a deleted topic's queues."""
    keys: list[str] = []
    for name in objects:
        if any(last >= minimums.get(queue, 0) for queue, (_, last, _) in name.queues.items()):
            break
        keys.append(name.key)
    return keys


def rows_below(name: CommittedObject, minimum: Callable[[int], int]) -> int:
    """Return the number of rows of an object below the minimums of their queues."""
    return sum(max(0, min(last + 1, minimum(queue)) - first) for queue, first, last in name.runs)


def _raise(minimums: dict[int, int], ends: Mapping[int, int]) -> None:
    for queue, end in ends.items():
        minimums[queue] = max(minimums.get(queue, 0), end)


def expired_ends(name: CommittedObject, ttl_ms: int, now_ms: int) -> dict[int, int]:
    """Return for each queue one above its last offset in the expired row groups at the beginning of an object."""
    ends: dict[int, int] = {}
    live: set[int] = set()
    for group in name.row_groups:
        expired = group.has_expired(ttl_ms, now_ms)
        for queue, _, last in group.runs:
            if not expired:
                live.add(queue)
            elif queue not in live:
                ends[queue] = last + 1
    return ends
