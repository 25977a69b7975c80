"""The routes of topics and the live brokers: tables without I/O, with an injected clock.

    topics    topic -> broker name -> QueueData
    brokers   broker name -> BrokerData(cluster, {id: address})
    clusters  cluster -> broker names
    live      (cluster, address) -> last seen, timeout, DataVersion, connection

The length of names and the numbers of brokers and topics are bounded (`RouteLimits`).

Liveness depends on the monotonic clock, so that a change of the wall clock expires no broker.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from infra.clock import Clock
from namesrv.registration import BrokerRegistration
from neve.errors import BrokerError
from neve.remoting.body import BrokerData, DataVersion, QueueData, TopicConfig, TopicRouteData
from neve.remoting.codes import ResponseCode

DEFAULT_TIMEOUT_MS = 120_000
MAX_NAME = 255
MAX_FILTER_SERVERS = 64
MASTER_ID = 0
PERM_WRITE = 2
FLAG_UNIT = 1
FLAG_UNIT_SUB = 2


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """The identity of a broker in its requests."""

    cluster: str
    name: str
    address: str
    broker_id: int


class RouteLimits(Protocol):
    """The limits of the tables, read each time: they may be changed at runtime."""

    @property
    def max_brokers(self) -> int:
        """Registered addresses."""

    @property
    def max_topic_routes(self) -> int:
        """Topics, counted once per broker."""


@dataclass(slots=True)
class _Live:
    identity: BrokerIdentity
    last_seen: float
    timeout_s: float
    data_version: DataVersion
    connection: Hashable
    ha_server_addr: str


@dataclass(frozen=True, slots=True)
class RegisterResult:
    """The addresses of the master, for a slave."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


class RouteCounts(NamedTuple):
    """Sizes of the tables: addresses of brokers, topics, and topics per broker."""

    brokers: int
    topics: int
    routes: int


class RouteInfoManager:
    """The tables; single-threaded."""

    def __init__(self, clock: Clock, limits: RouteLimits) -> None:
        self._clock, self._limits = clock, limits
        self._routes = 0  # rows of `topics`
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._broker_topics: dict[str, set[str]] = {}  # the reverse: removing a broker visits only its topics
        self._brokers: dict[str, BrokerData] = {}
        self._clusters: dict[str, set[str]] = {}
        self._live: dict[tuple[str, str], _Live] = {}
        self._filters: dict[str, list[str]] = {}

    @property
    def counts(self) -> RouteCounts:
        """The sizes of the tables."""
        return RouteCounts(len(self._live), len(self._topics), self._routes)

    # ---- brokers

    def register(
        self,
        identity: BrokerIdentity,
        registration: BrokerRegistration,
        *,
        connection: Hashable,
        ha_server_addr: str = "",
        timeout_ms: int | None = None,
        drop_missing_topics: bool = False,
        acting_master: bool | None = None,
    ) -> RegisterResult:
        """Register a broker or renew its registration. Raises BrokerError, also for one older than the current one.

        The master registers the topics; while there is none, the slave with the lowest id does. A broker without
        `acting_master` is of a version whose slaves register none.
        """
        key = (identity.cluster, identity.address)
        broker = self._brokers.get(identity.name)
        if broker is not None and broker.cluster != identity.cluster:
            raise _refused(f"{identity.name} belongs to cluster {broker.cluster}")
        previous = self._live.get(key)
        if broker is not None:
            self._check_not_older(broker, identity, registration.data_version)
        if previous is None and len(self._live) >= self._limits.max_brokers:
            raise _refused(f"{len(self._live)} brokers are registered, maxBrokers is {self._limits.max_brokers}")
        if len(ha_server_addr) > MAX_NAME:
            raise _refused("haServerAddr is too long")
        filters = registration.filter_servers
        if len(filters) > MAX_FILTER_SERVERS or any(len(name) > MAX_NAME for name in filters):
            raise _refused("too many filter servers, or too long names")
        self._check_room(identity.name, registration.topics.values())
        if previous is not None and previous.identity.name != identity.name:
            self.unregister(previous.identity)  # the broker was renamed
        if broker is None:
            broker = self._brokers[identity.name] = BrokerData(identity.cluster, identity.name, {}, False)
            self._clusters.setdefault(identity.cluster, set()).add(identity.name)
        broker.enable_acting_master = acting_master is True
        first = broker.broker_addrs.get(identity.broker_id) != identity.address
        for other in [i for i, a in broker.broker_addrs.items() if a == identity.address and i != identity.broker_id]:
            del broker.broker_addrs[other]
        broker.broker_addrs[identity.broker_id] = identity.address
        changed = first or previous is None or previous.data_version != registration.data_version
        is_source = acting_master is not None and identity.broker_id == min(broker.broker_addrs)
        if changed and (identity.broker_id == MASTER_ID or is_source):
            self._update_topics(identity.name, registration.topics.values(), drop_missing_topics)
        timeout_s = (timeout_ms if timeout_ms and timeout_ms > 0 else DEFAULT_TIMEOUT_MS) / 1000
        self._live[key] = _Live(
            identity, self._clock.monotonic(), timeout_s, registration.data_version, connection, ha_server_addr
        )
        if filters:
            self._filters[identity.address] = filters
        else:
            self._filters.pop(identity.address, None)
        return self._master_of(broker, identity)

    def is_current(self, identity: BrokerIdentity, version: DataVersion) -> bool:
        """Return whether a registration of this version would change no topic."""
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
        """Check the limits before a change. Raises BrokerError."""
        known, new = self._broker_topics.get(broker, set()), 0
        for topic in topics:
            name = topic.topic_name
            if len(name) > MAX_NAME:
                raise _refused(f"the name of topic {name[:MAX_NAME]!r}… is too long")
            new += name not in known
        if new and self._routes + new > self._limits.max_topic_routes:
            limit = self._limits.max_topic_routes
            raise _refused(f"{new} topics beside {self._routes} routes exceed maxTopicRoutes={limit}")

    def _check_not_older(self, broker: BrokerData, identity: BrokerIdentity, version: DataVersion) -> None:
        registered = broker.broker_addrs.get(identity.broker_id)
        if registered is None or registered == identity.address:
            return
        live = self._live.get((identity.cluster, registered))
        if live is None:
            return
        if live.data_version.state_version > version.state_version:
            raise _refused(f"{registered} holds id {identity.broker_id} with a newer state")

    def _master_of(self, broker: BrokerData, identity: BrokerIdentity) -> RegisterResult:
        master = broker.broker_addrs.get(MASTER_ID)
        if identity.broker_id == MASTER_ID or master is None:
            return RegisterResult()
        live = self._live.get((identity.cluster, master))
        return RegisterResult(live.ha_server_addr, master) if live is not None else RegisterResult()

    def unregister(self, identity: BrokerIdentity) -> None:
        """Remove a broker, under any id, since its role may have changed; and the topics that only it has."""
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
        """Remove and return the brokers of a closed connection; a broker that registered again by another one stays."""
        removed = [live.identity for live in self._live.values() if live.connection == connection]
        for identity in removed:
            self.unregister(identity)
        return removed

    def expire(self) -> list[tuple[BrokerIdentity, Hashable]]:
        """Remove and return the brokers whose timeout has passed."""
        now = self._clock.monotonic()
        removed = [
            (live.identity, live.connection) for live in self._live.values() if now - live.last_seen > live.timeout_s
        ]
        for identity, _ in removed:
            self.unregister(identity)
        return removed

    def heartbeat(self, cluster: str, address: str) -> None:
        """Record a sign of life."""
        live = self._live.get((cluster, address))
        if live is not None:
            live.last_seen = self._clock.monotonic()

    def query_data_version(self, cluster: str, address: str, version: DataVersion) -> tuple[bool, DataVersion | None]:
        """Return whether the broker must register again, and its registered version. Counts as a sign of life."""
        self.heartbeat(cluster, address)
        live = self._live.get((cluster, address))
        registered = live.data_version if live is not None else None
        return registered != version, registered

    # ---- topics

    def _update_topics(self, broker: str, topics: Iterable[TopicConfig], drop_missing: bool) -> None:
        names: set[str] = set()
        for topic in topics:
            names.add(topic.topic_name)
            registered = self._topics.get(topic.topic_name, {}).get(broker)
            if registered is None or not _is_equal(registered, topic):
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
        """Add the queues of a topic on registered brokers."""
        for queue in queues:
            if queue.broker_name in self._brokers:
                self._check_room(queue.broker_name, (TopicConfig(topic),))
                self._put_queue(topic, queue)

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Remove a topic, from all brokers or from those of one cluster."""
        for broker in list(self._topics.get(topic, {})):
            if cluster is None or broker in self._clusters.get(cluster, set()):
                self._broker_topics.get(broker, set()).discard(topic)
                self._drop_queue(topic, broker)

    def set_writable(self, broker: str, writable: bool) -> int:
        """Set or clear the write permission of all topics of a broker; return their number."""
        topics = self._broker_topics.get(broker, set())
        for topic in topics:
            queue = self._topics[topic][broker]
            queue.perm = queue.perm | PERM_WRITE if writable else queue.perm & ~PERM_WRITE
        return len(topics)

    # ---- queries

    def route(self, topic: str) -> TopicRouteData | None:
        """Return the route of a topic; None if there is none."""
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
        """Return all brokers by name, and their names by cluster."""
        return {
            "brokerAddrTable": dict(self._brokers),
            "clusterAddrTable": {cluster: sorted(names) for cluster, names in self._clusters.items()},
        }

    def topics(self) -> list[str]:
        """Return all topics."""
        return sorted(self._topics)

    def topics_of_cluster(self, cluster: str) -> list[str]:
        """Return the topics of the brokers of a cluster."""
        names = self._clusters.get(cluster, set())
        return sorted(set().union(*(self._broker_topics.get(name, set()) for name in names)))

    def topics_by_flag(self, matches: Callable[[int], bool]) -> list[str]:
        """Return the topics for whose system flag, on any broker, `matches` is true."""
        return sorted(
            topic for topic, queues in self._topics.items() if any(matches(q.topic_sys_flag) for q in queues.values())
        )

    def system_topics(self) -> tuple[list[str], str | None]:
        """Return the cluster and broker names, which are topics, and the address of a broker with the others."""
        names = sorted({*self._clusters, *self._brokers})
        addresses = [address for broker in self._brokers.values() for address in broker.broker_addrs.values()]
        return names, addresses[0] if addresses else None

    def member_group(self, cluster: str, broker: str) -> dict[str, object]:
        """Return all addresses of one broker name."""
        data = self._brokers.get(broker)
        addresses = dict(data.broker_addrs) if data is not None and data.cluster == cluster else {}
        return {"cluster": cluster, "brokerName": broker, "brokerAddrs": addresses}


def _is_equal(registered: QueueData, topic: TopicConfig) -> bool:
    return (
        registered.read_queue_nums == topic.read_queue_nums
        and registered.write_queue_nums == topic.write_queue_nums
        and registered.perm == topic.perm
        and registered.topic_sys_flag == topic.topic_sys_flag
    )


def _refused(why: str) -> BrokerError:
    return BrokerError(ResponseCode.SYSTEM_ERROR, f"register broker failed: {why}")
