"""A proxy in front of an S3 store that counts requests, for measurements.

    python -m bench.counted_store PORT HOST:PORT

Each line on its input is answered by a line of JSON, and begins the next count: {"GET data": 12, "HEAD journal": 1, …},
by method and target: `data` is a Parquet object, `journal` any other key, `listing` a listing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter
from urllib.parse import parse_qs, urlsplit

from bench.bad_store import content_length

_CHUNK = 1 << 18


class CountedStore:
    """Forwards requests unchanged; answers are not inspected."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self.asked: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        answers = asyncio.ensure_future(_pump(there, writer))
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._ask(reader, back)
        finally:
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)
            back.transport.abort()
            writer.transport.abort()

    async def _ask(self, reader: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked[_told(head)] += 1
            back.write(head)
            left = content_length(head)
            while left:
                data = await reader.read(min(left, _CHUNK))
                if not data:
                    return
                left -= len(data)
                back.write(data)
                await back.drain()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()


def _told(head: bytes) -> str:
    method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
    place = urlsplit(target)
    if method == "GET" and "list-type" in parse_qs(place.query):
        return "GET listing"
    return f"{method} {'data' if place.path.endswith('.parquet') else 'journal'}"


async def run(port: int, target: str) -> None:
    store = CountedStore(target)
    server = await asyncio.start_server(store.serve, "127.0.0.1", port)
    loop = asyncio.get_running_loop()
    print("READY", flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(store.asked), flush=True)
        store.asked.clear()
    server.close()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), sys.argv[2]))
