"""Which topics live on which brokers, and which brokers live. Pure tables: no sockets, the clock is given.

    topics    topic -> broker name -> QueueData
    brokers   broker name -> BrokerData(cluster, {id: address})
    clusters  cluster -> broker names
    live      (cluster, address) -> last seen, patience, DataVersion, connection

What brokers may name is bounded (`RouteLimits`): names in length, brokers and topics in number.

Liveness is measured on the monotonic clock: an operator who sets the wall clock must not end every broker.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from infra.clock import Clock
from namesrv.registration import Registration
from neve.errors import BrokerError
from neve.remoting.body import BrokerData, DataVersion, QueueData, TopicConfig, TopicRouteData
from neve.remoting.codes import ResponseCode

DEFAULT_PATIENCE_MS = 120_000
MAX_NAME = 255
MAX_FILTER_SERVERS = 64
MASTER_ID = 0
PERM_WRITE = 2
FLAG_UNIT = 1
FLAG_UNIT_SUB = 2


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """How a broker names itself in each of its requests."""

    cluster: str
    name: str
    address: str
    broker_id: int


class RouteLimits(Protocol):
    """What the tables may hold; asked each time, an operator may change it."""

    @property
    def max_brokers(self) -> int:
        """Addresses that are registered."""

    @property
    def max_topic_routes(self) -> int:
        """Topics on a broker, of all brokers together."""


@dataclass(slots=True)
class _Live:
    identity: BrokerIdentity
    last_seen: float
    patience_s: float
    data_version: DataVersion
    connection: Hashable
    ha_server_addr: str


@dataclass(frozen=True, slots=True)
class RegisterResult:
    """What a slave needs to find its master."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


class RouteCounts(NamedTuple):
    """Brokers' addresses, topics, and topics on a broker."""

    brokers: int
    topics: int
    routes: int


class RouteInfoManager:
    """All of the name server's tables; single-threaded."""

    def __init__(self, clock: Clock, limits: RouteLimits) -> None:
        self._clock, self._limits = clock, limits
        self._routes = 0  # rows of `topics`
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._broker_topics: dict[str, set[str]] = {}  # the way back, so that a broker's end costs its own topics only
        self._brokers: dict[str, BrokerData] = {}
        self._clusters: dict[str, set[str]] = {}
        self._live: dict[tuple[str, str], _Live] = {}
        self._filters: dict[str, list[str]] = {}

    @property
    def counts(self) -> RouteCounts:
        """How much there is."""
        return RouteCounts(len(self._live), len(self._topics), self._routes)

    # ---- brokers come and go

    def register(
        self,
        identity: BrokerIdentity,
        registration: Registration,
        *,
        connection: Hashable,
        ha_server_addr: str = "",
        patience_ms: int | None = None,
        drop_missing_topics: bool = False,
        acting_master: bool | None = None,
    ) -> RegisterResult:
        """Take a broker in, or refresh it; a registration older than the one that stands is refused.

        Topics are the master's to tell; while a name has none, the slave's with the lowest id. A broker that says
        nothing of `acting_master` is of a version whose slaves tell none.
        """
        key = (identity.cluster, identity.address)
        broker = self._brokers.get(identity.name)
        if broker is not None and broker.cluster != identity.cluster:
            raise _refused(f"{identity.name} belongs to cluster {broker.cluster}")
        previous = self._live.get(key)
        if broker is not None:
            self._check_not_older(broker, identity, registration.data_version)
        if previous is None and len(self._live) >= self._limits.max_brokers:
            raise _refused(f"there are {len(self._live)} brokers, maxBrokers is {self._limits.max_brokers}")
        if len(ha_server_addr) > MAX_NAME:
            raise _refused("haServerAddr is too long")
        filters = registration.filter_servers
        if len(filters) > MAX_FILTER_SERVERS or any(len(name) > MAX_NAME for name in filters):
            raise _refused("too many filter servers, or too long names")
        self._check_room(identity.name, registration.topics.values())
        if previous is not None and previous.identity.name != identity.name:
            self.unregister(previous.identity)  # renamed: the old name has nobody behind it
        if broker is None:
            broker = self._brokers[identity.name] = BrokerData(identity.cluster, identity.name, {}, False)
            self._clusters.setdefault(identity.cluster, set()).add(identity.name)
        broker.enable_acting_master = acting_master is True
        first = broker.broker_addrs.get(identity.broker_id) != identity.address
        for other in [i for i, a in broker.broker_addrs.items() if a == identity.address and i != identity.broker_id]:
            del broker.broker_addrs[other]
        broker.broker_addrs[identity.broker_id] = identity.address
        changed = first or previous is None or previous.data_version != registration.data_version
        tells_topics = acting_master is not None and identity.broker_id == min(broker.broker_addrs)
        if changed and (identity.broker_id == MASTER_ID or tells_topics):
            self._update_topics(identity.name, registration.topics.values(), drop_missing_topics)
        patience_s = (patience_ms if patience_ms and patience_ms > 0 else DEFAULT_PATIENCE_MS) / 1000
        self._live[key] = _Live(
            identity, self._clock.monotonic(), patience_s, registration.data_version, connection, ha_server_addr
        )
        if filters:
            self._filters[identity.address] = filters
        else:
            self._filters.pop(identity.address, None)
        return self._master_of(broker, identity)

    def stands(self, identity: BrokerIdentity, version: DataVersion) -> bool:
        """Whether a registration of this version would change no topic."""
        broker = self._brokers.get(identity.name)
        live = self._live.get((identity.cluster, identity.address))
        return (
            broker is not None
            and broker.broker_addrs.get(identity.broker_id) == identity.address
            and live is not None
            and live.identity == identity
            and live.data_version == version
        )

    def _check_room(self, broker: str, topics: Iterable[TopicConfig]) -> None:
        """Before anything is changed."""
        known, new = self._broker_topics.get(broker, set()), 0
        for topic in topics:
            name = topic.topic_name
            if len(name) > MAX_NAME:
                raise _refused(f"the name of topic {name[:MAX_NAME]!r}… is too long")
            new += name not in known
        if new and self._routes + new > self._limits.max_topic_routes:
            limit = self._limits.max_topic_routes
            raise _refused(f"{new} topics more than {self._routes} routes of topics, maxTopicRoutes is {limit}")

    def _check_not_older(self, broker: BrokerData, identity: BrokerIdentity, version: DataVersion) -> None:
        standing = broker.broker_addrs.get(identity.broker_id)
        if standing is None or standing == identity.address:
            return
        live = self._live.get((identity.cluster, standing))
        if live is None:
            return
        if live.data_version.state_version > version.state_version:
            raise _refused(f"{standing} holds id {identity.broker_id} with a newer state")

    def _master_of(self, broker: BrokerData, identity: BrokerIdentity) -> RegisterResult:
        master = broker.broker_addrs.get(MASTER_ID)
        if identity.broker_id == MASTER_ID or master is None:
            return RegisterResult()
        live = self._live.get((identity.cluster, master))
        return RegisterResult(live.ha_server_addr, master) if live is not None else RegisterResult()

    def unregister(self, identity: BrokerIdentity) -> None:
        """Take a broker out, with the topics that only it has; whichever id it has now: its role may have changed."""
        self._live.pop((identity.cluster, identity.address), None)
        self._filters.pop(identity.address, None)
        broker = self._brokers.get(identity.name)
        ids = [] if broker is None else [i for i, at in broker.broker_addrs.items() if at == identity.address]
        if broker is None or not ids:
            return
        for broker_id in ids:
            del broker.broker_addrs[broker_id]
        if broker.broker_addrs:
            return
        del self._brokers[identity.name]
        names = self._clusters.get(broker.cluster, set())
        names.discard(identity.name)
        if not names:
            self._clusters.pop(broker.cluster, None)
        for topic in self._broker_topics.pop(identity.name, set()):
            self._drop_queue(topic, identity.name)

    def connection_closed(self, connection: Hashable) -> list[BrokerIdentity]:
        """A broker whose connection ended is gone; one that has come back over another is not."""
        gone = [live.identity for live in self._live.values() if live.connection == connection]
        for identity in gone:
            self.unregister(identity)
        return gone

    def expire(self) -> list[tuple[BrokerIdentity, Hashable]]:
        """Take out every broker that was silent for longer than its patience."""
        now = self._clock.monotonic()
        gone = [
            (live.identity, live.connection) for live in self._live.values() if now - live.last_seen > live.patience_s
        ]
        for identity, _ in gone:
            self.unregister(identity)
        return gone

    def heartbeat(self, cluster: str, address: str) -> None:
        """The broker lives."""
        live = self._live.get((cluster, address))
        if live is not None:
            live.last_seen = self._clock.monotonic()

    def query_data_version(self, cluster: str, address: str, version: DataVersion) -> tuple[bool, DataVersion | None]:
        """Whether the broker must register again, and what we hold; asking proves that it lives."""
        self.heartbeat(cluster, address)
        live = self._live.get((cluster, address))
        standing = live.data_version if live is not None else None
        return standing != version, standing

    # ---- topics

    def _update_topics(self, broker: str, topics: Iterable[TopicConfig], drop_missing: bool) -> None:
        names: set[str] = set()
        for topic in topics:
            names.add(topic.topic_name)
            standing = self._topics.get(topic.topic_name, {}).get(broker)
            if standing is None or not _is_as_told(standing, topic):
                self._put_queue(
                    topic.topic_name,
                    QueueData(broker, topic.read_queue_nums, topic.write_queue_nums, topic.perm, topic.topic_sys_flag),
                )
        if drop_missing:
            for name in self._broker_topics.get(broker, set()) - names:
                self._broker_topics[broker].discard(name)
                self._drop_queue(name, broker)

    def _put_queue(self, topic: str, queue: QueueData) -> None:
        queues = self._topics.setdefault(topic, {})
        self._routes += queue.broker_name not in queues
        queues[queue.broker_name] = queue
        self._broker_topics.setdefault(queue.broker_name, set()).add(topic)

    def _drop_queue(self, topic: str, broker: str) -> None:
        queues = self._topics.get(topic, {})
        self._routes -= queues.pop(broker, None) is not None
        if not queues:
            self._topics.pop(topic, None)

    def register_topic(self, topic: str, queues: Iterable[QueueData]) -> None:
        """Add a topic's queues on brokers that are known."""
        for queue in queues:
            if queue.broker_name in self._brokers:
                self._check_room(queue.broker_name, (TopicConfig(topic),))
                self._put_queue(topic, queue)

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Forget a topic, everywhere or on one cluster's brokers."""
        for broker in list(self._topics.get(topic, {})):
            if cluster is None or broker in self._clusters.get(cluster, set()):
                self._broker_topics.get(broker, set()).discard(topic)
                self._drop_queue(topic, broker)

    def set_writable(self, broker: str, writable: bool) -> int:
        """Set or clear the write permission of all topics of a broker; how many there are."""
        topics = self._broker_topics.get(broker, set())
        for topic in topics:
            queue = self._topics[topic][broker]
            queue.perm = queue.perm | PERM_WRITE if writable else queue.perm & ~PERM_WRITE
        return len(topics)

    # ---- questions

    def route(self, topic: str) -> TopicRouteData | None:
        """Where a topic lives now."""
        queues = self._topics.get(topic)
        if not queues:
            return None
        brokers = [self._brokers[name] for name in sorted(queues) if name in self._brokers]
        if not brokers:
            return None
        filters = {
            address: self._filters[address]
            for broker in brokers
            for address in broker.broker_addrs.values()
            if address in self._filters
        }
        return TopicRouteData([queues[name] for name in sorted(queues)], brokers, filters)

    def cluster_info(self) -> dict[str, object]:
        """All brokers by name and their names by cluster."""
        return {
            "brokerAddrTable": dict(self._brokers),
            "clusterAddrTable": {cluster: sorted(names) for cluster, names in self._clusters.items()},
        }

    def topics(self) -> list[str]:
        """All topics."""
        return sorted(self._topics)

    def topics_of_cluster(self, cluster: str) -> list[str]:
        """Topics of a cluster's brokers."""
        names = self._clusters.get(cluster, set())
        return sorted(set().union(*(self._broker_topics.get(name, set()) for name in names)))

    def topics_by_flag(self, matches: Callable[[int], bool]) -> list[str]:
        """Topics whose system flag (of any broker) fits."""
        return sorted(
            topic for topic, queues in self._topics.items() if any(matches(q.topic_sys_flag) for q in queues.values())
        )

    def system_topics(self) -> tuple[list[str], str | None]:
        """Every cluster and broker name is a topic; and a broker that knows the rest."""
        names = sorted({*self._clusters, *self._brokers})
        addresses = [address for broker in self._brokers.values() for address in broker.broker_addrs.values()]
        return names, addresses[0] if addresses else None

    def member_group(self, cluster: str, broker: str) -> dict[str, object]:
        """All addresses of one broker name."""
        data = self._brokers.get(broker)
        addresses = dict(data.broker_addrs) if data is not None and data.cluster == cluster else {}
        return {"cluster": cluster, "brokerName": broker, "brokerAddrs": addresses}


def _is_as_told(standing: QueueData, topic: TopicConfig) -> bool:
    return (
        standing.read_queue_nums == topic.read_queue_nums
        and standing.write_queue_nums == topic.write_queue_nums
        and standing.perm == topic.perm
        and standing.topic_sys_flag == topic.topic_sys_flag
    )


def _refused(why: str) -> BrokerError:
    return BrokerError(ResponseCode.SYSTEM_ERROR, f"register broker failed: {why}")
