"""The cost of a cold replay compared with a hot one: the same backlog from the local log, and from MinIO.

    hot         a backlog of unarchived 1 KiB messages, read by a new group
    cold        as many messages that only the archive has, read by a new group
    apache      the hot backlog of Apache RocketMQ 5.3.3 (--apache)
    range GETs  the row groups of the cold topic from the same MinIO and nothing else, one by one and eight at a time

Each is read by one connection with a pull of 32 messages in flight for each queue, and by a push consumer of the stock
Java client. CPU includes the broker and its workers, from before the consumer began until it ended; speed is measured
between the consumer's marks. Cases alternate. Bodies are text that compresses about two to one; --equal makes them
equal. One cold replay precedes the first turn, for the state of a broker that has been serving for a while. The memory
cache for row groups is smaller than half of the topic and the disk cache is off, so a replay finds nothing cached: the
fetched bytes are checked.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.archive import TOPIC, fill, offload
from bench.measure import SIZE, Server, end_by_signal, java_command, own_cpu, raw_command, settle, spread
from bench.raw_load import QUEUES, create
from bench.wire import Client
from infra.objects import minio
from infra.objects.open import open_store
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import catalogs
from tests.kit.server.apache import ApacheServer
from tests.kit.server.neve import NeveServer

HOT = "backlog"
_LOAD_S = 600.0
_MB = 1e6
_AT_ONCE = 8
_FETCHED_SHARE = 0.85  # A consumer ends when it has 95 % of all messages.
_CACHE_MAX = 256 << 20

Spread = list[float]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one replay: messages per second, and CPU microseconds per message."""

    per_second: float
    broker_us: float
    workers_us: float

    @property
    def total_us(self) -> float:
        return self.broker_us + self.workers_us


def replay(command: list[str], server: Server) -> Cost:
    """Run one consumer from its start to its end."""
    own, all_of_it = _cpu(server)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_LOAD_S, check=True)
    own_after, all_after = _cpu(server)
    marks = [tuple(map(int, line.split()[1:3])) for line in ended.stdout.splitlines() if line.startswith("MARK")]
    (start, before), (end, after) = marks
    broker, everything = own_after - own, all_after - all_of_it
    per_message = 1e6 / after
    return Cost((after - before) / ((end - start) / 1e9), broker * per_message, (everything - broker) * per_message)


def _cpu(server: Server) -> tuple[float, float]:
    """Return the CPU time of the server's own processes, and of those with their children."""
    everything, roots = server.cpu_seconds(), {root.pid for root in server.roots}
    return sum(own_cpu(process) for process in server.alive() if process.pid in roots), everything


def cold_replay(command: list[str], server: NeveServer, groups: int) -> Cost:
    """Replay from the store with a running worker."""
    with Client(server.broker) as client:
        next(client.read(TOPIC, QUEUES - 1, 0, 1))
    settle([server])
    before = server.metric("neve_cold_fetches_total")
    cost = replay(command, server)
    fetched = server.metric("neve_cold_fetches_total") - before
    if fetched < _FETCHED_SHARE * groups:
        raise RuntimeError(f"{fetched:.0f} row groups came from the store, where {groups} are")
    return cost


class Gets:
    """Reads the same bytes from the same store, and discards them."""

    def __init__(self, url: str, catalog: Catalog) -> None:
        self._store = open_store(url)
        self._ranges = [
            (name.key, group.offset, group.length) for name in catalog.objects(TOPIC) for group in name.row_groups
        ]

    def one_by_one(self) -> None:
        for place in self._ranges:
            self._store.get_range(*place)

    def at_once(self) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for got in [pool.submit(self._store.get_range, *place) for place in self._ranges]:
                got.result()


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Measure wall seconds, and CPU seconds of this process."""
    start, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - start, time.process_time() - cpu


def archive(server: NeveServer, count: int, *, equal: bool) -> tuple[Catalog, int, int, int]:
    """Archive the cold topic; return its catalog, wire bytes, row groups and messages, a few more than requested."""
    create(server.broker, TOPIC)
    _fill(server.broker, TOPIC, count, equal=equal)
    offload(server)
    (catalog,) = catalogs(open_store(server.store)).values()
    names = catalog.objects(TOPIC)
    rows = sum(name.rows for name in names)
    if rows < count:
        raise RuntimeError(f"{rows} of {count} messages are in the archive")
    stored = sum(name.size for name in names)
    print(f"{rows:,} messages: {stored / _MB:,.0f} MB in {len(names)} objects")
    return catalog, sum(name.wire_bytes for name in names), sum(len(name.row_groups) for name in names), rows


def _fill(broker: str, topic: str, count: int, *, equal: bool) -> None:
    if equal:
        subprocess.run(raw_command("fill", broker, topic, SIZE, count), check=True)
    else:
        uvloop.run(fill(broker, count, topic))


class Figures:
    """The figures of all turns, by consumer and case."""

    def __init__(self, wire_each: float) -> None:
        self._wire_each = wire_each
        self._costs: dict[tuple[str, str], list[Cost]] = defaultdict(list)
        self._gets: dict[str, Spread] = defaultdict(list)

    def add(self, consumer: str, case: str, cost: Cost) -> None:
        self._costs[consumer, case].append(cost)
        speed = cost.per_second * self._wire_each / _MB
        print(
            f"  {consumer:16} {case:7} {speed:7,.0f} MB/s {cost.total_us:6.2f} us a message"
            f" (workers {cost.workers_us:.2f})",
            flush=True,
        )

    def add_gets(self, how: str, wire: int, wall: float, cpu: float) -> None:
        self._gets[how].append(wire / _MB / wall)
        us = cpu / (wire / self._wire_each) * 1e6
        print(f"  range GETs       {how:10} {wire / _MB / wall:7,.0f} MB/s {us:6.2f} us a message", flush=True)

    def show(self) -> None:
        print("\nmedian (lowest-highest)")
        print(f"{'consumer':16} {'case':7} {'MB/s of records':>24} {'us a message':>20} {'broker':>20} {'workers':>20}")
        for (consumer, case), costs in self._costs.items():
            speed = [cost.per_second * self._wire_each / _MB for cost in costs]
            total, own = [cost.total_us for cost in costs], [cost.broker_us for cost in costs]
            workers = [cost.workers_us for cost in costs]
            cpu = " ".join(f"{spread(us, 2):>20}" for us in (total, own, workers))
            print(f"{consumer:16} {case:7} {spread(speed):>24} {cpu}")
        for how, speeds in self._gets.items():
            print(f"{'range GETs':16} {how:10} {spread(speeds):>21}")
        plain = max((statistics.median(speeds) for speeds in self._gets.values()), default=0.0)
        for consumer in dict.fromkeys(consumer for consumer, _ in self._costs):
            self._compare(consumer, plain)

    def _compare(self, consumer: str, plain: float) -> None:
        cold = self._costs[consumer, "cold"]
        speed = statistics.median(cost.per_second for cost in cold) * self._wire_each / _MB
        for case in ("hot", "apache"):
            others = self._costs.get((consumer, case), [])
            if others:
                ratios = [one.total_us / other.total_us for one, other in zip(cold, others, strict=True)]
                print(f"{consumer}: CPU a message, cold over {case}: {spread(ratios, 2)}")
        goal = min(300, plain / 2)
        print(f"{consumer}: cold {speed:,.0f} MB/s, {speed / plain:.2f} of plain range GETs; goal {goal:,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=600_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--equal", action="store_true", help="bodies that are all alike, as bench/consume.py has them")
    parser.add_argument("--no-java", action="store_true", help="pipelined pulls alone")
    parser.add_argument("--apache", action="store_true", help="Apache's hot backlog, too")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of neve's broker")
    options = parser.parse_args()
    end_by_signal()
    cache = min(_CACHE_MAX, options.messages * SIZE * 9 // 20)
    caches = {"coldCacheBytes": cache, "coldCacheDiskBytes": 0}
    settings = {"archivePeriod": "1h", **caches, **dict(pair.split("=", 1) for pair in options.set)}
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neve-bench-")))
        store = stack.enter_context(minio.running(root / "minio"))
        os.environ.update(store.environment)
        minio.create_bucket(store, "bench")
        neve = stack.enter_context(NeveServer(root / "neve", store=store.url("bench"), settings=settings))
        catalog, wire, groups, rows = archive(neve, options.messages, equal=options.equal)
        cases: list[tuple[str, str, Server]] = [("hot", HOT, neve), ("cold", TOPIC, neve)]
        if options.apache:
            cases.append(("apache", HOT, stack.enter_context(ApacheServer(root / "apache", heap="2g"))))
        for case, topic, server in cases:
            if case != "cold":
                create(server.broker, topic)
                _fill(server.broker, topic, options.messages, equal=options.equal)
        figures, gets = Figures(wire / rows), Gets(neve.store, catalog)
        consumers = ["pipelined pulls"] + ([] if options.no_java else ["stock Java"])
        cold_replay(raw_command("consume", neve.broker, TOPIC, options.messages), neve, groups)
        for turn in range(options.repeat):
            for consumer in consumers:
                for case, topic, server in cases[:: -1 if turn % 2 else 1]:
                    settle([server])
                    command = raw_command("consume", server.broker, topic, options.messages)
                    if consumer == "stock Java":
                        home = server.directory / "load"
                        command = java_command(home, "consume", server.namesrv, topic, options.messages)
                    cost = cold_replay(command, neve, groups) if case == "cold" else replay(command, server)
                    figures.add(consumer, case, cost)
            figures.add_gets("one by one", wire, *timed(gets.one_by_one))
            figures.add_gets("8 at once", wire, *timed(gets.at_once))
        figures.show()


if __name__ == "__main__":
    main()
