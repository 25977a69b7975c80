"""Requests to brokers when a query or a batch is planned, on the driver; and the client by which tasks pull.

An unanswered request is an error and not an empty answer. A broker that the name servers do not know may be unreachable
or removed for good; the user decides by the option retiredBrokers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from neve.client import AsyncClient, MessageQueue, connect
from neve.client.security import credentials_in_environment, credentials_in_file, tls_context
from neve.client.sync.loop import BackgroundLoop
from neve.errors import BrokerError, ClientError, ConnectionFailed, NeveError, UnknownOutcome
from neve.remoting.codes import ResponseCode
from neve.remoting.names import is_system_topic
from neve.spark.planning.options import BadOption, Cluster, Security
from neve.spark.planning.queues import Bounds, BrokerAway, BrokerRefused, Queue, Seen

log = logging.getLogger(__name__)

T = TypeVar("T")

REQUESTS_IN_FLIGHT = 64


def with_credentials(cluster: Cluster, environment: Mapping[str, str]) -> Cluster:
    """Return the options with the credentials of the driver; workers have neither its files nor its environment.

    Raises:
        BadOption: the file or the variables are invalid.
    """
    security = cluster.security
    if security.access_key is not None:
        return cluster
    try:
        found = (
            credentials_in_environment(environment)
            if security.credentials_file is None
            else credentials_in_file(Path(security.credentials_file))
        )
    except (ClientError, OSError) as error:
        raise BadOption(f"option credentials: {error}") from error
    if found is None:
        return cluster
    return cluster._replace(security=replace(security, access_key=found[0], secret_key=found[1]))


class ClientLoop:
    """A client on an event loop in a thread, which connects when `client` is used first."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._loop = BackgroundLoop()
        self._client: AsyncClient | None = None

    @property
    def client(self) -> AsyncClient:
        """The client. Raises BrokerAway if no name server is reachable."""
        if self._client is None:
            try:
                self._client = self._loop.call(_connected(self._cluster))
            except ConnectionFailed as error:
                raise BrokerAway(f"{error.remark} (option namesrv: {self._cluster.namesrv})") from error
        return self._client

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result."""
        return self._loop.call(work)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine."""
        return self._loop.submit(work)

    def close(self) -> None:
        """Cancel running requests and stop the thread."""
        try:
            if self._client is not None:
                self._loop.call(self._client.close())
        finally:
            self._loop.stop()


async def _connected(cluster: Cluster) -> AsyncClient:
    security = cluster.security
    client = connect(
        cluster.namesrv,
        credentials=(security.access_key, security.secret_key) if security.access_key and security.secret_key else None,
        tls=_tls(security),
    )
    try:
        await client.start()
    except BaseException:
        await client.close()
        raise
    return client


def _tls(security: Security) -> Any:
    if not security.tls:
        return False
    files = (security.tls_ca, security.tls_cert, security.tls_key)
    try:
        return tls_context(*(None if file is None else Path(file) for file in files))
    except (ClientError, OSError) as error:
        raise BadOption(f"options tlsCa, tlsCert and tlsKey: {error}") from error


class ClusterBrokers:
    """The brokers of a cluster, as `HotTier` describes them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._client = ClientLoop(cluster)

    def topics(self) -> list[str]:
        client = self._client.client
        found = self._call("the list of topics", client.admin.topic_list())
        return [topic for topic in found if not is_system_topic(topic)]

    def seen(self, topics: Iterable[str]) -> Seen:
        client = self._client.client
        # Brokers are asked before routes: a broker registers with all of its topics at once.
        known = self._call("the list of brokers", client.admin.cluster_info())
        bounds: dict[Queue, Bounds] = {}
        unreadable: dict[tuple[str, str], str] = {}
        for found in self._client.call(_of_all(client, sorted(topics), self._failure)):
            bounds |= found[0]
            unreadable |= found[1]
        masterless = frozenset(name for name, broker in known.items() if broker.master is None)
        return Seen(frozenset(known), masterless, bounds, unreadable)

    def bounds(self, queues: Iterable[Queue]) -> Mapping[Queue, Bounds]:
        several = sorted(queues)
        if not several:
            return {}
        gate = asyncio.Semaphore(REQUESTS_IN_FLIGHT)
        return self._call(several[0].text(), _bounds_of(self._client.client, several, gate))

    def report(self, offsets: Mapping[Queue, int]) -> bool:
        group = self._cluster.group
        if group is None or not offsets:
            return True
        try:
            self._client.call(_committed(self._client.client, group, offsets))
        except (BrokerAway, NeveError) as error:
            if isinstance(error, BrokerError) and not is_temporary(error):
                raise BrokerRefused(f"consumerGroup {group}: the offsets cannot be committed: {error}") from error
            log.warning("offsets are not committed: %s: consumerGroup=%s", error, group)
            return False
        return True

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._client.call(work)
        except NeveError as error:
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: NeveError) -> BrokerAway | BrokerRefused:
        return failure(f"{what} (namesrv {self._cluster.namesrv})", error)


def failure(what: str, error: NeveError) -> BrokerAway | BrokerRefused:
    """Return the error of a request: BrokerRefused for an error response, BrokerAway without a response."""
    if isinstance(error, BrokerError):
        no_rights = error.code == ResponseCode.NO_PERMISSION
        prefix = "no rights: " if no_rights else ""
        return BrokerRefused(f"{what}: {prefix}{error}")
    return BrokerAway(f"{what}: no answer, so its rows are unknown: {error}")


#: The bounds of the queues of a topic, and the reasons of brokers at which it may not be read.
_OfTopic = tuple[dict[Queue, Bounds], dict[tuple[str, str], str]]


async def _of_all(
    client: AsyncClient, topics: Sequence[str], failed: Callable[[str, NeveError], Exception]
) -> list[_OfTopic]:
    """Ask for many topics at once, since a stream with a pattern does so at each trigger."""
    gate = asyncio.Semaphore(REQUESTS_IN_FLIGHT)

    async def ask(topic: str) -> _OfTopic:
        try:
            return await _bounds(client, topic, gate)
        except NeveError as error:
            raise failed(f"topic {topic}", error) from error

    answers = await asyncio.gather(*map(ask, topics), return_exceptions=True)
    found: list[_OfTopic] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        found.append(answer)
    return found


async def _bounds(client: AsyncClient, topic: str, gate: asyncio.Semaphore) -> _OfTopic:
    """Return the bounds of all queues of a topic, none if no broker has it."""
    try:
        async with gate:
            route = await client.admin.topic_route(topic)
    except BrokerError as error:
        if error.code != ResponseCode.TOPIC_NOT_EXIST:
            raise
        return {}, {}
    readable = {queue.broker_name for queue in route.read_queues}
    unreadable = {
        (broker, topic): "its permissions do not allow reading" for broker in route.brokers if broker not in readable
    }
    every = {Queue(one.broker_name, topic, one.queue_id) for one in (*route.read_queues, *route.write_queues)}
    return await _bounds_of(client, every, gate), unreadable


async def _bounds_of(client: AsyncClient, queues: Iterable[Queue], gate: asyncio.Semaphore) -> dict[Queue, Bounds]:
    async def ask(queue: Queue) -> tuple[Queue, Bounds]:
        at = message_queue(queue)
        async with gate:
            maximum = await client.max_offset(queue.topic, at)
            minimum = await client.min_offset(queue.topic, at)
        return queue, Bounds(min(minimum, maximum), maximum)

    return dict(await asyncio.gather(*(ask(queue) for queue in sorted(queues))))


def message_queue(queue: Queue) -> MessageQueue:
    """Return the queue as the client names it."""
    return MessageQueue(queue.topic, queue.broker, queue.queue_id)


async def _committed(client: AsyncClient, group: str, offsets: Mapping[Queue, int]) -> None:
    gate = asyncio.Semaphore(REQUESTS_IN_FLIGHT)

    async def commit(queue: Queue, offset: int) -> None:
        async with gate:
            try:
                await client.commit(group, queue.topic, message_queue(queue), offset)
            except BrokerError as error:
                if error.code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                    raise
                # A broker creates a group, if its configuration allows it, at the first pull of a member.
                await client.pull_records(message_queue(queue), offset, 1, group=group)
                await client.commit(group, queue.topic, message_queue(queue), offset)

    await asyncio.gather(*(commit(queue, offset) for queue, offset in sorted(offsets.items())))


#: Response codes after which a retry may succeed.
_TEMPORARY = frozenset(
    {ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE}
    | {ResponseCode.SYSTEM_ERROR, ResponseCode.TOPIC_NOT_EXIST}
)


def is_temporary(error: NeveError) -> bool:
    """Return whether a retry may succeed."""
    if isinstance(error, BrokerError):
        return error.code in _TEMPORARY
    return isinstance(error, (ConnectionFailed, UnknownOutcome, ClientError))
