"""A transaction ends with its mark or not at all: an end that a full disk refuses is checked again and applied once."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from broker.broker_controller import BrokerController
from broker.waiting.half_messages import COMMIT, ROLLBACK
from infra.disk.filesystem import DiskFull
from infra.net.remoting_server import Connection
from neve.record.ids import offset_msg_id, parse_offset_msg_id
from neve.record.layout import TRANSACTION_COMMIT
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.names import CHECK_MAX_TOPIC, OP_HALF_TOPIC
from tests.kit.broker.in_process import ask, running, send
from tests.kit.store.sim_disk import SimDisk

HALF = "TRAN_MSG\x01true\x02PGROUP\x01p\x02"
REFUSED = ResponseCode.SERVICE_NOT_AVAILABLE


def fill(disk: SimDisk) -> None:
    """Leave no room for new mark files, but for messages."""
    create = type(disk).create_preallocated

    def refuse(path: Path, size: int, *, sync: bool = True) -> None:
        if OP_HALF_TOPIC in str(path):
            raise DiskFull(errno.ENOSPC, "no space left on device", str(path))
        create(disk, path, size, sync=sync)

    disk.create_preallocated = refuse  # type: ignore[method-assign]


@asynccontextmanager
async def broker_on(disk: SimDisk, *settings: str) -> AsyncIterator[tuple[BrokerController, Connection]]:
    async with running(Path("/broker"), "flushDiskType=SYNC_FLUSH", *settings, disk=disk) as both:
        yield both


async def try_to_send(connection: Connection, topic: str) -> RemotingCommand:
    return await ask(
        connection, Code.SEND_MESSAGE_V2, b"body", a="p", b=topic, c="TBW102", d=1, e=0, f=0, g=1, h=0, i="", j=0,
        k="false", m="false",
    )  # fmt: skip


def tear_commit(broker: BrokerController, disk: SimDisk) -> SimDisk:
    """Return the disk after a power cut in the middle of a commit: the message is stored and its mark is not."""
    (half,), store = broker.transactions.waiting(), broker.store
    store.put(
        "orders", 0, b"half", b"", flag=0, sys_flag=TRANSACTION_COMMIT, born_timestamp=0, born_host=("127.0.0.1", 0),
        prepared_transaction_offset=half.physical_offset,
    )  # fmt: skip
    store.after_flush(store.visibility.flush())
    return disk.power_cut()


async def end(connection: Connection, stored: RemotingCommand, outcome: int) -> int:
    answer = await ask(
        connection,
        Code.END_TRANSACTION,
        producerGroup="p",
        tranStateTableOffset=stored.ext["queueOffset"],
        commitLogOffset=parse_offset_msg_id(stored.ext["msgId"])[2],
        commitOrRollback=outcome,
        msgId=stored.ext["transactionId"],
    )
    return answer.code


async def test_commit_without_room_for_its_mark_is_refused_and_applied_later() -> None:
    disk = SimDisk()
    async with broker_on(disk) as (broker, connection):
        await send(connection, "orders", b"before")
        stored = await send(connection, "orders", b"half", HALF)
        fill(disk)
        assert await end(connection, stored, COMMIT) == REFUSED
        await send(connection, "orders", b"after")
        assert broker.store.queues.max_offset("orders", 0) == 2
        assert len(broker.transactions) == 1
        disk = disk.power_cut()
    async with broker_on(disk) as (broker, connection):
        assert [await end(connection, stored, COMMIT) for _ in range(2)] == [0, 0]
        assert broker.store.queues.max_offset("orders", 0) == 3
        assert len(broker.transactions) == 0


async def test_rollback_without_room_for_its_mark_is_refused_and_checked_again() -> None:
    disk = SimDisk()
    async with broker_on(disk) as (broker, connection):
        stored = await send(connection, "orders", b"half", HALF)
        fill(disk)
        assert await end(connection, stored, ROLLBACK) == REFUSED
        assert broker.transactions.outcome(0) is None
        assert len(broker.transactions) == 1
        disk = disk.power_cut()
    async with broker_on(disk) as (broker, connection):
        assert await end(connection, stored, ROLLBACK) == 0
        disk = disk.power_cut()
    async with broker_on(disk) as (broker, connection):
        assert len(broker.transactions) == 0
        assert broker.store.queues.max_offset("orders", 0) == 0


async def test_half_message_that_cannot_be_marked_is_discarded_once() -> None:
    disk = SimDisk()
    async with broker_on(disk, "transactionCheckMax=3", "transactionTimeOut=0") as (broker, connection):
        stored = await send(connection, "orders", b"half", HALF)
        transactions = broker.transactions
        (half,) = transactions.waiting()
        fill(disk)
        check_back, half.checks = broker.check_back, 3
        where = offset_msg_id(broker.address, half.physical_offset)
        answer = await ask(connection, Code.RESUME_CHECK_HALF_MESSAGE, msgId=where)
        assert (answer.code, half.checks) == (REFUSED, 3)
        for _ in range(2):
            await check_back.run()
            await broker.flusher.flush_now()
            assert broker.store.queues.max_offset(CHECK_MAX_TOPIC, 0) == 0
        assert transactions.waiting() == [half]
        del disk.create_preallocated
        await check_back.run()
        await broker.flusher.flush_now()
        assert broker.store.queues.max_offset(CHECK_MAX_TOPIC, 0) == 1
        assert await end(connection, stored, ROLLBACK) == 0


async def test_commit_with_a_torn_mark_stays_ended_if_the_next_start_is_full() -> None:
    disk = SimDisk()
    async with broker_on(disk) as (broker, connection):
        await send(connection, "orders", b"before")
        stored = await send(connection, "orders", b"half", HALF)
        torn = tear_commit(broker, disk)
    fill(torn)
    async with broker_on(torn) as (broker, connection):
        for topic in ("orders", "others"):
            answer = await try_to_send(connection, topic)
            assert answer.code == REFUSED, "stored before the mark, it would hide the message from the next start"
        assert broker.store.queues.max_offset("orders", 0) == 2, "reads go on"
        assert len(broker.transactions) == 0
        again = torn.power_cut()
    async with broker_on(again) as (broker, connection):
        assert len(broker.transactions) == 0
        await send(connection, "orders", b"after")
        third = again.power_cut()
    async with broker_on(third) as (broker, connection):
        assert len(broker.transactions) == 0
        assert await end(connection, stored, COMMIT) != 0
        assert broker.store.queues.max_offset("orders", 0) == 3


async def test_sends_resume_once_there_is_room_for_the_torn_mark() -> None:
    disk = SimDisk()
    async with broker_on(disk) as (broker, connection):
        await send(connection, "orders", b"half", HALF)
        torn = tear_commit(broker, disk)
    fill(torn)
    async with broker_on(torn) as (broker, connection):
        assert (await try_to_send(connection, "orders")).code == REFUSED
        broker.store.end.roll()
        assert (await try_to_send(connection, "orders")).code == REFUSED
        del torn.create_preallocated
        await send(connection, "orders", b"after")
        assert broker.store.queues.max_offset(OP_HALF_TOPIC, 0) == 1
        again = torn.power_cut()
    async with broker_on(again) as (broker, connection):
        assert len(broker.transactions) == 0
        assert broker.store.queues.max_offset("orders", 0) == 2
