"""Queues, what brokers report of them, and the slices of them that tasks pull."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from neve.spark.planning.rows import Rows, runs_of

#: Maximum number of offsets that a task pulls; it takes about as long as a task of the archive.
TASK_ROWS = 50_000


class BrokerAway(RuntimeError):
    """A name server or a broker is unreachable, so the rows that it has are unknown."""


class BrokerRefused(RuntimeError):
    """A broker rejected a request."""


class Queue(NamedTuple):
    """A queue of a topic at a broker; `broker` is the name that all members of a broker set share."""

    broker: str
    topic: str
    queue_id: int

    def text(self) -> str:
        """Return the queue as an error message names it."""
        return f"topic {self.topic}, broker {self.broker}, queue {self.queue_id}"


class Bounds(NamedTuple):
    """The visible offsets of a queue at its broker: [minimum, maximum)."""

    minimum: int
    maximum: int


class Seen(NamedTuple):
    """The state of some topics, as the cluster reports it.

    Args:
        brokers: all brokers that the name servers know.
        without_master: those of them whose answers come from a slave, which may lag.
        bounds: the bounds of each queue.
        unreadable: (broker, topic) without permission to read -> the reason.
    """

    brokers: frozenset[str] = frozenset()
    without_master: frozenset[str] = frozenset()
    bounds: Mapping[Queue, Bounds] = {}
    unreadable: Mapping[tuple[str, str], str] = {}


class HotTier(Protocol):
    """The brokers of a cluster, as a planner uses them. Methods raise BrokerAway and BrokerRefused."""

    def topics(self) -> list[str]:
        """Return the topics that clients may read."""
        ...

    def seen(self, topics: Iterable[str]) -> Seen:
        """Return the state of the cluster, with the bounds of all queues of these topics."""
        ...

    def bounds(self, queues: Iterable[Queue]) -> Mapping[Queue, Bounds]:
        """Return the bounds of queues that are in no route."""
        ...

    def report(self, offsets: Mapping[Queue, int]) -> bool:
        """Commit offsets for the group of the options; False: retry later."""
        ...


class HotSlice(NamedTuple):
    """Offsets first ... last of a queue, which a task pulls from the broker."""

    queue: Queue
    first: int
    last: int


HotTask = list[HotSlice]


def hot_slices(broker: str, rows: Rows) -> list[HotSlice]:
    """Return the rows of one broker as slices."""
    return [HotSlice(Queue(broker, topic, queue), first, last) for topic, queue, first, last in runs_of(rows)]


def hot_tasks_of(slices: Sequence[HotSlice], least: int) -> list[HotTask]:
    """Divide slices into tasks of about the same number of offsets, at least `least` of them if there are enough rows.

    A slice is divided only if it is longer than a task's share.
    """
    total = sum(one.last - one.first + 1 for one in slices)
    share = max(1, min(TASK_ROWS, -(-total // max(least, 1))))
    tasks: list[HotTask] = []
    room = 0
    for one in slices:
        for piece in _pieces(one, share):
            count = piece.last - piece.first + 1
            if count > room:
                tasks.append([])
                room = share
            tasks[-1].append(piece)
            room -= count
    return tasks


def _pieces(one: HotSlice, most: int) -> Iterator[HotSlice]:
    for first in range(one.first, one.last + 1, most):
        yield HotSlice(one.queue, first, min(one.last, first + most - 1))
