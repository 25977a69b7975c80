"""Tests of Bloom filters in archive objects: no false negatives, and key queries read few other objects."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import Commit, CommittedObject, Intent, PlannedObject
from neve.archive.format.keys import data_key
from neve.archive.rows.schema import FILTERED, FILTERS_MARK, SCHEMA, DamagedObject, writer_options
from neve.record.codec import decode_record, encode_record
from tests.kit.archive.one_upload import upload_one
from tests.kit.archive.records import Run
from tiered.read.cold_query import has_key
from tiered.read.cold_reader import ColdReader
from tiered.worker.client import WorkerClient
from tiered.write import bloom_filter
from tiered.write.bloom_filter import filter_reads

TOPIC = "orders"
T0 = 1_700_000_000_000
ROWS = 300
# Duplicate names, an empty first value, invalid UTF-8: queries compare the value that RocketMQ's parser returns.
ODD = [
    b"UNIQ_KEY\x01first\x02UNIQ_KEY\x01second\x02KEYS\x01\x02KEYS\x01late\x02",
    b"KEYS\x01good \xff\x02UNIQ_KEY\x01ID\xfe\x02",
    b"KEYS\x01  two  words \x02",
    b"KEYS\x01no end",
]


@dataclass
class WrittenObject:
    name: CommittedObject
    path: Path
    records: list[bytes]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerClient]:
    client = WorkerClient(work_dir=tmp_path_factory.mktemp("work"))
    yield client
    client.close()


def properties_of(number: int) -> bytes:
    return b"UNIQ_KEY\x01U%d\x02KEYS\x01k%d hundred%d\x02" % (number, number, number // 100)


def write(worker: WorkerClient, root: Path, number: int, *, odd: bool = False) -> WrittenObject:
    """Write the object of round `number` with ROWS incompressible messages of about 1 KiB, and optional odd ones."""
    noise, log, records = random.Random(number), bytearray(), []
    base, first = number << 30, number * ROWS
    strings = [properties_of(offset) for offset in range(first, first + ROWS)] + (ODD if odd else [])
    for offset, properties in enumerate(strings, first):
        raw = encode_record(
            topic=TOPIC.encode(), body=noise.randbytes(1024), properties=properties, queue_id=0, flag=0,
            queue_offset=offset, physical_offset=base + len(log), sys_flag=0, born_timestamp=T0,
            born_host=("1.1.1.1", 1), store_timestamp=T0 + offset, store_host=("1.1.1.1", 2),
        )  # fmt: skip
        records.append(raw)
        log += raw
    path = root / f"{base:020d}"
    path.write_bytes(log)
    key = data_key("", TOPIC, "2026-01-02", "b", start=base, end=base + len(log), epoch=1)
    intent = PlannedObject(key, TOPIC, "2026-01-02", base, base + len(log), {0: (first, first + len(records) - 1)})
    sizes = np.array([len(raw) for raw in records])
    runs = {0: Run(first, base + np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes)}
    facts = {"cluster": "c", "broker": "b", "round": str(number)}
    name = upload_one(worker, f"dir:{root / 'store'}", intent, runs, [(str(path), base, len(log))], facts)
    return WrittenObject(name, root / "store" / key, records)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, worker: WorkerClient) -> WrittenObject:
    return write(worker, tmp_path_factory.mktemp("odd"), 3, odd=True)


def test_filter_may_hold_every_word_that_a_query_can_find(odd: WrittenObject, worker: WorkerClient) -> None:
    words = ["first", "second", "late", "good", "\ufffd", "ID\ufffd", "two", "words", "no", "end"]
    words += ["U900", "k1199", "hundred9", "U1200", "ID", "U"]
    records = [decode_record(raw) for raw in odd.records]
    there = [word for word in words if any(has_key(record, TOPIC, word) for record in records)]
    assert set(words) - set(there) == {"first", "U1200", "ID", "U"}
    url = f"dir:{odd.path.parents[3]}"
    assert len(odd.name.row_groups) == 1
    held = [word for word in words if worker.may_hold(url, odd.name, [0], word.encode()).groups]
    assert set(there) <= set(held) and len(held) < len(words)


def test_filter_answers_equal_those_of_another_parquet_reader(odd: WrittenObject) -> None:
    with pq.ParquetFile(odd.path) as file:
        (read,) = filter_reads(file.metadata)
    data = odd.path.read_bytes()[read.start : read.start + read.length]
    connection = duckdb.connect()

    def ruled_out(column: str, word: str) -> bool:
        rows = connection.execute("SELECT bloom_filter_excludes FROM parquet_bloom_probe(?, ?, ?)", [
            str(odd.path), column, word,
        ]).fetchall()  # fmt: skip
        return all(row[0] for row in rows)

    noise = random.Random(5)
    words = [f"U{noise.randrange(1000)}" for _ in range(60)] + [noise.randbytes(9).hex() for _ in range(60)]
    for word in words:
        only_id = read._replace(groups={group: places[:1] for group, places in read.groups.items()})
        assert bool(only_id.may_hold(data, word.encode())) != ruled_out("msg_id", word), word


@given(at=st.integers(0, 16), bit=st.integers(0, 7), cut=st.integers(1, 60))
def test_damaged_bloom_filter_is_refused(odd: WrittenObject, at: int, bit: int, cut: int) -> None:
    with pq.ParquetFile(odd.path) as file:
        (read,) = filter_reads(file.metadata)
    start, length = read.groups[0][0]
    whole = odd.path.read_bytes()[read.start + start : read.start + start + length]
    one = read._replace(groups={0: [(0, length)]})
    assert one.may_hold(whole, b"U901") == {0}
    header = bytearray(whole)
    header[min(at, length - (len(whole) & ~31) - 1)] ^= 1 << bit
    for spoilt in (bytes(header), whole[:-cut], b""):
        with pytest.raises(DamagedObject):
            one._replace(groups={0: [(0, len(spoilt))]}).may_hold(spoilt, b"U901")


def test_missing_or_partial_filters_exclude_nothing(tmp_path: Path, worker: WorkerClient) -> None:
    made = write(worker, tmp_path, 0)
    url = f"dir:{tmp_path / 'store'}"
    assert worker.may_hold(url, made.name, [0], b"nowhere").groups == []
    with pq.ParquetFile(made.path) as file:
        (read,) = filter_reads(file.metadata)
        paths = [file.metadata.row_group(0).column(n).path_in_schema for n in range(file.metadata.num_columns)]
    assert set(FILTERED) <= set(paths)
    whole = made.path.read_bytes()
    made.path.write_bytes(whole[: read.start] + bytes(read.length) + whole[read.start + read.length :])
    assert worker.may_hold(url, made.name, [0], b"nowhere").groups == [0]
    for mark in (b"neve.filters", b"neve.filterz"):
        (made.path.parent / "other").write_bytes(whole.replace(b"neve.filters", mark))
        other = msgspec.structs.replace(made.name, key=f"{Path(made.name.key).parent}/other")
        worker_of_its_own = WorkerClient(work_dir=tmp_path)
        assert worker_of_its_own.may_hold(url, other, [0], b"nowhere").groups == (
            [] if mark == b"neve.filters" else [0]
        )
        worker_of_its_own.close()


def test_key_query_over_fifty_objects_fetches_a_fraction(
    tmp_path: Path, worker: WorkerClient, record_property: Callable[[str, object], None]
) -> None:
    catalog, objects = Catalog(), [write(worker, tmp_path, number) for number in range(50)]
    for made in objects:
        intent = PlannedObject(made.name.key, TOPIC, "2026-01-02", made.name.start, made.name.end, {})
        catalog.apply(catalog.next_seq, Intent(round=catalog.rounds.last_round + 1, names=[intent]))
        catalog.apply(catalog.next_seq, Commit(round=catalog.rounds.last_round, names=[made.name]))
    stored = sum(group.length for made in objects for group in made.name.row_groups)
    for key, offsets in {"k7000": [7000], "U14": [14], "hundred8": range(899, 799, -1), "nobody": []}.items():
        reader = ColdReader(catalog, worker, f"dir:{tmp_path / 'store'}")
        found = reader.query(TOPIC, key, 200, 0, 1 << 60)
        assert [decode_record(raw).queue_offset for raw in found.records] == list(offsets)
        assert found.unsearched == "" and reader.counts.filters == 50
        print(f"{key}: {reader.counts.fetched_bytes} of {stored} bytes fetched")
        record_property(key, reader.counts.fetched_bytes)
        assert reader.counts.fetched_bytes < stored / 10
        reader.close()


@pytest.mark.parametrize("read_max", [1, 1 << 10, 1 << 20])
def test_bloom_filters_of_many_row_groups_need_few_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_max: int
) -> None:
    monkeypatch.setattr(bloom_filter, "_READ_MAX", read_max)
    columns = {"msg_id": pa.array(["a", "b"]), "keys": pa.array([["k"], []], SCHEMA.field("keys").type)}
    path, options = tmp_path / "many.parquet", writer_options(2, 0)
    with pq.ParquetWriter(
        path, pa.table(columns).schema, bloom_filter_options=options["bloom_filter_options"]
    ) as writer:
        for number in range(9):
            named = {**columns, "msg_id": pa.array([f"a{number}", "b"])}
            writer.write_table(pa.table(named))
        writer.add_key_value_metadata({FILTERS_MARK: "1"})
    data = path.read_bytes()
    reads = list(filter_reads(pq.read_metadata(path)))
    assert len(reads) == {1: 9, 1 << 20: 1}.get(read_max, len(reads)) and 1 <= len(reads) <= 9
    assert [group for read in reads for group in read.groups] == list(range(9))

    def held(word: bytes) -> list[int]:
        return [group for read in reads for group in read.may_hold(data[read.start : read.start + read.length], word)]

    assert held(b"a4") == [4] and sorted(held(b"k")) == sorted(held(b"b")) == list(range(9))


def test_filters_are_cached_on_disk(tmp_path: Path, worker: WorkerClient) -> None:
    made = write(worker, tmp_path, 0)
    for fetched_before in (False, True):
        fresh = WorkerClient(work_dir=tmp_path, cache_dir=tmp_path / "cache", cache_bytes=1 << 20)
        for word, groups in ((b"U7", [0]), (b"nobody", [])):
            answer = fresh.may_hold(f"dir:{tmp_path / 'store'}", made.name, [0], word)
            assert answer.groups == groups
            assert (answer.fetched == 0) == (fetched_before or word == b"nobody")
        fresh.close()
