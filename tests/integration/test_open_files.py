"""A broker limited to 200 open files refuses connections above its budget, and its disk operations do not fail."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from infra.net.remoting_server import open_connection
from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask
from tests.kit.server.neve import Serving, settings_as_options


def figures(admin: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{admin}/metrics", timeout=30) as answer:
        lines = [line.split() for line in answer.read().decode().splitlines() if line[0] != "#"]
    return {line[0]: float(line[1]) for line in lines if "{" not in line[0]}


def test_broker_survives_more_connections_than_open_files(tmp_path: Path) -> None:
    names = {"storePathRootDir": tmp_path / "data", "listenPort": 0, "adminPort": 0, "flushDiskType": "SYNC_FLUSH"}
    names |= {"brokerIP1": "127.0.0.1", "mappedFileSizeCommitLog": "1m"}
    with Serving(tmp_path, "broker", *settings_as_options(names), open_files=200) as broker:
        asyncio.run(_crowded(broker.ready))
        assert broker.stop() == 0


async def _crowded(ready: dict[str, Any]) -> None:
    host, port = ready["broker"].rsplit(":", 1)
    with ExitStack() as stack:
        first = await open_connection(host, int(port))
        crowd = [stack.enter_context(socket.create_connection((host, int(port)), 30)) for _ in range(400)]
        for one in crowd[-100:]:
            assert await asyncio.to_thread(one.recv, 1) == b"", "refused"
        found = figures(ready["admin"])
        assert 10 < found["neve_connections"] <= found["neve_connections_max"] < 200
        assert found["neve_connections_refused_total"] >= 100
        for queue in range(4):
            answer = await ask(
                first, Code.SEND_MESSAGE, b"x", producerGroup="p", topic="t", defaultTopic="TBW102",
                defaultTopicQueueNums=4, queueId=queue, sysFlag=0, bornTimestamp=1, flag=0,
            )  # fmt: skip
            assert answer.code == 0, answer.remark
        first.close()
