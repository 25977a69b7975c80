"""Reads lines of stdin in a thread, so that the event loop does not block on a terminal.

A thread of asyncio's pool would keep the process alive until the next line. This thread is a daemon, and reads the
descriptor itself, so that it holds no lock of `sys.stdin` when the interpreter ends.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator

_CHUNK = 64 * 1024
_AHEAD = 16  # chunks that are read in advance

Numbered = tuple[int, bytes]


class LineTooLong(ValueError):
    """A line is longer than any message."""

    def __init__(self, number: int, limit: int) -> None:
        super().__init__(f"it is longer than {limit} bytes: check --delimiter")
        self.number = number


async def stdin_lines(
    *, delimiter: bytes = b"\n", limit: int = 64 << 20, descriptor: int = 0
) -> AsyncIterator[list[Numbered]]:
    """Yield lines in batches as they arrive, each as (number from 1, line without its end); the last may lack an end.

    A carriage return before a line feed is removed as well.

    Raises:
        LineTooLong: `limit` bytes hold no line end.
    """
    number, rest = 0, bytearray()
    async for chunk in _chunks(descriptor):
        searched = max(0, len(rest) - len(delimiter) + 1)
        rest += chunk
        if rest.find(delimiter, searched) >= 0:
            *lines, last = bytes(rest).split(delimiter)
            rest = bytearray(last)
            yield [(at, _ended(line, delimiter)) for at, line in enumerate(lines, number + 1)]
            number += len(lines)
        if len(rest) > limit:
            raise LineTooLong(number + 1, limit)
    if last := _ended(bytes(rest), delimiter):
        yield [(number + 1, last)]


def _ended(line: bytes, delimiter: bytes) -> bytes:
    return line.removesuffix(b"\r") if delimiter == b"\n" else line


async def _chunks(descriptor: int) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_AHEAD)

    def hand(chunk: bytes | OSError) -> bool:
        """Pass a chunk to the loop; return False if the loop is closed."""
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
    while chunk := await chunks.get():
        if isinstance(chunk, OSError):
            raise chunk
        room.release()
        yield chunk
