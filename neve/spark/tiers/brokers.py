"""What brokers are asked, on the driver, when a query or a batch is planned; and the client that tasks pull by.

Nobody who can't be asked has nothing: what is not answered is an error. A broker that the name servers do not name may
be away, or gone for good; the second is for the user to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from neve.client import AsyncClient, MessageQueue, connect
from neve.client.security import credentials_in_environment, credentials_in_file, tls_context
from neve.client.sync.loop import BackgroundLoop
from neve.errors import BrokerError, ClientError, ConnectionFailed, NeveError, UnknownOutcome
from neve.remoting.codes import ResponseCode
from neve.remoting.names import is_system_topic
from neve.spark.planning.options import BadOption, Cluster, Security
from neve.spark.tiers.queues import Bounds, Queue

log = logging.getLogger(__name__)

T = TypeVar("T")

ASKED_AT_ONCE = 64  # questions that are on their way


class BrokerAway(RuntimeError):
    """A name server or broker can't be asked; so what it has is not known."""


class BrokerRefused(RuntimeError):
    """It was asked, and said no."""


class Seen(NamedTuple):
    """What the cluster says of the topics that are asked for."""

    brokers: frozenset[str]  # that the name servers know
    without_master: frozenset[str]  # of those; what answers may be behind
    bounds: Mapping[Queue, Bounds]
    unreadable: Mapping[tuple[str, str], str]  # (broker, topic) that may not be read, and why


class HotTier(Protocol):
    """What planning asks of the brokers."""

    def topics(self) -> list[str]: ...

    def seen(self, topics: Iterable[str]) -> Seen: ...

    def bounds(self, queues: Iterable[Queue]) -> Mapping[Queue, Bounds]: ...

    def report(self, offsets: Mapping[Queue, int]) -> bool: ...


def with_credentials(cluster: Cluster, environment: Mapping[str, str]) -> Cluster:
    """Looked up on the driver: tasks run on machines that have neither the file nor the variables. Raises BadOption."""
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
    """A client on a loop in a thread. It connects when it is asked for the first time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._loop = BackgroundLoop()
        self._client: AsyncClient | None = None

    @property
    def client(self) -> AsyncClient:
        """Raises BrokerAway: no name server can be reached."""
        if self._client is None:
            try:
                self._client = self._loop.call(_connected(self._cluster))
            except ConnectionFailed as error:
                raise BrokerAway(f"{error.remark} (option namesrv: {self._cluster.namesrv})") from error
        return self._client

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """What it gives."""
        return self._loop.call(work)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """The same, without waiting for it."""
        return self._loop.submit(work)

    def close(self) -> None:
        """Ends what is on its way, and the thread."""
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


class Brokers:
    """Of one cluster, for as long as a query is planned or a stream runs. Raises BrokerAway, BrokerRefused."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._client = ClientLoop(cluster)

    def topics(self) -> list[str]:
        """Of which clients may read, none of the servers' own."""
        client = self._client.client
        found = self._asked("the list of topics", client.topic_list())
        return [topic for topic in found if not is_system_topic(topic)]

    def seen(self, topics: Iterable[str]) -> Seen:
        """Brokers first, then the routes: a broker registers with all its topics at once."""
        client = self._client.client
        known = self._asked("the list of brokers", client.cluster_info())
        bounds: dict[Queue, Bounds] = {}
        unreadable: dict[tuple[str, str], str] = {}
        for found in self._client.call(_of_all(client, sorted(topics), self._told)):
            bounds |= found[0]
            unreadable |= found[1]
        masterless = frozenset(name for name, broker in known.items() if broker.master is None)
        return Seen(frozenset(known), masterless, bounds, unreadable)

    def bounds(self, queues: Iterable[Queue]) -> Mapping[Queue, Bounds]:
        """Of queues that the archive has and no route names any more."""
        several = sorted(queues)
        if not several:
            return {}
        gate = asyncio.Semaphore(ASKED_AT_ONCE)
        return self._asked(f"{several[0].told()}", _bounds_of(self._client.client, several, gate))

    def report(self, offsets: Mapping[Queue, int]) -> bool:
        """The group's position; False: not all of it, for a reason that may pass. A stream does not end by that."""
        group = self._cluster.group
        if group is None or not offsets:
            return True
        try:
            self._client.call(_committed(self._client.client, group, offsets))
        except (BrokerAway, NeveError) as error:
            if isinstance(error, BrokerError) and not passes(error):
                raise BrokerRefused(f"consumerGroup {group}: a position can't be reported: {error}") from error
            log.warning("consumerGroup %s: the position is not reported: %s", group, error)
            return False
        return True

    def close(self) -> None:
        """Ends the connections."""
        self._client.close()

    def _asked(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._client.call(work)
        except NeveError as error:
            raise self._told(what, error) from error

    def _told(self, what: str, error: NeveError) -> BrokerAway | BrokerRefused:
        return told(f"{what} (namesrv {self._cluster.namesrv})", error)


def told(what: str, error: NeveError) -> BrokerAway | BrokerRefused:
    """Whether it could not be asked, or said no."""
    if isinstance(error, BrokerError):
        no_rights = error.code == ResponseCode.NO_PERMISSION
        why = "no rights: " if no_rights else ""
        return BrokerRefused(f"{what}: {why}{error}")
    return BrokerAway(f"{what}: can't be asked, so what it has is not known: {error}")


#: Of a topic: the bounds of its queues, and why it may not be read at a broker.
_OfTopic = tuple[dict[Queue, Bounds], dict[tuple[str, str], str]]


async def _of_all(
    client: AsyncClient, topics: Sequence[str], failed: Callable[[str, NeveError], Exception]
) -> list[_OfTopic]:
    """Of many topics side by side: a stream by a pattern asks at each of its triggers."""
    gate = asyncio.Semaphore(ASKED_AT_ONCE)

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
    """Of each of its queues; of a topic that no broker has, of none."""
    try:
        async with gate:
            route = await client.topic_route(topic)
    except BrokerError as error:
        if error.code != ResponseCode.TOPIC_NOT_EXIST:
            raise
        return {}, {}
    readable = {queue.broker_name for queue in route.read_queues}
    unreadable = {
        (broker, topic): "its permissions do not let it be read" for broker in route.brokers if broker not in readable
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
    """As the client names it."""
    return MessageQueue(queue.topic, queue.broker, queue.queue_id)


async def _committed(client: AsyncClient, group: str, offsets: Mapping[Queue, int]) -> None:
    gate = asyncio.Semaphore(ASKED_AT_ONCE)

    async def tell(queue: Queue, offset: int) -> None:
        async with gate:
            try:
                await client.commit(group, queue.topic, message_queue(queue), offset)
            except BrokerError as error:
                if error.code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                    raise
                # A broker makes a group, where it may, for the first of its members that pulls.
                await client.pull_records(message_queue(queue), offset, 1, group=group)
                await client.commit(group, queue.topic, message_queue(queue), offset)

    await asyncio.gather(*(tell(queue, offset) for queue, offset in sorted(offsets.items())))


#: Who is asked again may answer.
_PASSING = frozenset(
    {ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE}
    | {ResponseCode.SYSTEM_ERROR, ResponseCode.TOPIC_NOT_EXIST}
)


def passes(error: NeveError) -> bool:
    """Whether to ask again makes sense."""
    if isinstance(error, BrokerError):
        return error.code in _PASSING
    return isinstance(error, (ConnectionFailed, UnknownOutcome, ClientError))
