"""Servers of tests leave nothing behind, whatever they do when they are told to end."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.servers import processes
from tests.servers.processes import Processes
from tests.waiting import wait_until

#: Neither ends when it is asked to, and the one that it starts has a session of its own.
DEAF = "trap '' TERM; setsid bash -c \"trap '' TERM; while :; do sleep 60; done\" & while :; do wait; done"


def test_what_a_server_started_ends_with_it_when_it_does_not_hear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
