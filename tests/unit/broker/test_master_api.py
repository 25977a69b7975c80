"""A slave's requests to its master: one connection, reopened when necessary, and an error for each failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.clients.master_api import MasterApi
from broker.config import BrokerConfig
from infra.config.properties import load
from infra.net.remoting_server import Connection, RemotingServer
from neve.errors import BrokerError, NeveError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import ask, running, send

CODE = Code.GET_ALL_CONSUMER_OFFSET


def config(*settings: str) -> BrokerConfig:
    return load(BrokerConfig, None, list(settings))


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())


@asynccontextmanager
async def serving(
    code: int = 0, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[RemotingServer, str, list[Connection]]]:
    asked: list[Connection] = []

    def serve(connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked.append(connection)
        return RemotingCommand.response(request, code, "why", ext=request.ext)

    server = RemotingServer(serve, host=host, port=0)
    await server.start()
    try:
        yield server, f"[{host}]:{server.port}" if ":" in host else f"{host}:{server.port}", asked
    finally:
        await server.shutdown()


def test_master_with_an_ipv6_address_is_reached() -> None:
    async def scenario() -> None:
        api = MasterApi(config())
        async with serving(host="::1") as (_, address, asked):
            await api.ask(address, CODE, {})
            assert len(asked) == 1
        api.close()

    run(scenario)


def test_connection_is_reused_until_the_master_changes_or_it_breaks() -> None:
    async def scenario() -> None:
        api = MasterApi(config())
        async with serving() as (_, first, asked), serving() as (_, second, others):
            await api.ask(first, CODE, {})
            await api.ask(first, CODE, {})
            assert asked[0] is asked[1]
            await api.ask(second, CODE, {})
            assert len(others) == 1
            while not asked[0].is_closed:
                await asyncio.sleep(0)
            await api.ask(first, CODE, {})
            assert asked[2] is not asked[0]
            asked[2].abort()
            while len(asked) < 4:
                try:
                    await api.ask(first, CODE, {})
                except (OSError, NeveError):
                    await asyncio.sleep(0)
            api.close()
            while not asked[3].is_closed:
                await asyncio.sleep(0)

    run(scenario)


def test_requests_are_signed_if_servers_sign() -> None:
    async def scenario() -> None:
        text = '{"accessKey":"inner","secretKey":"secret"}'
        api = MasterApi(config(f"innerClientAuthenticationCredentials={text}"))
        async with serving() as (_, address, _asked):
            answer = await api.ask(address, CODE, {"masterEpoch": "1"})
            assert (answer.ext["AccessKey"], answer.ext["masterEpoch"]) == ("inner", "1")
            assert answer.ext["Signature"]

    run(scenario)


def test_each_failure_raises_an_error_of_its_kind() -> None:
    async def scenario() -> None:
        api = MasterApi(config())
        async with serving(code=16) as (_, address, _asked):
            with pytest.raises(BrokerError, match="why"):
                await api.ask(address, CODE, {})
        with pytest.raises((OSError, NeveError)):
            await api.ask(address, CODE, {})
        for nowhere in ("", "host", "host:port"):
            with pytest.raises(NeveError, match="not host:port"):
                await api.ask(nowhere, CODE, {})

    run(scenario)


def test_close_ends_requests_that_await_an_answer() -> None:
    async def scenario() -> None:
        arrived = asyncio.Event()

        async def never(_: Connection, request: RemotingCommand) -> RemotingCommand:
            arrived.set()
            await asyncio.Event().wait()
            raise AssertionError(request)

        server = RemotingServer(never, host="127.0.0.1", port=0)
        await server.start()
        api = MasterApi(config())
        asking = asyncio.create_task(api.ask(f"127.0.0.1:{server.port}", CODE, {}))
        await arrived.wait()
        api.close()
        with pytest.raises((OSError, NeveError)):
            await asking
        await server.shutdown()

    run(scenario)


def test_broker_without_a_set_serves_only_stock_slaves(tmp_path: Path) -> None:
    """A stock slave saves no offsets without a version."""

    async def scenario() -> None:
        async with running(tmp_path) as (_, connection):
            await send(connection, "t")
            answer = await ask(connection, Code.GET_ALL_CONSUMER_OFFSET)
            assert b'"dataVersion":{"counter":' in b"".join(map(bytes, answer.parts or [answer.body]))
            for code in (Code.GET_ALL_CONSUMER_OFFSET, Code.GET_ALL_TOPIC_CONFIG):
                assert (await ask(connection, code)).code == 0
                refused = await ask(connection, code, masterEpoch=0)
                assert (refused.code, refused.remark) == (
                    1,
                    "this broker is not a master: it does not have the tables of epoch 0",
                )

    run(scenario)
