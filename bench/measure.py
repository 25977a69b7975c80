"""Shared parts of the benchmarks: two servers side by side, a window between two MARK lines, medians and spread."""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench import jvm
from tests.kit.server.apache import ApacheServer
from tests.kit.server.neve import NeveServer
from tests.kit.server.processes import Processes

SIZE = 1024
JAVA_SOURCES = Path(__file__).parent / "java"
_LOAD_TIMEOUT_S = 600.0
#: A server below this share of a core is idle; an idle JVM uses a sixth.
_SETTLE_S, _SETTLED_SHARE, _SETTLE_TIMEOUT_S = 1.0, 0.3, 60.0
#: The load generator uses a server's compiler, unlike small clients.
_LOAD_FLAGS = ["-server", "-Xms512m", "-Xmx512m", "-XX:+UseG1GC"]

Server = NeveServer | ApacheServer


@dataclass(frozen=True, slots=True)
class Rate:
    """One run: messages per second, and messages per CPU-second of all the broker's processes."""

    per_second: float
    per_cpu_second: float


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Add the options of every comparison."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--heap", default="2g", help="heap of Apache's broker")
    parser.add_argument("--sync-flush", action="store_true", help="both brokers answer when a message is on the disk")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="of neve's broker, such as archivePeriod=1h for a run in which it archives nothing",
    )  # fmt: skip
    return parser


@contextmanager
def side_by_side(options: argparse.Namespace) -> Iterator[dict[str, Server]]:
    """Run both servers on one file system, with their default settings except for those of `arguments`."""
    flush = {"flushDiskType": "SYNC_FLUSH"} if options.sync_flush else {}
    settings = flush | dict(pair.split("=", 1) for pair in options.set)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neve-bench-")))
        neve = stack.enter_context(NeveServer(root / "neve", settings=settings))
        apache = stack.enter_context(ApacheServer(root / "apache", heap=options.heap, settings=flush))
        yield {"neve": neve, "apache": apache}


def raw_command(*args: object) -> list[str]:
    return [sys.executable, "-m", "bench.raw_load", *map(str, args)]


def java_command(home: Path, *args: object) -> list[str]:
    """Return the command of the Java generator."""
    home.mkdir(parents=True, exist_ok=True)
    return jvm.java(jvm.classes(JAVA_SOURCES), "Load", *map(str, args), home=home, flags=_LOAD_FLAGS)


def settle(servers: Iterable[Processes]) -> None:
    """Wait until the servers finished their previous work: flushes, garbage collection, archiving rounds."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    busy = {server: server.cpu_seconds() for server in servers}
    while busy and time.monotonic() < deadline:
        time.sleep(_SETTLE_S)
        now = {server: server.cpu_seconds() for server in busy}
        busy = {server: now[server] for server in busy if now[server] - busy[server] >= _SETTLED_SHARE * _SETTLE_S}


def own_cpu(process: psutil.Process) -> float:
    """Return user and system seconds of this one process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def end_by_signal() -> None:
    """End this process on SIGTERM as on an interrupt: the servers that it started end before it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def run_window(command: list[str], server: Server) -> Rate:
    """Run a generator; count messages between its two marks, by its clock, and the broker's CPU time meanwhile."""
    marks: list[tuple[int, int, float]] = []
    other: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            word, *values = line.split() or [""]  # The Java client prints its logging configuration.
            if word == "MARK":
                marks.append((int(values[0]), int(values[1]), server.cpu_seconds()))
            elif word == "FAILED" and values != ["0"]:
                other.append(line)
        errors = process.stderr.read()
        status = process.wait(_LOAD_TIMEOUT_S)
    if len(marks) != 2 or status or other:
        raise RuntimeError(f"{command[-8:]} ended with {status}, {len(marks)} marks: {other}{errors[-2000:]}")
    (start, before, cpu_before), (end, after, cpu_after) = marks
    count = after - before
    # A window shorter than a clock tick of CPU time has no CPU figure.
    return Rate(count / ((end - start) / 1e9), count / max(cpu_after - cpu_before, 0.01))


class Table:
    """Runs by case and server, printed as medians, their spread and the ratio of the two compared servers."""

    def __init__(self, title: str, compared: tuple[str, str] = ("neve", "apache")) -> None:
        self._title, self._compared = title, compared
        self._runs: dict[str, dict[str, list[Rate]]] = defaultdict(lambda: defaultdict(list))

    def add(self, case: str, server: str, rate: Rate) -> None:
        self._runs[case][server].append(rate)
        print(f"  {case:28} {server:7} {rate.per_second:12,.0f}/s {rate.per_cpu_second:12,.0f}/CPU-s", flush=True)

    def show(self) -> None:
        print(f"\n{self._title}: median (lowest-highest)")
        head = ("case", "server", "messages/s", "messages/CPU-s of the broker")
        print(f"{head[0]:28} {head[1]:7} {head[2]:>34} {head[3]:>34}")
        for case, servers in self._runs.items():
            for name, rates in servers.items():
                speed = spread([rate.per_second for rate in rates])
                economy = spread([rate.per_cpu_second for rate in rates])
                print(f"{case:28} {name:7} {speed:>34} {economy:>34}")
            if servers.keys() >= set(self._compared):
                one, other = (servers[name] for name in self._compared)
                speed_ratio = _ratio([r.per_second for r in one], [r.per_second for r in other])
                economy_ratio = _ratio([r.per_cpu_second for r in one], [r.per_cpu_second for r in other])
                print(f"{'':28} {'ratio':7} {speed_ratio:>34} {economy_ratio:>34}")


def spread(values: Sequence[float], places: int = 0) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):,.{places}f} ({low:,.{places}f}-{high:,.{places}f})"


def _ratio(ours: list[float], theirs: list[float]) -> str:
    return f"{statistics.median(ours) / statistics.median(theirs):.2f}x"
