"""Reads a topic without a group: the present messages queue by queue, and then new ones.

The next pull is in flight while an answer is printed. If only bodies are printed, only bodies are decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING

from neve.cli.busy import retry_while_busy
from neve.cli.output import say
from neve.cli.printed import Printed
from neve.cli.spans import QueueChoice, RequestedSpan, Span
from neve.cli.standstill import Standstill
from neve.client.model import Message, MessageQueue, message_from_record
from neve.clock import system_now_ms
from neve.errors import ConnectionFailed, NeveError, ProtocolError, UnknownOutcome
from neve.record.bodies import inflate
from neve.record.codec import MalformedRecord, MessageRecord, StoredBody, iter_bodies, iter_records

if TYPE_CHECKING:
    from neve.client import AsyncClient, StoredPull, Subscription

_AT_ONCE = 1024
_BYTES = 1 << 20
_LONG_POLL_S = 15.0
_PAUSE_S = 1.0
_NEW_QUEUES_S = 30.0  # between two looks for new queues
_AHEAD = 16


class Reading:
    """Prints messages of one topic that pass one filter."""

    def __init__(
        self, client: AsyncClient, topic: str, wanted: RequestedSpan, filtered: Subscription, printed: Printed
    ) -> None:
        self._client, self._topic, self._wanted, self._filter = client, topic, wanted, filtered
        self._printed = printed
        # brokers compare only hashes of tags, so the tags must be decoded
        self._only_bodies = printed.bodies_end is not None and not filtered.tags
        self._at_once = min(_AT_ONCE, printed.limit or _AT_ONCE)

    # ---- present messages

    async def read(self, spans: list[Span]) -> None:
        """Print the messages of the spans, up to the limit."""
        for span in spans:
            async with aclosing(self._pulls(span)) as pulls:
                async for found in pulls:
                    await self._print(span.queue, found, span.begin, span.end)
                    if self._printed.is_full:
                        return

    async def read_last(self, spans: list[Span], count: int) -> None:
        """Print the last `count` messages of the spans together, the oldest first."""
        each = await asyncio.gather(*(self._last_of(span, count) for span in spans))
        together = sorted((message for messages in each for message in messages), key=_by_time)
        for message in together[-count:]:
            if not self._printed.is_full:
                self._printed.add(message)
        await self._printed.flush()

    async def _last_of(self, span: Span, count: int) -> list[Message]:
        width = count
        while True:
            tail = span._replace(begin=max(span.begin, span.end - width))
            found: list[Message] = []
            async with aclosing(self._pulls(tail)) as pulls:
                async for pull in pulls:
                    found += self._messages(span.queue, pull, tail.begin, tail.end)
                    del found[:-count]
            if len(found) >= count or tail.begin == span.begin:
                return found
            width *= 8  # the filter may pass few messages

    async def _pulls(self, span: Span) -> AsyncGenerator[StoredPull]:
        if span.begin >= span.end:
            return
        offset = span.begin
        standstill = Standstill(span.queue, span.end)
        pulling = asyncio.create_task(self._pull(span.queue, offset, span.end - offset))
        try:
            while True:
                found = await pulling
                if await standstill.is_at(offset, found.next_offset):
                    pulling = asyncio.create_task(self._pull(span.queue, offset, span.end - offset))
                    continue
                offset = found.next_offset
                has_more = offset < span.end
                if has_more:
                    pulling = asyncio.create_task(self._pull(span.queue, offset, span.end - offset))
                yield found
                if not has_more:
                    return
        finally:
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)

    async def _pull(self, queue: MessageQueue, offset: int, count: int, wait: float = 0.0) -> StoredPull:
        return await retry_while_busy(
            lambda: self._client.pull_records(
                queue, offset, min(self._at_once, count), expression=self._filter, wait=wait, max_bytes=_BYTES
            )
        )

    # ---- new messages

    async def follow(self, starts: dict[MessageQueue, int], idle: float | None, choice: QueueChoice) -> None:
        """Print new messages from these offsets on, up to the limit, until none has arrived for `idle` seconds.

        Chosen queues that are added to the topic meanwhile are followed as well.
        """
        arrived: asyncio.Queue[tuple[MessageQueue, StoredPull] | NeveError] = asyncio.Queue(_AHEAD)
        tails = [asyncio.create_task(self._tail(queue, start, arrived)) for queue, start in starts.items()]
        tails.append(asyncio.create_task(self._new_tails({*starts}, choice, tails, arrived)))
        try:
            while not self._printed.is_full:
                try:
                    async with asyncio.timeout(idle):
                        item = await arrived.get()
                except TimeoutError:
                    return
                if isinstance(item, NeveError):
                    raise item
                await self._print(*item, 0, None)
        finally:
            for task in tails:
                task.cancel()
            await asyncio.gather(*tails, return_exceptions=True)

    async def _new_tails(
        self,
        known: set[MessageQueue],
        choice: QueueChoice,
        tails: list[asyncio.Task[None]],
        arrived: asyncio.Queue[tuple[MessageQueue, StoredPull] | NeveError],
    ) -> None:
        """Follow queues that are not known from their first offset, or with `only_new` from now on."""
        began_ms = system_now_ms()
        while True:
            await asyncio.sleep(_NEW_QUEUES_S)
            try:
                for queue in await self._client.queues(self._topic):
                    if queue in known or not choice.includes(queue):
                        continue
                    if self._wanted.only_new:
                        start = await self._client.offset_by_time(self._topic, queue, began_ms)
                    else:
                        start = await self._client.min_offset(self._topic, queue)
                    say(f"queue {queue.queue_id} of {queue.broker_name} is new")
                    known.add(queue)
                    tails.append(asyncio.create_task(self._tail(queue, start, arrived)))
            except NeveError as error:
                say(f"cannot look for new queues of {self._topic}: {error}; retrying")

    async def _tail(
        self, queue: MessageQueue, offset: int, arrived: asyncio.Queue[tuple[MessageQueue, StoredPull] | NeveError]
    ) -> None:
        is_reported = False
        while True:
            try:
                found = await self._pull(queue, offset, _AT_ONCE, _LONG_POLL_S)
            except (ConnectionFailed, UnknownOutcome) as error:
                if not is_reported:
                    say(f"queue {queue.queue_id} of {queue.broker_name}: {error}; retrying")
                is_reported = True
                await asyncio.sleep(_PAUSE_S)
                continue
            except NeveError as error:
                await arrived.put(error)
                return
            if is_reported:
                say(f"queue {queue.queue_id} of {queue.broker_name} answers again")
            is_reported = False
            if found.records:
                await arrived.put((queue, found))
            offset = found.next_offset

    # ---- an answer

    async def _print(self, queue: MessageQueue, found: StoredPull, begin: int, end: int | None) -> None:
        if self._only_bodies:
            bodies: list[bytes] = []
            size = 0
            for body in self._bodies(found, begin, end):
                bodies.append(body)
                size += len(body)
                if size > _BYTES:  # decompressed bodies may be a thousand times as large
                    self._printed.add_bodies(bodies)
                    await self._printed.flush()
                    bodies, size = [], 0
            self._printed.add_bodies(bodies)
        else:
            for message in self._messages(queue, found, begin, end):
                if self._printed.is_full:
                    break
                if self._printed.add(message):
                    await self._printed.flush()
        await self._printed.flush()

    def _bodies(self, found: StoredPull, begin: int, end: int | None) -> Iterator[bytes]:
        try:
            for record in iter_bodies(found.records):
                if self._is_wanted(record, begin, end):
                    yield _inflated(record.body, record.sys_flag)
        except MalformedRecord as error:
            raise ProtocolError(str(error)) from error

    def _messages(self, queue: MessageQueue, found: StoredPull, begin: int, end: int | None) -> Iterator[Message]:
        try:
            for record in iter_records(found.records):
                if self._is_wanted(record, begin, end):
                    message = message_from_record(record, queue.broker_name)
                    if self._filter.matches(message):
                        yield message
        except MalformedRecord as error:
            raise ProtocolError(str(error)) from error

    def _is_wanted(self, record: StoredBody | MessageRecord, begin: int, end: int | None) -> bool:
        is_inside = begin <= record.queue_offset and (end is None or record.queue_offset < end)
        return is_inside and self._wanted.has(record.store_timestamp)


def _by_time(message: Message) -> tuple[int, int, int]:
    queue_id = message.queue.queue_id if message.queue else 0
    return message.store_timestamp, queue_id, message.queue_offset


def _inflated(body: bytes, sys_flag: int) -> bytes:
    """Return the decompressed body, or the stored one with a message if it cannot be decompressed."""
    try:
        return inflate(body, sys_flag)
    except (ValueError, ModuleNotFoundError) as error:
        say(f"a body is printed as stored: {error}")
        return body
