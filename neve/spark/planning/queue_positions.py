"""Positions of a stream of archive and brokers: the next offset of each queue. Pure.

    {"version": 2, "since": ms,                       `since` only if the stream began at a time
     "brokers": {"broker-a": {"orders": {"0": 4711}}}}

This is the offset of a stream in Spark's checkpoint. A row has the same offset in both tiers, and offsets are not
reused. The rows between two positions are therefore the same whether they are read from the broker, from an object, or
from the object that replaced it.

Spark stores the end of a batch, but requests the initial position again after a crash, when there may be more rows. An
initial position therefore has `"initial": true`, and the next one has the beginning of the stream (`"begin": {...}`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from neve.spark.planning.journal_positions import VERSION as OF_JOURNALS
from neve.spark.planning.journal_positions import BadPosition
from neve.spark.planning.queues import Queue
from neve.spark.planning.rows import share

VERSION = 2


class QueuePosition(NamedTuple):
    """The position of a stream; `since` and `begin` as in `journal_positions.Position`."""

    queues: Mapping[Queue, int]
    since: int | None = None
    is_initial: bool = False
    begin: Mapping[Queue, int] | None = None


def follows(start: QueuePosition, queues: Mapping[Queue, int]) -> QueuePosition:
    """Return the end of a batch that begins at `start`; `start` itself if nothing changed."""
    if queues == start.queues:
        return start
    return QueuePosition(queues, start.since, begin=start.queues if start.is_initial else None)


def advanced(position: QueuePosition, ends: Mapping[Queue, int], most: int | None) -> QueuePosition:
    """Return the position after at most `most` offsets, shared among the queues; queues without an end do not move."""
    waiting = {queue: max(ends.get(queue, 0) - offset, 0) for queue, offset in sorted(position.queues.items())}
    wanted = list(waiting.values())
    shares = wanted if most is None else share(most, wanted)
    moved = {queue: position.queues[queue] + some for queue, some in zip(waiting, shares, strict=True)}
    return follows(position, moved)


def between(start: QueuePosition, end: QueuePosition) -> dict[Queue, tuple[int, int]]:
    """Return the range [first, end) of each queue in both positions; a queue that is new in `end` begins there.

    The first batch begins at the first initial position, even if `start` is a later one.
    """
    begins = start.queues if not start.is_initial else end.queues if end.begin is None else end.begin
    return {
        queue: (begins[queue], following)
        for queue, following in end.queues.items()
        if queue in begins and following > begins[queue]
    }


def encoded(position: QueuePosition) -> dict[str, Any]:
    """Return the position as JSON; equal positions have equal text."""
    since = {} if position.since is None else {"since": position.since}
    initial = {"initial": True} if position.is_initial else {}
    begin = {} if position.begin is None else {"begin": _encoded(position.begin)}
    return {"version": VERSION, **since, **initial, **begin, "brokers": _encoded(position.queues)}


def _encoded(queues: Mapping[Queue, int]) -> dict[str, dict[str, dict[str, int]]]:
    brokers: dict[str, dict[str, dict[str, int]]] = {}
    for queue, offset in sorted(queues.items()):
        brokers.setdefault(queue.broker, {}).setdefault(queue.topic, {})[str(queue.queue_id)] = offset
    return brokers


def decoded(row: Mapping[str, Any]) -> QueuePosition:
    """Parse a position. Raises BadPosition."""
    version = row.get("version")
    if version == OF_JOURNALS:
        raise BadPosition(
            "this checkpoint was begun without the option namesrv, and counts entries of journals: remove the option, "
            "or begin with a new checkpoint"
        )
    if version != VERSION:
        raise BadPosition(f"the position in the checkpoint has version {version!r}, this neve reads {VERSION}")
    try:
        queues = _decoded(row["brokers"])
        begin = None if "begin" not in row else _decoded(row["begin"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadPosition(f"the checkpoint has no position of a stream of neve: {error!r}") from error
    return QueuePosition(queues, row.get("since"), bool(row.get("initial")), begin)


def _decoded(brokers: Mapping[str, Any]) -> dict[Queue, int]:
    return {
        Queue(broker, topic, int(queue)): int(offset)
        for broker, topics in brokers.items()
        for topic, offsets in topics.items()
        for queue, offset in offsets.items()
    }
