"""The archive: offload, cold read and Spark scan, each compared with the simplest way to do the same work.

    offload      wire bytes archived per CPU-second of the broker and its workers
    cold read    a consumer of evicted messages, compared with range GETs of the same row groups and nothing else
    Spark scan   the topic through neve.spark, compared with one Parquet file of the same rows

The messages are 1 KiB of text that compresses about two to one. Directory store; --minio starts a private MinIO
instead.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from bench.measure import SIZE, raw_command, run_window, spread
from bench.raw_load import QUEUES, Producer, create
from bench.wire import OPAQUE_FIRST, SendFrames
from infra.objects import minio
from infra.objects.open import open_store
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import catalogs
from tests.kit.server.neve import NeveServer
from tests.kit.wire.admin_port import post_request

TOPIC = "bench"
_POOL = 4096
_MB = 1e6


class TextFrames(SendFrames):
    """Frames with different bodies: slices of a pool of random hexadecimal text."""

    def __init__(self, topic: str, size: int) -> None:
        super().__init__(topic, b"x" * size, QUEUES)
        pool = random.Random(1).randbytes(size * _POOL // 2).hex().encode()
        self._bodies = [pool[at : at + size] for at in range(0, len(pool), size)]
        self._heads = [(before, after[:-size]) for before, after in self._parts]

    def frame(self, number: int) -> bytes:
        before, after = self._heads[number % self.queues]
        return b'%b"opaque":%d%b%b' % (before, OPAQUE_FIRST + number, after, self._bodies[number % _POOL])


async def fill(broker: str, count: int, topic: str = TOPIC) -> None:
    host, _, port = broker.rpartition(":")
    frames = TextFrames(topic, SIZE)
    loop = asyncio.get_running_loop()
    transport, producer = await loop.create_connection(lambda: Producer(frames, 256, count), host, int(port))
    await producer.done
    transport.abort()


@contextmanager
def store_url(root: Path, *, with_minio: bool) -> Iterator[tuple[str, int | None]]:
    """Return the URL of the store, and its process if it has one."""
    if not with_minio:
        yield f"dir:{root / 'archive'}", None
        return
    with minio.running(root / "minio") as running:
        os.environ.update(running.environment)
        minio.create_bucket(running, "bench")
        yield running.url("bench"), running.pid


def offload(server: NeveServer) -> None:
    call = post_request(f"http://{server.admin}/archive/offload?roll=1&evict=1")
    with urllib.request.urlopen(call, timeout=600) as answer:
        answer.read()


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def range_gets(url: str, catalog: Catalog) -> None:
    """Read every row group once, and discard its bytes."""
    store = open_store(url)
    for name in catalog.objects(TOPIC):
        for group in name.row_groups:
            store.get_range(name.key, group.offset, group.length)


def measure_offload(server: NeveServer, count: int) -> tuple[Catalog, int]:
    create(server.broker, TOPIC)
    uvloop.run(fill(server.broker, count))
    cpu = server.cpu_seconds()
    wall = timed(lambda: offload(server))
    cpu = server.cpu_seconds() - cpu
    (catalog,) = catalogs(open_store(server.store)).values()
    names = catalog.objects(TOPIC)
    wire = sum(name.wire_bytes for name in names)
    stored = sum(name.size for name in names)
    print(f"offload     {wire / _MB:,.0f} MB of records as {stored / _MB:,.0f} MB in {len(names)} objects")
    print(f"            {wire / _MB / wall:,.0f} MB/s, {wire / _MB / max(cpu, 0.01):,.0f} MB per CPU-second")
    return catalog, wire


def measure_cold_read(server: NeveServer, catalog: Catalog, wire: int, repeat: int) -> None:
    rows = sum(name.rows for name in catalog.objects(TOPIC))
    cold, plain, economy = [], [], []
    for _ in range(repeat):
        rate = run_window(raw_command("consume", server.broker, TOPIC, rows), server)
        cold.append(rate.per_second * wire / rows / _MB)
        economy.append(rate.per_cpu_second * wire / rows / _MB)
        plain.append(wire / _MB / timed(lambda: range_gets(server.store, catalog)))
    print(f"cold read   {spread(cold)} MB/s of records, {spread(economy)} MB per CPU-second")
    print(f"range GETs  {spread(plain)} MB/s of the same records, encoded; ratio {median(cold) / median(plain):.2f}x")


def measure_spark(url: str, catalog: Catalog, root: Path, wire: int, repeat: int) -> None:
    import pyarrow as pa  # noqa: PLC0415 - the other parts run without Spark
    import pyarrow.parquet as pq  # noqa: PLC0415

    from neve.spark import read_topic, session  # noqa: PLC0415

    store = open_store(url)
    tables = [pq.read_table(pa.BufferReader(store.get(name.key))) for name in catalog.objects(TOPIC)]
    plain_file = root / "plain.parquet"
    pq.write_table(pa.concat_tables(tables), plain_file, compression="zstd")
    del tables
    spark: Any = session(url, master="local[2]", conf={"spark.ui.enabled": "false"})
    question = ("count(*)", "sum(length(body))", "max(store_timestamp)")
    scans: dict[str, Callable[[], Any]] = {
        "neve.spark": lambda: read_topic(spark, TOPIC, store=url).selectExpr(*question).collect(),
        "one file": lambda: spark.read.parquet(str(plain_file)).selectExpr(*question).collect(),
    }
    speeds: dict[str, list[float]] = {name: [] for name in scans}
    for scan in scans.values():
        scan()  # The JVM is warm after one run.
    for _ in range(repeat):
        for name, scan in scans.items():
            speeds[name].append(wire / _MB / timed(scan))
    spark.stop()
    for name, values in speeds.items():
        print(f"Spark scan  {name:10} {spread(values)} MB/s of records")
    print(f"            ratio {median(speeds['neve.spark']) / median(speeds['one file']):.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--minio", action="store_true", help="a private MinIO instead of a directory")
    parser.add_argument("--no-spark", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neve-bench-")))
        url, _ = stack.enter_context(store_url(root, with_minio=options.minio))
        server = stack.enter_context(NeveServer(root / "neve", store=url))
        catalog, wire = measure_offload(server, options.messages)
        measure_cold_read(server, catalog, wire, options.repeat)
        if not options.no_spark:
            measure_spark(url, catalog, root, wire, options.repeat)


if __name__ == "__main__":
    main()
