"""Test of the load generator of the benchmarks."""

from __future__ import annotations

import asyncio
import gc

from bench import raw_load


async def test_producer_ends_without_an_unretrieved_exception() -> None:
    """The producer closes a connection with sends in flight."""
    reported: list[dict[str, object]] = []

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        await raw_load.produce(f"{host}:{port}", "t", 10, 4, 0.01, 0.01, None)
        for _ in range(3):  # the connection is lost in the next turn
            await asyncio.sleep(0)
        gc.collect()
    assert reported == []
