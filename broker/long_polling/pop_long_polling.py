"""Pop and notification requests that found no message and wait, first in, first out (RocketMQ's PopLongPollingService).

An arrival wakes one pop and one notification of each group. They are counted separately because a notification consumes
nothing: it must not use up the wake-up of a pop. A woken waiter leaves the list. If it ends without reading the queue,
`pass_on` wakes the next waiter.

    topic ─▶ (group, takes) ─▶ queue, or any ─▶ waiters

Thanks to this index the cost of an arrival depends only on the waiters for its queue.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from neve.remoting.names import RETRY_V1, RETRY_V2, real_topic

ANY_QUEUE = -1

_Line = dict["Waiter", None]
_Lines = dict[int, _Line]


@dataclass(slots=True, eq=False)
class Waiter:
    """A pop or a notification (`takes` is false) that waits for a message of its group.

    It waits for one queue, or for any queue (-1) of its topic, and for the group's retry topics. `future` completes
    when it is woken.
    """

    group: str
    topic: str
    # A message in any queue of these topics wakes this waiter.
    retry_topics: tuple[str, ...]
    queue_id: int
    # True: a pop, which locks messages. False: a notification, which only reports that there are some.
    takes: bool = True
    future: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @classmethod
    def of(cls, group: str, topic: str, queue_id: int, *, takes: bool) -> "Waiter":
        """Return a waiter that also waits for the group's pop-retry topics, which may be created while it waits."""
        retries = (real_topic(topic, group, RETRY_V1), real_topic(topic, group, RETRY_V2))
        return cls(group, topic, retries, queue_id, takes)

    def queues(self) -> Iterator[tuple[str, int]]:
        yield self.topic, self.queue_id
        for retry in self.retry_topics:
            if retry != self.topic:
                yield retry, ANY_QUEUE


class PopLongPolling:
    """Index of waiting pops and notifications (RocketMQ's PopLongPollingService).

    A woken waiter is removed. If it cannot read, the caller passes it to `pass_on`, so that no arrival is lost.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, dict[tuple[str, bool], _Lines]] = {}
        self.count = 0

    def add(self, waiter: Waiter) -> None:
        for topic, queue_id in waiter.queues():
            lines = self._waiting.setdefault(topic, {}).setdefault((waiter.group, waiter.takes), {})
            lines.setdefault(queue_id, {})[waiter] = None
        self.count += 1

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter; call it exactly once for each `add`, also if the waiter was woken."""
        self._leave(waiter)
        self.count -= 1

    def arrived(self, topic: str, queue_id: int) -> None:
        for lines in list(self._waiting.get(topic, {}).values()):
            self._wake_first(lines, queue_id)

    def wake(self, group: str, topic: str, queue_id: int = ANY_QUEUE) -> None:
        """Wake one pop and one notification of the group that wait for this queue or for any queue."""
        for takes in (True, False):
            lines = self._waiting.get(topic, {}).get((group, takes))
            if lines is not None:
                self._wake_first(lines, queue_id)

    def wake_group(self, group: str, topic: str) -> None:
        """Wake all waiters of the group, after its offset was reset."""
        for takes in (True, False):
            for line in list(self._waiting.get(topic, {}).get((group, takes), {}).values()):
                self._wake_line(line)

    def release_topic(self, topic: str) -> None:
        """Wake all waiters for the topic, after it was deleted or changed."""
        for lines in list(self._waiting.get(topic, {}).values()):
            for line in list(lines.values()):
                self._wake_line(line)

    def release_all(self) -> None:
        for groups in list(self._waiting.values()):
            for lines in list(groups.values()):
                for line in list(lines.values()):
                    self._wake_line(line)

    def pass_on(self, waiter: Waiter) -> None:
        """Wake the next waiter of the same kind, if this one was woken but cannot read."""
        lines = self._waiting.get(waiter.topic, {}).get((waiter.group, waiter.takes))
        if waiter.future.done() and lines is not None:
            self._wake_first(lines, waiter.queue_id)

    def waiting_for(self, group: str, topic: str, queue_id: int) -> int:
        """Return how many pops of the group would accept a message of the queue."""
        lines = self._waiting.get(topic, {}).get((group, True), {})
        fitting = lines if queue_id == ANY_QUEUE else {queue_id, ANY_QUEUE}
        return sum(len(lines.get(number, ())) for number in fitting)

    # ---- inside

    def _wake_first(self, lines: _Lines, queue_id: int) -> None:
        """Wake the first waiter for the queue, else the first one for any queue.

        If `queue_id` is `ANY_QUEUE`, wake the first waiter of any queue.
        """
        wanted = (queue_id, ANY_QUEUE) if queue_id != ANY_QUEUE else (ANY_QUEUE, *lines)
        for number in wanted:
            first = next(iter(lines.get(number, ())), None)
            if first is not None:
                self._wake_one(first)
                return

    def _wake_line(self, line: _Line) -> None:
        for waiter in list(line):
            self._wake_one(waiter)

    def _wake_one(self, waiter: Waiter) -> None:
        self._leave(waiter)
        if not waiter.future.done():
            waiter.future.set_result(None)

    def _leave(self, waiter: Waiter) -> None:
        for topic, queue_id in waiter.queues():
            groups = self._waiting.get(topic, {})
            lines = groups.get((waiter.group, waiter.takes), {})
            line = lines.get(queue_id)
            if line is None or waiter not in line:
                continue
            del line[waiter]
            if not line:
                del lines[queue_id]
            if not lines:
                del groups[waiter.group, waiter.takes]
            if not groups:
                del self._waiting[topic]
