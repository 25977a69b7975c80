"""The part of each queue that a command reads: by offsets, by store times, or the last messages.

    min ...... begin ........... end ...... max        messages that arrive meanwhile have offsets above max

Begin is included and end is excluded, everywhere.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.cli.failures import NOT_FOUND, Failure
from neve.cli.output import say

if TYPE_CHECKING:
    from typing_extensions import override

    from neve.client import AsyncClient, MessageQueue
else:

    def override(method: Any) -> Any:
        return method


class QueueChoice(NamedTuple):
    """The queues of `--queue` and `--broker`; None is no restriction."""

    queue: int | None = None
    broker: str | None = None

    def includes(self, queue: MessageQueue) -> bool:
        """Return whether the options choose this queue."""
        return self.queue in (None, queue.queue_id) and self.broker in (None, queue.broker_name)

    @override
    def __str__(self) -> str:
        number = "" if self.queue is None else f" {self.queue}"
        return f"queue{number}" + ("" if self.broker is None else f" at broker {self.broker}")


class RequestedSpan(NamedTuple):
    """The bounds of a command line; times are store times in milliseconds since 1970. None is no bound."""

    from_ms: int | None = None
    to_ms: int | None = None
    from_offset: int | None = None
    to_offset: int | None = None
    last: int | None = None
    only_new: bool = False

    def has(self, stored_ms: int) -> bool:
        """Return whether a store time is within the bounds; brokers' offsets by time assume that times are in order."""
        return (self.from_ms is None or stored_ms >= self.from_ms) and (self.to_ms is None or stored_ms < self.to_ms)


class Span(NamedTuple):
    """A range of offsets of one queue, `end` excluded."""

    queue: MessageQueue
    begin: int
    end: int
    lowest: int


async def chosen_queues(client: AsyncClient, topic: str, choice: QueueChoice) -> list[MessageQueue]:
    """Return the chosen queues of a topic.

    Raises:
        Failure: the topic has no such queue.
    """
    queues = [one for one in await client.queues(topic) if choice.includes(one)]
    if not queues:
        raise Failure(NOT_FOUND, f"topic {topic} has no {choice}")
    return queues


async def spans(client: AsyncClient, topic: str, wanted: RequestedSpan, choice: QueueChoice) -> list[Span]:
    """Return the wanted range of each chosen queue.

    Raises:
        Failure: the topic has no such queue.
    """
    queues = await chosen_queues(client, topic, choice)
    return list(await asyncio.gather(*(_span(client, topic, wanted, one) for one in queues)))


async def _span(client: AsyncClient, topic: str, wanted: RequestedSpan, queue: MessageQueue) -> Span:
    lowest, highest = await asyncio.gather(client.min_offset(topic, queue), client.max_offset(topic, queue))
    begin, end = lowest, highest
    if wanted.only_new:
        begin = highest
    if wanted.from_ms is not None:
        begin = await client.offset_by_time(topic, queue, wanted.from_ms)
    if wanted.from_offset is not None:
        begin = wanted.from_offset
        if begin < lowest < highest:
            say(f"queue {queue.queue_id} of {queue.broker_name} starts at offset {lowest}")
    if wanted.to_ms is not None:
        end = await client.offset_by_time(topic, queue, wanted.to_ms)
    if wanted.to_offset is not None:
        end = wanted.to_offset
    end = min(end, highest)
    return Span(queue, max(begin, lowest), end, lowest)
