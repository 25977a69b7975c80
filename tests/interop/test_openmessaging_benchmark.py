"""The RocketMQ driver of the OpenMessaging Benchmark: its admin calls, and a short workload with its settings."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import jvm
from tests.kit.server.neve import NeveServer

pytestmark = pytest.mark.servers
_SOURCES = Path(__file__).parent / "java_benchmark"
_TOPICS, _EACH = 2, 500


def test_benchmark_driver_creates_its_topics_and_runs_a_workload(tmp_path: Path) -> None:
    with NeveServer(tmp_path / "neve") as server:
        command = jvm.java(
            jvm.classes(_SOURCES), "Workload", server.namesrv, str(_TOPICS), str(_EACH), home=tmp_path / "client"
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        count = _TOPICS * _EACH
        lines = [line for line in done.stdout.splitlines() if line.startswith(("TOPIC", "SENT"))]
        assert lines == [
            *["TOPIC {queue.type=BatchCQ}"] * _TOPICS, f"SENT {count} RECEIVED {count}"
        ], done.stdout[-2000:] + done.stderr[-4000:]  # fmt: skip
        assert "Traceback" not in server.log()
