"""Tests of simulated links: directions are cut separately, and held data is delivered at healing or never."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.histories.faults import Kind, plan
from tests.histories.links import Links
from tests.kit.clock.waiting import until

THERE, BACK = ("client", "server"), ("server", "client")


class Far:
    """A server that records its input and the writer of its latest connection."""

    def __init__(self) -> None:
        self.got = b""
        self.is_closed = False
        self.writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer, self.is_closed = writer, False
        while data := await reader.read(1000):
            self.got += data
        self.is_closed = True
        writer.close()


@asynccontextmanager
async def linked(source: str = "client") -> AsyncIterator[tuple[Links, Far, int]]:
    """Run a server behind a link. Without `source`, clients are identified by their process."""
    far, links = Far(), Links(lambda: [("other", 1), ("client", os.getpid())], random.Random(1))
    server = await asyncio.start_server(far.serve, "127.0.0.1", 0)
    async with server:
        try:
            yield links, far, await links.face("127.0.0.1", 0, server.sockets[0].getsockname()[:2], "server", source)
        finally:
            await links.close()


@asynccontextmanager
async def conversation(
    source: str = "client",
) -> AsyncIterator[tuple[Links, Far, asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection over the link, and wait until the server has its first words."""
    async with linked(source) as (links, far, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello")
        await until(lambda: far.got == b"hello", "the first words")
        yield links, far, reader, writer
        writer.close()


@pytest.mark.parametrize("source", ["client", ""])
async def test_cut_direction_delivers_its_data_after_healing(source: str) -> None:
    async with conversation(source) as (links, far, reader, writer):
        links.cut([THERE])
        writer.write(b" late")
        assert far.writer is not None
        far.writer.write(b"answer")
        assert await reader.readexactly(6) == b"answer"  # the other direction works
        assert far.got == b"hello"
        links.heal()
        await until(lambda: far.got == b"hello late", "what was held")


async def test_close_is_not_delivered_over_a_cut_link() -> None:
    async with conversation() as (links, far, _reader, writer):
        links.cut([THERE])
        writer.close()
        assert far.writer is not None
        far.writer.write(b"are you there?")
        with pytest.raises(AssertionError, match="the end is told"):
            await until(lambda: far.is_closed, "the end is told", timeout=0.3)
        links.heal()
        await until(lambda: far.is_closed, "the end is told")


async def test_healing_that_breaks_connections_delivers_nothing() -> None:
    async with conversation() as (links, far, reader, writer):
        links.cut([BACK, THERE])
        writer.write(b" late")
        links.heal(breaks=True)
        await until(lambda: far.is_closed, "the connection is broken")
        assert far.got == b"hello"
        with pytest.raises((OSError, EOFError)):
            await reader.readexactly(1)


async def test_connection_of_an_unknown_process_is_refused_and_counted() -> None:
    async with linked("") as (links, far, port):
        links._owners = lambda: [("other", 1)]
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises((OSError, EOFError)):
            await reader.readexactly(1)
        assert (links.unknown, far.got) == (1, b"")


def test_fault_plan_is_deterministic_and_ends_with_the_round() -> None:
    kinds = set()
    for seed in range(300):
        faults = plan(random.Random(seed), 8.0)
        assert faults == plan(random.Random(seed), 8.0)
        assert faults == sorted(faults, key=lambda one: one.at)
        assert all(one.at > 0 and one.at + one.lasts <= 8.0 for one in faults)
        kinds |= {one.kind for one in faults}
    assert kinds == set(Kind)
    assert {one.kind for one in plan(random.Random(1), 8.0, [Kind.KILL])} == {Kind.KILL}
