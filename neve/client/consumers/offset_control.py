"""Offsets of the queues that a consumer is assigned: reading, moving, committing, pausing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from neve.client.group.fetcher import Fetcher
from neve.client.group.positions import Positions
from neve.client.group.pull import Puller
from neve.client.model import MessageQueue
from neve.client.times import Time, time_ms
from neve.remoting.names import RETRY_PREFIX


class OffsetSource(Protocol):
    """Fetches queues from offsets."""

    fetcher: Fetcher
    offsets: Positions

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue a queue at `offset`."""


class OffsetControl:
    """The offset methods of consumers that pull. Subclasses set both attributes."""

    source: OffsetSource
    _puller: Puller

    @property
    def assigned(self) -> list[MessageQueue]:
        """The assigned queues, sorted, without those of the group's retry topic."""
        return sorted(queue for queue in self.source.fetcher.assigned if not queue.topic.startswith(RETRY_PREFIX))

    def position(self, queue: MessageQueue) -> int:
        """Return the offset below which every message of the queue is acknowledged.

        Raises:
            ClientError: the queue is not assigned to this consumer.
        """
        return self.source.offsets.process_queue(queue).committable

    async def committed(self, queue: MessageQueue) -> int | None:
        """Return the committed offset of the group, or None if it has none."""
        return await self.source.offsets.store.read(queue)

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue a queue at `offset`. Fetched messages are dropped, and delivered ones can no longer be settled.

        Raises:
            ClientError: the queue is not assigned to this consumer.
        """
        await self.source.seek(queue, offset)

    async def seek_to_time(self, when: Time, queue: MessageQueue | None = None) -> None:
        """Continue at the first message that was stored at `when` or later.

        Args:
            when: a datetime with a time zone, or milliseconds since 1970.
            queue: an assigned queue; None for all.
        """
        at = time_ms(when)
        for one in self._chosen(queue):
            await self.seek(one, await self._puller.offset_by_time(one, at))

    async def seek_to_beginning(self, queue: MessageQueue | None = None) -> None:
        """Continue at the first message of an assigned queue, or of all."""
        for one in self._chosen(queue):
            await self.seek(one, await self._puller.min_offset(one))

    async def seek_to_end(self, queue: MessageQueue | None = None) -> None:
        """Continue behind the last message of an assigned queue, or of all."""
        for one in self._chosen(queue):
            await self.seek(one, await self._puller.max_offset(one))

    async def offset_by_time(self, queue: MessageQueue, when: Time) -> int:
        """Return the offset of the first message of a queue that was stored at `when` or later."""
        return await self._puller.offset_by_time(queue, time_ms(when))

    async def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Stop fetching and delivering these queues until `resume`. They stay assigned to this consumer."""
        self.source.offsets.pause(queues)

    async def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Fetch and deliver paused queues again."""
        self.source.offsets.resume(queues)

    def _chosen(self, queue: MessageQueue | None) -> list[MessageQueue]:
        return self.assigned if queue is None else [queue]
