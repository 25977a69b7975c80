"""Conformance of the client against neve and Apache RocketMQ 5.3.3: a test that takes `server` runs on both.

Each broker is one process tree for the whole session; pytest groups the tests by broker. So every test uses topics and
groups of its own (`topic`, `unique`) and leaves the brokers running.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from neve import connect
from neve.client import AsyncClient
from tests.kit.cluster.routes import is_routed
from tests.kit.server.apache import ApacheServer
from tests.kit.server.neve import NeveServer
from tests.kit.server.processes import free_ports

DEADLINE_S = 60

#: Settings with one name in both brokers, so that no test waits for a default of half a minute.
SETTINGS = {
    "transactionCheckInterval": "500",
    "transactionTimeOut": "2000",
    "recallMessageEnable": "true",
    "enablePropertyFilter": "true",
    "metricsExporterType": "PROM",
    "metricsPromExporterHost": "127.0.0.1",
}
#: Apache's broker records the end of a transaction in batches, by default every 3 s. With the time-out above it would
#: check back ended transactions, and store a second answer as a second message.
APACHE = {**SETTINGS, "transactionOpBatchInterval": "100"}


@dataclass(frozen=True, slots=True)
class ClusterUnderTest:
    """A running cluster of one broker. `kind` is "neve" or "apache", for the few promises in which the two differ."""

    kind: str
    namesrv: str
    broker: str
    metrics: str  # RocketMQ's metrics endpoint, as host:port.
    admin: str = ""


@pytest.fixture(scope="package", params=["neve", pytest.param("apache", marks=pytest.mark.servers)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterUnderTest]:
    kind: str = request.param
    directory = tmp_path_factory.mktemp(kind)
    if kind == "neve":
        settings = {**SETTINGS, "archiveWorkerPriority": "normal", "metricsPromExporterPort": 0}
        with NeveServer(directory, settings=settings) as neve:
            yield ClusterUnderTest(kind, neve.namesrv, neve.broker, neve.ready["metrics"], neve.admin)
        return
    (port,) = free_ports(1)
    apaches = {**APACHE, "metricsPromExporterPort": str(port)}
    with ApacheServer(directory, heap="512m", settings=apaches, quick=True) as apache:
        yield ClusterUnderTest(kind, apache.namesrv, apache.broker, f"127.0.0.1:{port}")
        apache.kill()  # Its data is not read again, and an orderly stop takes seconds.


@pytest.fixture
def unique() -> str:
    """A unique name for groups and keys."""
    return f"c{uuid.uuid4().hex[:10]}"


Work = Callable[[AsyncClient, str], Awaitable[None]]


@pytest.fixture
def run(server: ClusterUnderTest) -> Callable[..., None]:
    """Return `run(work, queues=4)`, which calls `work(client, topic)` with a new topic and a deadline."""

    async def inside(work: Work, queues: int, options: dict[str, Any]) -> None:
        topic = f"t{uuid.uuid4().hex[:10]}"
        async with asyncio.timeout(DEADLINE_S), connect(server.namesrv, **options) as client:
            await create_topic(client, topic, queues)
            await work(client, topic)

    def start(work: Work, *, queues: int = 4, **options: object) -> None:
        asyncio.run(inside(work, queues, options))

    return start


@pytest.fixture
def topic(server: ClusterUnderTest) -> str:
    """Return the name of a new topic of four queues, for tests of the synchronous client and the command line."""
    name = f"t{uuid.uuid4().hex[:10]}"

    async def make() -> None:
        async with asyncio.timeout(DEADLINE_S), connect(server.namesrv) as client:
            await create_topic(client, name, 4)

    asyncio.run(make())
    return name


async def create_topic(client: AsyncClient, topic: str, queues: int) -> None:
    """Create a topic; return once the name server routes clients to it."""
    await client.admin.create_topic(topic, queues)
    await is_routed(client, topic, queues)
