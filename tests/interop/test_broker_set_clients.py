"""Stock Java clients on a neve broker set whose masters are killed and frozen."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from bench import jvm
from bench.wire import Client
from tests.interop.steady import TOPIC, Steady, assert_each_offset_once_acknowledged_and_consumed
from tests.kit.server.broker_set import BrokerSet
from tests.kit.server.members import NAME

pytestmark = pytest.mark.servers
#: `make soak` tests both client versions.
VERSIONS = [jvm.SERVER, jvm.CLIENT_OLD] if os.environ.get("NEVE_SOAK") else [jvm.SERVER]


@pytest.mark.parametrize("version", VERSIONS)
def test_stock_clients_lose_no_message_in_failovers(tmp_path: Path, version: str) -> None:
    settings = {"replication": "sync", "slaveReadEnable": "true", "controllerHeartBeatTimeoutMills": "3s"}
    with BrokerSet(tmp_path / "set", settings=settings) as brokers:
        with Client(brokers.master.broker) as client:
            client.create_topic(TOPIC, 4)
        with Steady(brokers.name_server.namesrv, version, tmp_path / "client") as steady:
            steady.send_more([NAME])
            killed = brokers.master
            killed.kill()
            brokers.master_after(killed)
            steady.send_more([NAME])
            killed.start()
            brokers.wait_until_in_sync(*brokers.members)
            frozen = brokers.master
            frozen.signal(signal.SIGSTOP)
            try:
                brokers.master_after(frozen)
                steady.send_more([NAME])
            finally:
                frozen.signal(signal.SIGCONT)
            brokers.wait_until_in_sync(*brokers.members)
            steady.send_more([NAME])
            steady.stop_sending()
            steady.drained(NAME)
            acked, got = list(steady.acked), list(steady.got)
    assert_each_offset_once_acknowledged_and_consumed(acked, got)
