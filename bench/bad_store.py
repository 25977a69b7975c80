"""A store with faults, for measurements: a proxy in front of a real one, controlled by lines on its input.

    python -m bench.bad_store PORT HOST:PORT

    well    bytes are forwarded both ways
    slow    a client's bytes are forwarded two seconds later
    503     every request is answered with 503 SlowDown, at once
    away    connections are accepted, and nothing is ever answered

Another word closes the connections of the previous one, so that waiting clients learn that no answer will arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

_SLOW_S = 2.0
_CHUNK = 1 << 18
_BODY = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
_REFUSAL = b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%b" % (
    len(_BODY),
    _BODY,
)


class BadStore:
    """A proxy; `mood` is one of the words."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self.mood = "well"
        self._open: set[asyncio.Task[None]] = set()

    def set_mood(self, mood: str) -> None:
        self.mood = mood
        for task in self._open:
            task.cancel()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._served(reader, writer)
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mood == "away":
            while await reader.read(_CHUNK):
                pass
        elif self.mood == "503":
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(content_length(head))
                writer.write(_REFUSAL)
                await writer.drain()
        else:
            await self._passed_on(reader, writer, _SLOW_S if self.mood == "slow" else 0.0)

    async def _passed_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, after: float) -> None:
        there, back = await asyncio.open_connection(*self._target)
        pumps = [asyncio.ensure_future(_pump(reader, back, after)), asyncio.ensure_future(_pump(there, writer, 0.0))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            back.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, after: float) -> None:
    while data := await reader.read(_CHUNK):
        await asyncio.sleep(after)
        writer.write(data)
        await writer.drain()


def content_length(head: bytes) -> int:
    """Return the number of body bytes that follow this request head."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def run(port: int, target: str) -> None:
    store = BadStore(target)
    server = await asyncio.start_server(store.serve, "127.0.0.1", port)
    loop = asyncio.get_running_loop()
    print("READY", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        store.set_mood(line.strip())
    server.close()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), sys.argv[2]))
