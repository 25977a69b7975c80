"""Queues as both tiers name them, what their brokers say of them, and what a task pulls of one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from neve.spark.planning.rows import Rows, runs_of

#: Offsets that a task pulls at most: about as long as the rows of an archive's task take.
TASK_ROWS = 50_000


class Queue(NamedTuple):
    """One queue of a topic at a broker (by its name, whichever of its members is asked)."""

    broker: str
    topic: str
    queue_id: int

    def told(self) -> str:
        """As an error names it."""
        return f"topic {self.topic}, broker {self.broker}, queue {self.queue_id}"


class Bounds(NamedTuple):
    """What its broker has of a queue and shows: [minimum, maximum)."""

    minimum: int
    maximum: int


class HotSlice(NamedTuple):
    """Offsets first … last of a queue, which its broker is asked for. It travels to the machine that does."""

    queue: Queue
    first: int
    last: int


HotTask = list[HotSlice]


def hot_slices(broker: str, rows: Rows) -> list[HotSlice]:
    """Of one broker's rows."""
    return [HotSlice(Queue(broker, topic, queue), first, last) for topic, queue, first, last in runs_of(rows)]


def hot_tasks_of(slices: Sequence[HotSlice], least: int) -> list[HotTask]:
    """Divided into tasks of as many offsets; a queue may be in several. At least so many where there are as many rows.

    A queue stays in one task if it is no longer than a task's share.
    """
    total = sum(one.last - one.first + 1 for one in slices)
    share = max(1, min(TASK_ROWS, -(-total // max(least, 1))))
    tasks: list[HotTask] = []
    room = 0
    for one in slices:
        for piece in _pieces(one, share):
            some = piece.last - piece.first + 1
            if some > room:
                tasks.append([])
                room = share
            tasks[-1].append(piece)
            room -= some
    return tasks


def _pieces(one: HotSlice, most: int) -> Iterable[HotSlice]:
    for first in range(one.first, one.last + 1, most):
        yield HotSlice(one.queue, first, min(one.last, first + most - 1))


def by_broker(ranges: Mapping[Queue, tuple[int, int]]) -> dict[str, list[tuple[str, int, int, int]]]:
    """broker -> (topic, queue, first, last) of what is not empty; a range ends before its second number."""
    found: dict[str, list[tuple[str, int, int, int]]] = {}
    for queue, (first, end) in sorted(ranges.items()):
        if first < end:
            found.setdefault(queue.broker, []).append((queue.topic, queue.queue_id, first, end - 1))
    return found
