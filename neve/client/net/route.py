"""The route of a topic: its queues and their brokers, decoded from an answer of a name server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from neve.client.model import MASTER_ID, BrokerInfo, MessageQueue
from neve.errors import ConnectionFailed, ProtocolError

PERM_READ = 4
PERM_WRITE = 2
DEFAULT_TOPIC_QUEUES = 4  # of a topic that the first send creates, after the route of DEFAULT_TOPIC
QUEUES_MAX = 65_536  # of a route; each queue is an object


class Reader(NamedTuple):
    """A member of a broker set that is read from."""

    member: int
    address: str
    #: The member to read from if this one fails: the master, or the next replica while there is no master.
    instead: int


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """The queues of a topic and their brokers.

    Attributes:
        write_queues: the writable queues, sorted.
        read_queues: the readable queues, sorted.
        brokers: the brokers by name.
        without_master: a broker with writable queues that has no master now, or None.
    """

    write_queues: tuple[MessageQueue, ...]
    read_queues: tuple[MessageQueue, ...]
    brokers: Mapping[str, BrokerInfo]
    without_master: str | None = None

    def master(self, broker_name: str) -> str | None:
        """Return the address of a broker's master, or None if it is unknown."""
        broker = self.brokers.get(broker_name)
        return broker.master if broker else None

    def require_master(self, broker_name: str) -> str:
        """Return the address of a broker's master.

        Raises:
            ConnectionFailed: no master is known, so no request was sent to it.
        """
        address = self.master(broker_name)
        if address is None:
            raise ConnectionFailed(f"no master of {broker_name} is known")
        return address

    def address(self, broker_name: str) -> str | None:
        """Return the address to read from: the master, or a replica while there is no master."""
        reader = self.reader(broker_name, MASTER_ID)
        return None if reader is None else reader.address

    def reader(self, broker_name: str, wanted: int) -> Reader | None:
        """Return the member to read from: the wanted one, or another as RocketMQ's clients choose it."""
        broker = self.brokers.get(broker_name)
        if broker is None or not broker.addresses:
            return None
        ids = sorted(broker.addresses)
        near = (wanted,) if wanted == MASTER_ID else (wanted, wanted + 1)
        member = next((number for number in near if number in broker.addresses), ids[0])
        following = next((number for number in ids if number > member), ids[0])
        return Reader(member, broker.addresses[member], MASTER_ID if broker.master is not None else following)

    def is_set(self, broker_name: str) -> bool:
        """Return whether the broker has replicas, of which one may become master."""
        broker = self.brokers.get(broker_name)
        return broker is not None and (len(broker.addresses) > 1 or MASTER_ID not in broker.addresses)


def parse_brokers(data: Any) -> dict[str, BrokerInfo]:
    """Return the brokers of a list of BrokerData, by name."""
    brokers: dict[str, BrokerInfo] = {}
    for item in data or ():
        addresses = {int(key): str(value) for key, value in (item.get("brokerAddrs") or {}).items()}
        name = str(item["brokerName"])
        brokers[name] = BrokerInfo(str(item.get("cluster") or ""), name, addresses)
    return brokers


def parse_route(topic: str, data: Any) -> TopicRoute:
    """Return the route of a TopicRouteData object.

    Raises:
        ProtocolError: the object is invalid.
    """
    try:
        brokers = parse_brokers(data.get("brokerDatas"))
        write: list[MessageQueue] = []
        read: list[MessageQueue] = []
        without_master: str | None = None
        for queues in data.get("queueDatas") or ():
            name, perm = str(queues["brokerName"]), int(queues["perm"])
            broker = brokers.get(name)
            if broker is None:
                continue
            if perm & PERM_WRITE and broker.master is None:
                without_master = name
            elif perm & PERM_WRITE:
                write += _queues(topic, name, int(queues["writeQueueNums"]), QUEUES_MAX - len(write))
            if perm & PERM_READ:
                read += _queues(topic, name, int(queues["readQueueNums"]), QUEUES_MAX - len(read))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"invalid route of {topic} from the name server: {error!r}") from error
    return TopicRoute(tuple(sorted(write)), tuple(sorted(read)), brokers, without_master)


def _queues(topic: str, broker_name: str, count: int, limit: int) -> list[MessageQueue]:
    if count > limit:
        raise ProtocolError(f"{topic} has {count} queues on {broker_name}: a client takes {QUEUES_MAX} in all")
    return [MessageQueue(topic, broker_name, number) for number in range(count)]


def route_from_default(topic: str, default: TopicRoute) -> TopicRoute:
    """Return the route that `topic` will have if a broker creates it after the default topic."""
    queues = _renamed(topic, default.write_queues, DEFAULT_TOPIC_QUEUES)
    return TopicRoute(queues, queues, default.brokers, default.without_master)


def _renamed(topic: str, queues: Sequence[MessageQueue], count: int) -> tuple[MessageQueue, ...]:
    return tuple(queue._replace(topic=topic) for queue in queues if queue.queue_id < count)
