"""The total cost of archiving rounds: many tiny objects, and much of one topic, compared with plain PUTs.

    tiny       one message in each of many topics: objects per second, and per CPU-second
    bulk       1 KiB records of one topic: MB of records per CPU-second, and per second
    plain PUT  the same objects by as many threads, and nothing else: the capacity of the store

CPU-seconds are those of the broker and its workers; those of the store's own process are printed separately. The store
is a private MinIO; --directory uses a directory instead.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import uvloop

from bench.archive import TOPIC, fill, offload, store_url
from bench.measure import own_cpu, settle
from bench.raw_load import create
from bench.wire import Client
from infra.objects.open import open_store
from neve.archive.catalog.journal_reader import catalogs
from neve.archive.format.journal import CommittedObject
from tests.kit.server.neve import NeveServer

_TINY = 400  # In bytes of a body.
_UPLOADS = 32
_MB = 1e6
_SETTINGS = {"archivePeriod": "1d", "archiveCompactionEnable": "false", "archiveWorkerPriority": "normal"}


class Cpu:
    """CPU-seconds of the broker, of its workers and of the store, each since creation."""

    def __init__(self, server: NeveServer, store: int | None) -> None:
        self._server, self._broker = server, psutil.Process(server.process.pid)
        self._store = psutil.Process(store) if store is not None else None
        self._before = self._now()

    def since(self) -> tuple[float, float, float]:
        before, now = self._before, self._now()
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]

    def _now(self) -> tuple[float, float, float]:
        broker = own_cpu(self._broker)
        store = own_cpu(self._store) if self._store is not None else 0.0
        return broker, self._server.cpu_seconds() - broker, store


def fill_tiny(broker: str, topics: int) -> None:
    with Client(broker) as client:
        for number in range(topics):
            client.create_topic(f"tiny-{number:05d}", 1)
            client.send(f"tiny-{number:05d}", 0, os.urandom(_TINY // 2).hex().encode())


def objects(url: str) -> list[CommittedObject]:
    (catalog,) = catalogs(open_store(url)).values()
    return catalog.objects()


def measure(case: str, server: NeveServer, store_pid: int | None) -> None:
    """Run a round over all messages, and then upload the same objects without a round."""
    known = {name.key for name in (objects(server.store) if case != "tiny" else [])}
    settle([server])
    cpu, started = Cpu(server, store_pid), time.perf_counter()
    offload(server)
    wall, (broker, workers, of_store) = time.perf_counter() - started, cpu.since()
    names = [name for name in objects(server.store) if name.key not in known]
    count, wire = len(names), sum(name.wire_bytes for name in names) / _MB
    both = max(broker + workers, 0.01)
    print(f"{case}: {count} objects, {wire:,.1f} MB of records as {sum(name.size for name in names) / _MB:,.1f} MB")
    print(f"  round      {count / wall:,.0f} objects/s, {wire / wall:,.1f} MB/s of records, in {wall:.2f} s")
    print(f"             {count / both:,.0f} objects and {wire / both:,.1f} MB of records for each CPU-second")
    print(
        f"             of an object: broker {broker / count * 1e3:.2f} ms, workers {workers / count * 1e3:.2f} ms,",
        end="",
    )
    print(f" and the store's own {of_store / count * 1e3:.2f} ms")
    plain_puts(server.store, names, store_pid)


def plain_puts(url: str, names: Sequence[CommittedObject], store_pid: int | None) -> None:
    target = open_store(url)
    contents = [target.get(name.key) for name in names]
    own, of_store = psutil.Process(), psutil.Process(store_pid) if store_pid is not None else None
    before, store_before = own_cpu(own), own_cpu(of_store) if of_store is not None else 0.0
    started = time.perf_counter()
    with ThreadPoolExecutor(_UPLOADS) as pool:
        puts = [
            pool.submit(target.put, f"plain/{time.time_ns()}-{number}", content, if_absent=True)
            for number, content in enumerate(contents)
        ]
        for put in puts:
            put.result()
    wall, cpu = time.perf_counter() - started, max(own_cpu(own) - before, 0.01)
    of_the_store = own_cpu(of_store) - store_before if of_store is not None else 0.0
    count, wire = len(names), sum(name.wire_bytes for name in names) / _MB
    print(f"  plain PUT  {count / wall:,.0f} objects/s, {wire / wall:,.1f} MB/s of the same records")
    print(f"             {count / cpu:,.0f} objects and {wire / cpu:,.1f} MB of records for each CPU-second")
    own_ms, store_ms = cpu / count * 1e3, of_the_store / count * 1e3
    print(f"             of an object: {own_ms:.2f} ms, and the store's own {store_ms:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=3000)
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--directory", action="store_true", help="the store is a directory")
    options = parser.parse_args()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neve-bench-")))
        url, pid = stack.enter_context(store_url(root, with_minio=not options.directory))
        server = stack.enter_context(NeveServer(root / "neve", store=url, settings=_SETTINGS))
        if options.topics:
            fill_tiny(server.broker, options.topics)
            measure("tiny", server, pid)
        if options.messages:
            create(server.broker, TOPIC)
            uvloop.run(fill(server.broker, options.messages))
            measure("bulk", server, pid)


if __name__ == "__main__":
    main()
