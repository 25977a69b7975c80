"""A whole broker on a second S3 server: offload, evict, and read back cold, again after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.wire import Client
from infra.objects.s3_server import create_bucket
from tests.kit.server import versitygw
from tests.kit.server.killed_under_load import QUEUES, assert_tiles, post_offload, produce, stored
from tests.kit.server.neve import NeveServer

pytestmark = pytest.mark.servers


def test_broker_offloads_to_versitygw_and_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with versitygw.running(tmp_path / "store") as store:
        create_bucket(store, "archive")
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        server = NeveServer(tmp_path, store=store.url("archive", "run"), settings={"archivePeriod": "1h"})
        try:
            server.start()
            with Client(server.broker) as client:
                client.create_topic("tiles", QUEUES)
            sent = produce(server, 0, 60)
            assert {"commit", "evicted"} <= {event.get("event") for event in post_offload(server)}
            assert stored(server) == sent
            assert server.stop() == 0
            server.start()
            sent |= produce(server, 60, 10)
            assert stored(server) == sent, "the cold and the hot follow one another"
            post_offload(server)
            assert assert_tiles(server.store) == len(sent)
            assert server.stop() == 0
        finally:
            server.kill()
