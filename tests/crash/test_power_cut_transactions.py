"""SYNC_FLUSH and transactions: whatever pages survive a power cut, a confirmed commit is kept exactly once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.machine import Machine
from infra.clock import SystemClock
from infra.config.properties import load
from infra.net.remoting_server import Connection, open_connection
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask
from tests.kit.store.sim_disk import SimDisk

COMMIT, ROLLBACK = 8, 12
SETTINGS = (
    "storePathRootDir=/broker", "listenPort=0", "adminPort=-1", "bindAddress=127.0.0.1", "brokerIP1=127.0.0.1",
    "mappedFileSizeCommitLog=64k", "flushDiskType=SYNC_FLUSH", "transactionCheckInterval=1d",
)  # fmt: skip


@asynccontextmanager
async def broker_on(disk: SimDisk) -> AsyncIterator[tuple[BrokerController, Connection]]:
    controller = BrokerController(load(BrokerConfig, None, SETTINGS), Machine(clock=SystemClock(), disk=disk))
    await controller.start()
    connection = await open_connection(*controller.address)
    try:
        yield controller, connection
    finally:
        connection.close()
        await controller.shutdown()


async def half(connection: Connection, body: bytes) -> dict[str, object]:
    """Send a half message; return the fields that its producer needs to end the transaction."""
    answer = await ask(
        connection, Code.SEND_MESSAGE_V2, body, a="p", b="ledger", c="TBW102", d=1, e=0, f=4, g=1, h=0,
        i="TRAN_MSG\x01true\x02PGROUP\x01p\x02",
    )  # fmt: skip
    assert answer.code == 0, answer.remark
    place = {"tranStateTableOffset": answer.ext["queueOffset"], "commitLogOffset": int(answer.ext["msgId"][16:], 16)}
    return {"producerGroup": "p", "topic": "ledger", **place}


async def end(connection: Connection, transaction: dict[str, object], outcome: int) -> int:
    return (await ask(connection, Code.END_TRANSACTION, commitOrRollback=outcome, **transaction)).code


async def visible(connection: Connection) -> list[bytes]:
    answer = await ask(
        connection, Code.PULL_MESSAGE, consumerGroup="g", topic="ledger", queueId=0, queueOffset=0, maxMsgNums=32,
        sysFlag=4, commitOffset=0, suspendTimeoutMillis=0, subVersion=0, subscription="*",
    )  # fmt: skip
    return [record.body for record in iter_records(answer.body)]


@pytest.mark.parametrize("seed", range(4))
async def test_confirmed_end_of_a_transaction_survives_a_power_cut(seed: int) -> None:
    disk = SimDisk(seed=seed)
    async with broker_on(disk) as (_, connection):
        transactions = [await half(connection, body) for body in (b"committed", b"rolled back", b"open")]
        assert await end(connection, transactions[0], COMMIT) == 0
        assert await end(connection, transactions[1], ROLLBACK) == 0
        survivor = disk.power_cut(seed)
    async with broker_on(survivor) as (broker, connection):
        assert await visible(connection) == [b"committed"]
        (waiting,) = broker.transactions.waiting()
        assert waiting.physical_offset == transactions[2]["commitLogOffset"]
        for ended in transactions[:2]:  # The producer may not have received the answer, and repeats the request.
            await end(connection, ended, COMMIT)
        assert await visible(connection) == [b"committed"]
        assert await end(connection, transactions[2], COMMIT) == 0
        assert await visible(connection) == [b"committed", b"open"]
