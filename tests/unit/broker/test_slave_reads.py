"""Reads from a slave: only confirmed messages are returned, and no answer moves a group's offset."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from broker.broker_controller import BrokerController
from broker.requests.pull_checks import SUBSCRIPTION
from broker.requests.pull_message import COMMIT_OFFSET, SUSPEND
from broker.requests.slave_pull import moves_on, slave_code
from broker.role import Role
from infra.clock import Clock, ManualClock
from infra.net.remoting_server import Connection
from neve.record.codec import iter_records
from neve.remoting.codes import GetMessageStatus, ResponseCode
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import ask, offload, running, send

CONFIRMED, ALL = 3, 5


@asynccontextmanager
async def slave(
    root: Path, role: Role, *, clock: Clock | None = None
) -> AsyncIterator[tuple[BrokerController, Connection]]:
    """Yield a slave with five messages, three of which its set has confirmed."""
    async with running(root, "slaveReadEnable=true", clock=clock) as (broker, connection):
        for _ in range(CONFIRMED):
            await send(connection, "t")
        broker.store.visibility.join_set(broker.store.max_physical_offset)
        broker.offsets.commit("g", "t", 0, 2)
        for _ in range(CONFIRMED, ALL):
            await send(connection, "t")
        assert broker.store.queues.next_offset("t", 0) == ALL
        turn(broker, role)
        yield broker, connection


def turn(broker: BrokerController, role: Role, *, has_master: bool = False) -> None:
    broker.role.become(Role.FENCED)
    broker.role.become(role, has_master=has_master)


async def pull(connection: Connection, offset: int, flags: int = SUBSCRIPTION, **more: object) -> RemotingCommand:
    return await ask(
        connection, Code.PULL_MESSAGE, consumerGroup="g", topic="t", queueId=0, queueOffset=offset, maxMsgNums=32,
        sysFlag=flags, commitOffset=1, suspendTimeoutMillis=20_000, subscription="*", subVersion=0, **more,
    )  # fmt: skip


async def holds(broker: BrokerController, connection: Connection, offset: int) -> asyncio.Task[RemotingCommand]:
    """Start a pull and wait until the broker suspends it."""
    waiting = asyncio.create_task(pull(connection, offset, SUBSCRIPTION | SUSPEND))
    while not broker.hold.count:
        assert not waiting.done(), waiting.result()
        await asyncio.sleep(0)
    return waiting


def offsets(answer: RemotingCommand) -> list[int]:
    return [record.queue_offset for record in iter_records(b"".join(answer.parts or [answer.body]))]


@pytest.mark.parametrize("status", list(GetMessageStatus))
@pytest.mark.parametrize("has_master", [True, False])
def test_no_status_of_a_slaves_queue_moves_a_reader(status: GetMessageStatus, has_master: bool) -> None:
    code = slave_code(status, has_master=has_master)
    assert code is not ResponseCode.PULL_OFFSET_MOVED
    assert moves_on(status) is (status in {"FOUND", "NO_MATCHED_MESSAGE", "OFFSET_FOUND_NULL"})
    assert not (has_master and code is ResponseCode.PULL_NOT_FOUND), "it is held here, and its message is there"


@pytest.mark.parametrize("role", [Role.SLAVE, Role.SLAVE_IN_SYNC])
async def test_slave_returns_confirmed_messages(tmp_path: Path, role: Role) -> None:
    async with slave(tmp_path, role) as (_, connection):
        answer = await pull(connection, 1)
        assert (answer.code, offsets(answer)) == (ResponseCode.SUCCESS, [1, 2])
        assert answer.ext["nextBeginOffset"] == str(CONFIRMED)


@pytest.mark.parametrize("role", [Role.SLAVE, Role.SLAVE_IN_SYNC])
@pytest.mark.parametrize("offset", [CONFIRMED, CONFIRMED + 1, 1000])
async def test_reader_above_the_confirmed_offset_is_redirected_to_the_master(
    tmp_path: Path, role: Role, offset: int
) -> None:
    """It keeps its offset: a slave that lags moves no group back."""

    async with slave(tmp_path, role) as (broker, connection):
        turn(broker, role, has_master=True)
        answer = await pull(connection, offset)
        assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
        assert (answer.ext["nextBeginOffset"], answer.ext["suggestWhichBrokerId"]) == (str(offset), "0")


async def test_pull_that_may_wait_is_redirected_to_the_master_after_a_second(tmp_path: Path) -> None:
    """A client that does not know the master yet would otherwise repeat the pull without a pause."""

    clock = ManualClock()
    async with slave(tmp_path, Role.SLAVE, clock=clock) as (broker, connection):
        turn(broker, Role.SLAVE, has_master=True)
        waiting = await holds(broker, connection, 1000)
        clock.advance(900)
        broker.hold.check_deadlines()
        assert broker.hold.count == 1
        clock.advance(200)
        broker.hold.check_deadlines()
        answer = await waiting
        assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "1000")


async def test_reader_below_the_slaves_log_begin_is_not_moved_forward(tmp_path: Path) -> None:
    """The master or the archive may have messages that this slave never had."""

    async with slave(tmp_path, Role.SLAVE_IN_SYNC) as (broker, connection):
        broker.store.queue_changes.set_min_offset("t", 0, 2)
        answer = await pull(connection, 0)
        assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, "0")


@pytest.mark.parametrize("has_master", [True, False])
@pytest.mark.parametrize("is_released", [False, True])
async def test_pull_without_an_archived_message_is_suspended_once_and_answered(
    tmp_path: Path, has_master: bool, is_released: bool
) -> None:
    """At its deadline, or when all suspended pulls are released, it reads the archive once more."""

    clock = ManualClock()
    settings = ("slaveReadEnable=true", f"storeUrl=dir:{tmp_path / 'bucket'}")
    async with running(tmp_path / "broker", *settings, clock=clock) as (broker, connection):
        for _ in range(3):
            await send(connection, "t")
        broker.store.queue_changes.set_min_offset("t", 0, 2)  # no tier has the messages below
        turn(broker, Role.SLAVE, has_master=has_master)
        waiting = await holds(broker, connection, 0)
        if not is_released:
            broker.hold.check_all()  # read again, and suspended until its original deadline
            while not broker.hold.count:
                await asyncio.sleep(0)
            clock.advance(1_100 if has_master else 20_100)
            broker.hold.check_deadlines()
        else:
            broker.hold.release_topic("t")
        answer = await answered(broker, waiting)
        code = ResponseCode.PULL_RETRY_IMMEDIATELY if has_master else ResponseCode.PULL_NOT_FOUND
        assert (answer.code, answer.ext["nextBeginOffset"]) == (code, "0")


async def answered(broker: BrokerController, waiting: asyncio.Task[RemotingCommand]) -> RemotingCommand:
    while not waiting.done():
        assert not broker.hold.count, "it is held anew"
        await asyncio.sleep(0)
    return waiting.result()


async def test_pull_without_a_master_waits_for_confirmed_messages(tmp_path: Path) -> None:
    """An immediate answer would make the client repeat the pull without a pause."""

    async with slave(tmp_path, Role.SLAVE) as (broker, connection):
        waiting = await holds(broker, connection, ALL - 1)
        broker.store.visibility.confirm(broker.store.max_physical_offset)
        answer = await waiting
        assert (answer.code, offsets(answer)) == (ResponseCode.SUCCESS, [ALL - 1])


async def test_suspended_pull_of_a_slave_is_redirected_once_a_master_is_elected(tmp_path: Path) -> None:
    clock = ManualClock()
    async with slave(tmp_path, Role.SLAVE, clock=clock) as (broker, connection):
        waiting = await holds(broker, connection, CONFIRMED)
        broker.role.become(Role.SLAVE_IN_SYNC)
        broker.role.become(Role.SLAVE_IN_SYNC, has_master=True)
        await asyncio.sleep(0)
        clock.advance(1100)
        broker.hold.check_deadlines()
        answer = await waiting
        assert (answer.code, answer.ext["suggestWhichBrokerId"]) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "0")


async def test_pull_suspended_during_a_change_of_role_is_answered_afterwards(tmp_path: Path) -> None:
    async with slave(tmp_path, Role.SLAVE) as (broker, connection):
        waiting = await holds(broker, connection, CONFIRMED)
        broker.role.become(Role.FENCED)
        broker.store.visibility.confirm(broker.store.max_physical_offset)
        while not broker.hold.count:  # woken by the confirmation and suspended again: a fenced broker answers no pull
            await asyncio.sleep(0)
        await ask(connection, Code.GET_BROKER_RUNTIME_INFO)
        assert not waiting.done()
        broker.role.become(Role.MASTER)
        answer = await waiting
        assert (answer.code, offsets(answer)) == (ResponseCode.SUCCESS, [3, 4])


@pytest.mark.parametrize("role", [Role.SLAVE, Role.SLAVE_IN_SYNC])
async def test_pull_at_a_slave_neither_commits_an_offset_nor_takes_a_reset(tmp_path: Path, role: Role) -> None:
    async with slave(tmp_path, role) as (broker, connection):
        broker.offsets.install({"t@g": {0: 2}}, {"t@g": {0: 0}})
        answer = await pull(connection, 1, SUBSCRIPTION | COMMIT_OFFSET)
        assert (answer.code, offsets(answer)) == (ResponseCode.SUCCESS, [1, 2])
        assert broker.offsets.query("g", "t", 0) == 2
        assert broker.offsets.query_pull("g", "t", 0) == -1
        assert broker.offsets.resets() == {"t@g": {0: 0}}  # kept for its term as master
        refused = await ask(
            connection, Code.UPDATE_CONSUMER_OFFSET, consumerGroup="g", topic="t", queueId=0, commitOffset=1
        )
        assert refused.code == ResponseCode.SYSTEM_BUSY


async def test_slave_in_sync_reports_known_offsets_and_never_their_absence(tmp_path: Path) -> None:
    """A group without a committed offset would begin at the end of its queues and miss the messages below."""

    async with slave(tmp_path, Role.SLAVE_IN_SYNC) as (broker, connection):
        asked = {"topic": "t", "queueId": 0}
        known = await ask(connection, Code.QUERY_CONSUMER_OFFSET, consumerGroup="g", **asked)
        assert (known.code, known.ext["offset"]) == (ResponseCode.SUCCESS, "2")
        unknown = await ask(connection, Code.QUERY_CONSUMER_OFFSET, consumerGroup="other", **asked)
        assert unknown.code == ResponseCode.SYSTEM_BUSY
        end = await ask(connection, Code.GET_MAX_OFFSET, **asked)
        assert (end.code, end.ext["offset"]) == (ResponseCode.SUCCESS, str(CONFIRMED))
        broker.role.become(Role.SLAVE)
        for code in (Code.GET_MAX_OFFSET, Code.QUERY_CONSUMER_OFFSET):
            assert (await ask(connection, code, consumerGroup="g", **asked)).code == ResponseCode.SYSTEM_BUSY


async def test_disabled_slave_reads_are_refused_like_by_rocketmq(tmp_path: Path) -> None:
    """Suspended pulls are refused as well. The setting can be changed while the broker runs."""

    async with slave(tmp_path, Role.SLAVE) as (broker, connection):
        waiting = await holds(broker, connection, CONFIRMED)
        broker.config.slave_read_enable = False
        refused = await pull(connection, 0)
        assert refused.code == ResponseCode.SYSTEM_BUSY
        assert refused.remark is not None
        assert refused.remark.startswith("[REJECTREQUEST]")
        broker.store.visibility.confirm(broker.store.max_physical_offset)
        assert (await waiting).code == ResponseCode.SYSTEM_BUSY


@pytest.mark.parametrize("enabled", [True, False])
async def test_cold_reader_is_redirected_to_a_slave_and_back(tmp_path: Path, enabled: bool) -> None:
    """A replay then costs the master nothing. The group's setting names the member."""

    settings = (f"slaveReadEnable={str(enabled).lower()}", f"storeUrl=dir:{tmp_path / 'bucket'}")
    async with running(tmp_path / "broker", *settings) as (broker, connection):
        for _ in range(3):
            await send(connection, "t")
        assert (await pull(connection, 2)).ext["suggestWhichBrokerId"] == "0"
        await offload(broker)
        await send(connection, "t")
        cold = await pull(connection, 0)
        assert cold.code == ResponseCode.SUCCESS
        assert cold.ext["suggestWhichBrokerId"] == ("1" if enabled else "0")
        assert (await pull(connection, 3)).ext["suggestWhichBrokerId"] == "0"
        if enabled:  # any member reads the archive: the reader stays at the slave until it has caught up
            turn(broker, Role.SLAVE, has_master=True)
            assert (await pull(connection, 0)).ext["suggestWhichBrokerId"] == "1"
            assert (await pull(connection, 3)).ext["suggestWhichBrokerId"] == "0"


async def test_slave_finds_confirmed_messages_by_key_and_by_id(tmp_path: Path) -> None:
    async with slave(tmp_path, Role.SLAVE) as (broker, connection):
        places = [entry[0] for offset in range(CONFIRMED) if (entry := broker.store.reader.entry("t", 0, offset))]
        end = broker.store.visibility.confirmed
        found = [(await ask(connection, Code.VIEW_MESSAGE_BY_ID, offset=place)).code for place in (*places, end)]
        assert found == [*[ResponseCode.SUCCESS] * CONFIRMED, ResponseCode.SYSTEM_ERROR]
        broker.store.visibility.confirm(broker.store.max_physical_offset - 1)  # up to a byte within the last record
        entry = broker.store.reader.entry("t", 0, ALL - 2)
        assert entry is not None
        for place, code in ((entry[0], ResponseCode.SUCCESS), (entry[0] + entry[1], ResponseCode.SYSTEM_ERROR)):
            assert (await ask(connection, Code.VIEW_MESSAGE_BY_ID, offset=place)).code == code


async def test_heartbeat_at_a_slave_creates_neither_topic_nor_group(tmp_path: Path) -> None:
    """A slave's tables follow its master's log."""

    async with running(tmp_path, "slaveReadEnable=true") as (broker, connection):
        await send(connection, "t")
        broker.role.become(Role.FENCED)
        broker.store.follow()
        broker.role.become(Role.SLAVE)
        topics, groups, end = set(broker.topics.topics), set(broker.groups.groups), broker.store.max_physical_offset
        body = (
            b'{"clientID":"c","producerDataSet":[],"consumerDataSet":[{"groupName":"new","consumeType":'
            b'"CONSUME_PASSIVELY","messageModel":"CLUSTERING","consumeFromWhere":"CONSUME_FROM_LAST_OFFSET",'
            b'"subscriptionDataSet":[{"topic":"t","subString":"*","tagsSet":[],"codeSet":[],"subVersion":1}]}]}'
        )
        assert (await ask(connection, Code.HEART_BEAT, body)).code == ResponseCode.SUCCESS
        read = await ask(
            connection, Code.PULL_MESSAGE, consumerGroup="new", topic="t", queueId=0, queueOffset=0, maxMsgNums=1,
            sysFlag=0, commitOffset=0, suspendTimeoutMillis=0, subVersion=1,
        )  # fmt: skip
        assert (read.code, offsets(read)) == (ResponseCode.SUCCESS, [0])
        assert (set(broker.topics.topics), set(broker.groups.groups)) == (topics, groups)
        assert broker.store.max_physical_offset == end
