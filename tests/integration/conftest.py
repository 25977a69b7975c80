"""`neve up` as a user starts it: its own process, ports that the system chose, its data below the test's directory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.servers import free_ports

START_DEADLINE = 60
STOP_DEADLINE = 60


@dataclass
class RunningNeve:
    """Where it listens. `process` may be killed by the test."""

    namesrv: str
    broker: str
    admin: str
    process: subprocess.Popen[bytes]
    log: Path
    ready: dict[str, Any]

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_DEADLINE)

    def kill(self) -> None:
        """SIGKILL to the whole group: nothing gets to say goodbye."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_DEADLINE)


def _ready_line(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """The first line of output that is JSON, read beside a deadline."""
    found: list[dict[str, Any]] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                value = json.loads(line)
                if isinstance(value, dict) and "namesrv" in value:
                    found.append(value)
                    return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(START_DEADLINE)
    if not found:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"`neve up` did not come up (exit code {process.poll()}):\n{log.read_text()[-4000:]}")
    return found[0]


@contextlib.contextmanager
def _running(directory: Path, *arguments: str) -> Iterator[RunningNeve]:
    directory.mkdir(parents=True, exist_ok=True)
    namesrv_port, port = free_ports(2)
    command = [
        str(Path(sys.executable).with_name("neve")), "up",
        "--data", str(directory / "data"), "--namesrv-port", str(namesrv_port), "--port", str(port), *arguments,
    ]  # fmt: skip
    log = directory / "neve-up.log"
    with log.open("ab") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
    try:
        ready = _ready_line(process, log)
        yield RunningNeve(ready["namesrv"], ready["broker"], ready.get("admin", ""), process, log, ready)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_DEADLINE)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(STOP_DEADLINE)
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture(scope="session")
def neve_up() -> Callable[..., AbstractContextManager[RunningNeve]]:
    """`with neve_up(tmp_path, "--set", "k=v") as neve:`; the same directory again continues with the same data."""
    return _running


@pytest.fixture(scope="module")
def namesrv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name server of a cluster for the whole module; NEVE_TEST_NAMESRV names one that is up already."""
    outside = os.environ.get("NEVE_TEST_NAMESRV")
    if outside:
        yield outside
        return
    with _running(tmp_path_factory.mktemp("neve")) as neve:
        yield neve.namesrv
