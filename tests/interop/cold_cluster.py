"""A broker whose archive is in MinIO, with stock clients; shared by the tests of cold reads."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.wire import Client
from infra.objects import minio
from tests.interop.agent import Consumed, StockAgent
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NeveServer
from tests.kit.wire.admin_port import post_request

SETTINGS = {
    "archiveMinBytes": "1",
    "enablePropertyFilter": "true",
    "mappedFileSizeCommitLog": "8m",
    "tieredStorageLevel": "FORCE",
}


@dataclass
class ColdCluster:
    """A broker whose archive is in MinIO, clients of one version, and the messages they received before archiving."""

    server: NeveServer
    agent: StockAgent
    hot: dict[str, list[Consumed]] = field(default_factory=dict)

    def make_topic(self, name: str, queues: int = 4) -> None:
        with Client(self.server.broker) as broker:
            broker.create_topic(name, queues)

    def consumed_hot(self, topic: str, count: int) -> list[Consumed]:
        self.hot[topic] = self.agent.push(f"hot_{len(self.hot)}", topic, count)
        assert len(self.hot[topic]) == count
        return self.hot[topic]

    def offload(self) -> list[dict[str, object]]:
        """Archive all messages and evict the local segments: `neve archive offload --roll --evict`."""
        request = post_request(f"http://{self.server.admin}/archive/offload?roll=1&evict=1")
        with urllib.request.urlopen(request, timeout=120) as answer:
            return [json.loads(line) for line in answer.read().splitlines() if line.strip()]

    def offload_all(self) -> None:
        """Return once all messages now in the log are evicted. Pending messages may keep a segment for a while."""
        written = self.segments()
        wait_until(lambda: not self.offload_leaves(written), "the eviction of all")

    def offload_leaves(self, segments: set[str]) -> set[str]:
        """Offload again; return those of the segments that are still local."""
        self.offload()
        return segments & self.segments()

    def segments(self) -> set[str]:
        """Return the commit log files that have content; after a roll there may be none."""
        files = (self.server.directory / "data").rglob("commitlog/*")
        return {file.name for file in files if file.name.isdigit() and file.read_bytes()[:64].strip(b"\0")}

    def cold_reads(self) -> float:
        with urllib.request.urlopen(f"http://{self.server.admin}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("neve_cold_reads_total "))


@contextmanager
def running(home: Path, version: str) -> Iterator[ColdCluster]:
    """Run a broker with its own bucket, and clients."""
    with minio.running(home / "minio") as store, pytest.MonkeyPatch.context() as patch:
        minio.create_bucket(store, "cold")
        for key, value in store.environment.items():
            patch.setenv(key, value)
        server = NeveServer(home / "neve", store=store.url("cold"), settings=SETTINGS)
        with server, StockAgent(server.namesrv, version, home / "agent") as agent:
            yield ColdCluster(server, agent)
