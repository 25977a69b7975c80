"""A member's requests to a controller and its reading of the answers, also of unreachable or foreign controllers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from broker.ha import controllers as controllers_module
from broker.ha.controller_calls import Identity, call_of, event_of
from broker.ha.controllers import KNOWS_LIVES, Controllers, NoControllerAnswered
from broker.ha.member_events import (
    Alter,
    AlterRefused,
    ApplyBrokerId,
    Ask,
    AskNextBrokerId,
    AskReplicaInfo,
    BrokerIdApplied,
    BrokerIdLost,
    BrokerIdTaken,
    Elect,
    Event,
    Heartbeat,
    Life,
    NextBrokerId,
    NotRegistered,
    Register,
    Registered,
    SetSeen,
    Superseded,
)
from controller.controller_config import ControllerConfig
from controller.controller_manager import ControllerManager
from controller.registers import register_of
from infra.clock import SystemClock
from infra.config.properties import load
from infra.disk.filesystem import RealDisk
from infra.net.remoting_peer import PeerSecurity
from infra.net.remoting_server import Connection, RemotingServer
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand
from tests.kit.server.processes import free_ports

LIFE = Life(1, "incarnation", 1, "process")
CODE = "127.0.0.1:1;1"


def identity(address: str = "127.0.0.1:1") -> Identity:
    return Identity(
        cluster="DefaultCluster", name="b", address=address, min_in_sync_replicas=2, heartbeat_timeout_ms=10_000,
        election_priority=5,
    )  # fmt: skip


@asynccontextmanager
async def controller(directory: Path) -> AsyncIterator[str]:
    (port,) = free_ports(1)
    lines = [f"listenPort={port}", "bindAddress=127.0.0.1", f"controllerStorePath={directory / 'register'}"]
    config, disk = load(ControllerConfig, None, lines), RealDisk()
    manager = ControllerManager(config, SystemClock(), disk, *register_of(config, disk))
    await manager.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await manager.shutdown()


def to(*addresses: str) -> Controllers:
    return Controllers(addresses, PeerSecurity())


async def told(controllers: Controllers, ask: Ask, broker_id: int = 1, *, is_known: bool = True) -> Event | None:
    own = identity()
    answer = await controllers.ask(call_of(ask, own, broker_id, log_epoch=-1))
    return event_of(ask, answer, own, broker_id, is_known=is_known)


def run(main: object) -> None:
    asyncio.run(asyncio.wait_for(main, 30))  # type: ignore[arg-type]


def test_member_registers_is_elected_and_alters_the_set(tmp_path: Path) -> None:
    async def main() -> None:
        async with controller(tmp_path) as address:
            controllers = to(address)
            assert await told(controllers, AskReplicaInfo(1)) == NotRegistered()
            assert await told(controllers, AskNextBrokerId()) == NextBrokerId(1)
            assert await told(controllers, ApplyBrokerId(1, CODE)) == BrokerIdApplied(1)
            assert await told(controllers, ApplyBrokerId(1, CODE)) == BrokerIdApplied(1), "the answer was lost"
            assert await told(controllers, ApplyBrokerId(1, "another;2")) == BrokerIdTaken()
            assert await told(controllers, Register(LIFE, CODE)) == Registered(None)
            heartbeat = call_of(Heartbeat(LIFE, 0, 0, (0, 0)), identity(), 1, log_epoch=-1)
            (answer,) = await controllers.send(heartbeat)
            assert answer.code == ResponseCode.SUCCESS
            seen = await told(controllers, Elect())
            assert isinstance(seen, SetSeen)
            assert (seen.view.pair, seen.view.master, seen.view.master_address) == ((1, 1), 1, "127.0.0.1:1")
            asked = await told(controllers, AskReplicaInfo(7))
            assert asked == SetSeen(seen.view, 7)
            again = await told(controllers, Register(LIFE, CODE))
            assert again == Registered(seen.view), "the master lives"
            assert await told(controllers, Alter("r", 1, 0, (1,))) == AlterRefused("r", has_moved=True)
            assert await told(controllers, Alter("r", 1, 1, (1, 9))) == AlterRefused("r")
            controllers.close()

    run(main())


def test_unknown_later_incarnation_is_retried_and_a_known_one_is_disowned(tmp_path: Path) -> None:
    async def main() -> None:
        async with controller(tmp_path) as address:
            controllers = to(address)
            await told(controllers, ApplyBrokerId(1, CODE))
            await told(controllers, Register(LIFE, CODE))
            other = Register(Life(1, "incarnation", 1, "another process"), CODE)
            assert await told(controllers, other, is_known=False) is None, "the one before may only just have ended"
            assert isinstance(await told(controllers, other, is_known=True), Superseded)
            assert await told(controllers, Register(LIFE, "another;2")) == BrokerIdLost(1)
            controllers.close()

    run(main())


def test_unreachable_controller_is_skipped_and_reported(tmp_path: Path) -> None:
    async def main() -> None:
        (nobody,) = free_ports(1)
        async with controller(tmp_path) as address:
            controllers = to(f"127.0.0.1:{nobody}", address)
            assert await told(controllers, AskNextBrokerId()) == NextBrokerId(1)
            assert controllers.connected == 1
            assert list(controllers.troubles) == [f"127.0.0.1:{nobody}"]
            heartbeat = call_of(Heartbeat(LIFE, 0, 0, (0, 0)), identity(), 1, log_epoch=-1)
            assert len(await controllers.send(heartbeat)) == 1
            controllers.close()
        with pytest.raises(NoControllerAnswered, match=str(nobody)):
            await controllers.ask(heartbeat)

    run(main())


Answers = Callable[[Connection, RemotingCommand], RemotingCommand]


@asynccontextmanager
async def stock(answer: Answers) -> AsyncIterator[str]:
    """Serve as a stock controller that answers all requests but that for the leader (1005)."""

    def answers(connection: Connection, request: RemotingCommand) -> RemotingCommand:
        if request.code == RequestCode.CONTROLLER_GET_METADATA_INFO:
            return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={"isLeader": "true"})
        return answer(connection, request)

    server = RemotingServer(answers, host="127.0.0.1", port=0)
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.shutdown()


def says(code: ResponseCode, **ext: str) -> Answers:
    return lambda _, request: RemotingCommand.response(request, code, ext=ext)


def test_apache_controller_is_refused_if_acknowledged_messages_may_be_lost() -> None:
    """It cannot tell two incarnations of a member apart and would elect one that lost its memory."""

    async def main() -> None:
        async with stock(says(ResponseCode.SUCCESS, nextBrokerId="4")) as address:
            refused = Controllers([address], PeerSecurity(), stock_is_refused="it has to sync")
            with pytest.raises(NoControllerAnswered, match="Apache's controller: it has to sync"):
                await told(refused, AskNextBrokerId())
            assert refused.connected == 0 and not refused.are_stock
            controllers = to(address)
            assert await told(controllers, AskNextBrokerId()) == NextBrokerId(4)
            assert controllers.are_stock
            controllers.close()

    run(main())


def test_apache_controller_that_is_not_the_leader_is_skipped() -> None:
    async def main() -> None:
        async with (
            stock(says(ResponseCode.CONTROLLER_NOT_LEADER)) as follower,
            stock(says(ResponseCode.SUCCESS, nextBrokerId="4")) as leader,
        ):
            controllers = to(follower, leader)
            assert await told(controllers, AskNextBrokerId()) == NextBrokerId(4)
            controllers.close()
            nobody = to(follower)
            with pytest.raises(NoControllerAnswered, match="not the leader"):
                await told(nobody, AskNextBrokerId())
            nobody.close()

    run(main())


def test_unanswered_set_change_is_not_repeated_at_another_controller() -> None:
    """Another controller may refuse the change while the first one still applies it."""

    def goes(connection: Connection, request: RemotingCommand) -> RemotingCommand:
        connection.close()
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    async def main() -> None:
        async with stock(goes) as first, stock(says(ResponseCode.CONTROLLER_BROKER_NOT_ALIVE)) as other:
            controllers = to(first, other)
            with pytest.raises(NoControllerAnswered):
                await told(controllers, Alter("r", 1, 1, (1,)))
            assert await told(controllers, Alter("r", 1, 1, (1,))) == AlterRefused("r"), "asked again: of the other one"
            controllers.close()

    run(main())


def test_controller_gets_no_second_request_before_it_answers_the_first() -> None:
    """Otherwise each heartbeat would wait there in a task of its own. The other controllers get every heartbeat."""
    received: list[int] = []
    has_begun = asyncio.Event()

    async def silent(_: Connection, request: RemotingCommand) -> RemotingCommand:
        if request.code == RequestCode.BROKER_HEARTBEAT:
            received.append(request.opaque)
            has_begun.set()
            await asyncio.Event().wait()
        return answers(_, request)

    def answers(_: Connection, request: RemotingCommand) -> RemotingCommand:
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={KNOWS_LIVES: "true"})

    async def main() -> None:
        servers = [RemotingServer(handler, host="127.0.0.1", port=0) for handler in (silent, answers)]
        for server in servers:
            await server.start()
        controllers = to(*(f"127.0.0.1:{server.port}" for server in servers))
        heartbeat = call_of(Heartbeat(LIFE, 0, 0, (0, 0)), identity(), 1, log_epoch=-1)
        waiting = asyncio.create_task(controllers.send(heartbeat))
        await has_begun.wait()
        for _ in range(50):
            assert len(await controllers.send(heartbeat)) == 1
        assert len(received) == 1
        assert not waiting.done()
        waiting.cancel()
        controllers.close()
        for server in servers:
            await server.shutdown()

    run(main())


def test_closed_connections_are_reopened_by_the_next_request(tmp_path: Path) -> None:
    async def main() -> None:
        async with controller(tmp_path) as address:
            controllers = to(address)
            assert await told(controllers, AskNextBrokerId()) == NextBrokerId(1)
            controllers.hang_up()
            assert controllers.connected == 0
            assert await told(controllers, AskNextBrokerId()) == NextBrokerId(1)
            controllers.close()

    run(main())


def test_closed_controllers_never_reconnect(tmp_path: Path) -> None:
    async def main() -> None:
        async with controller(tmp_path) as address:
            controllers = to(address)
            assert await told(controllers, AskNextBrokerId()) == NextBrokerId(1)
            controllers.close()
            with pytest.raises(NoControllerAnswered, match="was closed by this server"):
                await told(controllers, AskNextBrokerId())
            assert controllers.connected == 0

    run(main())


def test_concurrent_requests_share_one_attempt_at_a_hanging_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests arrive more often than an attempt takes: with an attempt each, they would pile up."""
    monkeypatch.setattr(controllers_module, "ASK_S", 0.2)
    arrived: list[asyncio.StreamWriter] = []

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.append(writer)

    async def main() -> None:
        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        controllers = to(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        asks = [told(controllers, AskNextBrokerId()) for _ in range(20)]
        told_them = await asyncio.gather(*asks, return_exceptions=True)
        assert all(isinstance(one, NoControllerAnswered) for one in told_them)
        assert len(arrived) == 1
        for writer in arrived:
            writer.close()
        server.close()

    run(main())


def test_failed_set_change_may_be_applied_only_by_apache_controllers() -> None:
    """It does not recognize a repeated request and fails if the set is already the requested one.

    neve's is unchanged.
    """
    answer = RemotingCommand(ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED)
    for is_stock in (True, False):
        event = event_of(Alter("r", 1, 1, (1, 2)), answer, identity(), 1, is_known=True, is_stock=is_stock)
        assert event == AlterRefused("r", has_moved=is_stock)
