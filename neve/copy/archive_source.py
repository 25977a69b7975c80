"""The source of a copy in an archive: the archived messages of a topic, read from the store without brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from neve.archive.read.reader import Archive, NotCommitted, TopicReader
from neve.client.model import Message, MessageQueue, message_from_record
from neve.copy.source import CHUNK_BYTES, Chunk, OffsetRange
from neve.errors import ClientError
from neve.record.codec import MessageRecord


class ArchiveSource:
    """The archives of all brokers that have the topic."""

    def __init__(self, archive: Archive, topic: str) -> None:
        having = [of for of, catalog in archive.catalogs.items() if catalog.has_topic(topic)]
        if not having:
            raise FileNotFoundError(f"topic {topic} is not in this archive")
        self._topic = topic
        self._readers: dict[str, TopicReader] = {of: archive.topic(topic, broker=of) for of in sorted(having)}
        self._reading: tuple[MessageQueue, int, Iterator[MessageRecord]] | None = None  # resumes at this offset

    async def bounds(self) -> dict[MessageQueue, OffsetRange]:
        return await asyncio.to_thread(self._bounds)

    def _bounds(self) -> dict[MessageQueue, OffsetRange]:
        found: dict[MessageQueue, OffsetRange] = {}
        for broker, reader in self._readers.items():
            for queue in reader.queues():
                begin, end = reader.min_offset(queue), reader.max_offset(queue)
                if begin is not None and end is not None:
                    found[MessageQueue(self._topic, broker, queue)] = OffsetRange(begin, end)
        return found

    async def span(self, queue: MessageQueue, bounds: OffsetRange, since: int | None, until: int | None) -> OffsetRange:
        reader = self._readers[queue.broker_name]
        first, end = await asyncio.to_thread(reader.span, queue.queue_id, since, until)
        begin = min(max(first, bounds.begin), bounds.end)
        return OffsetRange(begin, min(max(end, begin), bounds.end))

    async def read(self, queue: MessageQueue, offset: int, end: int, count: int) -> Chunk:
        return await asyncio.to_thread(self._read, queue, offset, end, count)

    def _read(self, queue: MessageQueue, offset: int, end: int, count: int) -> Chunk:
        known = self._reading
        if known is not None and known[:2] == (queue, offset):
            records = known[2]
        else:
            records = self._readers[queue.broker_name].read(queue.queue_id, offset)
        self._reading = None
        found: list[Message] = []
        size = 0
        while len(found) < count and size < CHUNK_BYTES:
            try:
                record = next(records, None)
            except NotCommitted as error:
                raise ClientError(f"{error}") from error
            if record is None or record.queue_offset >= end:
                return Chunk(found, end)
            found.append(message_from_record(record, queue.broker_name))
            size += len(record.body)
        following = found[-1].queue_offset + 1
        self._reading = (queue, following, records)
        return Chunk(found, following)
