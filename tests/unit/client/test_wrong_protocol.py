"""Errors of a client that speaks TLS to a plain-text port, or plain text to a TLS port, name the remedy."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from neve.client.net.connection import ConnectionPool
from neve.errors import ConnectionFailed, UnknownOutcome, seconds_text
from neve.remoting.codes import RequestCode


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.transport.abort()


async def failure(*, tls: ssl.SSLContext | bool) -> Exception:
    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pool = ConnectionPool(5.0, lambda *_: None, lambda _: None, tls=tls)
    try:
        with pytest.raises((ConnectionFailed, UnknownOutcome)) as failed:
            await pool.invoke(address, RequestCode.HEART_BEAT, {}, timeout=5.0)
        return failed.value
    finally:
        await pool.close()
        server.close()


def test_tls_error_at_a_plain_port_suggests_no_tls() -> None:
    assert "--no-tls" in str(asyncio.run(failure(tls=ssl.create_default_context())))


def test_plain_text_error_at_a_tls_port_suggests_tls() -> None:
    assert "--tls-ca FILE" in str(asyncio.run(failure(tls=False)))


def test_refused_connection_has_no_hint_about_tls() -> None:
    async def refused() -> str:
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        await server.wait_closed()
        pool = ConnectionPool(5.0, lambda *_: None, lambda _: None, tls=ssl.create_default_context())
        with pytest.raises(ConnectionFailed) as failed:
            await pool.invoke(address, RequestCode.HEART_BEAT, {}, timeout=5.0)
        await pool.close()
        return str(failed.value)

    assert "--no-tls" not in asyncio.run(refused())


@pytest.mark.parametrize(("seconds", "text"), [(9.99946, "10 s"), (0.25, "0.25 s"), (1200.0, "1200 s"), (1.5, "1.5 s")])
def test_time_limits_are_rounded(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
