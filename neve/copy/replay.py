"""A task that sends messages of a topic again: `neve replay` and `neve dlq redrive`.

A chunk is read, sent and stored before the cursor is saved. A resumed task therefore repeats at most one chunk, and
omits no message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from neve.client.client import AsyncClient
from neve.client.model import Message, MessageQueue
from neve.client.send.batch_sender import BatchSender
from neve.copy.engine import CHUNK, copy_range
from neve.copy.messages import copy_of, is_selected
from neve.copy.source import Chunk, TopicSource
from neve.copy.task import CANCELLED, DONE, FAILED, RETRY, RUNNING, Filters, Range, Task
from neve.copy.task_files import TaskBook
from neve.errors import BrokerError, ClientError
from neve.remoting.codes import ResponseCode
from neve.remoting.names import RETRY_PREFIX


class RequestedRange(NamedTuple):
    """The requested part of each queue, the end excluded; None is no limit."""

    first: int | None = None
    end: int | None = None
    queue: int | None = None
    broker: str | None = None


async def ranges(source: TopicSource, asked: RequestedRange, filters: Filters) -> list[Range]:
    """Return the ranges of a new task. Raises ClientError if no queue is selected."""
    found: list[Range] = []
    for queue, bounds in (await source.bounds()).items():
        if asked.queue not in (None, queue.queue_id) or asked.broker not in (None, queue.broker_name):
            continue
        begin, end = bounds
        if (filters.since, filters.until) != (None, None):
            begin, end = await source.span(queue, bounds, filters.since, filters.until)
        if asked.first is not None:
            begin = max(begin, asked.first)
        if asked.end is not None:
            end = min(end, asked.end)
        begin = min(begin, end)
        found.append(Range(queue.broker_name, queue.queue_id, begin, end, begin))
    if not found:
        raise ClientError("the source has no such queue")
    return found


def continued(
    found: Sequence[Range], before: Sequence[Range], asked: RequestedRange, *, from_first: bool
) -> list[Range]:
    """Return the ranges of a task that begins where an earlier task of its name ended, or with the first message.

    The end of the earlier task is kept for queues that the new task does not read, too.

    Raises:
        ClientError: a queue ends before the end of the earlier task.
    """
    passed = {(one.broker, one.queue): max(one.end, one.passed) for one in before}
    for one in found:
        one.passed = passed.pop((one.broker, one.queue), 0)
        if one.passed > one.end and asked.end is None:
            if not from_first:
                raise ClientError(
                    f"broker {one.broker}, queue {one.queue}: it ends at {one.end}, and the task before went to "
                    f"{one.passed}. The topic was created again, or the broker that answers lags; --all begins with "
                    "the first message"
                )
            one.passed = 0
        if not from_first:
            one.begin = one.position = min(max(one.begin, one.passed), one.end)
    return [*found, *(Range(*queue, end, end, end, end) for queue, end in sorted(passed.items()))]


class Counted(NamedTuple):
    """The result of a dry run for one queue: messages, selected ones, and the bytes of their bodies."""

    read: int
    selected: int
    size: int


async def count(source: TopicSource, task: Task) -> dict[tuple[str, int], Counted]:
    """Return what the task would send, by (broker, queue). Raises NoOrigin as the task would."""
    counts: dict[tuple[str, int], Counted] = {}
    for one in task.ranges:
        counts[one.broker, one.queue] = Counted(0, 0, 0)

        async def add(chunk: Chunk, at: tuple[str, int] = (one.broker, one.queue)) -> bool:
            read, selected, size = counts[at]
            several = _selected(task, chunk)
            for message in several:
                copy_of(message, task.name, task.target)
            size += sum(len(message.body) for message in several)
            counts[at] = Counted(read + len(chunk.messages), selected + len(several), size)
            return True

        await copy_range(source, MessageQueue(task.source, one.broker, one.queue), one.position, one.end, add)
    return counts


class Replay:
    """Runs a task."""

    def __init__(
        self, task: Task, source: TopicSource, client: AsyncClient, book: TaskBook, now_ms: Callable[[], int]
    ) -> None:
        self._task = task
        self._source = source
        self._client = client
        self._book = book
        self._now_ms = now_ms
        self._chunk = CHUNK if not task.rate else max(1, min(CHUNK, int(task.rate)))

    async def run(self, progress: Callable[[Task], None]) -> Task:
        """Run the task until it is done, cancelled or failed; the cursor is saved in each case.

        Args:
            progress: is called after each chunk.

        Raises:
            NeveError, OSError: the task failed and can be resumed.
        """
        await self._check_target()
        task = self._task
        task.state, task.error = RUNNING, ""
        self._book.save(task)
        sender = self._client.batch_sender()
        try:
            for one in task.ranges:
                if not await self._copy(one, sender, progress):
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
        """Raise ClientError for a missing topic, which some brokers would create."""
        topic = self._task.target.topic
        if self._task.target.back == RETRY:
            topic = RETRY_PREFIX + self._task.target.group
        if topic is None:
            return
        try:
            route = await self._client.admin.topic_route(topic)
        except BrokerError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            raise ClientError(f"topic {topic} does not exist", ResponseCode.TOPIC_NOT_EXIST) from error
        if self._task.target.keeps_queues:
            _assign_queues(self._task.ranges, topic, route.write_queues)

    async def _copy(self, one: Range, sender: BatchSender, progress: Callable[[Task], None]) -> bool:
        """Copy a range, and return whether the task continues with the next one."""
        task = self._task
        now = asyncio.get_running_loop().time
        queue = MessageQueue(task.source, one.broker, one.queue)
        into = MessageQueue(task.target.topic, one.into, one.queue) if task.target.topic and one.into else None

        async def send(chunk: Chunk) -> bool:
            messages = [copy_of(message, task.name, task.target, into) for message in _selected(task, chunk)]
            began = now()
            await sender.put_all(messages)
            await sender.flush()
            task.read += len(chunk.messages)
            task.sent += len(messages)
            task.sent_bytes += sum(len(message.message.body) for message in messages)
            task.expired += chunk.expired
            one.position = chunk.next_offset
            if self._book.is_to_cancel(task.name):
                task.state = CANCELLED
                self._book.settle_cancel(task.name)
            self._save()
            progress(task)
            if task.state == CANCELLED:
                return False
            if task.rate:
                await asyncio.sleep(max(0.0, began + len(messages) / task.rate - now()))
            return True

        return await copy_range(self._source, queue, one.position, one.end, send, chunk=self._chunk)

    def _save(self) -> None:
        self._task.changed = self._now_ms()
        self._book.save(self._task)


def _assign_queues(several: Sequence[Range], topic: str, targets: Sequence[MessageQueue]) -> None:
    """Assign each range to the queue of its number, at the broker of its name or else at one of the others in turn.

    A range that has a broker keeps it. Raises ClientError for a missing queue.
    """
    if missing := sorted({one.queue for one in several} - {queue.queue_id for queue in targets}):
        raise ClientError(f"topic {topic} has no queue {', '.join(map(str, missing))}, which --keep-queues requires")
    sources = sorted({one.broker for one in several})
    for one in several:
        having = sorted(queue.broker_name for queue in targets if queue.queue_id == one.queue)
        in_turn = having[sources.index(one.broker) % len(having)]
        one.into = one.into or (one.broker if one.broker in having else in_turn)


def _selected(task: Task, chunk: Chunk) -> list[Message]:
    return [message for message in chunk.messages if is_selected(message, task.filters)]
