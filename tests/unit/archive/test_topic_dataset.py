"""Tests of `neve.archive.dataset`: the rows of the catalog in each engine, with filter pushdown."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import lz4.frame
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import zstandard

import neve.archive
from infra.objects.open import open_store
from neve.archive.format.journal import Expire
from neve.archive.rows import inflation
from neve.archive.rows.inflation import BadBody
from neve.record.layout import COMPRESSED, COMPRESSION_LZ4, COMPRESSION_ZLIB, COMPRESSION_ZSTD
from tests.kit.archive.archive_on_paper import HOUR, T0, ArchiveOnPaper

TOPIC = "%RETRY%g|x"
LONG = "%RETRY%" + "|" * 120  # too long for a path component
LEFT = [("a", 0, offset) for offset in range(15, 30)] + [("b", 1, offset) for offset in range(10)]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return an archive: queue 0 of broker a from 15 to 29, queue 1 of broker b, and an uncommitted object."""
    store = open_store(f"dir:{tmp_path}/archive [1]")
    a = ArchiveOnPaper(store, "a", TOPIC)
    gone = a.write(0, 0, 0, 10, hour=0)
    a.write(100, 0, 10, 10, hour=1)
    a.write(200, 0, 20, 10, hour=2, ids=False)
    a.checkpoint()
    a.append(Expire(keys=[gone], delete_after_ms=T0, minimums={TOPIC: {0: 15}}))
    a.write(300, 0, 30, 10, hour=3, commit=False)
    ArchiveOnPaper(store, "b", TOPIC).write(0, 1, 0, 10, hour=2)
    ArchiveOnPaper(store, "c", LONG).write(0, 0, 0, 5, hour=0)
    return f"dir:{tmp_path}/archive [1]"


def sql(query: str, rows: Any) -> list[Any]:
    """Run a query on the table `rows`."""
    found = duckdb.sql(query)
    assert rows is not None
    assert found is not None
    return found.fetchall()


def by_duckdb(rows: Any) -> list[tuple[str, int, int, bytes]]:
    return sql("SELECT broker, queue_id, queue_offset, body FROM rows", rows)


def by_polars(rows: Any) -> list[tuple[str, int, int, bytes]]:
    return list(pl.scan_pyarrow_dataset(rows).select("broker", "queue_id", "queue_offset", "body").collect().rows())


def by_polars_at_once(rows: Any) -> list[tuple[str, int, int, bytes]]:
    return list(pl.DataFrame(rows).select("broker", "queue_id", "queue_offset", "body").rows())


def by_pandas(rows: Any) -> list[tuple[str, int, int, bytes]]:
    frame: Any = rows.to_table().to_pandas()
    return list(frame[["broker", "queue_id", "queue_offset", "body"]].itertuples(index=False, name=None))


def by_pandas_from_arrow(rows: Any) -> list[tuple[str, int, int, bytes]]:
    frame: Any = pd.DataFrame.from_arrow(rows)
    return list(frame[["broker", "queue_id", "queue_offset", "body"]].itertuples(index=False, name=None))


ENGINES = [by_duckdb, by_polars, by_polars_at_once, by_pandas, by_pandas_from_arrow]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_reads_each_row_once_with_its_original_body(
    url: str, engine: Callable[[Any], list[tuple[str, int, int, bytes]]]
) -> None:
    found = sorted(engine(neve.archive.dataset(url, TOPIC)))
    assert [row[:3] for row in found] == LEFT
    assert [row[3] for row in found] == [b'{"n": %d, "q": %d}' % (offset, queue) for _, queue, offset in LEFT]


def test_rows_have_the_full_topic_name_despite_a_shortened_path(url: str) -> None:
    table = neve.archive.dataset(url, LONG).to_table()
    assert set(table["topic"].to_pylist()) == {LONG}
    assert table["queue_offset"].to_pylist() == [0, 1, 2, 3, 4]


def test_replaced_rows_are_read_from_the_new_object(tmp_path: Path) -> None:
    url = f"dir:{tmp_path}"
    archive = ArchiveOnPaper(open_store(url), "a", "t")
    for number in range(3):
        archive.write(number * 100, 0, number * 10, 10, hour=number)
    before = neve.archive.dataset(url, "t")
    old = archive.replace(0, 0, 30, hour=0)
    for rows in (before, neve.archive.dataset(url, "t")):
        assert sorted(rows.to_table()["queue_offset"].to_pylist()) == list(range(30))
    for key in old:
        (tmp_path / key).unlink()
    assert neve.archive.dataset(url, "t").count_rows() == 30


def offsets(rows: Any) -> list[tuple[str, int]]:
    table = rows.to_table(columns=["broker", "queue_offset"])
    return sorted(zip(table["broker"].to_pylist(), table["queue_offset"].to_pylist(), strict=True))


def test_dataset_returns_only_selected_rows(url: str) -> None:
    def of(**asked: Any) -> list[tuple[str, int]]:
        return offsets(neve.archive.dataset(url, TOPIC, **asked))

    end = datetime.fromtimestamp(T0 / 1000 + 3600 + 16 * 60, UTC)
    assert of(start=T0 + HOUR, end=end) == [("a", offset) for offset in range(15, 20)]
    assert of(start="2026-01-01T02:08:00", end="2026-01-01T02:09:00Z") == [("a", 28), ("b", 8)]
    assert of(queues=[1], offsets=(3, 4)) == [("b", 3), ("b", 4)]
    assert of(broker="b", tags=["odd"]) == [("b", offset) for offset in range(1, 10, 2)]
    assert of(offsets=(None, 15)) == [("a", 15), *(("b", offset) for offset in range(10))]
    assert of(start="2027-01-01") == []
    assert of(keys=["0-16", "1-3", "0-3"]) == [("a", 16), ("b", 3)], "the unique key; 0-3 has expired"
    assert len(of(keys=["k"])) == 25, "a word of KEYS"
    assert of(keys=["no"]) == []


def test_files_without_a_selected_row_are_not_opened(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    make = pa.dataset.ParquetFileFormat.make_fragment

    class Watched(pa.dataset.ParquetFileFormat):  # type: ignore[misc]
        def make_fragment(self, file: str, *args: Any, **options: Any) -> Any:
            opened.append(file)
            assert options["file_size"] == Path(file).stat().st_size
            return make(self, file, *args, **options)

    monkeypatch.setattr("neve.archive.read.topic_dataset.ds.ParquetFileFormat", Watched)
    assert len(offsets(neve.archive.dataset(url, TOPIC, start=T0 + HOUR, end=T0 + HOUR + 16 * 60_000))) == 5
    assert len(opened) == 1


def test_filter_by_body_applies_to_decompressed_bodies(url: str) -> None:
    rows = neve.archive.dataset(url, TOPIC)
    assert sql("""SELECT queue_offset FROM rows WHERE body = '{"n": 3, "q": 1}'::BLOB""", rows) == [(3,)]
    lazy = pl.scan_pyarrow_dataset(rows).filter(pl.col("body") == b'{"n": 21, "q": 0}').select("queue_offset")
    assert lazy.collect().rows() == [(21,)]
    assert rows.to_table(columns=["tags"], filter=pc.field("body") == b'{"n": 3, "q": 1}').to_pydict() == {
        "tags": ["odd"]
    }
    assert sql("SELECT count(*), count(body), count(body_error) FROM rows", rows) == [(25, 25, 0)]
    told = sql("SELECT decode(body) FROM rows WHERE tags = 'odd' AND queue_id = 1 ORDER BY queue_offset", rows)
    assert [text for (text,) in told] == [f'{{"n": {n}, "q": 1}}' for n in range(1, 10, 2)]


def test_unselected_bodies_are_neither_read_nor_inflated(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise AssertionError("inflated")

    monkeypatch.setattr(inflation, "inflate", refuse)
    rows = neve.archive.dataset(url, TOPIC)
    assert sql("SELECT tags, count(*) FROM rows GROUP BY 1 ORDER BY 1", rows) == [("even", 12), ("odd", 13)]
    assert pl.scan_pyarrow_dataset(rows).filter(pl.col("tags") == "odd").select("tags").collect().height == 13
    assert rows.count_rows() == 25
    assert rows.filter(pc.field("tags") == "odd").count_rows() == 13
    stored = neve.archive.dataset(url, TOPIC, bodies="stored", queues=[1], offsets=(1, 1)).to_table().to_pylist()
    assert [(row["body_codec"], zlib.decompress(row["body"])) for row in stored] == [("zlib", b'{"n": 1, "q": 1}')]
    assert "body_error" not in stored[0]


def test_dataset_supports_the_pyarrow_interface(url: str) -> None:
    rows = neve.archive.dataset(url, TOPIC)
    assert rows.head(3, columns=["body"]).num_rows == 3
    assert rows.take(pa.array([0, 24]), columns=["body"]).num_rows == 2
    renamed = rows.to_table(columns={"n": pc.field("queue_offset") + 1, "text": pc.field("body").cast("string")})
    assert (renamed.schema.names, renamed.num_rows) == (["n", "text"], 25)
    assert rows.scanner(columns=["body", "tags"]).projected_schema.names == ["body", "tags"]
    with pytest.raises(pa.ArrowInvalid, match="nope"):
        rows.to_table(columns=["nope"])
    with pytest.raises(ValueError, match="must be passed to the scan"):
        rows.filter(pc.field("body") == b"x")
    refusals: list[Callable[[], Any]] = [rows.get_fragments, lambda: rows.replace_schema(rows.schema)]
    for refused in refusals:
        with pytest.raises(NotImplementedError):
            refused()


def packings(row: dict[str, Any]) -> dict[str, Any]:
    """Return a sound and a damaged body of each codec."""
    body = b"message %d " % row["queue_offset"] * 20
    zstd, lz4_ = zstandard.ZstdCompressor().compress(body), lz4.frame.compress(body)
    kinds = [
        (body, "none", 0),
        (zlib.compress(body), "zlib", COMPRESSED),
        (zlib.compress(body), "zlib", COMPRESSED | COMPRESSION_ZLIB),
        (lz4_, "lz4", COMPRESSED | COMPRESSION_LZ4),
        (zstd, "zstd", COMPRESSED | COMPRESSION_ZSTD),
        (b"no zlib", "zlib", COMPRESSED),
        (b"no lz4", "lz4", COMPRESSED | COMPRESSION_LZ4),
        (b"no zstd", "zstd", COMPRESSED | COMPRESSION_ZSTD),
        (b"", "none", 0),
        (None, "none", 0),
    ]
    packed, codec, flag = kinds[row["queue_offset"] % 10]
    return {**row, "body": packed, "body_codec": codec, "sys_flag": flag}


@pytest.fixture
def packed(tmp_path: Path) -> str:
    store = open_store(f"dir:{tmp_path}/packed")
    ArchiveOnPaper(store, "a", "t").write(0, 0, 0, 20, hour=0, change=packings)
    return f"dir:{tmp_path}/packed"


@pytest.mark.parametrize("piece", [1, 64 << 20])
def test_inflate_decodes_each_codec_and_reports_damage(
    packed: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflation, "PIECE_BYTES", piece)
    found = neve.archive.dataset(packed, "t").to_table().sort_by("queue_offset").to_pylist()
    assert [row["queue_offset"] for row in found] == list(range(20))
    for row in found:
        kind = row["queue_offset"] % 10
        if kind < 5:
            assert (row["body"], row["body_error"]) == (b"message %d " % row["queue_offset"] * 20, None)
        elif kind < 8:
            assert row["body"] is None
            assert row["body_error"].startswith("the body does not match the compression in its sysFlag")
        else:
            assert (row["body"], row["body_error"]) == ((b"", None) if kind == 8 else (None, None))
    bad = neve.archive.dataset(packed, "t").to_table(filter=pc.field("body_error").is_valid())
    assert sorted(bad["queue_offset"].to_pylist()) == [5, 6, 7, 15, 16, 17]


def test_damaged_body_raises_if_requested(packed: str) -> None:
    rows = neve.archive.dataset(packed, "t", on_error="stop")
    with pytest.raises(BadBody, match="a, queue 0, offset 5: the body does not match"):
        rows.to_table(columns=["body"])
    assert rows.count_rows() == 20
    with pytest.raises(BadBody, match="longer than 10 bytes"):
        neve.archive.dataset(packed, "t", on_error="stop", max_body=10).to_table()


def test_missing_codec_library_is_not_reported_as_a_damaged_body(packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> bytes:
        raise ModuleNotFoundError(name="zstandard")

    monkeypatch.setattr(inflation, "inflate", missing)
    with pytest.raises(ImportError, match="pip install zstandard"):
        neve.archive.dataset(packed, "t").to_table()


def test_verify_reports_a_missing_or_shrinking_object(url: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="topic nope"):
        neve.archive.dataset(url, "nope")
    with pytest.raises(FileNotFoundError, match="no archive"):
        neve.archive.dataset(f"dir:{tmp_path}", TOPIC)
    with pytest.raises(FileNotFoundError, match="broker d"):
        neve.archive.dataset(url, TOPIC, broker="d")
    with pytest.raises(TypeError, match="collection"):
        neve.archive.dataset(url, TOPIC, tags="odd")
    with pytest.raises(ValueError, match="inflated"):
        neve.archive.dataset(url, TOPIC, bodies="json")  # type: ignore[arg-type]
