"""Queries by key: results are complete in spite of hash collisions, and no query occupies the event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from zlib import crc32

import pytest

from broker.store import reading, store_reader
from broker.store.store_reader import QUERY_STEP
from infra.loop.in_steps import Steps, in_turns
from infra.net.remoting_server import Connection
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import ask, running, send
from tests.kit.clock.calls_per_turn import CallsPerTurn
from tests.kit.store.colliding_keys import colliding_words

LONG = 1 << 60


async def query(connection: Connection, topic: str, key: str, begin: int = 0, end: int = LONG) -> RemotingCommand:
    return await ask(
        connection, Code.QUERY_MESSAGE, topic=topic, key=key, maxNum=32, beginTimestamp=begin, endTimestamp=end
    )


def bodies(answer: RemotingCommand) -> list[bytes]:
    return [bytes(record.body) for record in iter_records(answer.body)] if answer.code == 0 else []


async def test_key_query_finds_message_behind_colliding_keys(tmp_path: Path) -> None:
    """An index entry has no topic: 64 newer entries of another topic with the same hash are not results."""

    async with running(tmp_path) as (_, connection):
        await send(connection, "orders", b"paid", "KEYS\x01order-77\x02")
        (word, *_) = colliding_words("mine", crc32(b"orders#order-77"))
        for _ in range(70):
            await send(connection, "mine", b"hiding", f"KEYS\x01{word}\x02")
        assert bodies(await query(connection, "orders", "order-77")) == [b"paid"]


async def test_key_query_reports_what_it_did_not_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_reader, "QUERY_LOOKS_MAX", 50)

    async with running(tmp_path) as (_, connection):
        await send(connection, "orders", b"first", "KEYS\x01order-77\x02")
        (word, *_) = colliding_words("orders", crc32(b"orders#order-77"))
        for _ in range(60):
            await send(connection, "orders", b"other", f"KEYS\x01{word}\x02")
        answer = await query(connection, "orders", "order-77")
        assert answer.code == ResponseCode.SYSTEM_BUSY
        assert "not searched: the local log before 20" in (answer.remark or "")


async def test_concurrent_key_queries_share_one_step_per_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = CallsPerTurn(reading.store_time_at)
    monkeypatch.setattr(reading, "store_time_at", counted)

    async with running(tmp_path) as (_, connection):
        await send(connection, "orders", b"first", "KEYS\x01order-77\x02")
        (word, *_) = colliding_words("orders", crc32(b"orders#order-77"))
        for _ in range(300):
            await send(connection, "orders", b"other", f"KEYS\x01{word}\x02")
        counted.all = counted.most = 0
        answers = await asyncio.gather(*(query(connection, "orders", "order-77") for _ in range(20)))
        assert all(bodies(answer) == [b"first"] for answer in answers)
        assert counted.all >= 20 * 301
        assert counted.most <= QUERY_STEP


async def test_in_turns_takes_one_step_of_all_that_share_a_lock() -> None:
    shared, taken = asyncio.Lock(), list[str]()
    counted = CallsPerTurn(taken.append)

    def steps(name: str) -> Steps[str]:
        for _ in range(3):
            counted(name)
            yield
        return name

    assert await asyncio.gather(*(in_turns(steps(name), shared=shared) for name in "ab")) == ["a", "b"]
    assert taken == ["a", "b"] * 3, "fair"
    assert counted.most == 1
