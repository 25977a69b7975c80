"""What of a topic has expired: one pure decision, for the broker that acts on it and for the dry run that shows it.

Objects are looked at in log order, up to the first that has something live. Store times run backwards in a log only
where the clock was set back: what lies behind a time too late is kept as long. Times are milliseconds; one below 0 is
unknown, and is kept.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import NamedTuple

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import CommittedObject


class TopicExpiry(NamedTuple):
    """Objects that leave the readers' view whole, and the queues' new minimums: those of the object after them too."""

    keys: list[str]
    minimums: dict[int, int]


def expire_topic(catalog: Catalog, topic: str, ttl_ms: int | None, now_ms: int, most: int | None = None) -> TopicExpiry:
    """What has expired of a topic in a broker's catalog: what its sweep does, and what the dry run shows.

    `most`: of how many objects the oldest are enough, or a few more.
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
    """For the objects of one topic of one broker, in log order; `minimum` is what is recorded of a queue.

    Takes no more of `objects` than it must: the expired ones and one behind them.
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
    """Objects of a topic's former life: from the lowest on, those that lie wholly below where its queues go on."""
    keys: list[str] = []
    for name in objects:
        if any(last >= minimums.get(queue, 0) for queue, (_, last, _) in name.queues.items()):
            break
        keys.append(name.key)
    return keys


def rows_below(name: CommittedObject, minimum: Callable[[int], int]) -> int:
    """How many rows of an object lie below the minimums of their queues."""
    return sum(max(0, min(last + 1, minimum(queue)) - first) for queue, first, last in name.runs)


def _raise(minimums: dict[int, int], ends: Mapping[int, int]) -> None:
    for queue, end in ends.items():
        minimums[queue] = max(minimums.get(queue, 0), end)


def expired_ends(name: CommittedObject, ttl_ms: int, now_ms: int) -> dict[int, int]:
    """For each queue, one above its last offset in the expired row groups at its beginning."""
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
