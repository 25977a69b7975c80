"""Requests of slaves and administrators beyond mqadmin's commands, sent by the classes of Apache RocketMQ itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import jvm
from bench.wire import Client
from tests.kit.server.neve import NeveServer

pytestmark = pytest.mark.servers
SOURCES = Path(__file__).parent / "java_admin"
QUICK_CHECKS = {"transactionCheckInterval": "300", "transactionTimeOut": "0", "transactionCheckMax": "1"}


def test_expired_transaction_is_resumed_and_offsets_are_readable(tmp_path: Path) -> None:
    with NeveServer(tmp_path / "neve", settings=QUICK_CHECKS) as server:
        with Client(server.broker) as client:
            client.create_topic("ledger", 1)
        command = jvm.java(
            jvm.classes(SOURCES), "Leftovers", server.namesrv, server.broker, "ledger", home=tmp_path / "client"
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        said = dict(line.partition("\t")[::2] for line in done.stdout.splitlines())
        assert "DONE" in said, done.stdout[-2000:] + done.stderr[-4000:]
        assert "FAILED" not in said
        assert (said["GIVEN-UP"], said["COMMITTED"]) == ("kept", "kept")
        assert "ledger@leftovers_reader={0=1}" in said["OFFSETS"]
        assert said["DELAYS"].startswith('{"offsetTable":{1:0,2:0,')
        assert int(said["LATENCY"]) >= 0
        assert "Traceback" not in server.log()
