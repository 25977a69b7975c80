from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from infra.net.remoting_peer import PeerSecurity, RemotingPeer
from infra.net.remoting_server import Answer, Connection, RemotingServer
from neve.errors import NeveError
from neve.remoting.command import RemotingCommand

CODE = 105


def _echo(_: Connection, request: RemotingCommand) -> RemotingCommand:
    return RemotingCommand.response(request, 0, ext=request.ext)


async def _silence(_: Connection, request: RemotingCommand) -> RemotingCommand:
    await asyncio.Event().wait()
    raise AssertionError(request)


@asynccontextmanager
async def _serving(
    handler: Callable[[Connection, RemotingCommand], Answer | Awaitable[Answer]] = _echo,
) -> AsyncIterator[tuple[RemotingServer, str]]:
    server = RemotingServer(handler, host="127.0.0.1", port=0)
    await server.start()
    try:
        yield server, f"127.0.0.1:{server.port}"
    finally:
        await server.shutdown(grace_s=0)


def _peer(address: str, max_timeouts: int = 1) -> RemotingPeer:
    return RemotingPeer(address, PeerSecurity(("inner", "secret")), connect_s=5, max_timeouts=max_timeouts)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_concurrent_callers_share_one_connection() -> None:
    async with _serving() as (server, address):
        peer = _peer(address)
        answers = await asyncio.gather(*(peer.invoke(CODE, {"number": str(n)}, timeout=5) for n in range(5)))
        assert [answer.ext["number"] for answer in answers] == list("01234")
        assert len(server.connections) == 1
        peer.close()


async def test_requests_are_signed() -> None:
    async with _serving() as (_, address):
        peer = _peer(address)
        answer = await peer.invoke(CODE, {}, timeout=5)
        assert answer.ext["AccessKey"] == "inner"
        assert answer.ext["Signature"]
        peer.close()


async def test_lost_connection_is_reopened() -> None:
    async with _serving() as (server, address):
        peer = _peer(address)
        await peer.connect()
        await _until(lambda: bool(server.connections))
        for connection in server.connections:
            connection.abort()
        await _until(lambda: not peer.is_connected)
        await peer.invoke(CODE, {}, timeout=5)
        peer.close()


@pytest.mark.parametrize("max_timeouts", [1, 2])
async def test_requests_without_an_answer_close_the_connection(max_timeouts: int) -> None:
    async with _serving(_silence) as (_, address):
        peer = _peer(address, max_timeouts=max_timeouts)
        for sent in range(1, max_timeouts + 1):
            with pytest.raises(TimeoutError):
                await peer.invoke(CODE, {}, timeout=0)
            if sent < max_timeouts:
                assert peer.is_connected
        await _until(lambda: not peer.is_connected)


async def test_callers_share_the_failure_of_an_attempt() -> None:
    attempts = 0

    async def on_connect(_: Connection) -> None:
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(0)
        raise NeveError(None, "refused")

    async with _serving() as (server, address):
        peer = RemotingPeer(address, PeerSecurity(), connect_s=5, on_connect=on_connect)
        outcomes = await asyncio.gather(*(peer.connect() for _ in range(4)), return_exceptions=True)
        assert all(isinstance(outcome, NeveError) for outcome in outcomes)
        assert attempts == 1
        await _until(lambda: not server.connections)


async def test_close_during_an_attempt_leaves_no_connection() -> None:
    async with _serving() as (server, address):
        began = asyncio.Event()

        async def on_connect(_: Connection) -> None:
            began.set()
            await asyncio.sleep(0)

        peer = RemotingPeer(address, PeerSecurity(), connect_s=5, on_connect=on_connect)
        attempt = asyncio.create_task(peer.connect())
        await began.wait()
        peer.close()
        with pytest.raises(ConnectionAbortedError):
            await attempt
        await _until(lambda: not server.connections)


@pytest.mark.parametrize("address", ["", "host", "host:port"])
async def test_invalid_address_is_an_error(address: str) -> None:
    with pytest.raises(NeveError, match="not host:port"):
        await _peer(address).connect()
