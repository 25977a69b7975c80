"""A transaction ends by its half message's first offset, even after the half message was appended again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.waiting import half_messages
from broker.waiting.half_messages import COMMIT, ROLLBACK
from infra.net.remoting_server import Connection
from neve.record.codec import iter_records
from neve.record.ids import parse_offset_msg_id
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import ask, running, send

HALF = "TRAN_MSG\x01true\x02PGROUP\x01p\x02TAGS\x01t\x02"


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


@pytest.mark.parametrize("restarted", [False, True])
def test_transaction_ends_after_its_half_message_was_reappended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    monkeypatch.setattr(half_messages, "REAPPEND_AGAIN_MS", 0)

    async def reappend() -> list[RemotingCommand]:
        async with running(tmp_path / "broker") as (broker, connection):
            stored = [await send(connection, "orders", b"%d" % number, HALF) for number in range(3)]
            store, halves = broker.store, broker.transactions
            store.end.roll()
            await broker.flusher.flush_now()
            border = store.reader.segments()[0].end
            assert halves.reappend(border)
            assert not halves.reappend(border)
            store.take_out(0)()
            if not restarted:
                await finish(connection, stored)
            return stored

    async def finish(connection: Connection, stored: list[RemotingCommand]) -> None:
        assert await end(connection, stored[0], COMMIT) == 0
        assert await end(connection, stored[1], ROLLBACK) == 0
        assert await end(connection, stored[1], COMMIT) == 1

    async def look(stored: list[RemotingCommand]) -> None:
        async with running(tmp_path / "broker") as (broker, connection):
            if restarted:
                await finish(connection, stored)
            got = broker.store.reader.get("orders", 0, 0, 10, 1 << 20)
            (record,) = [record for buffer in got.buffers for record in iter_records(buffer)]
            assert (record.body, record.properties["TAGS"]) == (b"0", "t")
            assert len(broker.transactions) == 1
            assert await end(connection, stored[2], COMMIT) == 0
            assert broker.store.queues.max_offset("orders", 0) == 2

    asyncio.run(look(asyncio.run(reappend())))
