"""The cost of many topics for a broker and its name server: 1,000, 3,000 and 10,000 topics of eight queues.

    create       CPU time per topic, created one after another, as `mqadmin updateTopic` does; all servers together
    create many  the same, 500 topics in a request: how the others are created
    idle         CPU time of all servers per second without requests: registrations and all periodic work
    route        CPU time of a route query at the name server, of topics in turn
    heartbeat    CPU time of a consumer's heartbeat that subscribes to all topics
    scrape       bytes of /metrics and CPU time (neve)
    memory       of the broker, anonymous: without a message, and with one of each topic
    files        below the store while no queue has a message; bytes on the disk
    start        CPU and wall time of a restart until the broker is known: without a message, and with one of each topic
    restore      from the bucket alone, on an empty disk: CPU and wall time, the peak memory (neve)
    loop         longest turn of the broker's loop by the CPU time of its thread, from the first topic on (neve)

After each size the table shows the growth since the previous one: 1.0 is proportional to the topics, 0.0 is constant.
Apache's broker and name server run the same, one server at a time.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.measure import Server, end_by_signal, settle
from bench.pauses import Cluster, anonymous, pipelined
from bench.wire import ROUTE, SEND_V2, Client, send_ext
from tests.kit.server.apache import ApacheServer
from tests.kit.server.neve import NeveServer

SIZES = (1_000, 3_000, 10_000)
QUEUES = 8
_ONE_BY_ONE = 50  # The number of topics that are created by a request each.
_ROUTES = 2_000
_HEARTBEATS = 5
_SCRAPES = 5
_IDLE_S = 90.0
_SAMPLE_S = 0.05
_WAIT_S = 600.0
_REFUSED_S = 30.0
Found = dict[str, float]


def measure(server: Server, topics: int, served: Served, options: argparse.Namespace) -> Found:
    """Measure a running server without topics."""
    found: Found = {}
    cluster = Cluster(server.broker, topics, QUEUES, 1)
    with Client(server.broker, _WAIT_S) as client:
        one_by_one, cluster.topics = cluster.topics[:_ONE_BY_ONE], cluster.topics[_ONE_BY_ONE:]
        with _cpu(server, found, "create many ms/topic", 1e3 / len(cluster.topics)):
            cluster.create()
        settle([server])
        with _cpu(server, found, "create ms/topic", 1e3 / len(one_by_one)):
            for topic in one_by_one:
                client.create_topic(topic, QUEUES)
        cluster.topics = [*one_by_one, *cluster.topics]
        settle([server])
        found["memory MiB, empty"] = _memory(server) / 2**20
        found["files, empty"], found["disk MiB, empty"] = _files(server)
        with _cpu(server, found, "heartbeat ms", 1e3 / _HEARTBEATS):
            for _ in range(_HEARTBEATS):
                cluster.heartbeats(client)
    with Client(server.namesrv, _WAIT_S) as client, _cpu(server, found, "route us", 1e6 / _ROUTES):
        routes = [dict[str, object](topic=cluster.topics[number % topics]) for number in range(_ROUTES)]
        refused = pipelined(client, ((ROUTE, ext) for ext in routes))
        assert refused == 0, f"{refused} routes are not known"
    settle([server])
    with _cpu(server, found, "idle ms/s", 1e3 / options.idle):  # Registrations and all periodic work.
        time.sleep(options.idle)
    if isinstance(server, NeveServer):
        with _cpu(server, found, "scrape ms", 1e3 / _SCRAPES):
            for _ in range(_SCRAPES):
                found["scrape KiB"] = len(server.get("/metrics")) / 1024
    _restart(server, found, "start", served)
    with Client(server.broker, _WAIT_S) as client:
        places = [(topic, queue) for topic in cluster.topics for queue in range(options.fill)]
        with _cpu(server, found, "first sends us/queue", 1e6 / len(places)):
            for place in places:
                _send(client, place)
    settle([server])
    found["memory MiB, filled"] = _memory(server) / 2**20
    _restart(server, found, "start filled", served)
    if isinstance(server, NeveServer):
        server.post("/archive/offload?roll=1")
        served.ends()
        server.stop()
        _restore(server, found, served)
    return found


def _send(client: Client, place: tuple[str, int]) -> None:
    """Send messages; Apache's broker refuses requests that have waited for long."""
    deadline = time.monotonic() + _REFUSED_S
    while (answer := client.invoke(SEND_V2, send_ext(*place, queues=QUEUES), b"x")).code:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{place}: refused for {_REFUSED_S:.0f} s: code {answer.code}, {answer.remark}")
        time.sleep(_SAMPLE_S)


def _restart(server: Server, found: Found, name: str, served: Served) -> None:
    served.ends()
    server.stop()
    began = time.monotonic()
    if isinstance(server, NeveServer):
        server.start(served.watched)
    else:
        server.start()
    served.begins()
    with Client(server.namesrv, _WAIT_S) as client:
        while client.invoke(ROUTE, {"topic": "topic-00000"}).code:
            time.sleep(_SAMPLE_S)
    found[f"{name}, wall s"] = time.monotonic() - began
    found[f"{name}, CPU s"] = server.cpu_seconds()


def _restore(server: NeveServer, found: Found, served: Served) -> None:
    """Restore into another data directory from the same bucket."""
    fresh = server.directory / "restored"
    bucket = Path(server.store.removeprefix("dir:"))
    moved = server.directory / "bucket"
    shutil.move(bucket, moved)
    restored = NeveServer(fresh, "--restore-from", f"dir:{moved}", store=f"dir:{moved}")
    began = time.monotonic()
    restored.start(served.watched)
    try:
        found["restore, wall s"] = time.monotonic() - began
        found["restore, CPU s"] = restored.cpu_seconds()
        found["restore, peak MiB"] = max(_peak(process.pid) for process in restored.alive()) / 2**20
        found["restore, files"], _ = _files(restored)
    finally:
        restored.kill()


@contextmanager
def _cpu(server: Server, found: Found, name: str, scale: float) -> Iterator[None]:
    spent = server.cpu_seconds()
    yield
    found[name] = (server.cpu_seconds() - spent) * scale


def _memory(server: Server) -> int:
    return max(anonymous(process.pid) for process in server.alive())


def _peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def _files(server: Server) -> tuple[float, float]:
    """Return the number of queue files, and MiB of blocks of all files except text logs."""
    count, blocks = 0, 0
    for path in server.directory.rglob("*"):
        if path.is_file() and not path.name.endswith((".log", ".out")):
            count += "consumequeue" in path.parts
            blocks += path.stat().st_blocks
    return float(count), blocks * 512 / 2**20


class Served:
    """The period in which the loop served: during a start and a stop no client waits for it."""

    def __init__(self, steps: Path) -> None:
        self._steps = steps
        self._times: list[float] = []
        path = f"{Path(__file__).parent / 'steps'}:{os.environ.get('PYTHONPATH', '')}"
        self.watched = {"PYTHONPATH": path, "NEVE_BENCH_STEPS": str(steps)}

    def begins(self) -> None:
        self._times.append(time.monotonic())

    ends = begins

    def turns(self) -> list[dict[str, Any]]:
        """Return long turns, ordered by the CPU time of the loop's thread, the longest first."""
        lines = self._steps.read_text().splitlines() if self._steps.exists() else []
        turns = [turn for turn in map(json.loads, lines) if bisect.bisect(self._times, turn["at"]) % 2]
        return sorted(turns, key=lambda turn: -turn["cpu_ms"])


def _neve(root: Path, topics: int, options: argparse.Namespace) -> Found:
    served = Served(root / "steps")
    server = NeveServer(root / "neve")
    server.start(served.watched)
    served.begins()
    try:
        found = measure(server, topics, served, options)
    finally:
        server.kill()
    turns = served.turns()
    found["loop ms at most"] = turns[0]["cpu_ms"] if turns else 0.0
    for turn in turns[:5]:
        print(f"    a turn of {turn['cpu_ms']:.1f} ms of CPU time: {turn['where'] or 'no code of ours'}", flush=True)
    return found


def _apache(root: Path, topics: int, options: argparse.Namespace) -> Found:
    with ApacheServer(root / "apache") as server:
        return measure(server, topics, Served(root / "steps"), options)


def growth(before: float, now: float, sizes: tuple[int, int]) -> str:
    """Return the exponent of the growth of a cost with the topics, or nothing if the cost is too small."""
    if before <= 0 or now <= 0:
        return "    "
    return f"{math.log(now / before) / math.log(sizes[1] / sizes[0]):4.1f}"


def show(name: str, sizes: list[int], columns: list[Found]) -> None:
    print(f"\n{name:28} " + "".join(f"{size:>14,}     " for size in sizes))
    for figure in columns[-1]:
        cells = []
        for number, column in enumerate(columns):
            before = columns[number - 1].get(figure, 0.0) if number else 0.0
            grown = growth(before, column.get(figure, 0.0), (sizes[number - 1], sizes[number])) if number else "    "
            cells.append(f"{column.get(figure, 0.0):>14,.2f} {grown}")
        print(f"{figure:28} " + "".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--only", choices=("neve", "apache"))
    parser.add_argument("--idle", type=float, default=_IDLE_S, help="seconds without a request")
    parser.add_argument("--fill", type=int, default=1, help="queues of each topic that get a message; each is a file")
    parser.add_argument(
        "--directory", type=Path, help="where the servers keep their data; default: the system's for such"
    )
    options = parser.parse_args()
    end_by_signal()
    kinds: dict[str, Callable[[Path, int, argparse.Namespace], Found]] = {"neve": _neve, "apache": _apache}
    for name, one in kinds.items():
        if options.only in {None, name}:
            columns = []
            for size in options.sizes:
                root = Path(tempfile.mkdtemp(prefix="neve-bench-", dir=options.directory))
                try:
                    print(f"{name}, {size:,} topics", flush=True)
                    columns.append(one(root, size, options))
                finally:
                    subprocess.Popen(["rm", "-rf", root], start_new_session=True)
            show(name, options.sizes, columns)


if __name__ == "__main__":
    main()
