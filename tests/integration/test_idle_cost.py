"""The cost of an idle broker. The bounds are loose; the figures are printed (`pytest -s`)."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

from tests.kit.server.neve import Serving, settings_as_options

MEMORY_KIB = 150 * 1024
START_SECONDS = 10
CPU_SHARE = 0.05
WATCHED_SECONDS = 10


def family(pid: int) -> list[int]:
    """Return the process and its descendants."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(one for path in children for child in path.read_text().split() for one in family(int(child)))]


def anonymous_kib(pid: int) -> int:
    found = re.search(r"^Anonymous:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_idle_broker_uses_little_memory_and_cpu(tmp_path: Path) -> None:
    settings = {
        "storePathRootDir": tmp_path / "data", "storeUrl": f"dir:{tmp_path / 'store'}", "listenPort": 0, "adminPort": 0,
        "brokerIP1": "127.0.0.1", "mappedFileSizeCommitLog": "64m",
    }  # fmt: skip
    began = time.monotonic()
    with Serving(tmp_path, "broker", *settings_as_options(settings)) as broker:
        started = time.monotonic() - began
        pid = broker.process.pid
        before, began = sum(map(cpu_seconds, family(pid))), time.monotonic()
        threading.Event().wait(WATCHED_SECONDS)  # This sleep is the measurement interval, not a wait for a condition.
        members = family(pid)
        share = (sum(map(cpu_seconds, members)) - before) / (time.monotonic() - began)
        memory = sum(map(anonymous_kib, members))
        code = broker.stop()
    print(f"start {started:.2f} s, {len(members)} processes, {memory / 1024:.1f} MiB anonymous, {share:.2%} of a core")
    assert code == 0
    assert started < START_SECONDS
    assert memory <= MEMORY_KIB
    assert share < CPU_SHARE
