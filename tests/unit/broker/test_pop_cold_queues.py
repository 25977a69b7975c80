"""Pops over several queues, one of which is only in the archive: it delays no other queue and gets its turn."""

import asyncio
import mmap
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from broker.broker_controller import BrokerController
from broker.pop.pop_consumer_service import spread
from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from infra.net.remoting_server import open_connection
from neve.errors import NeveError
from neve.remoting.codes import GetMessageStatus, ResponseCode
from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask, running, send
from tests.kit.broker.pop_member import PopMember
from tests.kit.clock.waiting import until
from tiered.read.cold_reader import ColdResult, ColdUnavailable, Located
from tiered.read.read_request import ReadRequest

COLD_QUEUE, ANY = 1, -1


class ColdQueue:
    """The only holder of queue 1 of the topic. It is unavailable at first and counts requests."""

    def __init__(self, broker: BrokerController) -> None:
        store = broker.store
        self._record = bytes(store.reader.get("t", COLD_QUEUE, 0, 1, 1 << 20).buffers[0])
        store.queue_changes.set_min_offset("t", COLD_QUEUE, 1)
        self.is_down, self.asked = True, 0
        self.held: asyncio.Future[None] | None = None
        tier: Any = self
        broker.tiered.attach(tier)

    def has(self, topic: str, queue_id: int, offset: int) -> bool:
        return (topic, queue_id, offset) == ("t", COLD_QUEUE, 0)

    def min_offset(self, topic: str, queue_id: int) -> int | None:
        return 0 if (topic, queue_id) == ("t", COLD_QUEUE) else None

    def at_hand(self, *asked: object) -> None:
        """Return nothing: no object is in memory."""

    def locate(self, read: ReadRequest) -> Located:
        assert self.has(read.topic, read.queue_id, read.offset), "the local log has all others"
        self.asked += 1
        decoded: Future[Any] = Future()
        if self.held is not None:
            self.held.add_done_callback(lambda _: self._answer(decoded))
        else:
            self._answer(decoded)
        nobody: Any = None
        return Located(nobody, nobody, read.offset, decoded)

    def _answer(self, decoded: "Future[Any]") -> None:
        if self.is_down:
            decoded.set_exception(ColdUnavailable("no answer"))
        else:
            decoded.set_result(self._record)

    def has_moved(self, located: Located) -> bool:
        return False

    def take(self, located: Located, decoded: bytes, read: ReadRequest) -> ColdResult:
        return ColdResult(GetMessageStatus.FOUND, located.offset + 1, [memoryview(decoded)], 1)


Work = Callable[[PopMember, ColdQueue, ManualClock], Awaitable[None]]


def with_member(root: Path, work: Work) -> None:
    async def main() -> None:
        clock = ManualClock()
        async with running(root, clock=clock) as (broker, connection):
            answer = await ask(
                connection, Code.UPDATE_AND_CREATE_TOPIC, topic="t", defaultTopic="TBW102", readQueueNums=2,
                writeQueueNums=2, perm=6, topicFilterType="SINGLE_TAG", order="false",
            )  # fmt: skip
            assert answer.code == 0, answer.remark
            await send(connection, "t", b"cold", queue=COLD_QUEUE)
            await work(PopMember(broker, connection), ColdQueue(broker), clock)

    asyncio.run(main())


def test_unavailable_archive_neither_delays_nor_redelivers_hot_messages(tmp_path: Path) -> None:
    async def work(member: PopMember, archive: ColdQueue, clock: ManualClock) -> None:
        for number in range(8):
            await send(member.connection, "t", b"hot %d" % number)
            taken = await member.pop(queue=ANY)
            assert [one.body for one in taken] == [b"hot %d" % number]
            await member.ack(*taken)
        clock.advance(120_000)
        assert await member.broker.revive.run_due() == 0
        assert member.broker.topics.select("%RETRY%g_t") is None
        archive.is_down = False
        assert [one.body for one in await member.pop(queue=ANY)] == [b"cold"]

    with_member(tmp_path, work)


def test_pop_without_messages_reports_an_unavailable_archive(tmp_path: Path) -> None:
    async def work(member: PopMember, archive: ColdQueue, clock: ManualClock) -> None:
        answer = await member.ask_pop(queue=ANY)
        assert (answer.code, archive.asked) == (ResponseCode.SYSTEM_BUSY, 1)
        assert "archive" in (answer.remark or "")

    with_member(tmp_path, work)


def test_pop_that_waits_for_the_archive_gets_new_messages_meanwhile(tmp_path: Path) -> None:
    async def work(member: PopMember, archive: ColdQueue, clock: ManualClock) -> None:
        waiting = asyncio.create_task(member.pop(queue=ANY, poll=50_000))
        await member.until_in_line()
        await send(member.connection, "t", b"hot")
        assert [one.body for one in await waiting] == [b"hot"]
        assert archive.asked == 1  # not asked again for a while

    with_member(tmp_path, work)


def test_pop_with_hot_messages_does_not_wait_for_the_archive(tmp_path: Path) -> None:
    async def work(member: PopMember, archive: ColdQueue, clock: ManualClock) -> None:
        archive.held, archive.is_down = asyncio.get_running_loop().create_future(), False
        for number in range(6):
            await send(member.connection, "t", b"hot %d" % number)
        pops = [asyncio.create_task(member.pop(1, queue=ANY)) for _ in range(6)]
        while not archive.asked or sum(pop.done() for pop in pops) < 5:
            await ask(member.connection, Code.GET_BROKER_HA_STATUS)
        archive.held.set_result(None)
        got = Counter(taken[0].body for taken in await asyncio.gather(*pops))
        # one pop had the turn of the cold queue; no hot message waited for it
        assert got == Counter([b"cold", *(b"hot %d" % number for number in range(5))])

    with_member(tmp_path, work)


def test_waiter_gets_the_queue_of_a_disconnected_cold_reader(tmp_path: Path) -> None:
    async def work(member: PopMember, archive: ColdQueue, clock: ManualClock) -> None:
        archive.held, archive.is_down = asyncio.get_running_loop().create_future(), False
        leaving = await open_connection(*member.broker.address)
        lost = asyncio.create_task(PopMember(member.broker, leaving).ask_pop(queue=COLD_QUEUE))
        while not archive.asked:
            await ask(member.connection, Code.GET_BROKER_HA_STATUS)
        waiting = asyncio.create_task(member.pop(queue=COLD_QUEUE, poll=50_000))
        await member.until_in_line()
        archive.held = None
        leaving.close()
        assert [one.body for one in await waiting] == [b"cold"]
        with pytest.raises(NeveError):
            await lost

    with_member(tmp_path, work)


def test_pop_that_outlasts_an_outage_of_the_archive_gets_its_message(tmp_path: Path) -> None:
    async def work(member: PopMember, archive: ColdQueue, clock: ManualClock) -> None:
        member.broker.pop_service.unreadable_seconds = 0.01
        waiting = asyncio.create_task(member.pop(queue=ANY, poll=50_000))
        await member.until_in_line()
        archive.is_down = False
        clock.advance(11)
        assert [one.body for one in await waiting] == [b"cold"]

    with_member(tmp_path, work)


class NoPageCache(RealDisk):
    """A disk without a page cache."""

    __slots__ = ()

    def is_resident(self, mapped: mmap.mmap, offset: int, size: int) -> bool:
        return False


async def test_message_read_from_disk_is_redelivered_without_delaying_others(tmp_path: Path) -> None:
    clock = ManualClock()
    async with running(tmp_path, "hotBytes=0", clock=clock, disk=NoPageCache()) as (broker, connection):
        await send(connection, "t", b"old")
        member = PopMember(broker, connection)
        assert [one.body for one in await member.pop()] == [b"old"]
        clock.advance(120_000)
        assert await broker.revive.run_due() == 0
        await until(lambda: broker.revive.revived == 1)
        assert [one.body for one in await member.pop()] == [b"old"]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_every_queue_is_first_equally_often(number: int, step: int) -> None:
    turns = 64 * number
    firsts = Counter(spread(turn, number) for turn in range(0, turns * step, step))
    assert sorted(firsts) == list(range(number))
    assert max(firsts.values()) - min(firsts.values()) <= 8
