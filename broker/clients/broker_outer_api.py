"""Requests to all name servers: registration at start, every 30 s and when topics change, and unregistration."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

from access.wiring import peer_security
from broker.config import BrokerConfig
from broker.ha.ha_service import HaService
from broker.tables.state_file import encode_table
from broker.tables.topic_config_manager import TopicConfig
from infra.net.remoting_peer import RemotingPeer
from infra.net.remoting_server import Connection
from neve.errors import NeveError
from neve.remoting.body import QueueData, TopicRouteData, dumps, loads_as
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

log = logging.getLogger(__name__)

_TIMEOUT = 6.0
# Shorter than the 3 s after which clients time out.
_ROUTE_TIMEOUT = 2.0


class BrokerOuterApi:
    """Connections to the name servers (RocketMQ's BrokerOuterAPI), one each and reopened on demand.

    A name server that fails does not delay the others.
    """

    def __init__(
        self,
        config: BrokerConfig,
        address: tuple[str, int],
        *,
        ha_service: HaService | None = None,
        on_master: Callable[[str, str], None] | None = None,
    ) -> None:
        """Create it without connecting.

        `address` is for clients. Slaves connect to `ha_service`; without one the port above is registered for them.
        `on_master` is called after each registration of a slave, with the master's address and HA address if a name
        server has them.
        """
        self._config, self._address = config, address
        self._ha_service, self._on_master = ha_service, on_master
        #: Registered broker id; a master has 0.
        self.broker_id = config.broker_id
        self._security = peer_security(config)
        self._peers = dict[str, RemotingPeer]()
        self.registered: set[str] = set()
        #: Name servers that did not answer or refused the last request, with the reason.
        self.unanswered: dict[str, str] = {}
        self._whole_only: set[str] = set()  # name servers that reject single topics: older releases, or no permission
        self.failures = 0

    @property
    def are_there(self) -> bool:
        """Whether the configuration names name servers."""
        return bool(self._config.name_servers)

    async def register(self, topics: dict[str, Any]) -> int:
        """Register the whole topic table with all name servers; return how many accepted it."""
        body, checksum = await asyncio.to_thread(_registration, topics)
        host, port = self._address
        ha_port = port + 1 if self._ha_service is None else self._ha_service.port
        ext = {
            **self._identity(),
            "haServerAddr": f"{host}:{ha_port}",
            "enableActingMaster": "false",  # required, so that a slave registers its topics while there is no master
            "compressed": "false",
            "bodyCrc32": str(checksum),
        }
        request = (RequestCode.REGISTER_BROKER, ext, body)
        answers = await asyncio.gather(*(self._ask(server, *request) for server in self._config.name_servers))
        masters = (_master(answer.ext) for answer in answers if answer is not None)
        master = next(filter(None, masters), None)
        if self.broker_id and self._on_master is not None and master is not None:
            self._on_master(*master)
        return sum(answer is not None for answer in answers)

    async def register_topics(self, names: Sequence[str], row: Callable[[str], TopicConfig | None]) -> bool:
        """Register single topics with the name servers that know this broker; return whether all accepted them.

        `row` returns the current settings of a topic, None if it was deleted.
        """
        servers = self._config.name_servers
        if not all(self._takes_topics(server) for server in servers):
            return False
        for name in names:
            if not all(await asyncio.gather(*(self._register_topic(server, name, row) for server in servers))):
                return False
        return True

    async def _register_topic(self, server: str, name: str, row: Callable[[str], TopicConfig | None]) -> bool:
        """Register a topic with a name server; return whether it was accepted or deleted meanwhile.

        A request with settings read before a deletion must not follow the deletion's registration.
        """
        try:
            peer = self._peer(server)
            connection = await peer.connect()
            # No await between here and the send: the settings are current when they are sent.
            config = row(name)
            if config is None:
                return True
            answer = await connection.invoke(self._topic_request(peer, config), _TIMEOUT)
        except (OSError, TimeoutError, NeveError) as error:
            self._failed(server, str(error) or type(error).__name__)
            return False
        if answer.code not in {ResponseCode.SUCCESS, ResponseCode.SYSTEM_BUSY} and server not in self._whole_only:
            self._whole_only.add(server)
            reason = answer.remark or f"code {answer.code}"
            log.warning("name server %s accepts no single topic, all topics are registered: %s", server, reason)
        return answer.code == ResponseCode.SUCCESS

    def _topic_request(self, peer: RemotingPeer, config: TopicConfig) -> RemotingCommand:
        queues = QueueData(
            self._config.broker_name,
            config.read_queue_nums,
            config.write_queue_nums,
            config.perm,
            config.topic_sys_flag,
        )
        ext, body = {"topic": config.topic_name}, dumps(TopicRouteData(queue_datas=[queues]))
        return peer.request(RequestCode.REGISTER_TOPIC_IN_NAMESRV, ext, body)

    def _takes_topics(self, server: str) -> bool:
        """Return whether a name server accepts single topics; a restarted one does not know this broker."""
        is_known = server in self.registered and self._peer(server).is_connected
        return is_known and server not in self._whole_only

    async def unregister(self) -> None:
        """Unregister this broker from all name servers, and close the connections."""
        request = (RequestCode.UNREGISTER_BROKER, self._identity(), b"")
        await asyncio.gather(*(self._ask(server, *request) for server in self._config.name_servers))
        for peer in self._peers.values():
            peer.close()

    async def route(self, topic: str) -> list[QueueData] | None:
        """Return a topic's queues on all brokers, from the first name server that answers; None without an answer."""
        for server in self._config.name_servers:
            try:
                request = RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}
                answer = await self._peer(server).invoke(*request, timeout=_ROUTE_TIMEOUT)
                if answer.code == ResponseCode.SUCCESS:
                    return loads_as(answer.body, TopicRouteData).queue_datas
            except (OSError, TimeoutError, NeveError, ValueError) as error:
                self._failed(server, str(error) or type(error).__name__)
        return None

    def _identity(self) -> dict[str, str]:
        host, port = self._address
        return {
            "brokerName": self._config.broker_name,
            "brokerAddr": f"{host}:{port}",
            "clusterName": self._config.broker_cluster_name,
            "brokerId": str(self.broker_id),
        }

    async def _ask(self, server: str, code: RequestCode, ext: dict[str, str], body: bytes) -> RemotingCommand | None:
        try:
            answer = await self._peer(server).invoke(code, ext, body, timeout=_TIMEOUT)
        except (OSError, TimeoutError, NeveError) as error:
            self._failed(server, str(error) or type(error).__name__)
            return None
        if answer.code != ResponseCode.SUCCESS:
            self._failed(server, answer.remark or f"code {answer.code}")
            return None
        if server not in self.registered:
            log.info("registered at name server %s", server)
        self.registered.add(server)
        self.unanswered.pop(server, None)
        return answer

    def _failed(self, server: str, reason: str) -> None:
        self.failures += 1
        self.registered.discard(server)
        self._peer(server).drop()
        if server not in self.unanswered:  # log only the first of the failures, which repeat every 30 s
            log.warning("name server %s: %s", server, reason)
        self.unanswered[server] = reason

    def _peer(self, server: str) -> RemotingPeer:
        if server not in self._peers:

            async def on_connect(_: Connection) -> None:
                self._whole_only.discard(server)  # the name server may have been upgraded

            self._peers[server] = RemotingPeer(server, self._security, connect_s=_TIMEOUT, on_connect=on_connect)
        return self._peers[server]


def _master(ext: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the master's address and HA address from the answer to a slave's registration; None without a master."""
    address, ha_address = ext.get("masterAddr"), ext.get("haServerAddr")
    return (address, ha_address) if address and ha_address else None


def _registration(topics: dict[str, Any]) -> tuple[bytes, int]:
    """Return the body of REGISTER_BROKER and its checksum."""
    body = b'{"filterServerList":[],"topicConfigSerializeWrapper":%b}' % encode_table(topics)
    return body, crc32(body) & 0x7FFFFFFF
