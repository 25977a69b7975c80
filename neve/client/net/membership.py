"""The groups of a client: heartbeats that register them at brokers, and the requests of brokers for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from neve.client.model import MASTER_ID, BrokerInfo
from neve.client.net.connection import Connection
from neve.client.net.requests import BrokerRequests
from neve.client.net.routes import Routes
from neve.client.net.tasks import Tasks
from neve.errors import ClientError, NeveError
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

log = logging.getLogger(__name__)

ConsumerData = dict[str, Any]
#: Answers a request of a broker, and returns whether it did.
RequestHandler = Callable[[Connection, RemotingCommand], bool]
_PATIENCE_S = 1.0  # for the list of all brokers, before a heartbeat
_LEAVE_TIMEOUT_S = 1.0


class Membership:
    """The groups of one client.

    Heartbeats are best effort: a broker that is unreachable learns of the groups when it is back.
    """

    def __init__(self, requests: BrokerRequests, routes: Routes, tasks: Tasks) -> None:
        self.client_id = ""
        #: By request code, for requests that name no consumer group.
        self.code_handlers: dict[int, RequestHandler] = {}
        self._requests = requests
        self._routes = routes
        self._tasks = tasks
        self._consumers: dict[str, Callable[[], ConsumerData]] = {}  # by group
        self._group_handlers: dict[str, RequestHandler] = {}
        self._producer_groups: set[str] = set()
        # The producer groups that the masters of all brokers must know, also of brokers that no route names.
        self._cluster_wide_groups: set[str] = set()
        self._cluster: Mapping[str, BrokerInfo] = {}  # the latest list of all brokers; for these groups only
        self._addresses: dict[str, bool] = {}  # of known brokers; whether each is a master
        # By address, the producer groups that the broker has acknowledged over its present connection.
        self._introduced: dict[str, frozenset[str]] = {}

    # ---- consumers

    def add_consumer(self, group: str, describe: Callable[[], ConsumerData], handler: RequestHandler) -> None:
        """Add a consumer group to heartbeats; `handler` answers the requests of brokers for it.

        Raises:
            ClientError: this client is already in the group.
        """
        if group in self._consumers:
            raise ClientError(f"this client is already in group {group}")
        self._consumers[group] = describe
        self._group_handlers[group] = handler

    def remove_consumer(self, group: str) -> None:
        """Remove a consumer group from heartbeats."""
        self._consumers.pop(group, None)
        self._group_handlers.pop(group, None)

    # ---- producers

    def produces(self, group: str) -> None:
        """Add a producer group to heartbeats, and send a first one in the background."""
        if group not in self._producer_groups:
            self._producer_groups.add(group)
            self._tasks.spawn(self.heartbeat(), "first heartbeat")

    async def introduce(self, group: str, brokers: Iterable[BrokerInfo]) -> None:
        """Wait until the masters of these brokers know the client as a producer of `group`."""
        self._producer_groups.add(group)
        masters = [broker.master for broker in brokers if broker.master is not None]
        unaware = [address for address in masters if group not in self._introduced.get(address, ())]
        await asyncio.gather(*(self._heartbeat_to(address) for address in unaware))

    async def introduce_everywhere(self, group: str) -> None:
        """Make the client known as a producer of `group` to the masters of all brokers, until it leaves the group.

        Every heartbeat reads the list of brokers again, so brokers that join later learn of the group, too.

        Raises:
            NeveError: no name server returned the list of brokers.
        """
        self._cluster = await self._routes.brokers()
        self._cluster_wide_groups.add(group)
        try:
            await self.introduce(group, self._cluster.values())
        except BaseException:
            self._forget_producer_group(group)
            raise

    async def leave_producer_group(self, group: str) -> None:
        """Remove a producer group, and tell the brokers."""
        self._forget_producer_group(group)
        await self.unregister({"producerGroup": group})

    async def leave_producer_groups(self) -> None:
        """Remove all producer groups, and tell the brokers."""
        for group in list(self._producer_groups):
            await self.leave_producer_group(group)

    def _forget_producer_group(self, group: str) -> None:
        self._producer_groups.discard(group)
        self._cluster_wide_groups.discard(group)

    # ---- heartbeats

    def learn(self, brokers: Mapping[str, BrokerInfo]) -> None:
        """Add brokers to those that get heartbeats."""
        for broker in brokers.values():
            for number, address in broker.addresses.items():
                was, self._addresses[address] = self._addresses.get(address), number == MASTER_ID
                if was not in (None, number == MASTER_ID) and not self._tasks.are_closing:
                    # A new master has to know its producers; a former one may be dead, which a heartbeat finds out.
                    self._tasks.spawn(self._heartbeat_to(address), f"heartbeat to {address}")

    def connected(self, address: str) -> None:
        """Send a heartbeat over a new connection: brokers forget a client when its connection ends."""
        self._introduced.pop(address, None)
        if address in self._addresses and not self._tasks.are_closing:
            self._tasks.spawn(self._heartbeat_to(address), f"heartbeat to {address}")

    async def heartbeat_forever(self, interval: float) -> None:
        """Send heartbeats every `interval` seconds."""
        while True:
            await asyncio.sleep(interval)
            await self.heartbeat()

    async def heartbeat(self) -> None:
        """Send a heartbeat with all groups to all known brokers."""
        await self._refresh_cluster()
        self._forget_unlisted_brokers()
        await asyncio.gather(*(self._heartbeat_to(address) for address in list(self._addresses)))

    async def _refresh_cluster(self) -> None:
        """Read the list of all brokers again if a group needs it; keep the present list if no name server answers."""
        if not self._cluster_wide_groups:
            self._cluster = {}
            return
        try:
            async with asyncio.timeout(_PATIENCE_S):
                self._cluster = await self._routes.brokers()
        except (NeveError, TimeoutError) as error:
            log.info("list of brokers not refreshed: cause=%r", error)

    def _forget_unlisted_brokers(self) -> None:
        """Forget addresses that neither a route nor the list of all brokers names, as RocketMQ's clients do."""
        listed = [self._cluster, *self._routes.known_brokers()]
        named = {at for brokers in listed for broker in brokers.values() for at in broker.addresses.values()}
        for address in self._addresses.keys() - named:
            del self._addresses[address]
            self._introduced.pop(address, None)

    async def unregister(self, groups: Mapping[str, str]) -> None:
        """Tell the brokers that the client left a group. A broker that is unreachable notices it by itself."""
        ext = {"clientID": self.client_id, **groups}

        async def leave(address: str) -> None:
            try:
                await self._requests.ask(address, RequestCode.UNREGISTER_CLIENT, ext, timeout=_LEAVE_TIMEOUT_S)
            except NeveError as error:
                log.info("unregistration failed: address=%s groups=%s cause=%s", address, groups, error)

        await asyncio.gather(*(leave(address) for address in list(self._addresses)))

    async def _heartbeat_to(self, address: str) -> None:
        groups = frozenset(self._producer_groups)
        producers = [{"groupName": group} for group in sorted(groups)]
        consumers = [describe() for describe in self._consumers.values()]
        if not consumers and not (producers and self._addresses.get(address)):
            return
        data = {
            "clientID": self.client_id,
            "consumerDataSet": consumers,
            "heartbeatFingerprint": 0,
            "producerDataSet": producers,
            "withoutSub": False,
        }
        try:
            await self._requests.ask(address, RequestCode.HEART_BEAT, {}, body=dumps(data))
        except NeveError as error:
            log.info("heartbeat failed: address=%s cause=%s", address, error)
        else:
            self._introduced[address] = groups

    # ---- requests of brokers

    def serve(self, connection: Connection, request: RemotingCommand) -> None:
        """Answer a request of a broker by the handler of its code or of its consumer group."""
        group = (request.ext or {}).get("consumerGroup") or (request.ext or {}).get("group") or ""
        handler = self.code_handlers.get(request.code) or self._group_handlers.get(group)
        if handler is None or not handler(connection, request):
            remark = f"request type {request.code} not supported"
            connection.answer(request, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark)
