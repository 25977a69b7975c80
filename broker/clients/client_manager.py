"""Connected producers and consumers by group, registered by heartbeats and removed with their connection."""

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.clock import Clock
from infra.loop.in_steps import Steps
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import SubscriptionData
from neve.remoting.codes import ResponseCode

EXPIRE_SECONDS = 120.0
MAX_CLIENT_ID = 1024
# Memory of a table row, without the texts in it.
_ROW_BYTES = 200
# Subscriptions compared in one turn of the event loop, about 0.1 ms. A comparison restarts if the group has changed
# meanwhile. The last attempt does not yield, so that it ends.
_SLICE = 500
_COMPARISONS = 4
BROADCASTING = "BROADCASTING"
TAG = "TAG"


@dataclass(slots=True)
class ClientChannel:
    """One client's connection as its heartbeats describe it (RocketMQ's ClientChannelInfo).

    `last_update` is in monotonic seconds and decides about expiry; `last_update_ms` is wall clock time for display.
    """

    connection: Connection
    client_id: str
    language: str
    version: int
    last_update: float
    last_update_ms: int
    # User that signed the heartbeat.
    user: str = ""

    def to_wire(self) -> dict[str, Any]:
        host, port = self.connection.remote
        return {
            "clientAddr": f"{host}:{port}",
            "clientId": self.client_id,
            "language": self.language,
            "version": self.version,
        }


@dataclass(slots=True)
class ConsumerGroup:
    """Connected members of a group and their subscriptions (RocketMQ's ConsumerGroupInfo).

    `size` is the memory that counts against the limit. `revision` changes with each change of settings or
    subscriptions.
    """

    name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    channels: dict[Connection, ClientChannel] = field(default_factory=dict)
    subscriptions: dict[str, SubscriptionData] = field(default_factory=dict)
    size: int = 0  # of the subscriptions, in bytes
    revision: int = -1  # of everything but the members

    @property
    def kinds(self) -> tuple[str, str, str]:
        """Consume type, message model and start position, as in heartbeats."""
        return self.consume_type, self.message_model, self.consume_from_where

    def client_ids(self) -> list[str]:
        return sorted({channel.client_id for channel in self.channels.values()})

    def find_client(self, client_id: str) -> ClientChannel | None:
        return next((channel for channel in self.channels.values() if channel.client_id == client_id), None)


@dataclass(slots=True)
class Changes:
    """Changes of a group's subscriptions by a heartbeat; valid while the group has the same revision."""

    of: ConsumerGroup | None
    revision: int
    newer: dict[str, SubscriptionData] = field(default_factory=dict)
    removed: Sequence[str] = ()
    size: int = 0  # growth of the group's size, in bytes
    topics_changed: bool = False


class ClientManager:
    """Table of connected clients (RocketMQ's ProducerManager and ConsumerManager).

    `on_change(group)` is called when members or topics of a group change, so that its consumers rebalance. Data of
    heartbeats stays in memory until the connection ends, so at most `limit` bytes are accepted.
    """

    def __init__(
        self, clock: Clock, on_change: Callable[[ConsumerGroup], None], limit: Callable[[], int] = lambda: sys.maxsize
    ) -> None:
        self._clock, self._limit = clock, limit
        self._on_change = on_change
        self._turn = itertools.count()
        self.consumers: dict[str, ConsumerGroup] = {}
        self.producers: dict[str, dict[Connection, ClientChannel]] = {}
        # Groups by connection, so that a closing connection costs only its own groups.
        self._consumers_of: dict[Connection, set[str]] = {}
        self._producers_of: dict[Connection, set[str]] = {}
        self._watched: set[Connection] = set()
        self.bytes = 0

    def register_producer(self, group: str, channel: ClientChannel) -> None:
        """Register a producer. Raises BrokerError if the table is full."""
        channels = self.producers.get(group, {})
        if channel.connection not in channels:
            self._take(_cost(group))
            self._producers_of.setdefault(channel.connection, set()).add(group)
        self.producers[group] = channels
        channels[channel.connection] = channel

    def find_producer(self, client_id: str) -> ClientChannel | None:
        """Return a client's channel in any of its producer groups."""
        channels = (channel for group in self.producers.values() for channel in group.values())
        return next((channel for channel in channels if channel.client_id == client_id), None)

    def next_producer(self, group: str, may: Callable[[ClientChannel], bool]) -> ClientChannel | None:
        """Return a live channel of the group for which `may` returns True, in round-robin order."""
        channels = [
            channel
            for connection, channel in self.producers.get(group, {}).items()
            if not connection.is_closed and may(channel)
        ]
        return channels[next(self._turn) % len(channels)] if channels else None

    def compare(self, group: str, subs: Sequence[SubscriptionData] | None) -> Steps[Changes]:
        """Return the changes that `subs` make to the group; None keeps its subscriptions (a heartbeat without any).

        The result is valid until the caller yields to the event loop, so `register_consumer` must follow immediately.
        """
        for turn in itertools.count(1):
            info = self.consumers.get(group)
            changes = Changes(info, info.revision if info is not None else -1)
            for _ in _compare(changes, subs):
                if turn < _COMPARISONS:
                    yield
                    if not self._is_current(group, changes):
                        break
            else:
                return changes
        raise AssertionError("the last comparison takes no pauses")

    def _is_current(self, group: str, changes: Changes) -> bool:
        info = self.consumers.get(group)
        return info is changes.of and (info is None or info.revision == changes.revision)

    def register_consumer(
        self, group: str, channel: ClientChannel, kinds: tuple[str, str, str], changes: Changes
    ) -> ConsumerGroup:
        """Register a member and apply the changes of its heartbeat.

        Raises BrokerError if the table is full. Nothing has changed then.
        """
        assert self._is_current(group, changes)
        info = changes.of or ConsumerGroup(group)
        is_new = channel.connection not in info.channels
        self._take(changes.size + (_cost(group) if is_new else 0))
        self.consumers[group] = info
        info.channels[channel.connection] = channel
        self._consumers_of.setdefault(channel.connection, set()).add(group)
        if changes.newer or changes.removed or info.kinds != kinds:
            info.consume_type, info.message_model, info.consume_from_where = kinds
            for topic in changes.removed:
                del info.subscriptions[topic]
            info.subscriptions.update(changes.newer)
            info.size += changes.size
            info.revision = next(self._turn)
        if is_new or changes.topics_changed:
            self._on_change(info)
        return info

    def is_same_heartbeat(self, group: str, channel: ClientChannel, revision: int) -> bool:
        """Renew a member whose heartbeat has not changed since `revision`; return False if the group has changed."""
        info = self.consumers.get(group)
        if info is None or info.revision != revision or channel.connection not in info.channels:
            return False
        info.channels[channel.connection] = channel
        return True

    def unregister(self, connection: Connection, producer_group: str | None, consumer_group: str | None) -> None:
        """Remove groups of this connection only, because clients can send any client id."""
        if producer_group:
            self._remove_producer(producer_group, connection)
        info = self.consumers.get(consumer_group or "")
        if info is not None and connection in info.channels:
            self._remove(info, connection)

    def watch(self, connection: Connection) -> None:
        """Remove the connection's clients when it closes."""
        if connection not in self._watched:
            self._watched.add(connection)
            connection.on_close(self.connection_closed)

    def connection_closed(self, connection: Connection) -> None:
        """Remove all producers and consumers of a connection."""
        self._watched.discard(connection)
        for group in tuple(self._producers_of.get(connection, ())):
            self._remove_producer(group, connection)
        for group in tuple(self._consumers_of.get(connection, ())):
            self._remove(self.consumers[group], connection)

    def expire(self) -> None:
        """Remove clients without a heartbeat for 120 s; a proxy may keep their connection open."""
        limit = self._clock.monotonic() - EXPIRE_SECONDS
        for group, producers in list(self.producers.items()):
            for connection in [c for c, channel in producers.items() if channel.last_update < limit]:
                self._remove_producer(group, connection)
        for info in list(self.consumers.values()):
            for connection in [c for c, channel in info.channels.items() if channel.last_update < limit]:
                self._remove(info, connection)

    def groups_subscribed_to(self, topic: str) -> list[str]:
        return [name for name, info in self.consumers.items() if topic in info.subscriptions]

    def _take(self, more: int) -> None:
        if more > 0 and self.bytes + more > self._limit():
            raise BrokerError(ResponseCode.SYSTEM_BUSY, f"heartbeats exceed maxClientBytes={self._limit()}")
        self.bytes += more

    def _remove(self, info: ConsumerGroup, connection: Connection) -> None:
        del info.channels[connection]
        self.bytes -= _cost(info.name)
        _leave(self._consumers_of, connection, info.name)
        if not info.channels:
            self.bytes -= info.size
            del self.consumers[info.name]
        self._on_change(info)

    def _remove_producer(self, group: str, connection: Connection) -> None:
        channels = self.producers.get(group, {})
        if channels.pop(connection, None) is None:
            return
        self.bytes -= _cost(group)
        _leave(self._producers_of, connection, group)
        if not channels:
            del self.producers[group]


def _cost(group: str) -> int:
    """Return the size in bytes that a member counts, whatever its heartbeats contain."""
    return 2 * _ROW_BYTES + MAX_CLIENT_ID + len(group)


def _leave(groups_of: dict[Connection, set[str]], connection: Connection, group: str) -> None:
    groups = groups_of[connection]
    groups.discard(group)
    if not groups:
        del groups_of[connection]


def _size(sub: SubscriptionData) -> int:
    size = len(sub.topic) + len(sub.sub_string) + len(sub.expression_type or TAG) + 2 * _ROW_BYTES
    if sub.tags_set or sub.code_set:
        size += sum(map(len, sub.tags_set)) + _ROW_BYTES * len(sub.code_set)
    return size


def _compare(changes: Changes, wanted: Sequence[SubscriptionData] | None) -> Steps[None]:
    """Fill in `changes`: new and newer subscriptions, and the topics that are no longer subscribed to."""
    if wanted is None:
        return
    known = changes.of.subscriptions if changes.of is not None else {}
    newer, topics = changes.newer, set[str]()
    for number, sub in enumerate(wanted, 1):
        topic = sub.topic
        topics.add(topic)
        current = newer.get(topic) or known.get(topic)
        if current is None or sub.sub_version > current.sub_version:
            newer[topic] = sub
            changes.size += _size(sub) - (_size(current) if current is not None else 0)
            changes.topics_changed |= current is None
        if number % _SLICE == 0:
            yield
    changes.removed = tuple(known.keys() - topics)
    changes.topics_changed |= bool(changes.removed)
    for number, topic in enumerate(changes.removed, 1):
        changes.size -= _size(known[topic])
        if number % _SLICE == 0:
            yield


def subscription_to_wire(sub: SubscriptionData) -> dict[str, Any]:
    """Convert a subscription to the form of RocketMQ's admin tools."""
    return {
        "classFilterMode": False,
        "codeSet": sorted(set(sub.code_set)),
        "expressionType": sub.expression_type or TAG,
        "subString": sub.sub_string,
        "subVersion": sub.sub_version,
        "tagsSet": list(sub.tags_set),
        "topic": sub.topic,
    }
