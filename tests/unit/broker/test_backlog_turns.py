"""Reads of a backlog get a part of each event loop turn, so that other requests are served in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.broker_controller import BrokerController
from broker.long_polling.pull_request_hold import MAX_HELD_SIZE
from broker.reading.backlog_turns import TURN_S, BacklogTurns
from broker.reading.tiered_store import PendingRead
from broker.requests.pull_checks import SUBSCRIPTION
from broker.store.reading import GetResult
from infra.net.remoting_server import Connection
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import ask, running, send

MESSAGES = 40


def test_loop_runs_other_callbacks_between_two_turns_of_a_backlog() -> None:
    async def main() -> list[str]:
        turns, happened = BacklogTurns(), list[str]()

        def reads(name: str) -> Callable[[], None]:
            def read() -> None:
                happened.append(name)
                asyncio.get_running_loop().call_soon(happened.append, "other")
                turns.used(TURN_S)

            return read

        for name in ("first", "second", "third"):
            turns.wait(reads(name))
        while happened.count("other") < 3:
            await asyncio.sleep(0)
        return happened

    assert asyncio.run(main()) == ["first", "other", "second", "other", "third", "other"]


async def test_new_read_waits_behind_pending_ones_even_in_a_new_turn() -> None:
    turns, served = BacklogTurns(), list[int]()
    assert turns.has_room
    turns.used(TURN_S)
    assert not turns.has_room, "this turn is used up"
    turns.wait(lambda: served.append(1))
    turns.wait(lambda: served.append(2))
    assert turns.waiting == 2
    await asyncio.sleep(0)
    assert (served, turns.waiting) == ([1, 2], 0), "they took no time"
    assert turns.has_room


async def test_number_of_waiting_reads_is_bounded() -> None:
    turns = BacklogTurns()
    turns.used(TURN_S)
    while not turns.has_room:
        turns.wait(lambda: None)
    assert 1000 < len(turns._waiting) < 10_000


async def pull(connection: Connection, offset: int, body: bytes = b"") -> RemotingCommand:
    return await ask(
        connection, RequestCode.PULL_MESSAGE, body, consumerGroup="g", topic="t", queueId=0, queueOffset=offset,
        maxMsgNums=8, sysFlag=SUBSCRIPTION, commitOffset=0, suspendTimeoutMillis=0, subscription="*", subVersion=0,
    )  # fmt: skip


@pytest.mark.parametrize(("offset", "waits"), [(0, True), (MESSAGES - 9, True), (MESSAGES - 8, False)])
async def test_pull_of_a_backlog_waits_for_its_turn_and_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, waits: bool
) -> None:
    async with running(tmp_path) as (broker, connection):
        await filled(connection)
        waited = used_up(broker, monkeypatch)
        answer = await pull(connection, offset)
        assert bool(waited) is waits
        got = [record.queue_offset for record in iter_records(b"".join(answer.parts or [answer.body]))]
        assert (answer.code, got) == (ResponseCode.SUCCESS, list(range(offset, offset + 8)))


async def test_waiting_pull_is_refused_after_its_permission_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as (broker, connection):
        await filled(connection)
        waited = used_up(broker, monkeypatch, then=lambda: setattr(broker.config, "broker_permission", 2))
        answer = await pull(connection, 0)
        assert waited
        assert answer.code == ResponseCode.NO_PERMISSION


async def test_pull_that_reads_the_disk_after_its_turn_counts_as_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a connection could have any number of them.

    Reading from a connection stops at a number of requests in flight.
    """

    async with running(tmp_path) as (broker, connection):
        await filled(connection)
        (served,) = broker.server.connections
        read, begun, goes_on = broker.tiered.get_message, asyncio.Event(), asyncio.Event()

        def later(*asked: Any) -> PendingRead:
            async def wait() -> GetResult:
                begun.set()
                await goes_on.wait()
                answer = read(*asked)
                assert isinstance(answer, GetResult)
                return answer

            return PendingRead(wait)

        monkeypatch.setattr(broker.tiered, "get_message", later)
        waited = used_up(broker, monkeypatch)
        answer = asyncio.ensure_future(pull(connection, 0))
        await begun.wait()
        assert waited
        assert len(served.in_flight) == 1
        goes_on.set()
        assert (await answer).code == ResponseCode.SUCCESS
        assert not served.in_flight


async def test_large_request_is_not_kept_until_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as (broker, connection):
        await filled(connection)
        waited = used_up(broker, monkeypatch)
        answer = await pull(connection, 0, body=bytes(MAX_HELD_SIZE))
        assert answer.code == ResponseCode.SUCCESS
        assert not waited


async def filled(connection: Connection) -> None:
    for _ in range(MESSAGES):
        await send(connection, "t")


def used_up(
    broker: BrokerController, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object] = lambda: None
) -> list[Callable[[], None]]:
    """Leave no room in a turn until a read waits for one. Return the reads that waited."""
    waited: list[Callable[[], None]] = []
    wait = broker.backlog_turns.wait

    def waits(read: Callable[[], None]) -> None:
        waited.append(read)
        then()
        wait(read)

    monkeypatch.setattr(BacklogTurns, "has_room", property(lambda _: bool(waited)))
    monkeypatch.setattr(broker.backlog_turns, "wait", waits)
    return waited
