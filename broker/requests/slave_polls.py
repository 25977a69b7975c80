"""What slaves poll: tables (21) and group offsets (43), as RocketMQ's slaves ask for them, and as neve's do.

A neve slave says with `masterEpoch` of which master it wants to hear. Only who leads in that epoch answers, with an
image (`broker.metadata.images`): a former master, or one that does not know yet that it is one, has nothing to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from access.guard import Guard
from broker.metadata.images import MetadataImage, OffsetsImage, deflated
from broker.metadata.metadata_log import MetadataLog
from broker.metadata.slave_synchronize import IS_IMAGE, MASTER_EPOCH
from broker.requests.admin_offsets import AdminOffsetsProcessor
from broker.requests.admin_topics import AdminTopicsProcessor
from infra.loop.in_steps import in_turns
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import require_int


class SlavePollsProcessor:
    """Answers slaves (a part of RocketMQ's AdminBrokerProcessor)."""

    def __init__(
        self,
        metadata: MetadataLog,
        topics: AdminTopicsProcessor,
        offsets: AdminOffsetsProcessor,
        guard: Guard,
        *,
        leads_in: Callable[[], int | None],
        frontier: Callable[[], int] = lambda: 0,
    ) -> None:
        """`leads_in`: the epoch in which this broker is its set's master; None where it is not.

        `frontier`: what nothing needs any more below.
        """
        self._metadata, self._topics, self._offsets, self._guard = metadata, topics, offsets, guard
        self._leads_in, self._frontier = leads_in, frontier

    async def all_topics(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """21: with `masterEpoch` all tables."""
        if MASTER_EPOCH not in request.ext:
            return await self._topics.all_topics(connection, request)
        self._require_epoch(request)
        self._guard.require_super(connection, request)
        return await self._answer(request, self._metadata.image())

    async def all_offsets(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """43."""
        if MASTER_EPOCH not in request.ext:
            return await self._offsets.all_offsets(connection, request)
        self._require_epoch(request)
        image = await in_turns(self._metadata.offsets_image())
        self._require_epoch(request)  # its turns may have been another's
        return await self._answer(request, msgspec.structs.replace(image, frontier=self._frontier()))

    def _require_epoch(self, request: RemotingCommand) -> None:
        wanted, epoch = require_int(request.ext, MASTER_EPOCH), self._leads_in()
        if wanted != epoch:
            is_what = "is no master" if epoch is None else f"is master in epoch {epoch}"
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR, f"this broker {is_what}: the tables of epoch {wanted} are another's"
            )

    async def _answer(self, request: RemotingCommand, image: MetadataImage | OffsetsImage) -> RemotingCommand:
        body = await asyncio.to_thread(deflated, image)
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={IS_IMAGE: "1"}, body=body)
