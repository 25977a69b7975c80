"""Which part of each queue is meant: from here to there, by offsets, by times, or the last so many.

min ...... begin ........... end ...... max        what is stored meanwhile comes above max
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

import click

from neve.cli.failures import NOT_FOUND, Failure
from neve.cli.output import say

if TYPE_CHECKING:
    from neve.client import AsyncClient, MessageQueue


class Wanted(NamedTuple):
    """As the command line says it; times in ms since 1970, of storing. What is None has no bound."""

    from_ms: int | None = None
    to_ms: int | None = None
    from_offset: int | None = None
    to_offset: int | None = None
    last: int | None = None
    only_new: bool = False

    def has(self, stored_ms: int) -> bool:
        """Which offset a time has is told by brokers for messages whose times are in order."""
        return (self.from_ms is None or stored_ms >= self.from_ms) and (self.to_ms is None or stored_ms < self.to_ms)


class Span(NamedTuple):
    """Of one queue. What is asked for ends before `end`."""

    queue: MessageQueue
    begin: int
    end: int
    lowest: int


def offsets(text: str) -> tuple[int, int | None]:
    """(first, end) of `N`, `N:` or `N:M`."""
    first, colon, end = text.partition(":")
    if not first.isdecimal() or (end and not end.isdecimal()) or (end and int(end) < int(first)):
        raise click.BadParameter(f"{text!r} is not N, N: or N:M", param_hint="--offset")
    return int(first), int(end) if colon and end else None


async def spans(client: AsyncClient, topic: str, wanted: Wanted, queue: int | None) -> list[Span]:
    """
    Raises:
        Failure: there is no such queue.
    """
    queues = [one for one in await client.queues(topic) if queue in (None, one.queue_id)]
    if not queues:
        raise Failure(NOT_FOUND, f"{topic} has no queue" + ("" if queue is None else f" {queue}"))
    return list(await asyncio.gather(*(_span(client, topic, wanted, one) for one in queues)))


async def _span(client: AsyncClient, topic: str, wanted: Wanted, queue: MessageQueue) -> Span:
    lowest, highest = await asyncio.gather(client.min_offset(topic, queue), client.max_offset(topic, queue))
    begin, end = lowest, highest
    if wanted.only_new:
        begin = highest
    if wanted.from_ms is not None:
        begin = await client.offset_by_time(topic, queue, wanted.from_ms)
    if wanted.from_offset is not None:
        begin = wanted.from_offset
        if begin < lowest < highest:
            say(f"queue {queue.queue_id} of {queue.broker_name} begins at {lowest}")
    if wanted.to_ms is not None:
        end = await client.offset_by_time(topic, queue, wanted.to_ms)
    if wanted.to_offset is not None:
        end = wanted.to_offset
    end = min(end, highest)
    return Span(queue, max(begin, lowest), end, lowest)
