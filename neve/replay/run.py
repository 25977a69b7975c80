"""A task from its ranges to its end: a chunk is read, sent, stored, and only then noted as done.

So a process that is killed has sent at most one chunk twice, and left out nothing. While a chunk is on its way the next
one is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from neve.client.client import AsyncClient
from neve.client.model import Message, MessageQueue
from neve.client.send.batch_sender import BatchSender
from neve.errors import BrokerError, ClientError
from neve.remoting.codes import ResponseCode
from neve.remoting.names import RETRY_PREFIX
from neve.replay.again import again, is_meant
from neve.replay.book import TaskBook
from neve.replay.source import Chunk, Source
from neve.replay.task import CANCELLED, DONE, FAILED, RETRY, RUNNING, Filters, Range, Task

CHUNK = 1_000  # messages that are sent twice at most


class Asked(NamedTuple):
    """Which part of each queue; None for what there is."""

    first: int | None = None
    last: int | None = None
    queue: int | None = None
    broker: str | None = None


async def ranges(source: Source, asked: Asked, filters: Filters) -> list[Range]:
    """What a task goes through, settled when it begins. Raises ClientError where that is nothing."""
    found: list[Range] = []
    for queue, bounds in (await source.bounds()).items():
        if asked.queue not in (None, queue.queue_id) or asked.broker not in (None, queue.broker_name):
            continue
        begin, end = bounds
        if (filters.since, filters.until) != (None, None):
            begin, end = await source.span(queue, bounds, filters.since, filters.until)
        if asked.first is not None:
            begin = max(begin, asked.first)
        if asked.last is not None:
            end = min(end, asked.last + 1)
        begin = min(begin, end)
        found.append(Range(queue.broker_name, queue.queue_id, begin, end, begin))
    if not found:
        raise ClientError("there is no such queue")
    return found


def going_on(found: Sequence[Range], before: Sequence[Range], asked: Asked, *, from_first: bool) -> list[Range]:
    """The ranges of a replay that begins where the one of its name before it ended, or with the first.

    How far a queue is stays known, whatever part of it, or none, this one is asked for. Raises ClientError.
    """
    passed = {(one.broker, one.queue): max(one.end, one.passed) for one in before}
    for one in found:
        one.passed = passed.pop((one.broker, one.queue), 0)
        if one.passed > one.end and asked.last is None:
            if not from_first:
                raise ClientError(
                    f"broker {one.broker}, queue {one.queue}: it ends at {one.end}, and the one before this went to "
                    f"{one.passed}. The topic was made anew, or who answers is behind; --all begins with the first"
                )
            one.passed = 0
        if not from_first:
            one.begin = one.position = min(max(one.begin, one.passed), one.end)
    return [*found, *(Range(*queue, end, end, end, end) for queue, end in sorted(passed.items()))]


class Counted(NamedTuple):
    """Of a dry run, by (broker, queue): messages in the range, and those that would be sent, with their bytes."""

    read: int
    meant: int
    size: int


async def count(source: Source, task: Task) -> dict[tuple[str, int], Counted]:
    """What the task would send. Raises NoOrigin, as the task would."""
    told: dict[tuple[str, int], Counted] = {}
    for one in task.ranges:
        read = meant = size = 0
        offset = one.position
        while offset < one.end:
            chunk = await source.read(MessageQueue(task.source, one.broker, one.queue), offset, one.end, CHUNK)
            read += len(chunk.messages)
            for message in _meant(task, chunk):
                again(message, task.name, task.target)
                meant, size = meant + 1, size + len(message.body)
            offset = chunk.next_offset
        told[one.broker, one.queue] = Counted(read, meant, size)
    return told


class Replay:
    """Carries one task out. `tell` hears of it after every chunk."""

    def __init__(
        self, task: Task, source: Source, client: AsyncClient, book: TaskBook, now_ms: Callable[[], int]
    ) -> None:
        self._task = task
        self._source = source
        self._client = client
        self._book = book
        self._now_ms = now_ms
        self._chunk = CHUNK if not task.rate else max(1, min(CHUNK, int(task.rate)))

    async def run(self, tell: Callable[[Task], None]) -> Task:
        """Until it is done, cancelled, or fails; what it has sent is noted in each case.

        Raises:
            NeveError, OSError: it stands where it was, and can be begun again.
        """
        await self._check_target()
        task = self._task
        task.state, task.error = RUNNING, ""
        self._book.save(task)
        sender = self._client.batch_sender()
        try:
            for one in task.ranges:
                if not await self._go_through(one, sender, tell):
                    break
        except Exception as error:
            task.state, task.error = FAILED, str(error)
            self._save()
            raise
        if task.state == RUNNING:
            task.state = DONE
        self._save()
        return task

    async def _check_target(self) -> None:
        """A topic that is not there is not made by a typing error. Raises ClientError."""
        topic = self._task.target.topic
        if self._task.target.back == RETRY:
            topic = RETRY_PREFIX + self._task.target.group
        if topic is None:
            return
        try:
            route = await self._client.topic_route(topic)
        except BrokerError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            raise ClientError(f"there is no topic {topic}", ResponseCode.TOPIC_NOT_EXIST) from error
        if self._task.target.keeps_queues:
            _keep_queues(self._task.ranges, topic, route.write_queues)

    async def _go_through(self, one: Range, sender: BatchSender, tell: Callable[[Task], None]) -> bool:
        """Whether to go on with the next range."""
        task = self._task
        now = asyncio.get_running_loop().time
        queue = MessageQueue(task.source, one.broker, one.queue)
        into = MessageQueue(task.target.topic, one.into, one.queue) if task.target.topic and one.into else None
        reading = asyncio.create_task(self._read(queue, one.position, one.end))
        try:
            while one.position < one.end:
                chunk = await reading
                position = chunk.next_offset
                reading = asyncio.create_task(self._read(queue, position, one.end))
                messages = [again(message, task.name, task.target, into) for message in _meant(task, chunk)]
                began = now()
                await sender.put_all(messages)
                await sender.flush()
                task.read += len(chunk.messages)
                task.sent += len(messages)
                task.sent_bytes += sum(len(message.message.body) for message in messages)
                task.expired += chunk.expired
                one.position = position
                if self._book.is_to_cancel(task.name):
                    task.state = CANCELLED
                    self._book.settle_cancel(task.name)
                self._save()
                tell(task)
                if task.state == CANCELLED:
                    return False
                if task.rate:
                    await asyncio.sleep(max(0.0, began + len(messages) / task.rate - now()))
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        return True

    async def _read(self, queue: MessageQueue, offset: int, end: int) -> Chunk:
        return await self._source.read(queue, offset, end, self._chunk) if offset < end else Chunk((), end)

    def _save(self) -> None:
        self._task.changed = self._now_ms()
        self._book.save(self._task)


def _keep_queues(several: Sequence[Range], topic: str, there: Sequence[MessageQueue]) -> None:
    """Gives each a queue of its number: at the broker of its name if there is one, else the brokers take turns.

    One that has its queue keeps it. Raises ClientError.
    """
    if lacking := sorted({one.queue for one in several} - {queue.queue_id for queue in there}):
        raise ClientError(f"{topic} has no queue {', '.join(map(str, lacking))}: queues can't be kept")
    sources = sorted({one.broker for one in several})
    for one in several:
        having = sorted(queue.broker_name for queue in there if queue.queue_id == one.queue)
        in_turn = having[sources.index(one.broker) % len(having)]
        one.into = one.into or (one.broker if one.broker in having else in_turn)


def _meant(task: Task, chunk: Chunk) -> list[Message]:
    return [message for message in chunk.messages if is_meant(message, task.filters)]
