"""Who is connected: producers and consumers by group, as their heartbeats say, gone with their connection."""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from infra.clock import Clock
from infra.remoting_server import Connection

EXPIRE_SECONDS = 120.0
BROADCASTING = "BROADCASTING"


@dataclass(slots=True)
class ClientChannel:
    connection: Connection
    client_id: str
    language: str
    version: int
    last_update: float
    last_update_ms: int

    def to_wire(self) -> dict[str, Any]:
        host, port = self.connection.remote
        return {
            "clientAddr": f"{host}:{port}",
            "clientId": self.client_id,
            "language": self.language,
            "version": self.version,
        }


@dataclass(slots=True)
class Subscription:
    """One topic of a group: the tag hashes to send, or all when there are none."""

    topic: str
    sub_string: str
    tags: tuple[str, ...]
    codes: frozenset[int]
    version: int
    expression_type: str

    def to_wire(self) -> dict[str, Any]:
        return {
            "classFilterMode": False,
            "codeSet": sorted(self.codes),
            "expressionType": self.expression_type,
            "subString": self.sub_string,
            "subVersion": self.version,
            "tagsSet": list(self.tags),
            "topic": self.topic,
        }


@dataclass(slots=True)
class ConsumerGroup:
    name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    channels: dict[Connection, ClientChannel] = field(default_factory=dict)
    subscriptions: dict[str, Subscription] = field(default_factory=dict)

    def client_ids(self) -> list[str]:
        return sorted({channel.client_id for channel in self.channels.values()})

    def find_client(self, client_id: str) -> ClientChannel | None:
        return next((channel for channel in self.channels.values() if channel.client_id == client_id), None)


class ClientManager:
    """`on_change(group)` is called when its members or its topics change: the consumers then share out anew."""

    def __init__(self, clock: Clock, on_change: Callable[[ConsumerGroup], None]) -> None:
        self._clock = clock
        self._on_change = on_change
        self._turn = itertools.count()
        self.consumers: dict[str, ConsumerGroup] = {}
        self.producers: dict[str, dict[Connection, ClientChannel]] = {}

    def register_producer(self, group: str, channel: ClientChannel) -> None:
        self.producers.setdefault(group, {})[channel.connection] = channel

    def find_producer(self, client_id: str) -> ClientChannel | None:
        """The client's channel in any of its groups."""
        channels = (channel for group in self.producers.values() for channel in group.values())
        return next((channel for channel in channels if channel.client_id == client_id), None)

    def next_producer(self, group: str) -> ClientChannel | None:
        """A live channel of the group, each in its turn."""
        channels = [
            channel for connection, channel in self.producers.get(group, {}).items() if not connection.is_closed
        ]
        return channels[next(self._turn) % len(channels)] if channels else None

    def register_consumer(
        self, group: str, channel: ClientChannel, kinds: tuple[str, str, str], subs: Iterable[Subscription] | None
    ) -> bool:
        """`subs` None keeps what the group had (a heartbeat without its subscriptions). True: something changed."""
        info = self.consumers.setdefault(group, ConsumerGroup(group))
        info.consume_type, info.message_model, info.consume_from_where = kinds
        is_new = channel.connection not in info.channels
        info.channels[channel.connection] = channel
        changed = subs is not None and _replace_subscriptions(info, list(subs))
        if is_new or changed:
            self._on_change(info)
        return is_new or changed

    def unregister(self, connection: Connection, producer_group: str | None, consumer_group: str | None) -> None:
        """What came over this connection: anybody can say another's client id."""
        if producer_group:
            self.producers.get(producer_group, {}).pop(connection, None)
            self._tidy()
        info = self.consumers.get(consumer_group or "")
        if info is not None and connection in info.channels:
            self._remove(info, connection)

    def connection_closed(self, connection: Connection) -> None:
        for producers in self.producers.values():
            producers.pop(connection, None)
        for info in list(self.consumers.values()):
            if connection in info.channels:
                self._remove(info, connection)
        self._tidy()

    def expire(self) -> None:
        """Clients that were silent for 120 s; their connection may be held open by something between."""
        limit = self._clock.monotonic() - EXPIRE_SECONDS
        for producers in self.producers.values():
            for connection in [c for c, channel in producers.items() if channel.last_update < limit]:
                del producers[connection]
        for info in list(self.consumers.values()):
            for connection in [c for c, channel in info.channels.items() if channel.last_update < limit]:
                self._remove(info, connection)
        self._tidy()

    def groups_subscribed_to(self, topic: str) -> list[str]:
        return [name for name, info in self.consumers.items() if topic in info.subscriptions]

    def _remove(self, info: ConsumerGroup, connection: Connection) -> None:
        info.channels.pop(connection, None)
        if not info.channels:
            self.consumers.pop(info.name, None)
        self._on_change(info)

    def _tidy(self) -> None:
        for group in [group for group, producers in self.producers.items() if not producers]:
            with contextlib.suppress(KeyError):
                del self.producers[group]


def _replace_subscriptions(info: ConsumerGroup, subs: list[Subscription]) -> bool:
    """True if the set of topics changed; a newer expression for the same topic is taken without a word."""
    before = set(info.subscriptions)
    for sub in subs:
        known = info.subscriptions.get(sub.topic)
        if known is None or sub.version > known.version:
            info.subscriptions[sub.topic] = sub
    topics = {sub.topic for sub in subs}
    for topic in before - topics:
        del info.subscriptions[topic]
    return before != topics
