"""The lines of stdin for a loop, which a terminal that says nothing does not hold up.

A thread of asyncio's pool that waits for a line would keep the command until the line comes: Ctrl-C twice. This one is
a daemon, and reads the descriptor itself: no lock of `sys.stdin` is held when the interpreter ends.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator

_CHUNK = 64 * 1024
_AHEAD = 16  # chunks that are read before anybody asked for them


async def stdin_lines(descriptor: int = 0) -> AsyncIterator[tuple[int, bytes]]:
    """(number from 1, line without its end); the last one may have had no end."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_AHEAD)

    def hand(chunk: bytes | OSError) -> bool:
        """Whether there is still a loop that wants it."""
        try:
            loop.call_soon_threadsafe(chunks.put_nowait, chunk)
        except RuntimeError:
            return False
        return True

    def read() -> None:
        while True:
            room.acquire()
            try:
                chunk = os.read(descriptor, _CHUNK)
            except OSError as error:
                hand(error)
                return
            if not hand(chunk) or not chunk:
                return

    threading.Thread(target=read, name="stdin", daemon=True).start()
    number, rest = 0, [b""]
    while chunk := await chunks.get():
        if isinstance(chunk, OSError):
            raise chunk
        room.release()
        first, *more = chunk.split(b"\n")
        rest.append(first)
        for following in more:
            number += 1
            yield number, b"".join(rest).rstrip(b"\r")
            rest = [following]
    if last := b"".join(rest).rstrip(b"\r"):
        yield number + 1, last
