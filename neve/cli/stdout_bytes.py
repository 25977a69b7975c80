"""Writes bytes to stdout in large writes that do not block the event loop.

A pipe that poll(2) reports as writable accepts PIPE_BUF bytes. The descriptor stays blocking, because the shell and
other commands may share it. A reader that closes the pipe is noticed at once, not only by the next write.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import stat
from collections.abc import AsyncIterator

_FULL = 256 * 1024
_PIPE_BUF = select.PIPE_BUF


class NotPrinted(Exception):
    """Stdout cannot be written, for example because a disk is full."""


class StdoutBytes:
    """Buffers output; `flush` returns after it is written to the descriptor."""

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor = descriptor
        kind = os.fstat(descriptor).st_mode
        self._is_pipe = stat.S_ISFIFO(kind) and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
        self._may_wait = self._is_pipe or stat.S_ISSOCK(kind) or stat.S_ISCHR(kind)
        self._parts: list[bytes] = []
        self._size = 0
        self._one_at_a_time = asyncio.Lock()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def add(self, data: bytes) -> bool:
        """Buffer data; return whether the buffer should be flushed."""
        self._parts.append(data)
        self._size += len(data)
        return self._size >= _FULL

    async def flush(self) -> None:
        """Write the buffer.

        Raises:
            BrokenPipeError: the reader has closed the pipe.
            NotPrinted: the write failed for another reason.
        """
        async with self._one_at_a_time:
            waiting = memoryview(b"".join(self._parts))
            self._parts, self._size = [], 0
            while waiting:
                if self._may_wait and not self._poll.poll(0):
                    await self._writable()
                waiting = waiting[self._written(waiting[:_PIPE_BUF] if self._may_wait else waiting) :]

    def _written(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise NotPrinted(f"stdout cannot be written: {error.strerror}") from error

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_writer(self._descriptor, _set, ready)
        try:
            await ready
        finally:
            loop.remove_writer(self._descriptor)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Raise BrokenPipeError in the body as soon as the reader closes the pipe.

        The write end of a pipe never becomes readable; an error on it wakes a reader callback.
        """
        if not self._is_pipe:
            yield
            return
        loop, task, is_disconnected = asyncio.get_running_loop(), asyncio.current_task(), False
        assert task is not None

        def stop() -> None:
            nonlocal is_disconnected
            is_disconnected = True
            loop.remove_reader(self._descriptor)
            task.cancel()

        loop.add_reader(self._descriptor, stop)
        try:
            yield
        except asyncio.CancelledError:
            if not is_disconnected:
                raise
            task.uncancel()
            raise BrokenPipeError("the reader of the output has closed the pipe") from None
        finally:
            loop.remove_reader(self._descriptor)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
