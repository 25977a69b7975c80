"""An Apache master with a slave of neve."""

from __future__ import annotations

from pathlib import Path

from bench.wire import Client
from neve.record.codec import MessageRecord
from tests.interop.promoted import FILE_SIZE, settings_of
from tests.kit.server.apache import ApacheServer
from tests.kit.server.neve import Serving, settings_as_options
from tests.kit.server.processes import free_ports

TOPIC, GROUP = "orders", "readers"


def apache(directory: Path, **settings: str) -> ApacheServer:
    return ApacheServer(
        directory, heap="512m", quick=True, settings={"mappedFileSizeCommitLog": str(FILE_SIZE), **settings}
    )


def slave_of(master: ApacheServer, directory: Path, **settings: object) -> Serving:
    """Run a slave on ports that stay the same over a restart."""
    port, admin_port = free_ports(2)
    own = settings_of(master.namesrv, directory, (port, admin_port))
    return Serving(directory, "broker", *settings_as_options({**own, **settings}))


def send(master: ApacheServer, count: int, size: int = 100, properties: str = "") -> None:
    with Client(master.broker) as client:
        for number in range(count):
            client.send(TOPIC, 0, b"%08d" % number + bytes(size - 8), properties)


def read(address: str, count: int, start: int = 0) -> list[MessageRecord]:
    with Client(address) as client:
        return list(client.read(TOPIC, 0, start, count))
