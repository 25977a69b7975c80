"""The engine of all copies: a range of a queue is read in chunks, and each is written before the cursor moves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from neve.client.model import MessageQueue
from neve.copy.source import Chunk, TopicSource

CHUNK = 1_000  # messages; a killed copy repeats at most one chunk


async def copy_range(
    source: TopicSource,
    queue: MessageQueue,
    begin: int,
    end: int,
    write: Callable[[Chunk], Awaitable[bool]],
    *,
    chunk: int = CHUNK,
) -> bool:
    """Read the offsets [begin, end) of a queue, and await `write` for each chunk; the next one is read meanwhile.

    Args:
        write: returns when the messages are stored and the cursor is saved; False stops the copy.
        chunk: the maximum number of messages in a chunk.

    Returns:
        False if `write` stopped the copy.
    """
    reading = asyncio.create_task(_read(source, queue, begin, end, chunk))
    offset = begin
    try:
        while offset < end:
            found = await reading
            offset = found.next_offset
            reading = asyncio.create_task(_read(source, queue, offset, end, chunk))
            if not await write(found):
                return False
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return True


async def _read(source: TopicSource, queue: MessageQueue, offset: int, end: int, count: int) -> Chunk:
    return await source.read(queue, offset, end, count) if offset < end else Chunk((), end)
