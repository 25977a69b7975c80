"""The routes of topics, which are read from the name servers and kept for a while."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from neve.client.model import BrokerInfo, MessageQueue
from neve.client.net.answers import parse_body, require_success
from neve.client.net.name_servers import NameServers
from neve.client.net.route import TopicRoute, parse_brokers, parse_route, route_from_default
from neve.errors import BrokerError, ConnectionFailed, NeveError
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.names import DEFAULT_TOPIC

log = logging.getLogger(__name__)

_STALE = float("-inf")  # the age of a route that failed
_DOUBT_S = 0.25  # a younger route is not read again because of a mere doubt
_PATIENCE_S = 1.0  # how long a caller with an older route waits for a newer one


class Routes:
    """The routes that a client knows.

    A route stays in use until a newer one is read, as in RocketMQ's MQClientInstance: a name server that was restarted
    knows no topics until the brokers register again, up to 30 s later. `learned` is called with the brokers of every
    answer.
    """

    def __init__(
        self, name_servers: NameServers, interval: float, learned: Callable[[Mapping[str, BrokerInfo]], None]
    ) -> None:
        self._name_servers = name_servers
        self._interval = interval
        self._learned = learned
        self._known: dict[str, tuple[float, TopicRoute]] = {}  # by topic, with the time at which it was read
        self._reading: dict[str, asyncio.Task[TopicRoute]] = {}

    # ---- of a topic

    async def get(self, topic: str, *, fresh: bool = False) -> TopicRoute:
        """Return the route of a topic.

        A known route that is older than `route_interval` is returned and read again in the background. With `fresh`,
        and after `forget`, the name servers are waited for, at most a second if an older route is known.

        Raises:
            BrokerError: TOPIC_NOT_EXIST, and no route was ever known.
        """
        known = self._known.get(topic)
        if known is None:
            return await asyncio.shield(self._read(topic))
        read_at, route = known
        if not fresh and asyncio.get_running_loop().time() - read_at < self._interval:
            return route
        reading = self._read(topic)
        if not fresh and read_at != _STALE:
            return route
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await asyncio.shield(reading)
        except (NeveError, TimeoutError) as error:
            log.info("route not refreshed: topic=%s cause=%r", topic, error)
            self._keep(topic)
            return route

    async def read_now(self, topic: str) -> TopicRoute:
        """Read the route of a topic from the name servers.

        Raises:
            BrokerError: TOPIC_NOT_EXIST.
        """
        return await asyncio.shield(self._read(topic))

    async def to_publish(self, topic: str, *, fresh: bool = False) -> TopicRoute:
        """Return the route to send to; for a topic that does not exist, the route that it would be created with."""
        try:
            return await self.get(topic, fresh=fresh)
        except BrokerError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            try:
                return route_from_default(topic, await self.get(DEFAULT_TOPIC))
            except BrokerError:
                raise error from None

    def forget(self, topic: str) -> None:
        """Have the next `get` wait for the name servers; the old route is used if they do not answer."""
        known = self._known.get(topic)
        if known is not None:
            self._known[topic] = (_STALE, known[1])

    def drop(self, topic: str) -> None:
        """Remove the route of a deleted topic."""
        self._known.pop(topic, None)

    def _keep(self, topic: str) -> None:
        """Use the present route for another `route_interval`, because the name servers did not answer."""
        known = self._known.get(topic)
        if known is not None:
            self._known[topic] = (asyncio.get_running_loop().time(), known[1])

    def _read(self, topic: str) -> asyncio.Task[TopicRoute]:
        """Return the task that reads the route; concurrent callers share it."""
        reading = self._reading.get(topic)
        if reading is None:
            reading = self._reading[topic] = asyncio.create_task(self._fetch(topic), name=f"route of {topic}")
            reading.add_done_callback(lambda done: self._ended(topic, done))
        return reading

    def _ended(self, topic: str, reading: asyncio.Task[TopicRoute]) -> None:
        self._reading.pop(topic, None)
        if not reading.cancelled() and reading.exception() is not None:
            self._keep(topic)

    async def _fetch(self, topic: str) -> TopicRoute:
        answer = require_success(await self._name_servers.read(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}))
        route = parse_route(topic, parse_body(answer))
        self._known[topic] = (asyncio.get_running_loop().time(), route)
        self._learned(route.brokers)
        return route

    # ---- of brokers

    async def brokers(self) -> dict[str, BrokerInfo]:
        """Read all brokers from the name servers, by name."""
        answer = require_success(await self._name_servers.read(RequestCode.GET_BROKER_CLUSTER_INFO, {}))
        found = parse_brokers((parse_body(answer).get("brokerAddrTable") or {}).values())
        self._learned(found)
        return found

    async def master(self, queue: MessageQueue) -> str:
        """Return the address of the queue's master.

        Raises:
            ConnectionFailed: no master is known, so no request was sent to it.
        """
        for fresh in (False, True):
            address = (await self.to_publish(queue.topic, fresh=fresh)).master(queue.broker_name)
            if address is not None:
                return address
        raise ConnectionFailed(f"no master of {queue.broker_name} is known")

    def known_master(self, queue: MessageQueue) -> str | None:
        """Return the address of the queue's master in the known route."""
        known = self._known.get(queue.topic)
        return None if known is None else known[1].master(queue.broker_name)

    def has_replicas(self, queue: MessageQueue) -> bool:
        """Return whether the queue's broker has replicas, as far as is known."""
        known = self._known.get(queue.topic) or self._known.get(DEFAULT_TOPIC)
        return known is not None and known[1].is_set(queue.broker_name)

    def known_brokers(self) -> Iterable[Mapping[str, BrokerInfo]]:
        """Return the brokers of each known route."""
        return [route.brokers for _, route in self._known.values()]

    # ---- doubts

    def mark_doubtful(self, address: str) -> None:
        """Have routes that name `address` read again, because a connection to it ended."""
        self._doubt(address, lambda _route, _broker: True)

    def mark_master_doubtful(self, address: str) -> None:
        """Have routes that name `address` read again, because it answered as a broker that is not the master does.

        A broker without replicas answers so if it is busy; its routes are still valid.
        """
        self._doubt(address, TopicRoute.is_set)

    def _doubt(self, address: str, may_have_moved: Callable[[TopicRoute, str], bool]) -> None:
        now = asyncio.get_running_loop().time()
        for topic, (read_at, route) in list(self._known.items()):
            if read_at > now - _DOUBT_S:
                continue
            named = (name for name, broker in route.brokers.items() if address in broker.addresses.values())
            if any(may_have_moved(route, name) for name in named):
                self._known[topic] = (_STALE, route)
