"""The latency of sends while the archive works: neve alone, and under one disturbance at a time.

One producer sends at a steady rate, open-loop: each send is timed from the moment at which it was due
(`bench.open_load`). Undisturbed and disturbed windows alternate; the result is the ratio of their p99, by pairs. All
rows have a pair at each rate before one has a second, and no turn is begun after --minutes: ten of them suffice for two
or three turns on a quiet machine.

    archive      a bulk producer's 200 MB are archived at full speed
    cold         eight groups replay an archived topic, each from another offset
    checkpoint   the catalog is saved, with a million objects (--objects)
    scrape       /metrics is scraped each second, with 10,000 topics and five groups (--topics)
    ttl          the TTL job expires 50,000 objects and deletes them; all its windows belong to one run
    slow         the store answers two seconds late } under archiving rounds,
    503          the store answers 503              } cold reads of eight groups,
    away         the store answers nothing          } and all jobs at once

The first five use one broker with its archive in a directory, the others another with MinIO behind `bench.bad_store`.
Producer and store represent other machines: the load is a real-time process if permitted, and the directory is in
memory if possible, so that no process waits for a processor or a disk that a broker would not share. Besides the p99,
the table has the loop's longest pause, from the broker's metric, and the cores used: by the loop's thread, by the
broker's other threads, which compete for the interpreter, by its workers, and by the load. Apache's broker, alternating
with neve's, provides a reference for the undisturbed value (--no-apache).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from bench.archive import fill
from bench.measure import SIZE, end_by_signal, own_cpu, settle, spread
from bench.pauses import Cluster, create_topics
from bench.raw_load import QUEUES, create
from bench.wire import Client
from infra.clock import SystemClock
from infra.config.properties import DAY
from infra.disk.filesystem import RealDisk
from infra.objects import minio
from infra.objects.open import open_store
from neve.archive.format.journal import Commit, CommittedObject, RowGroup
from neve.archive.format.keys import data_key
from tests.kit.clock.waiting import wait_until
from tests.kit.server.apache import ApacheServer
from tests.kit.server.neve import NeveServer
from tests.kit.server.processes import Processes, free_ports
from tiered.journal.writer import JournalWriter

HOT, BULK, COLD = "hot", "bulk", "cold"
RATES = (1_000, 5_000)
GOAL = 1.2  # The ratio of p99, disturbed to alone.
WARM_S = 0.5
OF_TOPIC = 100
EXPIRED_TOPICS = 500  # With this many objects each, they have the 50,000.
COLD_GROUPS, GROUPS = 8, 5
_BULK, _COLD, _SMALL_BULK = 200_000, 400_000, 10_000
_BATCH = 2_000  # The number of names in a COMMIT.
_BESIDE_APACHE = 2  # In turns.
_JOBS_S = 900.0
_ARCHIVE_BYTES = 8 << 30  # The total of all windows, with a margin.
_CLOCK_TICK = os.sysconf("SC_CLK_TCK")

#: No job starts by itself within a window.
_QUIET = {
    "archivePeriod": "1d",
    "archiveMaxAge": "1d",
    "statePeriod": "1d",
    "expireGrace": "0s",
    "archiveReplacedGrace": "0s",
    "journalCheckpointEntries": "2",
}
#: The store is used as soon as it is requested.
_DEMANDING = {"archiveMinBytes": "256k", "coldCacheBytes": "1m", "coldCacheDiskBytes": "0"}
_ALL_JOBS = ("offload", "ttl", "checkpoint", "state", "sweep", "compaction")


# ---- a broker's archive with a simulated history


def names(topics: Sequence[str], queues: int, newest_ms: int) -> Iterator[CommittedObject]:
    """Return `OF_TOPIC` objects of each topic, grouped by topic."""
    etag, digest = "0" * 32, "0" * 64
    day = time.strftime("%Y-%m-%d", time.gmtime(newest_ms / 1000))
    for topic in topics:
        for number in range(OF_TOPIC):
            runs = [(queue, number * 50, number * 50 + 49) for queue in range(queues)]
            rows, start = 50 * queues, number * 64
            group = RowGroup(0, rows, 4, 20_000, newest_ms, newest_ms - 1000, rows * 700, runs)
            yield CommittedObject(
                key=data_key("", topic, day, "broker-a", start=start, end=start + 64, epoch=1),
                topic=topic, day=day, start=start, end=start + 64, size=21_000, footer=996, etag=etag,
                checksum=("crc32", "0" * 8), sha256=digest, rows=rows, wire_bytes=rows * 700,
                min_time=newest_ms - 1000, max_time=newest_ms, row_groups=[group],
                queues={queue: (first, last, queue * 50) for queue, first, last in runs},
            )  # fmt: skip


def seed(server: NeveServer, expiring: Sequence[str], objects: int) -> None:
    """Add them to the journal of a stopped broker; objects that will expire exist, but are empty."""
    root = server.directory / "data" / "broker"
    store = open_store(server.store)
    journal = JournalWriter(
        store, "", "broker-a", (root / "log_uuid").read_text().strip(), local=root / "archive", disk=RealDisk(),
        clock=SystemClock(),
    )  # fmt: skip
    journal.ownership.attach(1 << 62)
    now = time.time_ns() // 1_000_000
    old = names(expiring, 4, now - 10 * DAY)
    kept = [f"kept-{number:05d}" for number in range(objects // OF_TOPIC)]
    archive = Path(server.store.removeprefix("dir:"))

    def with_objects() -> Iterator[CommittedObject]:
        for name in old:
            path = archive / name.key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            yield name

    coming = itertools.chain(with_objects(), names(kept, QUEUES, now))
    while batch := list(itertools.islice(coming, _BATCH)):
        journal.append(Commit(round=1, names=batch))
    journal.checkpoint_if_due()


# ---- one window


@dataclass(frozen=True, slots=True)
class Window:
    """The results of one run of the load; times in milliseconds, the rest in cores."""

    p50: float
    p99: float
    p999: float
    slowest: float
    late_p99: float
    pause: float
    load: float
    loop: float
    threads: float
    workers: float


@dataclass(slots=True)
class Used:
    """CPU seconds of a server: of the broker's loop, of its other threads, of its children."""

    loop: float = 0.0
    threads: float = 0.0
    workers: float = 0.0

    @classmethod
    def of(cls, server: Processes) -> Used:
        root = server.roots[-1].pid
        loop = _ticks(Path(f"/proc/{root}/task/{root}/stat"))
        own = own_cpu(psutil.Process(root))
        return cls(loop, max(own - loop, 0.0), server.cpu_seconds() - own)


def _ticks(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICK


class Load:
    """The producer's process; it waits for a command to begin."""

    def __init__(self, broker: str, rate: int, seconds: float) -> None:
        arguments = ["send", broker, HOT, SIZE, rate, WARM_S, seconds]
        self._seconds = seconds
        self._process = _piped("bench.open_load", *arguments)
        _said_ready(self._process)

    def run(self, server: Processes, take_pause: Callable[[], float]) -> Window:
        before = Used.of(server)
        took = time.monotonic()
        out, _ = self._process.communicate("go\n", timeout=self._seconds + 60)
        took, after, pause = time.monotonic() - took, Used.of(server), take_pause()
        told = json.loads(out.splitlines()[-1])
        if self._process.returncode or told["failed"]:
            raise RuntimeError(f"the load ended with {self._process.returncode}: {told['failed']} sends failed")
        return Window(
            p50=told["p50"] / 1e3, p99=told["p99"] / 1e3, p999=told["p999"] / 1e3, slowest=told["slowest"] / 1e3,
            late_p99=told["late_p99"] / 1e3, pause=pause * 1e3, load=told["cpu"],
            loop=(after.loop - before.loop) / took, threads=(after.threads - before.threads) / took,
            workers=(after.workers - before.workers) / took,
        )  # fmt: skip


def _piped(module: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _said_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != "READY":
        process.kill()
        raise RuntimeError(f"{process.args!r} did not begin")


# ---- disturbances

#: Started before a window; the yielded function describes at the window's end what has been done meanwhile.
Disturbance = Callable[[], AbstractContextManager[Callable[[], str]]]


@dataclass
class Neve:
    """The broker under test."""

    server: NeveServer
    expiring: list[str] = field(default_factory=list)

    def take_pause(self) -> float:
        return self.server.metric("neve_loop_pause_seconds")

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.server.get("/archive/status")))

    def run_job(self, job: str) -> None:
        self.server.post(f"/jobs/{job}/run")

    def run_jobs(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            self.run_job(job)

    @contextmanager
    def archive(self) -> Iterator[Callable[[], str]]:
        uvloop.run(fill(self.server.broker, _BULK, BULK))
        before = self.status()["backlog_bytes"]
        with _beside(lambda: self.server.post("/archive/offload")):
            yield lambda: f"{(before - self.status()['backlog_bytes']) / 1e6:,.0f} of {before / 1e6:,.0f} MB archived"

    @contextmanager
    def cold(self) -> Iterator[Callable[[], str]]:
        with _replayed(self.server.broker) as got:
            yield got

    @contextmanager
    def ttl(self) -> Iterator[Callable[[], str]]:
        """Run the TTL job, which continues after the windows: nothing may be measured afterwards."""
        with Client(self.server.broker, 600) as client:
            create_topics(client, self.expiring, 4, {"reserve.time": "1"})
        before = self.status()
        self.run_job("ttl")

        def done() -> str:
            now = self.status()
            hidden = before["objects"] - now["objects"]
            return f"{hidden:,} hidden, {now['deleted_objects'] - before['deleted_objects']:,} deleted"

        yield done

    @contextmanager
    def checkpoint(self) -> Iterator[Callable[[], str]]:
        uvloop.run(fill(self.server.broker, _SMALL_BULK, BULK))  # So that there is a change to save.
        self.server.post("/archive/offload")
        before = self.runs("checkpoint")
        self.run_job("checkpoint")
        yield lambda: f"{self.status()['objects']:,} objects, {'' if self.runs('checkpoint') > before else 'not '}whole"
        wait_until(lambda: self.runs("checkpoint") > before, "the checkpoint is written", _JOBS_S)

    def runs(self, job: str) -> int:
        return int(self.status()["jobs"].get(job, 0))

    @contextmanager
    def scrape(self) -> Iterator[Callable[[], str]]:
        sizes: list[int] = []
        with _each_second(lambda: sizes.append(len(self.server.get("/metrics")))):
            yield lambda: f"{len(sizes)} scrapes of {max(sizes, default=0) / 1e6:.1f} MB"

    @contextmanager
    def all_jobs(self, store: subprocess.Popen[str], mood: str) -> Iterator[Callable[[], str]]:
        with _replayed(self.server.broker) as got:
            _tell(store, mood)
            before = self.status()

            def done() -> str:
                now = self.status()
                runs, asked = (
                    sum(now[what].values()) - sum(before[what].values()) for what in ("jobs", "store_requests")
                )
                waits = f"{now['backlog_bytes'] / 1e6:,.1f} MB wait"
                return f"{got()}; {runs} jobs ended, {asked} requests of the broker itself, {waits}"

            try:
                with _each_second(lambda: self.run_jobs(_ALL_JOBS)):
                    yield done
            finally:
                _tell(store, "well")
        self.server.post("/archive/offload")  # Waiting requests do not belong to the next window.


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


@contextmanager
def _replayed(broker: str) -> Iterator[Callable[[], str]]:
    with _piped("bench.open_load", "replay", broker, COLD, COLD_GROUPS) as process:
        _said_ready(process)
        began = time.monotonic()
        _tell(process, "go")

        def got() -> str:
            took = time.monotonic() - began
            out, _ = process.communicate(timeout=60)
            told = json.loads(out)
            return f"{told['got'] / took:,.0f} messages/s read cold, {told['refused']} pulls refused"

        try:
            yield got
        finally:
            process.kill()


@contextmanager
def _beside(work: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join(_JOBS_S)


@contextmanager
def _each_second(work: Callable[[], object]) -> Iterator[None]:
    over = threading.Event()

    def works() -> None:
        work()
        while not over.wait(1.0):
            work()

    with _beside(works):
        try:
            yield
        finally:
            over.set()


# ---- the rows


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the measurement: turns of a row, a window's length, and the time after which no turn begins."""

    repeat: int
    seconds: float
    until: float

    def goes_on(self, turn: int) -> bool:
        return turn < self.repeat and (not turn or time.monotonic() < self.until)


class Rows:
    """Windows by row and rate, alternating between alone and disturbed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pairs: dict[tuple[str, int], list[tuple[Window, Window]]] = defaultdict(list)
        self._beside: dict[int, list[tuple[Window, Window]]] = defaultdict(list)
        self.broken: dict[str, str] = {}

    def measure(self, neve: Neve, disturbances: Mapping[str, Disturbance], limits: Limits) -> None:
        """Measure turn by turn, so that each row has its share of the available time. A failing row is reported."""
        turn = 0
        while limits.goes_on(turn):
            for row, disturbance in disturbances.items():
                for rate in RATES:
                    if row not in self.broken and limits.goes_on(turn):
                        with self._told_if_broken(row):
                            self._pair(row, rate, neve, disturbance)
            turn += 1

    def _pair(self, row: str, rate: int, neve: Neve, disturbance: Disturbance) -> None:
        alone = self._window("alone", rate, neve.server, neve.take_pause)
        settle([neve.server])
        with disturbance() as done:
            self._pairs[row, rate].append((alone, self._disturbed(row, rate, neve, done)))

    def measure_one_run(self, row: str, neve: Neve, disturbance: Disturbance, limits: Limits) -> None:
        """Measure a disturbance that runs once: its windows follow those alone, and are paired by their order."""
        with self._told_if_broken(row):
            alone: dict[int, list[Window]] = {rate: [] for rate in RATES}
            turn = 0
            while limits.goes_on(turn):
                for rate in RATES:
                    alone[rate].append(self._window("alone", rate, neve.server, neve.take_pause))
                turn += 1
            settle([neve.server])
            with disturbance() as done:
                for number in range(turn):
                    for rate in RATES:
                        pair = alone[rate][number], self._disturbed(row, rate, neve, done)
                        self._pairs[row, rate].append(pair)

    def _disturbed(self, row: str, rate: int, neve: Neve, done: Callable[[], str]) -> Window:
        load = Load(neve.server.broker, rate, self._seconds)
        neve.take_pause()
        found = load.run(neve.server, neve.take_pause)
        self._tell(row, rate, found, done())
        return found

    @contextmanager
    def _told_if_broken(self, row: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, AssertionError, OSError, subprocess.SubprocessError) as error:
            self.broken[row] = f"{type(error).__name__}: {error}"
            print(f"  {row} is broken: {self.broken[row]}", flush=True)

    def measure_apache(self, neve: Neve, root: Path, heap: str, limits: Limits) -> None:
        with self._told_if_broken("Apache"), ApacheServer(root, heap=heap) as apache:
            create(apache.broker, HOT)
            for rate in RATES:
                self._window("(warm)", rate, apache, lambda: 0.0)
            turn = 0
            while limits.goes_on(turn):
                for rate in RATES:
                    ours = self._window("alone", rate, neve.server, neve.take_pause)
                    self._beside[rate].append((ours, self._window("Apache", rate, apache, lambda: 0.0)))
                turn += 1

    def _window(
        self, row: str, rate: int, server: NeveServer | ApacheServer, take_pause: Callable[[], float]
    ) -> Window:
        settle([server])
        load = Load(server.broker, rate, self._seconds)
        take_pause()
        found = load.run(server, take_pause)
        self._tell(row, rate, found, "")
        return found

    @staticmethod
    def _tell(row: str, rate: int, found: Window, done: str) -> None:
        print(
            f"  {row:10} {rate:5}/s  p50 {found.p50:6.2f}  p99 {found.p99:7.2f}  p99.9 {found.p999:7.2f}  "
            f"slowest {found.slowest:7.1f}  pause {found.pause:6.1f}  load late {found.late_p99:5.2f} ms  cores: load "
            f"{found.load:.2f} loop {found.loop:.2f} threads {found.threads:.2f} workers {found.workers:.2f}  {done}",
            flush=True,
        )

    def show(self) -> None:
        print(f"\np99 in ms: median (lowest-highest); the ratio is of pairs of windows, the goal is {GOAL}")
        for rate, pairs in self._beside.items():
            self._row(f"Apache {rate}/s", pairs, ("neve", "Apache"), "")
        for (row, rate), pairs in self._pairs.items():
            ratio = statistics.median(_ratios(pairs))
            self._row(f"{row} {rate}/s", pairs, ("alone", "disturbed"), "met" if ratio <= GOAL else "missed")
        for row, why in self.broken.items():
            print(f"{row} is broken: {why}")

    @staticmethod
    def _row(title: str, pairs: list[tuple[Window, Window]], words: tuple[str, str], verdict: str) -> None:
        one, other = ([pair[side].p99 for pair in pairs] for side in (0, 1))
        print(
            f"{title:18} {words[0]} {spread(one, 2):22} {words[1]} {spread(other, 2):22} "
            f"ratio {spread(_ratios(pairs), 2):18} of {len(pairs)} {verdict}"
        )


def _ratios(pairs: list[tuple[Window, Window]]) -> list[float]:
    return [disturbed.p99 / alone.p99 for alone, disturbed in pairs]


# ---- the servers


def with_directory(stack: ExitStack, root: Path, rows: Sequence[str], options: argparse.Namespace) -> Neve:
    """Run the prepared broker of the first rows."""
    began = time.monotonic()
    settings = {**_QUIET, **dict(pair.split("=", 1) for pair in options.set)}
    store = f"dir:{stack.enter_context(_in_memory()) or root / 'neve'}/archive"
    neve = Neve(NeveServer(root / "neve", store=store, settings=settings, own_session=False))
    neve.expiring = [f"old-{number:03d}" for number in range(EXPIRED_TOPICS)] if "ttl" in rows else []
    objects = options.objects if "checkpoint" in rows else 0
    if neve.expiring or objects:
        with neve.server:
            pass
        seed(neve.server, neve.expiring, objects)
    stack.enter_context(neve.server)
    prepare(neve, options.topics if "scrape" in rows else 0)
    print(
        f"{len(neve.expiring) * OF_TOPIC + objects:,} objects named, {options.topics:,} topics: ready in "
        f"{time.monotonic() - began:.0f} s", flush=True,
    )  # fmt: skip
    return neve


@contextmanager
def _in_memory() -> Iterator[Path | None]:
    """Return a directory in memory if it has room for the archive of the rows."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < _ARCHIVE_BYTES:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="neve-bench-", dir=memory) as directory:
        yield Path(directory)


def with_bad_store(stack: ExitStack, root: Path, options: argparse.Namespace) -> tuple[Neve, subprocess.Popen[str]]:
    """Run the broker of the last rows; yield the store's input."""
    store = stack.enter_context(minio.running(root / "minio"))
    minio.create_bucket(store, "bench")
    (port,) = free_ports(1)
    bad = stack.enter_context(_piped("bench.bad_store", port, store.endpoint.removeprefix("http://")))
    stack.callback(bad.kill)
    _said_ready(bad)
    os.environ.update(store.environment)
    url = f"s3://bench/?endpoint=http://127.0.0.1:{port}&region=us-east-1"
    settings = {**_QUIET, **_DEMANDING, **dict(pair.split("=", 1) for pair in options.set)}
    neve = Neve(stack.enter_context(NeveServer(root / "neve-s3", store=url, settings=settings, own_session=False)))
    prepare(neve, 0)
    return neve, bad


def prepare(neve: Neve, topics: int) -> None:
    broker = neve.server.broker
    for topic in (HOT, BULK, COLD):
        create(broker, topic)
    uvloop.run(fill(broker, _COLD, COLD))
    neve.server.post("/archive/offload?roll=1&evict=1")
    if topics:
        cluster = Cluster(broker, topics, 1, GROUPS)
        cluster.create()
        cluster.fill(heartbeats=False)


_OF_DIRECTORY = ("archive", "cold", "checkpoint", "scrape", "ttl")
_OF_BAD_STORE = ("slow", "503", "away")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = (*_OF_DIRECTORY, *_OF_BAD_STORE)
    parser.add_argument("--rows", nargs="+", choices=choices, default=choices, metavar="ROW", help=", ".join(choices))
    parser.add_argument("--repeat", type=int, default=3, help="pairs of windows of each row and rate, at most")
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no further turn is begun")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window")
    parser.add_argument("--objects", type=int, default=1_000_000, help="in the catalog, for the row checkpoint")
    parser.add_argument("--topics", type=int, default=10_000, help="for the row scrape")
    parser.add_argument("--no-apache", action="store_true")
    parser.add_argument("--heap", default="2g", help="heap of Apache's broker")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of neve's broker")
    options = parser.parse_args()
    end_by_signal()
    began, told = time.monotonic(), Rows(options.seconds)
    root = Path(tempfile.mkdtemp(prefix="neve-bench-"))
    of_directory = [row for row in _OF_DIRECTORY if row in options.rows]
    of_bad_store = [row for row in _OF_BAD_STORE if row in options.rows]

    def limits(share: float) -> Limits:
        return Limits(options.repeat, options.seconds, began + share * options.minutes * 60)

    try:
        if of_directory or not options.no_apache:
            with ExitStack() as stack:
                run_with_directory(stack, root, of_directory, told, options, limits(0.65 if of_bad_store else 1.0))
        if of_bad_store:
            with ExitStack() as stack:
                neve, store = with_bad_store(stack, root, options)
                moods = {row: functools.partial(neve.all_jobs, store, row) for row in of_bad_store}
                told.measure(neve, moods, limits(1.0))
    finally:
        subprocess.Popen(["rm", "-rf", root], start_new_session=True)
        told.show()
        print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    return len(told.broken) > 0


def run_with_directory(
    stack: ExitStack, root: Path, rows: Sequence[str], told: Rows, options: argparse.Namespace, limits: Limits
) -> None:
    neve = with_directory(stack, root, rows, options)
    if not options.no_apache:
        told.measure_apache(
            neve, root / "apache", options.heap, dataclasses.replace(limits, repeat=min(limits.repeat, _BESIDE_APACHE))
        )
    disturbances: dict[str, Disturbance] = {
        "archive": neve.archive,
        "cold": neve.cold,
        "checkpoint": neve.checkpoint,
        "scrape": neve.scrape,
    }
    told.measure(neve, {row: work for row, work in disturbances.items() if row in rows}, limits)
    if "ttl" in rows:
        told.measure_one_run("ttl", neve, neve.ttl, limits)


if __name__ == "__main__":
    sys.exit(main())
