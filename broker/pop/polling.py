"""Pops and notifications that found nothing wait here, in the order in which they came."""

import asyncio
from dataclasses import dataclass, field

ANY_QUEUE = -1


@dataclass(slots=True, eq=False)
class Waiter:
    group: str
    topic: str
    retry_topic: str
    queue_id: int
    future: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def fits(self, topic: str, queue_id: int) -> bool:
        return topic == self.retry_topic or self.queue_id in (ANY_QUEUE, queue_id)


class PopPolling:
    """A message wakes one waiter of each group: the next message finds the next one."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Waiter, None]] = {}
        self.count = 0

    def add(self, waiter: Waiter) -> None:
        for topic in {waiter.topic, waiter.retry_topic}:
            self._waiting.setdefault(topic, {})[waiter] = None
        self.count += 1

    def remove(self, waiter: Waiter) -> None:
        """Once for each `add`."""
        for topic in {waiter.topic, waiter.retry_topic}:
            waiting = self._waiting.get(topic)
            if waiting is not None:
                waiting.pop(waiter, None)
                if not waiting:
                    del self._waiting[topic]
        self.count -= 1

    def arrived(self, topic: str, queue_id: int) -> None:
        waiting = self._waiting.get(topic)
        if not waiting:
            return
        woken: set[str] = set()
        for waiter in waiting:
            if waiter.group not in woken and not waiter.future.done() and waiter.fits(topic, queue_id):
                woken.add(waiter.group)
                waiter.future.set_result(None)

    def wake(self, group: str, topic: str, queue_id: int = ANY_QUEUE) -> None:
        """There is more than a pop of the group could take, in that queue: one that waits for another cannot help."""
        for waiter in self._waiting.get(topic, ()):
            fits = queue_id == ANY_QUEUE or waiter.fits(topic, queue_id)
            if waiter.group == group and fits and not waiter.future.done():
                waiter.future.set_result(None)
                return

    def wake_all(self) -> None:
        for waiting in self._waiting.values():
            for waiter in waiting:
                if not waiter.future.done():
                    waiter.future.set_result(None)

    def waiting_for(self, group: str, topic: str, queue_id: int) -> int:
        """Who would take a message of that queue."""
        waiting = [waiter for waiter in self._waiting.get(topic, ()) if waiter.group == group]
        return sum(1 for waiter in waiting if queue_id == ANY_QUEUE or waiter.queue_id in (ANY_QUEUE, queue_id))
