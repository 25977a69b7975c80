"""The time of Spark on neve's archive, compared with plain Spark on one Parquet file of the same rows.

    full         all columns of all rows, discarded
    columns      minimum and maximum of two integer columns
    bodies       body and store time, total bytes
    pruned       all columns of the rows of a fiftieth of the time
    key          all columns of the one row with a key
    stream       all columns of all rows by a stream with `availableNow`, discarded
    hot stream   the same for rows that only the broker has (option namesrv), without a comparison
    verify       every object decoded and compared with the journal; compared with plain Spark's `full`
    sink         body, tag and key of 100,000 rows of a file, into a topic, without a comparison

    plain  the file, zstd, by spark.read.parquet        topic   by read_topic, the JVM's reader
    source format("neve")                               job     a job's function

Spark is local[1]. CPU time is that of the JVM, its Python workers and this driver, without the broker and the store.
Cases alternate, after one turn that does not count; the results are medians and their spread. MB are wire bytes of
records.

Afterwards a topic of --objects objects (100,000), one per five minutes, in MinIO: the cost of planning all of it, and
of planning and scanning an hour of it, with requests as counted by a proxy. The journal has all names; only the objects
of that hour, and one on either side, exist: a request for another one would fail.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from bench.archive import store_url
from bench.measure import end_by_signal, spread
from infra.objects import minio
from infra.objects.open import open_store
from infra.objects.store import ObjectStore
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import catalogs
from neve.archive.format.journal import Checkpoint, Commit, CommittedObject, Deleted, Epoch, RowGroup, encode_entry
from neve.archive.format.keys import checkpoint_key, data_key, journal_key, pack_key
from neve.archive.rows.schema import SCHEMA
from neve.client import Message, sync
from neve.client.send.batch_sender import BatchItem
from neve.spark import read_topic, session
from neve.spark.reader import ROW_SCHEMA
from neve.spark.verify import verify
from tests.kit.archive.archive_on_paper import row
from tests.kit.server.neve import NeveServer
from tests.kit.server.processes import free_ports

COLD, HOT, SUNK = "cold", "hot", "sunk"
QUEUES = 8
PRUNED = 50  # The number of parts of the time, of which one is read.
SUNK_ROWS = 100_000
STORED = SCHEMA.names
#: One topic must be archived at once, and another must stay unarchived during the measurement.
SETTINGS = {"archivePeriod": "1h", "archiveMaxAge": "1d", "archiveWorkerPriority": "normal"}
_CONF = {
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.driver.memory": "2g",
    "spark.sql.shuffle.partitions": "1",
}
_MB = 1e6


class Cost(NamedTuple):
    """The cost of one run: wall and CPU seconds."""

    wall: float
    cpu: float


class Meter:
    """Measures one Spark with its child processes."""

    def __init__(self, spark: Any) -> None:
        self._jvm = psutil.Process(spark.sparkContext._gateway.proc.pid)

    def measured(self, action: Callable[[], object]) -> Cost:
        wall, cpu = time.perf_counter(), self._cpu()
        action()
        return Cost(time.perf_counter() - wall, self._cpu() - cpu)

    def _cpu(self) -> float:
        total = time.process_time()
        for process in (self._jvm, *self._jvm.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue  # Included in the sum of its parent.
            total += times.user + times.system + times.children_user + times.children_system
        return total


class Size(NamedTuple):
    """The amount of data that a run of a case reads."""

    rows: int
    wire: int


class Figures:
    """Runs by case and way."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[str, list[Cost]]] = defaultdict(lambda: defaultdict(list))
        self._sizes: dict[str, Size] = {}

    def add(self, case: str, way: str, size: Size, cost: Cost) -> None:
        self._runs[case][way].append(cost)
        self._sizes[case] = size
        print(f"  {case:12} {way:7} {cost.wall:7.2f} s {cost.cpu:7.2f} CPU-s", flush=True)

    def show(self) -> None:
        print(
            f"\n{'case':12} {'way':7} {'wall s':>20} {'CPU s':>20} {'rows/CPU-s':>12} {'MB/CPU-s':>9}"
            "  of plain: CPU, wall"
        )
        for case, ways in self._runs.items():
            rows, wire = self._sizes[case]
            for way, runs in ways.items():
                wall, cpu = ([getattr(run, name) for run in runs] for name in ("wall", "cpu"))
                middle = statistics.median(cpu)
                told = f"{case:12} {way:7} {spread(wall, 2):>20} {spread(cpu, 2):>20} "
                told += f"{rows / middle:>12,.0f} {wire / _MB / middle:>9,.0f}"
                if way != "plain" and "plain" in ways:
                    pairs = list(zip(runs, ways["plain"], strict=True))
                    shares = [
                        [getattr(one, name) / getattr(other, name) for one, other in pairs] for name in ("cpu", "wall")
                    ]
                    told += "  " + ", ".join(spread(share, 2) for share in shares)
                print(told)


# ---- the archive, and the file beside it


def filled(server: NeveServer, topic: str, count: int, size: int) -> None:
    """Fill with JSON that compresses about two to one, a key for each message, and one of ten tags."""
    chance = Random(1)
    with sync.connect(server.namesrv) as client:
        client.admin.create_topic(topic, QUEUES)
        sender = client.batch_sender()
        for first in range(0, count, 2000):
            sender.put_all([_message(topic, number, size, chance) for number in range(first, min(first + 2000, count))])
        sender.flush()


def _message(topic: str, number: int, size: int, chance: Random) -> BatchItem:
    told = f'{{"order": {number}, "price": {chance.randrange(100_000) / 100}, "note": "'
    noise = f"{chance.getrandbits(4 * max(size - len(told) - 2, 4)):x}"
    return BatchItem(Message(topic, f'{told}{noise}"}}'.encode(), f"T{number % 10}", (f"k{number}",)))


class Archive(NamedTuple):
    """The cold topic, and the plain file of its rows."""

    url: str
    namesrv: str
    size: Size
    since: int
    until: int
    key: str
    plain: str
    to_be_sunk: str


def archived(spark: Any, server: NeveServer, root: Path, options: argparse.Namespace) -> Archive:
    filled(server, COLD, options.messages, options.size)
    server.post("/archive/offload?roll=1&evict=1")
    (catalog,) = catalogs(open_store(server.store)).values()
    names = catalog.objects(COLD)
    size = Size(sum(name.rows for name in names), sum(name.wire_bytes for name in names))
    stored = sum(name.size for name in names)
    first, last = min(name.min_time for name in names), max(name.max_time for name in names)
    part = max((last - first) // PRUNED, 1)
    since = first + part * (PRUNED // 2)
    plain = root / "plain"
    one = read_topic(spark, COLD, store=server.store).select(*STORED).coalesce(1)
    one.write.option("compression", "zstd").parquet(plain.as_uri())
    file = sum(path.stat().st_size for path in plain.glob("*.parquet"))
    print(
        f"{size.rows:,} messages, {size.wire / _MB:,.0f} MB on the wire, {stored / _MB:,.0f} MB in {len(names)} "
        f"objects; the plain file has {file / _MB:,.0f} MB", flush=True,
    )  # fmt: skip
    if size.rows < options.messages:
        raise RuntimeError(f"{size.rows} of {options.messages} messages are in the archive")
    to_be_sunk = root / "to-be-sunk"
    spark.read.parquet(plain.as_uri()).select("body", "tags", "keys").limit(SUNK_ROWS).write.parquet(
        to_be_sunk.as_uri()
    )
    filled(server, HOT, options.messages // 2, options.size)
    with sync.connect(server.namesrv) as client:
        client.admin.create_topic(SUNK, QUEUES)
    key = f"k{size.rows // 2}"
    return Archive(server.store, server.namesrv, size, since, since + part, key, plain.as_uri(), to_be_sunk.as_uri())


# ---- the cases


def into_nothing(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


class Cases:
    """The measurements, by case and way."""

    def __init__(self, spark: Any, archive: Archive, root: Path) -> None:
        self._spark, self._archive, self._root = spark, archive, root
        self._count = 0

    def all(self) -> dict[str, tuple[Size, dict[str, Callable[[], object]]]]:
        from pyspark.sql import functions as f  # noqa: PLC0415

        whole, archive = self._archive.size, self._archive
        two = (f.min("queue_id"), f.max("queue_offset"))
        bodies = (f.sum(f.length("body")), f.max("store_timestamp"))
        low, high = (f.timestamp_millis(f.lit(at)) for at in (archive.since, archive.until))
        in_time = (f.col("store_timestamp") >= low) & (f.col("store_timestamp") < high)
        with_key = f.array_contains("keys", archive.key)
        times = {"startingTimestamp": str(archive.since), "endingTimestamp": str(archive.until)}
        everything, numbers = " ".join(ROW_SCHEMA.split()), "queue_id INT, queue_offset BIGINT"
        return {
            "full": (whole, self._scans(lambda frame: into_nothing(frame.select(*STORED)), everything)),
            "columns": (whole, self._scans(lambda frame: frame.agg(*two).collect(), numbers)),
            "bodies": (
                whole, self._scans(lambda frame: frame.agg(*bodies).collect(), "body BINARY, store_timestamp TIMESTAMP")
            ),
            "pruned": (whole, {
                "plain": lambda: into_nothing(self._plain().where(in_time)),
                "topic": lambda: into_nothing(self._topic(start=archive.since, end=archive.until)),
                "source": lambda: into_nothing(self._source(**times)),
            }),
            "key": (whole, {
                "plain": lambda: _one(self._plain().where(with_key)),
                "topic": lambda: _one(self._topic().where(with_key)),
                "source": lambda: _one(self._source(key=archive.key)),
            }),
            "stream": (whole, {
                "plain": lambda: self._streamed(
                    self._spark.readStream.schema(self._plain().schema).parquet(archive.plain)
                ),
                "source": lambda: self._streamed(self._reading(self._spark.readStream, COLD).load()),
            }),
            "hot stream": (Size(whole.rows // 2, whole.wire // 2), {
                "source": lambda: self._streamed(
                    self._reading(self._spark.readStream, HOT).option("namesrv", archive.namesrv).load()
                ),
            }),
            "verify": (whole, {"plain": lambda: into_nothing(self._plain()), "job": self._verified}),
            "sink": (
                Size(min(whole.rows, SUNK_ROWS), whole.wire * min(whole.rows, SUNK_ROWS) // whole.rows),
                {"source": self._sunk},
            ),
        }  # fmt: skip

    def _scans(self, work: Callable[[Any], object], schema: str) -> dict[str, Callable[[], object]]:
        return {
            "plain": lambda: work(self._plain()),
            "topic": lambda: work(self._topic()),
            "source": lambda: work(self._reading(self._spark.read, COLD).schema(schema).load()),
        }

    def _plain(self) -> Any:
        return self._spark.read.parquet(self._archive.plain)

    def _topic(self, **bounds: Any) -> Any:
        return read_topic(self._spark, COLD, store=self._archive.url, **bounds)

    def _source(self, **more: str) -> Any:
        return self._reading(self._spark.read, COLD).options(**more).load()

    def _reading(self, reader: Any, topic: str) -> Any:
        return reader.format("neve").options(store=self._archive.url, subscribe=topic, startingOffsets="earliest")

    def _streamed(self, frame: Any) -> None:
        writer = frame.writeStream.format("noop").option("checkpointLocation", self._place("checkpoint"))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        if not query.lastProgress or query.lastProgress["numInputRows"] < self._archive.size.rows // 2:
            raise RuntimeError(f"the stream had fewer rows: {query.lastProgress}")

    def _verified(self) -> None:
        found = verify(self._spark, store=self._archive.url, topics=[COLD])
        if not found.ok or found.rows != self._archive.size.rows:
            raise RuntimeError(f"{found}")

    def _sunk(self) -> None:
        rows = self._spark.read.parquet(self._archive.to_be_sunk)
        rows.write.format("neve").options(namesrv=self._archive.namesrv, topic=SUNK).mode("append").save()

    def _place(self, name: str) -> str:
        self._count += 1
        return str(self._root / f"{name}-{self._count}")

    def clear(self) -> None:
        """Remove the output of the last run."""
        for kind in ("table", "checkpoint"):
            shutil.rmtree(self._root / f"{kind}-{self._count}", ignore_errors=True)


def _one(frame: Any) -> None:
    found = frame.collect()
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} rows with one key")


def compare(options: argparse.Namespace) -> None:
    figures = Figures()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neve-bench-")))
        url, _ = stack.enter_context(store_url(root, with_minio=options.store == "minio"))
        server = stack.enter_context(NeveServer(root / "neve", store=url, settings=SETTINGS))
        spark: Any = session(url, master="local[1]", conf=_CONF)
        stack.callback(spark.stop)
        archive = archived(spark, server, root, options)
        meter, cases = Meter(spark), Cases(spark, archive, root)
        chosen = {case: told for case, told in cases.all().items() if not options.only or case in options.only}
        for turn in range(options.repeat + 1):
            for case, (size, ways) in chosen.items():
                for way, run in ways.items():
                    cost = meter.measured(run)
                    cases.clear()
                    if turn:
                        figures.add(case, way, size, cost)
    figures.show()


# ---- a topic of very many objects

BROKER, MANY = "broker-a", "many"
_EACH_MS, _ROWS = 300_000, 20  # One object per five minutes, and its number of messages.
_OF_COMMIT = 256
_BEGIN_MS = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1000)
HOUR_MS = 3_600_000


def written(store: ObjectStore, count: int, since: int) -> int:
    """Write all names, and the objects of the hour from `since` on with neighbours; return the hour's row count."""
    made = pa.BufferOutputStream()
    pq.write_table(_rows_of(0), made, compression="zstd")
    size, rows = made.tell(), 0
    catalog = Catalog()
    catalog.apply(0, Epoch(epoch=1, owner="o", log_uuid="u", broker=BROKER))
    for first in range(0, count, _OF_COMMIT):
        names = []
        for number in range(first, min(first + _OF_COMMIT, count)):
            at = _BEGIN_MS + number * _EACH_MS
            name = _name(number, size)
            if since - _EACH_MS <= at < since + HOUR_MS + _EACH_MS:
                made = pa.BufferOutputStream()
                pq.write_table(_rows_of(number), made, compression="zstd")
                data = made.getvalue().to_pybytes()
                store.put(name.key, data, if_absent=True)
                name = msgspec.structs.replace(name, size=len(data))
                rows += _ROWS * (since <= at < since + HOUR_MS)
            names.append(name)
        catalog.apply(catalog.next_seq, Commit(round=catalog.next_seq, names=names))
    through = catalog.next_seq - 1
    for seq in range(through + 1):  # These are not read, because the checkpoint covers them.
        store.put(journal_key("", BROKER, seq), encode_entry(Deleted(keys=[], epoch=1)), if_absent=True)
    told = catalog.write_checkpoint(BROKER, lambda pack, data: _put(store, pack_key("", BROKER, through, pack), data))
    _put(store, checkpoint_key("", BROKER, through), told.content)
    _put(store, journal_key("", BROKER, through + 1), encode_entry(Checkpoint(key="", through_seq=through, epoch=1)))
    return rows


def _rows_of(number: int) -> pa.Table:
    first, at = number * _ROWS, _BEGIN_MS + number * _EACH_MS
    each = _EACH_MS // _ROWS
    return pa.Table.from_pylist([row(0, first + n, at + n * each, first + n) for n in range(_ROWS)], SCHEMA)


def _name(number: int, size: int) -> CommittedObject:
    first, oldest = number * _ROWS, _BEGIN_MS + number * _EACH_MS
    last, newest = first + _ROWS - 1, oldest + _EACH_MS // _ROWS * (_ROWS - 1)
    start, end = number * 10_000, (number + 1) * 10_000
    day = datetime.fromtimestamp(oldest / 1000, UTC).strftime("%Y-%m-%d")
    return CommittedObject(
        key=data_key("", MANY, day, BROKER, start=start, end=end, epoch=1),
        topic=MANY, day=day, start=start, end=end, size=size, footer=0, etag=f"{number:032x}",
        checksum=("crc32", f"{number:08x}"), sha256=f"{number:064x}", rows=_ROWS, wire_bytes=10_000, min_time=oldest,
        max_time=newest, queues={0: (first, last, 0)},
        row_groups=[RowGroup(0, _ROWS, 4, size - 4, newest, oldest, 10_000, [(0, first, last)])],
    )  # fmt: skip


def _put(store: ObjectStore, key: str, data: bytes) -> None:
    store.put(key, data, if_absent=True)


@contextmanager
def counting(endpoint: str) -> Iterator[tuple[str, Callable[[], dict[str, int]]]]:
    """Run a counting proxy; yield its address, and a function that returns the requests since its last call."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "bench.counted_store", str(port), endpoint.removeprefix("http://")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as proxy:
        given, answers = proxy.stdin, proxy.stdout
        assert given is not None
        assert answers is not None
        answers.readline()

        def asked() -> dict[str, int]:
            given.write("\n")
            given.flush()
            found: dict[str, int] = json.loads(answers.readline())
            return found

        try:
            yield f"http://127.0.0.1:{port}", asked
        finally:
            proxy.kill()


def many_objects(options: argparse.Namespace) -> None:
    count = options.objects
    since = _BEGIN_MS + count // 2 * _EACH_MS // HOUR_MS * HOUR_MS
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neve-bench-")))
        server = stack.enter_context(minio.running(root / "minio"))
        os.environ.update(server.environment)
        minio.create_bucket(server, "bench")
        rows = written(open_store(server.url("bench")), count, since)
        endpoint, asked = stack.enter_context(counting(server.endpoint))
        url = f"s3://bench/?endpoint={endpoint}&region=us-east-1"
        spark: Any = session(url, master="local[1]", conf=_CONF)
        stack.callback(spark.stop)
        meter = Meter(spark)

        def source(**times: str) -> Any:
            return spark.read.format("neve").options(store=url, subscribe=MANY, **times).load()

        hour = {"startingTimestamp": str(since), "endingTimestamp": str(since + HOUR_MS)}
        works: dict[str, Callable[[], object]] = {
            "topic, all planned": lambda: _planned(read_topic(spark, MANY, store=url)),
            "topic, an hour read": lambda: _checked(
                read_topic(spark, MANY, store=url, start=since, end=since + HOUR_MS), rows
            ),
            "source, all planned": lambda: _planned(source()),
            "source, an hour read": lambda: _checked(source(**hour), rows),
        }
        print(f"\n{count:,} objects, {rows} rows in the hour's {HOUR_MS // _EACH_MS}")
        for what, work in works.items():
            work()
            asked()
            costs = []
            for _ in range(options.repeat):
                costs.append(meter.measured(work))
            requests = {name: found / options.repeat for name, found in sorted(asked().items())}
            wall, cpu = [one.wall for one in costs], [one.cpu for one in costs]
            told = ", ".join(f"{number:g} {name}" for name, number in requests.items())
            each = f"  {statistics.median(wall) / count * 1e3:.3f} ms an object" if "planned" in what else ""
            print(f"{what:21} {spread(wall, 2)} s, {spread(cpu, 2)} CPU-s{each}  {told}", flush=True)


def _planned(frame: Any) -> None:
    """Plan: files are divided into tasks, and no task is started."""
    frame._jdf.queryExecution().toRdd().getNumPartitions()


def _checked(frame: Any, rows: int) -> None:
    found = len(frame.collect())
    if found != rows:
        raise RuntimeError(f"{found} rows of {rows}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=400_000)
    parser.add_argument("--size", type=int, default=1024, help="of a body")
    parser.add_argument("--repeat", type=int, default=3, help="turns that count")
    parser.add_argument("--store", choices=["dir", "minio"], default="dir")
    parser.add_argument("--only", nargs="+", metavar="CASE")
    parser.add_argument("--objects", type=int, default=100_000, help="of the large topic; 0: none")
    options = parser.parse_args()
    end_by_signal()
    if options.messages:
        compare(options)
        if options.objects:  # In a JVM that has not used another S3.
            subprocess.run([sys.executable, "-m", "bench.spark", *sys.argv[1:], "--messages", "0"], check=True)
    elif options.objects:
        many_objects(options)


if __name__ == "__main__":
    main()
