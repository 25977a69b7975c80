"""Where a stream over both tiers stands: the next offset of each queue. Pure.

    {"version": 2, "since": ms,                       `since` only where the stream began at a time
     "brokers": {"broker-a": {"orders": {"0": 4711}}}}

That is a stream's offset, as Spark keeps it in its checkpoint. A row's offset is the same in both tiers and never given
twice, so the rows between two positions are the same ones wherever they lie by the time they are read: at the broker,
in an object of the archive, in the object that took its place.

Spark keeps where a batch ends. Where the first one begins it asks again after a crash, when more has come: so an
initial position says that it is one (`"initial": true`), and the one behind it where the stream began (`"begin": {…}`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from neve.spark.planning.positions import VERSION as OF_JOURNALS
from neve.spark.planning.positions import BadPosition
from neve.spark.planning.rows import share
from neve.spark.tiers.queues import Queue

VERSION = 2


class QueuePosition(NamedTuple):
    """`since`: the stream has no row that was stored before. `begin`: where the stream began, in the position that ends
    its first batch."""

    queues: Mapping[Queue, int]
    since: int | None = None
    is_initial: bool = False
    begin: Mapping[Queue, int] | None = None


def follows(start: QueuePosition, queues: Mapping[Queue, int]) -> QueuePosition:
    """The end of a batch from `start` on; `start` itself where it would be the same place."""
    if queues == start.queues:
        return start
    return QueuePosition(queues, start.since, begin=start.queues if start.is_initial else None)


def advanced(position: QueuePosition, ends: Mapping[Queue, int], most: int | None) -> QueuePosition:
    """The position after at most so many offsets more, each queue its share; queues without an end stay."""
    waiting = {queue: max(ends.get(queue, 0) - offset, 0) for queue, offset in sorted(position.queues.items())}
    wanted = list(waiting.values())
    shares = wanted if most is None else share(most, wanted)
    moved = {queue: position.queues[queue] + some for queue, some in zip(waiting, shares, strict=True)}
    return follows(position, moved)


def between(start: QueuePosition, end: QueuePosition) -> dict[Queue, tuple[int, int]]:
    """[first, end) of each queue that both have; one that is new at `end` begins there.

    Of a stream's first batch, from where it began at the first time, whatever initial position Spark is told now.
    """
    begins = start.queues if not start.is_initial else end.queues if end.begin is None else end.begin
    return {
        queue: (begins[queue], following)
        for queue, following in end.queues.items()
        if queue in begins and following > begins[queue]
    }


def encoded(position: QueuePosition) -> dict[str, Any]:
    """As Spark writes it down: equal positions become equal text."""
    since = {} if position.since is None else {"since": position.since}
    initial = {"initial": True} if position.is_initial else {}
    begin = {} if position.begin is None else {"begin": _encoded(position.begin)}
    return {"version": VERSION, **since, **initial, **begin, "brokers": _encoded(position.queues)}


def _encoded(queues: Mapping[Queue, int]) -> dict[str, dict[str, dict[str, int]]]:
    brokers: dict[str, dict[str, dict[str, int]]] = {}
    for queue, offset in sorted(queues.items()):
        brokers.setdefault(queue.broker, {}).setdefault(queue.topic, {})[str(queue.queue_id)] = offset
    return brokers


def decoded(told: Mapping[str, Any]) -> QueuePosition:
    """Raises BadPosition."""
    version = told.get("version")
    if version == OF_JOURNALS:
        raise BadPosition(
            "this checkpoint was begun without the option namesrv, and counts entries of journals: go on without it, "
            "or begin with a new checkpoint"
        )
    if version != VERSION:
        raise BadPosition(f"the checkpoint has a position of version {version!r}, this program knows {VERSION}")
    try:
        queues = _decoded(told["brokers"])
        begin = None if "begin" not in told else _decoded(told["begin"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadPosition(f"the checkpoint has no position of a neve stream: {error!r}") from error
    return QueuePosition(queues, told.get("since"), bool(told.get("initial")), begin)


def _decoded(brokers: Mapping[str, Any]) -> dict[Queue, int]:
    return {
        Queue(broker, topic, int(queue)): int(offset)
        for broker, topics in brokers.items()
        for topic, offsets in topics.items()
        for queue, offset in offsets.items()
    }
