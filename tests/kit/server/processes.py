"""Servers as separate processes: how tests and measurements start and stop them and read their logs.

Ports are free ones on loopback. Each process has its own session and is ended by its id, together with its children. If
a `with` block fails, the end of the log is shown.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any, Self

import psutil

_READY_S = 60.0
_STOP_S = 60.0
_TOLD = 4000  # In characters of the log.
_LOWEST_PORT, _EPHEMERAL, _REGION = 20_000, 32_768, 500


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, with port − 2 free as well: RocketMQ clients may connect to a broker's VIP port.

    No other process gets them: they are below the system's ephemeral ports, and in a range that is reserved for this
    process. Port − 2 is never returned itself.
    """
    found = list[int]()
    for _ in range(_REGION):
        if len(found) == count:
            return found
        port = _region(os.getpid()).next_port()
        if port not in found and _is_free(port) and _is_free(port - 2):
            found.append(port)
    raise RuntimeError(f"{count} ports: of {_REGION} too few are free")


class _Region:
    """A range of ports that no other test process uses while this one lives."""

    def __init__(self) -> None:
        # An abstract socket name, in the same network namespace as the ports; it ends with its process.
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        starts = [*range(_LOWEST_PORT, _EPHEMERAL - _REGION, _REGION)]
        shift = os.getpid() % len(starts)
        start = next(filter(self._is_claimed, starts[shift:] + starts[:shift]), None)
        if start is None:
            raise RuntimeError(f"{len(starts)} processes of tests have all regions of ports")
        self._ports = itertools.cycle(port for port in range(start, start + _REGION) if port % 4 > 1)
        self._turn = threading.Lock()

    def _is_claimed(self, start: int) -> bool:
        try:
            self._claim.bind(f"\0neve tests have ports from {start}")
        except OSError:
            return False
        return True

    def next_port(self) -> int:
        """Return the ports in rotation, because a recently returned one may not be in use yet."""
        with self._turn:
            return next(self._ports)


@cache
def _region(_process: int) -> _Region:
    """Return the region of this process; a forked process has its own."""
    return _Region()


def _is_free(port: int) -> bool:
    """Return whether the port is free on all addresses."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def accepts(address: str) -> bool:
    """Return whether a server listens there."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, int(port))) == 0


class NotReady(Exception):
    """A server ended, or printed nothing, instead of becoming ready; the message has the end of its log."""


class Processes:
    """The processes of one server: ended or killed together, their CPU time summed."""

    def __init__(self, directory: Path, *, own_session: bool = True) -> None:
        """Create them; `own_session` matters because Linux may schedule by session, so priorities count within one."""
        self.directory = directory
        self._popen = {"start_new_session": True} if own_session else {"process_group": 0}
        self.roots: list[subprocess.Popen[str]] = []
        self._logs: set[str] = set()
        directory.mkdir(parents=True, exist_ok=True)

    def spawn(
        self, command: list[str], log: str, env: Mapping[str, str] | None = None, *, piped: bool = False
    ) -> subprocess.Popen[str]:
        with (self.directory / log).open("a") as err:
            out: int | IO[str] = subprocess.PIPE if piped else err
            process = subprocess.Popen(
                command, stdout=out, stderr=err, text=True, env={**os.environ, **(env or {})}, **self._popen
            )
        self.roots.append(process)
        self._logs.add(log)
        return process

    def first_line(self, process: subprocess.Popen[str], log: str) -> dict[str, Any]:
        """Return the JSON line that reports readiness; without it, kill the server and raise with its log."""
        assert process.stdout is not None
        out = process.stdout
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.append(out.readline()), daemon=True)
        reader.start()
        reader.join(_READY_S)
        if not lines or not lines[0].startswith("{"):
            self.kill()
            raise NotReady(f"{process.args!r} did not get ready: {lines}\n{self.log(log)[-_TOLD:]}")
        ready: dict[str, Any] = json.loads(lines[0])
        return ready

    def log(self, name: str = "neve.log") -> str:
        """Return the log so far."""
        return (self.directory / name).read_text(errors="replace")

    def alive(self) -> list[psutil.Process]:
        """Return all running processes."""
        found: list[psutil.Process] = []
        for root in self.roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(root.pid)
                found += [process, *process.children(recursive=True)]
        return found

    def cpu_seconds(self) -> float:
        """Return user and system time; that of ended workers is in their parent's children times."""
        total = 0.0
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def signal(self, number: int) -> None:
        """Signal the started processes, not their children."""
        for root in self.roots:
            with contextlib.suppress(ProcessLookupError):
                os.kill(root.pid, number)

    def kill(self) -> None:
        """SIGKILL all of them at once."""
        self._kill_all(self.alive())
        self._reap()

    def _kill_all(self, victims: Iterable[psutil.Process]) -> None:
        for root in self.roots:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(root.pid, signal.SIGKILL)
        for victim in victims:  # A worker may have its own session.
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()

    def stop(self) -> int:
        """SIGTERM in reverse order of starting, SIGKILL after a time-out. Return the exit status of the last one."""
        status, started = 0, self.alive()
        for root in reversed(self.roots):
            with contextlib.suppress(ProcessLookupError):
                os.kill(root.pid, signal.SIGTERM)
            try:
                status = root.wait(_STOP_S) or status
            except subprocess.TimeoutExpired:
                status = -signal.SIGKILL
                self._kill_all(started)
        self._reap()
        return status

    def _reap(self) -> None:
        for root in self.roots:
            root.wait()
            if root.stdout is not None:
                root.stdout.close()
        self.roots.clear()

    def start(self) -> Self:
        """Start the server; return once it serves."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.kill()  # Started processes must not outlive their test.
            raise

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.stop()
        if kind is not None:
            for path in sorted({Path(self.directory, name) for name in self._logs}):
                sys.stderr.write(f"--- the end of {path}\n{path.read_text(errors='replace')[-_TOLD:]}\n")
