"""Creating a topic costs the same whether there are ten others or ten thousand."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from infra.clock import SystemClock
from infra.disk.filesystem import RealDisk
from infra.net.remoting_server import Connection, open_connection
from namesrv.namesrv_config import NamesrvConfig
from namesrv.namesrv_controller import NamesrvController
from namesrv.request_processor import RequestProcessor
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import ask, running
from tests.kit.clock.waiting import until

COUNT = 30


class CountedDisk(RealDisk):
    """Counts the writes of each table."""

    def __init__(self) -> None:
        self.writes: Counter[str] = Counter()

    def write_atomic(self, path: Path, data: bytes) -> None:
        self.writes[path.name] += 1
        super().write_atomic(path, data)


@asynccontextmanager
async def name_server(root: Path, port: int = 0) -> AsyncIterator[tuple[str, Connection]]:
    config = NamesrvConfig(listen_port=port, bind_address="127.0.0.1", kv_config_path=str(root / "kv.json"))
    controller = NamesrvController(config, SystemClock(), RealDisk())
    await controller.start()
    asker = await open_connection("127.0.0.1", controller.port)
    try:
        yield f"127.0.0.1:{controller.port}", asker
    finally:
        asker.close()
        await controller.shutdown()


def replace_handler(patch: pytest.MonkeyPatch, name: str, handler: Callable[..., object]) -> None:
    """Replace a handler of name servers that start afterwards; the row of its request code stays."""
    patch.setattr(RequestProcessor, name, functools.wraps(getattr(RequestProcessor, name))(handler))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the registration requests to a name server."""
    counts: Counter[str] = Counter()
    whole, single = RequestProcessor.register_broker, RequestProcessor.register_topic

    def register_broker(self: RequestProcessor, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        counts["whole"] += 1
        return whole(self, connection, request)

    def register_topic(self: RequestProcessor, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        counts["single"] += 1
        return single(self, connection, request)

    replace_handler(monkeypatch, "register_broker", register_broker)
    replace_handler(monkeypatch, "register_topic", register_topic)
    return counts


async def make(connection: Connection, name: str, queues: int = 4) -> None:
    ext = {"topic": name, "readQueueNums": queues, "writeQueueNums": queues, "perm": 6, "order": "false"}
    answer = await ask(connection, Code.UPDATE_AND_CREATE_TOPIC, **ext)
    assert answer.code == 0, answer.remark


async def knows(asker: Connection, name: str) -> bool:
    return (await ask(asker, Code.GET_ROUTEINFO_BY_TOPIC, topic=name)).code == 0


async def test_new_topic_is_registered_alone_and_its_table_saved_later(tmp_path: Path, told: Counter[str]) -> None:
    disk = CountedDisk()
    async with (
        name_server(tmp_path / "n") as (address, asker),
        running(tmp_path / "b", f"namesrvAddr={address}", "flushConsumerOffsetInterval=10m", disk=disk) as (
            broker,
            connection,
        ),
    ):
        whole, writes = told["whole"], disk.writes["topics.json"]
        for number in range(COUNT):
            await make(connection, f"t{number}")
            assert await knows(asker, f"t{number}"), "whoever is answered may go and ask"
            assert broker.topics.is_saved(f"t{number}")
        assert told["single"] == COUNT
        assert told["whole"] - whole <= 3, "a second lies between two of them"
        assert disk.writes["topics.json"] - writes <= 3, "the table goes to the disk with the registration"
        seen = told["whole"]
        await make(connection, "t0", queues=16)
        await until(lambda: told["whole"] > seen)


async def test_created_topic_exists_after_a_kill(tmp_path: Path) -> None:
    """Its record is in the log, although the table's file was not written."""

    async with running(tmp_path, "flushConsumerOffsetInterval=10m", disk=(disk := CountedDisk())) as (
        broker,
        asker,
    ):
        writes = disk.writes["topics.json"]
        await make(asker, "made")
        assert disk.writes["topics.json"] == writes
        assert broker.store.visibility.flushed == broker.store.max_physical_offset
        saved = (tmp_path / "config" / "topics.json").read_bytes()
    (tmp_path / "config" / "topics.json").write_bytes(saved)  # as it was when the process ended
    assert b'"made"' not in saved
    async with running(tmp_path) as (broker, _):
        assert broker.topics.select("made") is not None


@pytest.mark.parametrize("code", [ResponseCode.REQUEST_CODE_NOT_SUPPORTED, ResponseCode.NO_PERMISSION])
async def test_name_server_without_single_registrations_gets_all_topics(
    tmp_path: Path,
    told: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: ResponseCode,
) -> None:
    """Name servers of RocketMQ 4.x.

    After their first refusal they get no single registrations, and that is logged once.
    """
    refused: list[str] = []

    def refuse(self: RequestProcessor, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        refused.append(request.ext["topic"])
        return RemotingCommand.response(request, code, "not so")

    replace_handler(monkeypatch, "register_topic", refuse)

    async with (
        name_server(tmp_path / "n") as (address, asker),
        running(tmp_path / "b", f"namesrvAddr={address}") as (_, connection),
    ):
        for name in ("a", "b"):
            whole = told["whole"]
            await make(connection, name)
            assert told["whole"] > whole
            assert await knows(asker, name)
    assert refused == ["a"]
    (warning,) = [record for record in caplog.records if "accepts no single topic" in record.getMessage()]
    assert "not so" in warning.getMessage()


async def test_name_server_that_refused_one_topic_gets_the_next_one_alone(
    tmp_path: Path, told: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    take = RequestProcessor.register_topic

    def refuse(self: RequestProcessor, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        if refused:
            return take(self, connection, request)
        refused.append(request.ext["topic"])
        return RemotingCommand.response(request, ResponseCode.SYSTEM_BUSY, "too much at once")

    replace_handler(monkeypatch, "register_topic", refuse)

    async with (
        name_server(tmp_path / "n") as (address, asker),
        running(tmp_path / "b", f"namesrvAddr={address}") as (_, connection),
    ):
        for name in ("a", "b"):
            await make(connection, name)
            assert await knows(asker, name)
    assert (refused, told["single"]) == (["a"], 1)


async def test_name_server_upgraded_by_a_restart_gets_single_registrations(
    tmp_path: Path, told: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: RequestProcessor, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        return RemotingCommand.response(request, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "217 is not supported")

    root = tmp_path / "n"
    async with AsyncExitStack() as whole_life, AsyncExitStack() as first_life:
        with monkeypatch.context() as older:
            replace_handler(older, "register_topic", refuse)
            address, _ = await first_life.enter_async_context(name_server(root))
        _, connection = await whole_life.enter_async_context(running(tmp_path / "b", f"namesrvAddr={address}"))
        await make(connection, "a")
        await first_life.aclose()
        _, asker = await whole_life.enter_async_context(name_server(root, int(address.rpartition(":")[2])))
        await make(connection, "b")
        assert told["single"] == 0
        await make(connection, "c")
        assert (told["single"], await knows(asker, "c")) == (1, True)


async def test_topic_deleted_during_a_registration_is_not_registered_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the name server would have its route until the broker's next change of topics."""
    take, has_come, may_answer = RequestProcessor.register_topic, asyncio.Event(), asyncio.Event()

    async def wait_with_the_first(
        self: RequestProcessor, connection: Connection, request: RemotingCommand
    ) -> RemotingCommand:
        has_come.set()
        await may_answer.wait()
        return take(self, connection, request)

    replace_handler(monkeypatch, "register_topic", wait_with_the_first)

    async with (
        name_server(tmp_path / "n") as (address, asker),
        running(tmp_path / "b", f"namesrvAddr={address}") as (broker, connection),
    ):
        for name in ("first", "doomed"):
            broker.topics.create_plain(name, 1)
        telling = asyncio.create_task(broker.registration.topics(["first", "doomed"]))
        async with asyncio.timeout(30):
            await has_come.wait()
            answer = await ask(connection, Code.DELETE_TOPIC_IN_BROKER, topic="doomed")
            assert answer.code == 0, answer.remark
            may_answer.set()
            await telling
        assert await knows(asker, "first")
        assert not await knows(asker, "doomed")


async def test_restarted_name_server_gets_all_topics(tmp_path: Path, told: Counter[str]) -> None:
    async with name_server(tmp_path / "n") as (address, _):
        pass
    async with (
        running(tmp_path / "b", f"namesrvAddr={address}") as (_, connection),
        name_server(tmp_path / "n", int(address.rpartition(":")[2])) as (_, asker),
    ):
        await make(connection, "a")
        assert await knows(asker, "a")
    assert (told["single"], told["whole"] > 0) == (0, True)
