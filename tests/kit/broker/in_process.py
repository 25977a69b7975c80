"""A broker in the test's own process, used through its port."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from broker.archiving.restore import Restore
from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.machine import Machine
from infra.clock import Clock, SystemClock
from infra.config.properties import load
from infra.disk.filesystem import Disk, RealDisk
from infra.net.remoting_server import Connection, open_connection
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from tests.kit.broker.fake_set import FakeSet
from tests.kit.wire.admin_port import post_request

DEADLINE_S = 60
ROOM_ENOUGH = "diskSpaceWarningLevelRatio=99"
"""How full the disk of whoever runs the tests is decides no test."""


@asynccontextmanager
async def running(
    root: Path,
    *settings: str,
    clock: Clock | None = None,
    disk: Disk | None = None,
    restoring: bool = False,
    broker_set: FakeSet | None = None,
) -> AsyncIterator[tuple[BrokerController, Connection]]:
    """Run a broker with small log files on free ports; a directory that was used before keeps its data.

    `restoring`: from the bucket, into an empty directory. `broker_set`: the set of which it is a member, as master.
    """
    own = [f"storePathRootDir={root}", "mappedFileSizeCommitLog=1m"]
    own += ["listenPort=0", "adminPort=0", "bindAddress=127.0.0.1", "brokerIP1=127.0.0.1", ROOM_ENOUGH]
    own += ["archiveWorkerPriority=normal"]  # Beside other suites an idle broker may get no processor for minutes.
    config, disk = load(BrokerConfig, None, [*own, *settings]), disk or RealDisk()
    machine = Machine(clock=clock or SystemClock(), disk=disk)
    broker = BrokerController(config, machine, Restore(config, disk) if restoring else None, broker_set=broker_set)
    await broker.start()
    if broker_set is not None:
        broker_set.join(broker)
    connection = await open_connection(*broker.address)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield broker, connection
    finally:
        connection.close()
        await broker.shutdown()


async def ask(connection: Connection, code: int, body: bytes = b"", /, **ext: object) -> RemotingCommand:
    texts = {name: str(value) for name, value in ext.items()}
    return await connection.invoke(RemotingCommand(code, ext=texts, body=body), 30)


async def send(
    connection: Connection, topic: str, body: bytes = b"body", properties: str = "", queue: int = 0
) -> RemotingCommand:
    """Send to a queue of a topic that the first send creates."""
    answer = await ask(
        connection, Code.SEND_MESSAGE_V2, body, a="p", b=topic, c="TBW102", d=1, e=queue, f=0, g=1, h=0, i=properties,
        j=0, k="false", m="false",
    )  # fmt: skip
    assert answer.code == 0, answer.remark
    return answer


async def offload(broker: BrokerController) -> bytes:
    """Archive all messages and evict the local ones; return the answer of the admin port."""
    assert broker.admin_address is not None
    url = "http://{}:{}/archive/offload?roll=1&evict=1".format(*broker.admin_address)
    return await asyncio.to_thread(lambda: bytes(urllib.request.urlopen(post_request(url), timeout=60).read()))
