"""Tests of server processes for tests: they are always ended completely and get unique ports."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.kit.clock.waiting import wait_until
from tests.kit.server import processes
from tests.kit.server.processes import Processes, free_ports

#: Ignores SIGTERM, and starts a process in another session that ignores it, too.
DEAF = "trap '' TERM; setsid bash -c \"trap '' TERM; while :; do sleep 60; done\" & while :; do wait; done"


def test_stop_kills_child_processes_that_ignore_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_STOP_S", 0.2)
    server = Processes(tmp_path)
    server.spawn(["bash", "-c", DEAF], "bash.log")
    started = list[psutil.Process]()

    def has_started_all() -> bool:
        started[:] = server.alive()
        return any(process.name() == "sleep" for process in started)

    try:
        wait_until(has_started_all, "it has started another one")
        assert server.stop() != 0
        _, left = psutil.wait_procs(started, timeout=10)
        assert not left
    finally:
        for process in started:
            if process.is_running():
                process.kill()


DRAWS = """
import json, sys
from tests.kit.server.processes import free_ports
print(json.dumps(sorted({free_ports(1)[0] for _ in range(10_000)})), flush=True)
sys.stdin.read()
"""


def test_free_ports_of_two_processes_are_disjoint_and_not_ephemeral() -> None:
    with ExitStack() as stack:
        drawing = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", DRAWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            for _ in range(2)
        ]
        drawn = list[set[int]]()
        for process in drawing:
            assert process.stdout is not None
            drawn.append(set(json.loads(process.stdout.readline())))
        for process in drawing:
            process.communicate()
    one, other = drawn
    assert len(one) > 50
    assert len(other) > 50
    assert not one & other
    lowest_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(one | other) < lowest_of_connections


def test_free_ports_are_not_repeated_and_reserve_the_port_two_below() -> None:
    ports = [free_ports(1)[0] for _ in range(50)] + free_ports(50)
    assert len(set(ports)) == 100
    assert not {port - 2 for port in ports} & set(ports)
