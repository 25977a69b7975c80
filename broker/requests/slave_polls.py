"""Polls of slaves for tables (21) and committed offsets (43), in the forms of RocketMQ and of neve.

A neve slave sends the epoch of its master as `masterEpoch`. Only the master of that epoch answers, with an image
(`broker.metadata.images`). A former master, which may not know its successor yet, is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from access.guard import Guard
from access.permissions import GET, LIST, of_cluster
from broker.metadata.images import MetadataImage, OffsetsImage, deflated
from broker.metadata.metadata_log import MetadataLog
from broker.metadata.slave_synchronize import IS_IMAGE, MASTER_EPOCH
from broker.requests.admin_offsets import AdminOffsetsProcessor
from broker.requests.admin_topics import AdminTopicsProcessor
from broker.requests.route import MEMBERS, BrokerRoute, Waits
from infra.loop.in_steps import in_turns
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import require_int


class SlavePollsProcessor:
    """Answers polls of slaves (a part of RocketMQ's AdminBrokerProcessor)."""

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
        """Create the processor.

        `leads_in` returns the epoch in which this broker is the master, None on a slave. `frontier` returns the
        physical offset below which nothing needs the log.
        """
        self._metadata, self._topics, self._offsets, self._guard = metadata, topics, offsets, guard
        self._leads_in, self._frontier = leads_in, frontier

    @BrokerRoute(Code.GET_ALL_TOPIC_CONFIG, of_cluster(LIST), MEMBERS, Waits.NO, reads=True, hides_topics=False)
    async def all_topics(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return the topics (21); with `masterEpoch`, an image of all tables."""
        if MASTER_EPOCH not in request.ext:
            return await self._topics.all_topics(connection, request)
        self._require_epoch(request)
        self._guard.require_super(connection, request)
        return await self._answer(request, self._metadata.image())

    @BrokerRoute(Code.GET_ALL_CONSUMER_OFFSET, of_cluster(GET), MEMBERS, Waits.NO, reads=True, hides_topics=False)
    async def all_offsets(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return all committed offsets (43); with `masterEpoch`, as an image."""
        if MASTER_EPOCH not in request.ext:
            return await self._offsets.all_offsets(connection, request)
        self._require_epoch(request)
        image = await in_turns(self._metadata.offsets_image())
        self._require_epoch(request)  # the role may have changed between the steps
        return await self._answer(request, msgspec.structs.replace(image, frontier=self._frontier()))

    def _require_epoch(self, request: RemotingCommand) -> None:
        wanted, epoch = require_int(request.ext, MASTER_EPOCH), self._leads_in()
        if wanted != epoch:
            is_what = "is not a master" if epoch is None else f"is master in epoch {epoch}"
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR, f"this broker {is_what}: it does not have the tables of epoch {wanted}"
            )

    async def _answer(self, request: RemotingCommand, image: MetadataImage | OffsetsImage) -> RemotingCommand:
        body = await asyncio.to_thread(deflated, image)
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={IS_IMAGE: "1"}, body=body)
