"""Pops and notifications that found nothing wait here, in the order in which they came.

A message wakes one pop and one notification of each group: a notification takes nothing, so it may not use up the
waking of who does. Who was woken is no longer in line; if it ends without a look at what is there (`pass_on`), the
next one is woken instead.

    topic ─▶ (group, takes) ─▶ queue, or any ─▶ waiters

So an arrival asks only those who wait for its queue, however many wait for others.
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
    """One pop, or one notification (`takes` is false), that waits for a message of its group.

    It waits for one queue, or for any (-1) of its topic and the group's retry topics. `future` ends when it is woken.
    """

    group: str
    topic: str
    # Whatever comes into one of these is for it, in whichever queue.
    retry_topics: tuple[str, ...]
    queue_id: int
    # A pop takes messages, a notification only tells of them.
    takes: bool = True
    future: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @classmethod
    def of(cls, group: str, topic: str, queue_id: int, *, takes: bool) -> "Waiter":
        """Also for the group's pop-retry topics: one of these may be made while it waits."""
        retries = (real_topic(topic, group, RETRY_V1), real_topic(topic, group, RETRY_V2))
        return cls(group, topic, retries, queue_id, takes)

    def queues(self) -> Iterator[tuple[str, int]]:
        yield self.topic, self.queue_id
        for retry in self.retry_topics:
            if retry != self.topic:
                yield retry, ANY_QUEUE


class PopLongPolling:
    """Who waits for what (RocketMQ's PopLongPollingService): each arrival wakes one pop and one notification of a
    group.

    Whoever was woken is out of line; if he can't look, `pass_on` wakes the next, so no arrival is lost on him.
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
        """Once for each `add`."""
        self._leave(waiter)
        self.count -= 1

    def arrived(self, topic: str, queue_id: int) -> None:
        for lines in list(self._waiting.get(topic, {}).values()):
            self._wake_first(lines, queue_id)

    def wake(self, group: str, topic: str, queue_id: int = ANY_QUEUE) -> None:
        """There is something for the group, in that queue: one that waits for another cannot help."""
        for takes in (True, False):
            lines = self._waiting.get(topic, {}).get((group, takes))
            if lines is not None:
                self._wake_first(lines, queue_id)

    def wake_group(self, group: str, topic: str) -> None:
        """The group stands elsewhere: everyone of it looks again."""
        for takes in (True, False):
            for line in list(self._waiting.get(topic, {}).get((group, takes), {}).values()):
                self._wake_line(line)

    def release_topic(self, topic: str) -> None:
        """It is gone, or other than it was: everyone who waits for it looks again."""
        for lines in list(self._waiting.get(topic, {}).values()):
            for line in list(lines.values()):
                self._wake_line(line)

    def release_all(self) -> None:
        for groups in list(self._waiting.values()):
            for lines in list(groups.values()):
                for line in list(lines.values()):
                    self._wake_line(line)

    def pass_on(self, waiter: Waiter) -> None:
        """It was woken and can't look: the next of its kind does."""
        lines = self._waiting.get(waiter.topic, {}).get((waiter.group, waiter.takes))
        if waiter.future.done() and lines is not None:
            self._wake_first(lines, waiter.queue_id)

    def waiting_for(self, group: str, topic: str, queue_id: int) -> int:
        """Who would take a message of that queue."""
        lines = self._waiting.get(topic, {}).get((group, True), {})
        fitting = lines if queue_id == ANY_QUEUE else {queue_id, ANY_QUEUE}
        return sum(len(lines.get(number, ())) for number in fitting)

    # ---- inside

    def _wake_first(self, lines: _Lines, queue_id: int) -> None:
        """Who waits for that queue, else for any; where any queue has something, whoever it is."""
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
