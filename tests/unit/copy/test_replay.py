"""A replay that was killed resumes: no message is omitted, and at most one chunk is sent twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from neve.client.model import Message, MessageQueue
from neve.client.net.route import TopicRoute
from neve.client.send.batch_sender import BatchItem
from neve.copy.engine import CHUNK
from neve.copy.replay import Replay, RequestedRange, continued, count, ranges
from neve.copy.source import Chunk, OffsetRange
from neve.copy.task import CopyTarget, Filters, Range, Task
from neve.copy.task_files import TaskBook
from neve.errors import BrokerError, ClientError

QUEUES = [MessageQueue("orders", "a", 0), MessageQueue("orders", "b", 3)]
LENGTH = 2_500


class ListedQueues:
    """Two queues of messages a millisecond apart. Every tenth offset is missing."""

    async def bounds(self) -> dict[MessageQueue, OffsetRange]:
        return dict.fromkeys(QUEUES, OffsetRange(5, LENGTH))

    async def span(
        self, _queue: MessageQueue, bounds: OffsetRange, since: int | None, until: int | None
    ) -> OffsetRange:
        return OffsetRange(bounds.begin if since is None else since, bounds.end if until is None else until)

    async def read(self, queue: MessageQueue, offset: int, end: int, count: int) -> Chunk:
        following = min(offset + count, end)
        there = [n for n in range(offset, following) if n % 10]
        return Chunk([message(queue, n) for n in there], following)


def message(queue: MessageQueue, offset: int) -> Message:
    return Message("orders", b"x", tags="AB"[offset % 2], queue=queue, queue_offset=offset, store_timestamp=offset)


class KilledCopy(BaseException):
    """The simulated kill of a process."""


class FailingClient:
    """A client that stores messages, and is killed or fails after `left` of them."""

    def __init__(self, left: int, end: type[BaseException] = KilledCopy) -> None:
        self.stored: list[Message] = []
        self.into: dict[MessageQueue, set[Any]] = {}  # source -> requested targets
        self.brokers = "c"
        self._left, self._end = left, end

    def batch_sender(self) -> FailingClient:
        return self

    async def put_all(self, messages: Iterable[BatchItem]) -> None:
        for one in messages:
            if not self._left:
                raise self._end
            self._left -= 1
            self.stored.append(one.message)
            _, source, _, queue, _ = one.message.properties["NEVE_REPLAY"].split("/")
            self.into.setdefault(MessageQueue("orders", source, int(queue)), set()).add(one.queue)

    async def flush(self) -> None:
        await asyncio.sleep(0)

    @property
    def admin(self) -> FailingClient:
        return self

    async def topic_route(self, topic: str) -> TopicRoute:
        if topic != "other":
            raise BrokerError(17, "No topic route info")
        queues = [MessageQueue(topic, broker, n) for broker in self.brokers for n in range(1 if broker == "c" else 4)]
        return TopicRoute(tuple(queues), (), {}, None)


def task(**changes: Any) -> Task:
    fields: dict[str, Any] = {"name": "r", "source": "orders", "target": CopyTarget(topic="other")}
    return Task(**fields | {"namesrv": "x", "to_namesrv": "x"} | changes)


async def carried_out(of: Task, cluster: Any, book: TaskBook) -> Task:
    source = ListedQueues()
    if not of.ranges:
        of.ranges = await ranges(source, RequestedRange(), of.filters)
    return await Replay(of, source, cluster, book, lambda: 0).run(lambda _: None)


OFFSETS = [(queue.broker_name, n) for queue in QUEUES for n in range(5, LENGTH) if n % 10]


@pytest.mark.parametrize("left", [0, 1, 899, 900, 901, 3000, 4000])
def test_killed_task_omits_nothing_and_repeats_at_most_one_chunk(tmp_path: Path, left: int) -> None:
    book = TaskBook(tmp_path)
    first, second = FailingClient(left), FailingClient(1 << 30)
    with pytest.raises(KilledCopy):
        asyncio.run(carried_out(task(), first, book))
    done = asyncio.run(carried_out(book.load("r"), second, book))
    assert (done.state, done.left, done.read, done.sent) == ("done", 0, len(OFFSETS), len(OFFSETS))
    told = Counter(one.properties["NEVE_REPLAY"] for one in [*first.stored, *second.stored])
    assert set(told) == {f"r/{broker}/orders/{3 * (broker == 'b')}/{n}" for broker, n in OFFSETS}
    assert sum(times - 1 for times in told.values()) <= CHUNK
    assert book.load("r") == done


def test_failed_task_can_be_resumed(tmp_path: Path) -> None:
    book = TaskBook(tmp_path)
    with pytest.raises(ConnectionResetError):
        asyncio.run(carried_out(task(), FailingClient(10, ConnectionResetError), book))
    assert book.load("r").state == "failed"
    assert asyncio.run(carried_out(book.load("r"), FailingClient(1 << 30), book)).state == "done"


def test_dry_run_counts_the_messages_that_are_sent(tmp_path: Path) -> None:
    wanted = task(filters=Filters(tags=("B",), since=1_001, until=1_201))

    async def both() -> tuple[Any, FailingClient]:
        source, cluster = ListedQueues(), FailingClient(1 << 30)
        wanted.ranges = await ranges(source, RequestedRange(first=1_100, end=1_150, broker="b"), wanted.filters)
        counted = await count(source, wanted)
        await carried_out(wanted, cluster, TaskBook(tmp_path))
        return counted, cluster

    counted, cluster = asyncio.run(both())
    expected = [n for n in range(1_100, 1_150) if n % 2]
    assert [int(one.properties["NEVE_REPLAY"].rpartition("/")[2]) for one in cluster.stored] == expected
    assert counted == {("b", 3): (45, len(expected), len(expected))}


def test_cancelled_task_ends_and_missing_target_is_refused(tmp_path: Path) -> None:
    book, cluster = TaskBook(tmp_path), FailingClient(1 << 30)
    book.save(task())
    with book.locked("r"):
        book.cancel("r")
        ended = asyncio.run(carried_out(task(), cluster, book))
    assert (ended.state, len(cluster.stored)) == ("cancelled", 900)
    assert not book.is_to_cancel("r")
    for target, why in (
        (CopyTarget(topic="another"), "topic another does not exist"),
        (CopyTarget(topic="other", keeps_queues=True), "has no queue 3"),
    ):
        with pytest.raises(ClientError, match=why):
            asyncio.run(carried_out(task(target=target), FailingClient(0), book))


@pytest.mark.parametrize(
    ("brokers", "expected"), [("ab", ["a", "b"]), ("de", ["d", "e"]), ("d", ["d", "d"]), ("bd", ["b", "b"])]
)
def test_kept_queue_goes_to_one_queue_after_a_resume(tmp_path: Path, brokers: str, expected: list[str]) -> None:
    """Batches that alternate between brokers would lose the order of the queue."""
    book, first, second = TaskBook(tmp_path), FailingClient(2_300), FailingClient(1 << 30)
    first.brokers, second.brokers = brokers, brokers + "f"
    with pytest.raises(KilledCopy):
        asyncio.run(carried_out(task(target=CopyTarget(topic="other", keeps_queues=True)), first, book))
    asyncio.run(carried_out(book.load("r"), second, book))
    into = {q: {MessageQueue("other", to, q.queue_id)} for q, to in zip(QUEUES, expected, strict=True)}
    assert first.into == into
    assert second.into == {QUEUES[1]: into[QUEUES[1]]}


def found(*queues: tuple[str, int, int]) -> list[Range]:
    return [Range(broker, 0, begin, end, begin) for broker, begin, end in queues]


def told(several: list[Range]) -> dict[str, tuple[int, int]]:
    return {one.broker: (one.position, one.end) for one in several}


def test_end_of_a_queue_is_kept_by_tasks_of_other_parts() -> None:
    every = RequestedRange()
    first = continued(found(("a", 0, 100), ("b", 0, 50)), [], every, from_first=True)
    assert told(first) == {"a": (0, 100), "b": (0, 50)}
    # a task of one queue, or without an unreachable broker, keeps the end of the other queue
    second = continued(found(("b", 0, 60)), first, RequestedRange(broker="b"), from_first=False)
    assert told(second) == {"b": (50, 60), "a": (100, 100)}
    # offsets already processed
    third = continued(found(("a", 0, 11), ("b", 0, 11)), second, RequestedRange(first=0, end=11), from_first=False)
    assert told(third) == {"a": (11, 11), "b": (11, 11)}
    again = continued(found(("a", 0, 11), ("b", 0, 11)), third, RequestedRange(first=0, end=11), from_first=True)
    assert told(again) == {"a": (0, 11), "b": (0, 11)}
    last = continued(found(("a", 0, 105), ("b", 0, 60)), again, every, from_first=False)
    assert told(last) == {"a": (100, 105), "b": (60, 60)}


def test_queue_shorter_than_the_earlier_task_is_an_error() -> None:
    before = continued(found(("a", 0, 100)), [], RequestedRange(), from_first=True)
    with pytest.raises(ClientError, match="it ends at 5, and the task before went to 100"):
        continued(found(("a", 0, 5)), before, RequestedRange(), from_first=False)
    anew = continued(found(("a", 0, 5)), before, RequestedRange(), from_first=True)
    assert told(anew) == {"a": (0, 5)}
    assert told(continued(found(("a", 0, 8)), anew, RequestedRange(), from_first=False)) == {"a": (5, 8)}


class ClockSetBack(ListedQueues):
    """Like `Listed`, but the clock was set back twice: times are 5 .. 1004, again 5 .. 1004, then 5 .. 504."""

    async def span(
        self, _queue: MessageQueue, bounds: OffsetRange, _since: int | None, _until: int | None
    ) -> OffsetRange:
        return bounds

    async def read(self, queue: MessageQueue, offset: int, end: int, count: int) -> Chunk:
        chunk = await super().read(queue, offset, end, count)
        messages = [replace(one, store_timestamp=5 + (one.queue_offset - 5) % 1_000) for one in chunk.messages]
        return chunk._replace(messages=messages)


def test_replay_until_a_time_reads_past_later_messages(tmp_path: Path) -> None:
    wanted, cluster, source = task(filters=Filters(until=105)), FailingClient(1 << 30), ClockSetBack()

    async def both() -> dict[tuple[str, int], Any]:
        wanted.ranges = await ranges(source, RequestedRange(broker="a"), wanted.filters)
        counted = await count(source, wanted)
        await Replay(wanted, source, cast("Any", cluster), TaskBook(tmp_path), lambda: 0).run(lambda _: None)
        return counted

    counted = asyncio.run(both())
    sent = [int(one.properties["NEVE_REPLAY"].rpartition("/")[2]) for one in cluster.stored]
    assert sent == [n for n in range(5, LENGTH) if n % 10 and (n - 5) % 1_000 < 100]
    assert counted["a", 0].selected == len(sent)
