"""Topics of thousands of queues: each request does a bounded amount of work per turn of the event loop.

Lookups keep no memory. The work between two turns is counted, not timed.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.broker_controller import BrokerController
from broker.pop.pop_book import PopBook
from broker.pop.pop_consumer_service import PopConsumerService
from broker.pop.pop_queue import MAX_INVISIBLE_MS
from broker.requests import wide_answer
from broker.store.queue_table import QueueTable
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from infra.clock import ManualClock
from infra.loop.in_steps import at_once
from infra.loop.parts import run_here
from infra.net.remoting_server import Connection
from neve.remoting.body import dumps_object_keys, lenient_loads
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import ask, running, send
from tests.kit.broker.pop_member import PopMember
from tests.kit.clock.calls_per_turn import CallsPerTurn
from tests.kit.clock.waiting import until

QUEUES = 2_000
MOST = 80  # calls in one turn: a slice of queues, with two or three calls for each


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str], CallsPerTurn]:
    def count(owner: type, name: str) -> CallsPerTurn:
        counter = CallsPerTurn(getattr(owner, name))

        def method(*args: Any) -> Any:
            return counter(*args)

        monkeypatch.setattr(owner, name, method)
        return counter

    return count


def make(broker: BrokerController, *, with_offsets: bool = True) -> None:
    broker.topics.create_plain("t", QUEUES)
    broker.groups.require("g")
    for queue in range(QUEUES if with_offsets else 0):
        broker.offsets.commit("g", "t", queue, 0)


@pytest.mark.parametrize(
    ("code", "ext"),
    [
        (Code.GET_BROKER_CONSUME_STATS, {"isOrder": "false"}),
        (Code.GET_CONSUME_STATS, {"consumerGroup": "g"}),
        (Code.GET_TOPIC_STATS_INFO, {"topic": "t"}),
        (Code.QUERY_CONSUME_TIME_SPAN, {"topic": "t", "group": "g"}),
        (Code.INVOKE_BROKER_TO_RESET_OFFSET, {"topic": "t", "group": "g", "timestamp": -1, "isForce": "true"}),
    ],
)
async def test_wide_request_reads_one_slice_per_turn(
    tmp_path: Path, counted: Callable[[type, str], CallsPerTurn], code: int, ext: dict[str, object]
) -> None:
    async with running(tmp_path) as (broker, connection):
        make(broker)
        looked_at = counted(QueueTable, "max_offset")
        encoded: list[int] = []
        encode = dumps_object_keys

        def measured(value: object) -> bytes:
            data = encode(value)
            encoded.append(len(data))
            return data

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wide_answer, "dumps_object_keys", measured)
            answer = await ask(connection, code, **ext)
        assert answer.code == 0, answer.remark
        assert len(answer.body) > 20 * QUEUES
        assert lenient_loads(answer.body)
        assert looked_at.all >= QUEUES
        assert looked_at.most <= MOST
        assert max(encoded, default=0) < len(answer.body) / 20, "encoded as it is looked up"


async def test_copying_offsets_takes_a_few_queues_per_turn(
    tmp_path: Path, counted: Callable[[type, str], CallsPerTurn]
) -> None:
    async with running(tmp_path) as (broker, connection):
        groups = [f"g{number}" for number in range(8)]
        for group in groups:
            for queue in range(QUEUES):
                broker.offsets.commit(group, "t", queue, queue)
        copied = counted(ConsumerOffsetManager, "queues_of")
        answer = await ask(connection, Code.GET_ALL_CONSUMER_OFFSET)
        table = lenient_loads(answer.body)["offsetTable"]
        assert set(table) == {f"t@{group}" for group in groups}
        assert [len(queues) for queues in table.values()] == [QUEUES] * len(groups)
        assert copied.all == len(groups)
        assert copied.most == 1, "2,000 queues are more than a slice"


async def test_reset_of_a_popping_group_updates_its_pop_state_in_slices(
    tmp_path: Path, counted: Callable[[type, str], CallsPerTurn]
) -> None:
    async with running(tmp_path) as (broker, connection):
        make(broker, with_offsets=False)
        for queue in range(QUEUES):
            broker.pops.open("g", "t", queue, 0)
        told = counted(PopBook, "record")
        answer = await ask(
            connection, Code.INVOKE_BROKER_TO_RESET_OFFSET, topic="t", group="g", timestamp=-1, isForce="true"
        )
        assert answer.code == 0, answer.remark
        assert told.all == QUEUES
        assert told.most <= 32


async def test_reset_completes_after_its_client_disconnected(
    tmp_path: Path, counted: Callable[[type, str], CallsPerTurn]
) -> None:
    async with running(tmp_path) as (broker, connection):
        make(broker, with_offsets=False)
        for queue in range(QUEUES):
            broker.pops.open("g", "t", queue, 0)
        told = counted(PopBook, "record")
        ext = {"topic": "t", "group": "g", "timestamp": -1, "isForce": "true"}
        asking = asyncio.create_task(ask(connection, Code.INVOKE_BROKER_TO_RESET_OFFSET, **ext))
        while not told.all:
            await asyncio.sleep(0)
        assert told.all < QUEUES
        connection.close()
        asking.cancel()
        await until(lambda: told.all == QUEUES)


async def pop(connection: Connection, group: str, **ext: object) -> RemotingCommand:
    asked: dict[str, object] = {
        "consumerGroup": group, "topic": "t", "queueId": -1, "maxMsgNums": 32, "invisibleTime": 60_000, "pollTime": 0,
        "bornTime": 0, "initMode": 0, "order": "false",
    }  # fmt: skip
    return await ask(connection, Code.POP_MESSAGE, **(asked | ext))


@pytest.mark.parametrize("poll_ms", [0, 500])
async def test_pop_reads_one_slice_of_queues_per_turn(
    tmp_path: Path, counted: Callable[[type, str], CallsPerTurn], poll_ms: int
) -> None:
    async with running(tmp_path) as (broker, connection):
        make(broker, with_offsets=False)
        looked_at, found = counted(QueueTable, "max_offset"), counted(PopBook, "find")
        answer = await pop(connection, "g", pollTime=poll_ms)
        assert answer.code == ResponseCode.POLLING_TIMEOUT
        assert looked_at.all >= QUEUES
        assert looked_at.most <= MOST
        assert found.most <= 2 * MOST


async def test_pop_without_a_message_keeps_no_state(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, connection):
        make(broker, with_offsets=False)
        offsets = broker.offsets.count
        for number in range(5):
            assert (await pop(connection, f"group-{number}")).code == ResponseCode.POLLING_TIMEOUT
        assert broker.pops.queues == {}
        assert broker.offsets.count == offsets


async def test_popping_group_gets_all_messages_sent_after_its_first_pop(tmp_path: Path) -> None:
    """A group that begins with the newest message keeps its first offset, even if the queue was empty then."""

    async with running(tmp_path) as (broker, connection):
        broker.topics.create_plain("t", 2)
        await send(connection, "t", b"before")
        assert (await pop(connection, "g", initMode=1, queueId=0)).code == ResponseCode.SUCCESS
        for body in (b"one", b"two", b"three"):
            await send(connection, "t", body)
        taken = await PopMember(broker, connection).pop()
        assert [one.body for one in taken] == [b"one", b"two", b"three"]
        assert (await pop(connection, "late", initMode=1, queueId=1)).code == ResponseCode.POLLING_TIMEOUT
        assert broker.offsets.query("late", "t", 1) == 0
        assert ("late", "t", 1) not in broker.pops.queues


async def test_notification_reports_a_message_that_arrives_during_its_lookup(
    tmp_path: Path, counted: Callable[[type, str], CallsPerTurn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PopConsumerService, "in_turn", lambda _, queues: list(range(queues)))

    async with running(tmp_path) as (broker, connection):
        make(broker, with_offsets=False)
        await send(connection, "other")
        ext = {"consumerGroup": "g", "topic": "t", "queueId": -1, "pollTime": 20_000, "bornTime": 0}
        looked_at = counted(PopConsumerService, "_has_message_in")
        notified = asyncio.create_task(ask(connection, Code.NOTIFICATION, **ext))
        while not looked_at.all:
            await asyncio.sleep(0)
        assert looked_at.all < QUEUES
        broker.store.put("t", 0, b"body", b"", flag=0, sys_flag=0, born_timestamp=1, born_host=("10.1.2.3", 4000))
        async with asyncio.timeout(10):
            assert (await notified).ext["hasMsg"] == "true"


async def test_idle_pop_queue_is_dropped_and_its_offset_kept(tmp_path: Path) -> None:
    clock = ManualClock()
    async with running(tmp_path, clock=clock) as (broker, connection):
        await send(connection, "t", b"one")
        member = PopMember(broker, connection)
        (one,) = await member.pop()
        polled = at_once(broker.metadata.offsets_image())
        assert await broker.pops.drop_idle() == 0, "a message is out"
        await member.ack(one)
        assert await broker.pops.drop_idle() == 0, "popped just now"
        newest = broker.pops.queues["g", "t", 0].newest
        clock.advance(601_000)
        assert await broker.pops.drop_idle() == 1
        assert broker.pops.queues == {}
        broker.metadata.install_offsets(polled)
        assert broker.offsets.query("g", "t", 0) == 1, "a slave has it, though an older poll is installed after it"
        run_here(broker.metadata.reload_parts())
        assert broker.offsets.query("g", "t", 0) == 1, "so has a start, though no table was saved"
        await send(connection, "t", b"two")
        clock.set_wall(newest - 1_000)
        (two,) = await member.pop()
        assert two.body == b"two"
        assert broker.pops.queues["g", "t", 0].newest > newest, "no pop time is used twice, whatever the clock does"
        broker.offsets.commit("g", "t", 0, 0)
        assert [again.body for again in await member.pop()] == [b"one", b"two"]
    async with running(tmp_path, clock=clock) as (broker, connection):
        assert broker.offsets.query("g", "t", 0) == 0


async def test_new_committed_offsets_are_limited_and_known_ones_can_change(tmp_path: Path) -> None:
    async with running(tmp_path, "maxConsumerOffsets=1000") as (broker, connection):
        make(broker, with_offsets=False)
        await send(connection, "t", queue=0)

        async def commit(group: str, queue: int, offset: int) -> RemotingCommand:
            return await ask(
                connection, Code.UPDATE_CONSUMER_OFFSET, consumerGroup=group, topic="t", queueId=queue,
                commitOffset=offset,
            )  # fmt: skip

        for queue in range(1_000 - broker.offsets.count):
            assert (await commit("g", queue, 1)).code == 0
        assert broker.offsets.count == 1_000
        refused = await commit("g", 1_999, 1)
        assert refused.code == ResponseCode.SYSTEM_BUSY
        assert "maxConsumerOffsets=1000" in (refused.remark or "")
        assert (await commit("g", 0, 0)).code == 0, "a known offset moves"
        broker.groups.require("new")
        popped = await pop(connection, "new")
        assert popped.code == ResponseCode.SYSTEM_BUSY
        assert broker.pops.queues == {}
        reset = await ask(
            connection, Code.INVOKE_BROKER_TO_RESET_OFFSET, topic="t", group="new", timestamp=-1, isForce="true"
        )
        assert reset.code == ResponseCode.SYSTEM_BUSY
        assert not broker.offsets.has_offsets("new", "t")
        broker.offsets.delete_group("g")
        assert broker.offsets.count == 0
        assert (await pop(connection, "new")).code == ResponseCode.SUCCESS


@pytest.mark.parametrize("milliseconds", [0, -1, MAX_INVISIBLE_MS + 1, (1 << 63) - 1])
async def test_pop_refuses_invisible_time_out_of_bounds(tmp_path: Path, milliseconds: int) -> None:
    async with running(tmp_path) as (broker, connection):
        await send(connection, "t")
        answer = await pop(connection, "g", invisibleTime=milliseconds)
        assert answer.code == ResponseCode.INVALID_PARAMETER
        assert answer.remark == f"invisibleTime must be from 1 to 259200000 ms (3 days), got {milliseconds}"
        assert broker.pops.queues == {}
        assert (await pop(connection, "g", invisibleTime=MAX_INVISIBLE_MS)).code == 0


@pytest.mark.parametrize("milliseconds", [-1, MAX_INVISIBLE_MS + 1, (1 << 63) - 1])
async def test_change_of_invisible_time_is_bounded(tmp_path: Path, milliseconds: int) -> None:
    async with running(tmp_path) as (broker, connection):
        await send(connection, "t")
        member = PopMember(broker, connection)
        (taken,) = await member.pop()
        ext = {"consumerGroup": "g", "topic": "t", "queueId": 0, "offset": 0, "extraInfo": taken.receipt}
        refused = await ask(connection, Code.CHANGE_MESSAGE_INVISIBLETIME, invisibleTime=milliseconds, **ext)
        assert refused.code == ResponseCode.INVALID_PARAMETER
        assert "from 0 to 259200000 ms (3 days)" in (refused.remark or "")
        await member.ack(taken)
        assert broker.pops.queues["g", "t", 0].flights == {}, "the refused change kept the receipt"


@pytest.mark.parametrize(
    ("code", "ext"),
    [(Code.DELETE_TOPIC_IN_BROKER, {"topic": "t"}), (Code.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"})],
)
async def test_deletion_removes_popped_queues_with_one_record(
    tmp_path: Path, counted: Callable[[type, str], CallsPerTurn], code: int, ext: dict[str, str]
) -> None:
    async with running(tmp_path / "broker") as (broker, connection):
        make(broker, with_offsets=False)
        broker.topics.create_plain("other", 1)
        broker.groups.require("other")
        for queue in range(QUEUES):
            broker.pops.open("g", "t", queue, 0)
        broker.pops.open("other", "other", 0, 0)
        told = counted(PopBook, "record")
        assert (await ask(connection, code, **ext)).code == 0
        assert list(broker.pops.queues) == [("other", "other", 0)]
        assert told.all == 1


async def test_recreated_topic_keeps_its_new_pops_after_a_crash(tmp_path: Path) -> None:
    async with running(tmp_path / "broker") as (broker, connection):
        member = PopMember(broker, connection)
        await send(connection, "t", b"before")
        assert [taken.body for taken in await member.pop()] == [b"before"]
        await broker.pops.save()  # the image includes the deleted pop, and the log behind it the deletion
        assert (await ask(connection, Code.DELETE_TOPIC_IN_BROKER, topic="t")).code == 0
        await send(connection, "t", b"after")
        assert [taken.body for taken in await member.pop()] == [b"after"]
        await broker.flusher.flush_now()
        left = {key: sorted(queue.flights) for key, queue in broker.pops.queues.items()}
        assert left == {("g", "t", 0): [0]}
        shutil.copytree(tmp_path / "broker", tmp_path / "crashed")
    async with running(tmp_path / "crashed") as (broker, _):
        assert {key: sorted(queue.flights) for key, queue in broker.pops.queues.items()} == left
