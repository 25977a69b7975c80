"""Tests of Delta tables: a table has exactly the rows of its archive, for every reader and after every fault."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable as ForeignTable
from deltalake import QueryBuilder, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaProtocolError
from hypothesis import given, settings
from hypothesis import strategies as st

import neve.archive
from infra.clock import ManualClock
from infra.objects.open import open_store
from infra.objects.store import (
    AccessDenied,
    ObjectStore,
    ObjectStoreError,
    PreconditionFailed,
    StoreUnavailable,
    UnknownOutcome,
)
from lifecycle.delta_tables import DeltaTables
from neve.archive.delta.changes import MirroredTopics
from neve.archive.delta.deletion_vector import deletion_vector
from neve.archive.delta.log import read_table
from neve.archive.delta.table import (
    COLUMNS,
    PARTITIONS,
    PROTOCOL,
    add,
    encode_lines,
    metadata,
    path_in,
    remove,
    visible_file,
)
from neve.archive.format.journal import Expire, Unexpire
from neve.archive.format.keys import escape
from neve.archive.rows.schema import SCHEMA
from tests.kit.archive.archive_at_random import T0, ArchiveAtRandom
from tests.kit.archive.records import TOPIC
from tests.kit.store.memory_store import MemoryStore
from tiered.write import delta_table

ENTRIES = int(os.environ.get("NEVE_DELTA_ENTRIES", "60"))
SERVERS = Path(__file__).parents[2] / "kit" / "server"
DAY_MS = 86_400_000
PLACE = "broker, queue_id, queue_offset, commit_log_offset"
Row = tuple[Any, ...]


class Rules(NamedTuple):
    delta_topics: Sequence[str] = (TOPIC,)
    journal_retention_ms: int = 7 * DAY_MS


class OfBroker(NamedTuple):
    """The broker whose journal is published."""

    store: ObjectStore
    broker: str
    prefix: str = ""


def tables(store: ObjectStore, broker: str, rules: Rules | None = None, now: int = T0) -> DeltaTables:
    return DeltaTables(OfBroker(store, broker), lambda: rules or Rules(), ManualClock(now), lambda: now)


def by_delta(root: Path, query: str = f"SELECT {PLACE} FROM rows") -> list[Row]:
    found = pa.table(QueryBuilder().register("rows", ForeignTable(str(root))).execute(query).read_all())
    return sorted(tuple(row.values()) for row in found.to_pylist())


class OtherReader:
    """A reader in its own process, because it needs other library versions than these tests."""

    def __init__(self, python: str, program: str, table: str) -> None:
        """Start the process. `table` is the format of a table reference in a query."""
        command = [python, str(SERVERS / program)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._table = table

    def rows(self, root: Path) -> list[Row]:
        return sorted(tuple(row) for row in self.ask(f"SELECT {PLACE} FROM {self.name(root)}"))

    def name(self, root: Path) -> str:
        return self._table.format(root)

    def ask(self, query: str) -> Any:
        given, answers = self.process.stdin, self.process.stdout
        assert given is not None and answers is not None
        given.write(query + "\n")
        given.flush()
        return json.loads(answers.readline())


@pytest.fixture
def by_duckdb() -> Iterator[OtherReader | None]:
    """Where `make delta` has installed it."""
    yield from _reader("NEVE_DELTA_DUCKDB", "duckdb_delta.py", "delta_scan('{}')")


@pytest.fixture
def by_spark() -> Iterator[OtherReader | None]:
    """Where `make delta` has installed it."""
    yield from _reader("NEVE_DELTA_SPARK", "spark_delta.py", "delta.`{}`")


def _reader(variable: str, program: str, table: str) -> Iterator[OtherReader | None]:
    python = os.environ.get(variable)
    if python is None:
        yield None
        return
    reader = OtherReader(python, program, table)
    with reader.process:
        yield reader


def by_archive(store: Path) -> list[Row]:
    columns = [name.strip() for name in PLACE.split(",")]
    found = neve.archive.dataset(f"dir:{store}", TOPIC, bodies="stored").to_table(columns=columns)
    return sorted(tuple(row[name] for name in columns) for row in found.to_pylist())


# ---- readers


def test_delta_table_equals_archive_after_each_entry(
    tmp_path: Path, by_duckdb: OtherReader | None, by_spark: OtherReader | None
) -> None:
    """Two brokers, one with a name that paths encode; at random, a job is restarted."""
    directory = tmp_path / "store"
    directory.mkdir()
    store = open_store(f"dir:{directory}")
    dice = random.Random(5)
    archives = [ArchiveAtRandom(store, broker, tmp_path / str(n), n) for n, broker in enumerate(("a", "b%2 ü"))]
    jobs = [tables(store, one.broker) for one in archives]
    told: dict[str, int] = {}
    for _ in range(ENTRIES):
        number = dice.randrange(2)
        kind = archives[number].step()
        told[kind] = told.get(kind, 0) + 1
        if dice.random() < 0.2:
            jobs[number] = tables(store, archives[number].broker)
        jobs[number].run()
        if archives[0].live() or archives[1].live():
            rows = by_archive(directory)
            assert by_delta(directory / "topic=orders") == rows, kind
            for reader in filter(None, (by_duckdb, by_spark)):
                assert reader.rows(directory / "topic=orders") == rows, (kind, reader.process.args)
    assert {"Commit", "Expire", "Replace", "Erase"} <= told.keys()
    if by_spark is not None:
        refuses_to_write(by_spark, directory / "topic=orders")
        assert by_spark.rows(directory / "topic=orders") == by_archive(directory)


def refuses_to_write(spark: OtherReader, root: Path) -> None:
    name = spark.name(root)
    for statement in (
        f"DELETE FROM {name} WHERE queue_offset = 1",
        f"UPDATE {name} SET tags = 'x'",
        f"INSERT INTO {name} SELECT * FROM {name}",
        f"OPTIMIZE {name}",
        f"VACUUM {name} RETAIN 1000 HOURS",
        f"RESTORE TABLE {name} TO VERSION AS OF 0",
    ):
        refusal = spark.ask(statement)
        assert isinstance(refusal, str), (statement, refusal)
        is_older = statement.startswith("RESTORE") and "Not all files from version 0 are available" in refusal
        assert is_older or "neveManaged" in refusal, (statement, refusal)


class Readers(NamedTuple):
    """A store with a table of several commits and hidden rows."""

    root: Path
    archive: ArchiveAtRandom
    job: DeltaTables
    store: Path


@pytest.fixture
def table(tmp_path: Path) -> Readers:
    directory = tmp_path / "store"
    directory.mkdir()
    store = open_store(f"dir:{directory}")
    archive = ArchiveAtRandom(store, "b%", tmp_path / "log", 3)
    job = tables(store, "b%")
    for _ in range(4):
        archive.commit()
    archive.expire()
    while archive.expire_in_part() is None or not any(held[1] for held in hidden(archive)):
        archive.commit()
    job.run()
    return Readers(directory / "topic=orders", archive, job, directory)


def hidden(archive: ArchiveAtRandom) -> list[tuple[str, tuple[tuple[int, int], ...]]]:
    minimums = {queue: archive.catalog.recorded_minimum(TOPIC, queue) for queue in range(3)}
    found = [(name.key, visible_file(name, minimums)) for name in archive.live()]
    return [(key, one.hidden) for key, one in found if one is not None]


def test_table_columns_equal_the_archive(table: Readers) -> None:
    rows = QueryBuilder().register("rows", ForeignTable(str(table.root))).execute("SELECT * FROM rows").read_all()
    ours = sorted(pa.table(rows).to_pylist(), key=place)
    theirs = sorted(
        neve.archive.dataset(f"dir:{table.store}", TOPIC, bodies="stored").to_table().to_pylist(), key=place
    )
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys() == {name for name, _ in COLUMNS}
        assert {**mine, "dt": str(mine["dt"])} == {**other, "dt": str(other["dt"])}


def place(row: dict[str, Any]) -> tuple[int, int]:
    return row["queue_id"], row["queue_offset"]


def test_statistics_skip_no_matching_row(table: Readers) -> None:
    rows = by_archive(table.store)
    for low in range(max(row[2] for row in rows) + 2):
        found = by_delta(table.root, f"SELECT {PLACE} FROM rows WHERE queue_offset >= {low} AND queue_id <= 1")
        assert found == [row for row in rows if row[2] >= low and row[1] <= 1]
    times = by_delta(table.root, f"SELECT {PLACE}, store_timestamp FROM rows")
    for at in sorted({row[-1] for row in times if row[-1] is not None}):
        later = by_delta(table.root, f"SELECT {PLACE} FROM rows WHERE store_timestamp > '{at.isoformat()}'")
        assert later == [row[:-1] for row in times if row[-1] is not None and row[-1] > at]


def test_table_schema_equals_object_schema() -> None:
    kinds: dict[Any, Any] = {
        pa.int32(): "integer", pa.int64(): "long", pa.timestamp("ms", tz="UTC"): "timestamp", pa.string(): "string",
        pa.bool_(): "boolean", pa.binary(): "binary",
    }  # fmt: skip
    found = {name: kind for name, kind in COLUMNS if name not in PARTITIONS}
    assert list(found) == SCHEMA.names
    for field in SCHEMA:
        if field.type in kinds:
            assert found[field.name] == kinds[field.type]
        else:
            assert isinstance(found[field.name], dict)


def test_reader_without_deletion_vector_support_is_refused(table: Readers) -> None:
    with pytest.raises(DeltaProtocolError, match="deletionVectors"):
        ForeignTable(str(table.root)).to_pyarrow_dataset()
    # Polars looks up deletion vectors by the encoded path and would find none of this broker.
    with pytest.raises(DeltaProtocolError, match="v2Checkpoint"):
        pl.scan_delta(str(table.root)).collect()


def test_polars_and_duckdb_read_the_table_through_delta_rs(table: Readers) -> None:
    rows = pa.table(
        QueryBuilder().register("rows", ForeignTable(str(table.root))).execute(f"SELECT {PLACE} FROM rows").read_all()
    )
    assert sorted(pl.from_arrow(rows).rows()) == by_archive(table.store)
    found = duckdb.sql(f"SELECT {PLACE} FROM rows")
    assert found is not None
    assert sorted(found.fetchall()) == by_archive(table.store)


# ---- other writers

ONE_ROW: Any = pa.table({"queue_id": pa.array([1], pa.int32())})
WRITES: dict[str, Callable[[ForeignTable], object]] = {
    "delete": lambda table: table.delete("queue_id = 0"),
    "delete all": lambda table: table.delete(),
    "update": lambda table: table.update({"tags": "'x'"}),
    "optimize": lambda table: table.optimize.compact(),
    "z-order": lambda table: table.optimize.z_order(["queue_id"]),
    "append": lambda table: write_deltalake(table, ONE_ROW, mode="append", schema_mode="merge"),
    "overwrite": lambda table: write_deltalake(table, ONE_ROW, mode="overwrite", schema_mode="overwrite"),
    "restore": lambda table: table.restore(1),
    "properties": lambda table: table.alter.set_table_properties({"delta.appendOnly": "false"}),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_of_other_programs_are_refused(table: Readers, write: str) -> None:
    before = {path: path.read_bytes() for path in table.store.rglob("*") if path.is_file()}
    with pytest.raises(CommitFailedError, match="neveManaged"):
        WRITES[write](ForeignTable(str(table.root)))
    log = set(table.root.rglob("_delta_log/*"))
    assert {path: path.read_bytes() for path in log} == {path: before[path] for path in before if path in log}
    assert all(path.read_bytes() == data for path, data in before.items()), "no object is touched"


@pytest.mark.parametrize("full", [False, True])
def test_vacuum_of_other_programs_is_refused(table: Readers, full: bool) -> None:
    """Objects in their grace and uncommitted objects must survive."""
    stray = table.root / "dt=2026-01-02" / "broker=b%25" / f"{0:020d}-{1:020d}-e9.parquet"
    stray.write_bytes(b"on its way")
    before = {path: path.read_bytes() for path in table.store.rglob("*") if path.is_file()}
    foreign = ForeignTable(str(table.root))
    with pytest.raises(CommitFailedError, match="neveManaged"):
        foreign.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=full)
    foreign.cleanup_metadata()
    assert {path: path.read_bytes() for path in before} == before


def test_foreign_checkpoint_changes_nothing(table: Readers) -> None:
    ForeignTable(str(table.root)).create_checkpoint()
    for _ in range(3):
        table.archive.step()
        table.job.run()
        assert by_delta(table.root) == by_archive(table.store)


def test_table_of_another_program_is_not_written(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    directory.mkdir()
    write_deltalake(str(directory / "topic=orders"), ONE_ROW)
    store = open_store(f"dir:{directory}")
    archive = ArchiveAtRandom(store, "b", tmp_path / "log", 3)
    archive.commit()
    job = tables(store, "b")
    assert job.run() == 0
    assert "another program's" in job.set_aside.reasons()[TOPIC]
    assert ForeignTable(str(directory / "topic=orders")).version() == 0


@pytest.mark.parametrize("damage", [b'{"commitInfo":{"timest', b'{"add":{"size":1}}\n', b'{"txn":{}}\n', b"[1]\n"])
def test_damaged_delta_log_stops_only_its_table(tmp_path: Path, damage: bytes) -> None:
    store = MemoryStore(ManualClock(T0))
    archive = history(store, tmp_path / "log", 4, 3)
    assert of_broker(store).run() > 0
    version = read_table(store, f"topic={TOPIC}").version
    running = of_broker(store)
    running.run()
    store.put(f"topic={TOPIC}/_delta_log/{version + 1:020d}.json", damage)
    archive.commit()
    begun = of_broker(store)
    begun.run()
    assert "of its log" in begun.set_aside.reasons()[TOPIC]
    running.run()  # reads only the owner of the commits
    assert damage.endswith(b"}\n") or "of its log" in running.set_aside.reasons()[TOPIC]


def test_checkpoint_keeps_removes_without_deletion_timestamp(tmp_path: Path) -> None:
    """`deletionTimestamp` is optional. A remove without one must be kept."""
    store = MemoryStore(ManualClock(T0))
    history(store, tmp_path / "log", 4, 3)
    of_broker(store).run()
    state = read_table(store, f"topic={TOPIC}")
    gone: dict[str, Any] = {"path": "x.parquet", "dataChange": True}
    store.put(f"topic={TOPIC}/_delta_log/{state.version + 1:020d}.json", encode_lines([{"remove": gone}]))
    state = read_table(store, f"topic={TOPIC}")
    assert {"remove": {**gone, "dataChange": False}} in state.checkpoint(T0 + DAY_MS)


# ---- deletion vectors


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 70_000), st.integers(1, 150_000)), min_size=1, max_size=6))
def test_delta_rs_reads_exact_rows_from_deletion_vector(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
) -> None:
    spans, at = [], 0
    for skip, count in steps:
        spans.append((at + skip, at + skip + count - 1))
        at += skip + count + 1
    vector = deletion_vector(spans)
    root = tmp_path_factory.mktemp("table")
    (root / "_delta_log").mkdir()
    told = {"path": "a", "partitionValues": {}, "size": 1, "modificationTime": 0, "dataChange": True}
    told |= {"stats": f'{{"numRecords": {at}}}', "deletionVector": vector.action()}
    head = metadata(TOPIC, "12345678-1234-1234-1234-123456789abc", 0)
    head["metaData"] |= {"partitionColumns": []}
    (root / "_delta_log" / f"{0:020d}.json").write_bytes(encode_lines([PROTOCOL, head, {"add": told}]))
    (kept,) = pl.DataFrame(ForeignTable(str(root)).deletion_vectors())["selection_vector"]
    gone = [row for row, keep in enumerate(kept.to_list()) if not keep]
    assert gone == [row for first, last in spans for row in range(first, last + 1)]
    assert vector.rows == len(gone)


# ---- faults, checked by an independent reader of the log


class DeltaFollower:
    """A reader that applies new versions of the log like a stream: it counts rows of commits with `dataChange`."""

    def __init__(self, store: MemoryStore) -> None:
        self.store, self.version = store, -1
        self.files: dict[tuple[str, str], dict[str, Any]] = {}
        self.streamed: list[str] = []

    def follow(self) -> None:
        while (found := self.store.objects.get(f"topic={TOPIC}/_delta_log/{self.version + 1:020d}.json")) is not None:
            self.version += 1
            for line in found[0].splitlines():
                ((kind, told),) = json.loads(line).items()
                key = told.get("path", ""), (told.get("deletionVector") or {}).get("pathOrInlineDv", "")
                if kind == "remove":
                    assert not told["dataChange"], "a stream would end here"
                    assert self.files.pop(key)["size"] == told["size"]
                elif kind == "add":
                    assert not any(path == key[0] for path, _ in self.files), "once in the table at a time"
                    self.files[key] = told
                    self.streamed += [key[0]] if told["dataChange"] else []

    def check(self, archive: ArchiveAtRandom) -> None:
        assert manifest_lines(self.store, archive.broker) == shown_uris(archive)
        self.check_table(archive)

    def check_table(self, archive: ArchiveAtRandom) -> None:
        """Assert that the files have the rows of the archive, and that the stream has seen each archived row once."""
        self.follow()
        minimums = {queue: archive.catalog.recorded_minimum(TOPIC, queue) for queue in range(3)}
        wanted = {}
        for name in archive.live():
            one = visible_file(name, minimums)
            if one is not None:
                told = add(f"topic={TOPIC}", archive.broker, one, data_change=True)["add"]
                wanted[told["path"], told.get("deletionVector", {}).get("pathOrInlineDv", "")] = told
        mine = {key: told for key, told in self.files.items() if told["partitionValues"]["broker"] == archive.broker}
        assert mine.keys() == wanted.keys()
        assert len(self.streamed) == len(set(self.streamed))


def manifest_lines(store: ObjectStore, broker: str = "b") -> list[str]:
    """Return the lines of all symlink manifests of a broker."""
    keys = [one.key for one in store.list(f"topic={TOPIC}/_symlink_format_manifest/")]
    mine = [key for key in keys if key.endswith(f"/broker={escape(broker)}/manifest")]
    assert all(store.get(key) for key in mine), "an empty manifest is deleted"
    return sorted(line for key in mine for line in store.get(key).decode().splitlines())


def shown_uris(archive: ArchiveAtRandom, base: str = "s3://memory") -> list[str]:
    minimums = {queue: archive.catalog.recorded_minimum(TOPIC, queue) for queue in range(3)}
    return sorted(f"{base}/{name.key}" for name in archive.live() if visible_file(name, minimums) is not None)


def test_symlink_manifests_name_the_current_objects_after_each_entry(tmp_path: Path) -> None:
    store = open_store(f"dir:{tmp_path}/store")
    dice = random.Random(7)
    archives = [ArchiveAtRandom(store, broker, tmp_path / str(n), n) for n, broker in enumerate(("a", "b%2 ü"))]
    jobs = [tables(store, one.broker) for one in archives]
    kinds = set[str]()
    for _ in range(60):
        number = dice.randrange(2)
        kinds.add(archives[number].step())
        if dice.random() < 0.2:
            jobs[number] = tables(store, archives[number].broker)
        jobs[number].run()
        for one in archives:
            expected = shown_uris(one, f"file://{tmp_path}/store")
            assert manifest_lines(store, one.broker) == expected
            assert all(Path(uri.removeprefix("file://")).is_file() for uri in expected)
    assert {"Commit", "Expire", "Replace", "Erase"} <= kinds


def test_symlink_manifest_that_is_missing_is_written_from_all_objects(tmp_path: Path) -> None:
    store = MemoryStore(ManualClock(T0))
    archive = ArchiveAtRandom(store, "b", tmp_path / "log", 3)
    for _ in range(4):
        archive.commit()
    job = of_broker(store)
    job.run()
    for key in [key for key in store.objects if "_symlink_format_manifest" in key]:
        del store.objects[key]
    archive.commit()
    job.run()
    assert manifest_lines(store) == shown_uris(archive)


def test_manifest_of_a_new_day_reads_no_manifest_of_another_day(tmp_path: Path) -> None:
    store = MemoryStore(ManualClock(T0))
    archive = ArchiveAtRandom(store, "b", tmp_path / "log", 3)
    job, read = of_broker(store), list[str]()

    def on_call(verb: str, key: str) -> None:
        if verb == "get" and "_symlink_format_manifest" in key:
            read.append(key)

    days = set[str]()
    while len(days) < 4:
        archive.commit()
        days.add(archive.live()[-1].day)
        if len(days) == 3 and store.on_call is None:
            job.run()
            store.on_call = on_call
    job.run()
    store.on_call = None
    assert manifest_lines(store) == shown_uris(archive)
    assert {key.split("/dt=")[1].split("/")[0] for key in read} <= {*sorted(days)[-2:]}


def test_manifests_of_further_topics_are_not_written_when_the_broker_stops() -> None:
    store = MemoryStore(ManualClock(T0))
    journal = OfBroker(store, "b")
    job = DeltaTables(journal, Rules, ManualClock(T0), lambda: T0, is_closed=lambda: bool(store.objects))
    file = SimpleNamespace(name=SimpleNamespace(day="2026-01-01", key="k"))
    topics = SimpleNamespace(topics=lambda: ["t1", "t2"], files=lambda topic: [file])
    job._write_manifests(cast(MirroredTopics, topics))
    assert list(store.objects) == ["topic=t1/_symlink_format_manifest/dt=2026-01-01/broker=b/manifest"]


def history(store: MemoryStore, directory: Path, seed: int, entries: int) -> ArchiveAtRandom:
    """Make an archive of random entries without a checkpoint, so that jobs begin at the first entry."""
    archive = ArchiveAtRandom(store, "b", directory, seed, checkpoints=False)
    archive.commit()
    for _ in range(entries):
        archive.step()
    return archive


ERRORS: dict[str, tuple[BaseException, bool]] = {
    "refused": (StoreUnavailable("connection refused"), False),
    "lost answer": (UnknownOutcome("timeout"), True),
    "not done": (UnknownOutcome("timeout"), False),
    "412 of the own retry": (PreconditionFailed("412"), True),
    "403": (AccessDenied("403"), False),
    "killed before": (SystemExit(1), False),
    "killed after": (SystemExit(1), True),
}


@pytest.mark.parametrize("error", ERRORS)
def test_fault_or_crash_at_each_call_loses_and_duplicates_nothing(
    tmp_path: Path, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of a job fails that publishes 16 entries and writes a checkpoint and cleans up on the way."""
    monkeypatch.setattr(delta_table, "CHECKPOINT_COMMITS", 5)
    store = MemoryStore(ManualClock(T0))
    archive = history(store, tmp_path / "log", 8, 16)
    assert interrupted_at_each_call(store, archive, *ERRORS[error]) > 40


@pytest.mark.parametrize("error", ["lost answer", "killed before", "killed after"])
def test_table_created_in_several_commits_has_each_file_once(
    tmp_path: Path, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive existed before the table, so the job begins at a checkpoint of the journal."""
    monkeypatch.setattr(delta_table, "BATCH", 2)
    store = MemoryStore(ManualClock(T0))
    archive = ArchiveAtRandom(store, "b", tmp_path / "log", 8)
    for _ in range(7):
        archive.commit()
    archive.expire_in_part()
    archive.checkpoint()
    archive.commit()
    assert interrupted_at_each_call(store, archive, *ERRORS[error]) > 15
    assert read_table(store, f"topic={TOPIC}").version == 4


def interrupted_at_each_call(store: MemoryStore, archive: ArchiveAtRandom, what: BaseException, after: bool) -> int:
    """Interrupt a job at each of its store calls, check the result, and return the number of calls."""
    before = dict(store.objects)
    calls = 0
    while True:
        store.objects = dict(before)
        store.faults = []
        store.fail("*", what, after=after, skip=calls)
        with contextlib.suppress(ObjectStoreError, SystemExit):
            of_broker(store).run()
        is_through = store.faults[0].times == 1
        store.faults = []
        of_broker(store).run()
        DeltaFollower(store).check(archive)
        assert of_broker(store).run() == 0, "all is told"
        if is_through:
            return calls
        calls += 1


def of_broker(store: MemoryStore, broker: str = "b", rules: Rules | None = None, now: int = T0) -> DeltaTables:
    return tables(store, broker, rules, now)


def test_unexpire_restores_rows_of_a_visible_object(tmp_path: Path) -> None:
    store = MemoryStore(ManualClock(T0))
    archive = history(store, tmp_path / "log", 8, 0)
    queue, (_, last, _) = next(iter(archive.live()[0].queues.items()))
    job = of_broker(store)
    for entry in (
        Expire(keys=[], delete_after_ms=T0, minimums={TOPIC: {queue: last}}),
        Unexpire(keys=[], minimums={TOPIC: {queue: 0}}),
    ):
        job.run()
        archive.append(entry)
    job.run()
    DeltaFollower(store).check(archive)


def test_two_processes_publish_each_journal_entry_once(tmp_path: Path) -> None:
    """At each call of a deposed master's job, the job of its successor runs completely."""
    store = MemoryStore(ManualClock(T0))
    archive = history(store, tmp_path / "log", 4, 10)
    before = dict(store.objects)
    calls = 0
    while True:
        store.objects = dict(before)
        seen = 0

        def other(verb: str, key: str, at: int = calls) -> None:
            nonlocal seen
            seen += 1
            if seen == at + 1:
                store.on_call = None
                of_broker(store).run()

        store.on_call = other
        slow = of_broker(store)
        slow.run()
        is_through = store.on_call is not None
        store.on_call = None
        archive_checked = DeltaFollower(store)
        archive_checked.check(archive)
        slow.run()
        slow.run()
        archive_checked.check(archive)
        if is_through:
            break
        calls += 1
    assert calls > 20


def test_concurrent_brokers_take_one_version_each(tmp_path: Path) -> None:
    store = MemoryStore(ManualClock(T0))
    one = history(store, tmp_path / "one", 4, 6)
    two = ArchiveAtRandom(store, "c", tmp_path / "two", 5)
    for _ in range(4):
        two.commit()
    store.before_first("put", lambda key: of_broker(store, "c").run(), match="_delta_log")
    of_broker(store, "b").run()
    follower = DeltaFollower(store)
    follower.check(one)
    follower.check(two)
    of_broker(store, "c").run()
    follower.check(two)


def test_delta_log_is_deleted_below_old_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_table, "CHECKPOINT_COMMITS", 5)
    clock = ManualClock(T0)
    store = MemoryStore(clock)
    archive = ArchiveAtRandom(store, "b", tmp_path / "log", 4)
    follower = DeltaFollower(store)
    job = DeltaTables(OfBroker(store, "b"), Rules, clock, clock.now_ms)
    for _ in range(40):
        archive.step()
        clock.advance(8 * 3_600_000)
        job.run()
        follower.check(archive)
    versions = sorted(int(key.rpartition("/")[2][:20]) for key in store.objects if "_delta_log" in key)
    assert follower.version - 40 < versions[0] > 0
    state = read_table(store, f"topic={TOPIC}")
    assert state.files.keys() == follower.files.keys()
    assert state.version == follower.version
    # A job that was suspended that long and resumes:
    assert of_broker(store).run() == 0


def test_stale_job_reloads_a_log_that_was_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commit may be at a version that no reader reads, so it is published again above the others."""
    store = MemoryStore(ManualClock(T0))
    archive = ArchiveAtRandom(store, "b", tmp_path / "log", 4)
    archive.commit()
    sleeper = of_broker(store)
    sleeper.run()
    monkeypatch.setattr(delta_table, "CHECKPOINT_COMMITS", 2)
    for _ in range(5):
        archive.commit()
    of_broker(store, now=T0 + 30 * DAY_MS, rules=Rules(journal_retention_ms=0)).run()
    archive.commit()
    of_broker(store, now=T0 + 30 * DAY_MS).run()
    log = [key for key in store.objects if "_delta_log" in key]
    assert f"topic={TOPIC}/_delta_log/{0:020d}.json" not in log
    before = dict(store.objects)
    sleeper.run()
    sleeper.run()
    state = read_table(store, f"topic={TOPIC}")
    assert [key for key, _ in state.files] == [path_in(f"topic={TOPIC}", name.key) for name in archive.live()]
    assert {key: store.objects[key] for key in before} == before


def test_late_first_commit_starts_no_second_delta_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 0 is free again, but no reader would read it."""
    store = MemoryStore(ManualClock(T0))
    quiet = ArchiveAtRandom(store, "b", tmp_path / "quiet", 4)
    quiet.commit()
    quiet.append(Expire(keys=[name.key for name in quiet.live()], delete_after_ms=T0, minimums={}))
    quiet.checkpoint()
    sleeper = of_broker(store)
    assert sleeper.run() == 0
    monkeypatch.setattr(delta_table, "CHECKPOINT_COMMITS", 2)
    busy = ArchiveAtRandom(store, "c", tmp_path / "busy", 5)
    for _ in range(5):
        busy.commit()
        of_broker(store, "c", now=T0 + 30 * DAY_MS, rules=Rules(journal_retention_ms=0)).run()
    assert f"topic={TOPIC}/_delta_log/{0:020d}.json" not in store.objects
    quiet.commit()
    for _ in range(2):
        sleeper.run()
    told = {path for path, _ in read_table(store, f"topic={TOPIC}").files}
    assert told == {path_in(f"topic={TOPIC}", name.key) for name in (*quiet.live(), *busy.live())}


def test_restart_repairs_a_table_changed_by_another_writer(tmp_path: Path) -> None:
    """Files that a non-compliant writer removed are added again at the next start."""
    store = MemoryStore(ManualClock(T0))
    archive = history(store, tmp_path / "log", 4, 3)
    of_broker(store).run()
    state = read_table(store, f"topic={TOPIC}")
    told = next(iter(state.files.values()))
    gone = encode_lines([remove(told, time_ms=T0, data_change=False)])
    store.put(f"topic={TOPIC}/_delta_log/{state.version + 1:020d}.json", gone)
    assert of_broker(store).run() == 1
    assert read_table(store, f"topic={TOPIC}").files.keys() == state.files.keys()
    assert len(state.files) == sum(1 for _ in hidden(archive))


def test_topic_without_rule_has_no_table(tmp_path: Path) -> None:
    store = MemoryStore(ManualClock(T0))
    history(store, tmp_path / "log", 4, 3)
    for said in ((), ("other",), ("orders2*",)):
        assert of_broker(store, rules=Rules(said)).run() == 0
    assert not any("_delta_log" in key for key in store.objects)
    assert of_broker(store, rules=Rules(("ord*",))).run() > 0
