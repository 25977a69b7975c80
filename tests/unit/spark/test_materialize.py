"""A table of a topic: each row once, whatever ends a run and wherever; and nothing of a run that died is seen.

The half of Spark is a double that writes what it is told to; the store of the table breaks at any of its calls.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from infra.objects.open import open_store
from neve.archive.format.journal import CommittedObject, Deleted, Erase, Expire
from neve.archive.store.source import open_source
from neve.spark.jobs.table_log import Commit, NoTable, Overtaken, Span, TableFile, TableLog, decode, encode
from neve.spark.jobs.table_rows import Output, Written, rows_in
from neve.spark.jobs.table_run import MaterializeJob, RowsDiffer, Run
from neve.spark.jobs.table_store import DirectoryTable
from neve.spark.planning.options import Options, Subscription
from neve.spark.planning.planner import DataLoss
from neve.spark.planning.rows import Rows, runs_of
from neve.spark.planning.slices import Slice
from tests.doubles.archive_on_paper import T0, ArchiveOnPaper

Place = tuple[str, int, int]
SETTINGS = {"topic": "orders", "columns": "c"}


@pytest.fixture(autouse=True)
def no_disk_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neve.spark.jobs.table_store._sync", lambda path, flags: None)


class Killed(BaseException):
    """The process is gone: nobody tidies up."""


class Mortal(DirectoryTable):
    """Ends the process at a call, before it or after it has had its effect."""

    def __init__(self, root: Path, at: int = -1, *, after: bool = False) -> None:
        super().__init__(root)
        self.calls, self._at, self._after = 0, at, after

    def _through(self, call: Callable[[], Any]) -> Any:
        if self._at >= 0 and self.calls > self._at:
            raise Killed  # of a dead process nothing comes
        is_last, self.calls = self.calls == self._at, self.calls + 1
        if is_last and not self._after:
            raise Killed
        found = call()
        if is_last:
            raise Killed
        return found

    def put_new(self, key: str, data: bytes) -> None:
        self._through(lambda: super(Mortal, self).put_new(key, data))

    def move(self, source: str, target: str) -> None:
        self._through(lambda: super(Mortal, self).move(source, target))

    def delete(self, key: str) -> None:
        self._through(lambda: super(Mortal, self).delete(key))

    def delete_below(self, prefix: str) -> None:
        self._through(lambda: super(Mortal, self).delete_below(prefix))

    def settle(self, key: str) -> None:
        self._through(lambda: super(Mortal, self).settle(key))


class Scribe:
    """In the place of Spark: a file is a JSON list of its rows."""

    def __init__(self, root: Path, log: TableLog, lose: int = 0) -> None:
        self._root, self._log, self._lose = root, log, lose

    is_half = False

    def write(self, slices: Sequence[Slice], names: Mapping[str, CommittedObject], staged: str) -> Output:
        planned = rows_in(slices, names, "orders")
        rows = [(broker, queue, at) for broker, queue, first, last in flat(planned) for at in range(first, last + 1)]
        half = len(rows) // 2
        written = self._put(staged, [rows[: half + 1 - self._lose], rows[half + 1 :]])
        return Output(written, sum(one.rows for one in written))

    def rewrite(self, files: Sequence[TableFile], without: Mapping[str, Rows], staged: str) -> list[Written]:
        gone = {(broker, queue, at) for broker, queue, first, last in flat(without) for at in range(first, last + 1)}
        found = [place for file in files for place in read(self._root / file.path) if place not in gone]
        return self._put(staged, [found])

    def _put(self, staged: str, parts: Sequence[Sequence[Place]]) -> list[Written]:
        written = []
        for at, rows in enumerate(part for part in parts if part):
            path = self._root / staged / "dt=2026-01-01" / f"part-{at}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(rows))
            spans = tuple(
                Span(broker, queue, min(offsets), max(offsets))
                for broker, queue in sorted({row[:2] for row in rows})
                if (offsets := [row[2] for row in rows if row[:2] == (broker, queue)])
            )
            written.append(Written("", "2026-01-01", 0, len(rows), spans))
        sizes = self._log.staged(staged)
        return [
            one._replace(key=key, size=size) for one, (key, size) in zip(written, sorted(sizes.items()), strict=True)
        ]


def flat(rows: Mapping[str, Rows]) -> list[tuple[str, int, int, int]]:
    return [(broker, *run[1:]) for broker, of in rows.items() for run in runs_of(of)]


def read(path: Path) -> list[Place]:
    return [(broker, queue, offset) for broker, queue, offset in json.loads(path.read_text())]


class Table:
    """A table, and an archive beside it."""

    def __init__(self, home: Path, url: str | None = None) -> None:
        self.url, self.root, self.runs = url or f"dir:{home}/archive", home / "table", 0
        if url is None:
            self.a = ArchiveOnPaper(open_store(self.url), "a", "orders")

    def run(self, store: DirectoryTable | None = None, *, most: int = 1000, drop: bool = False, lose: int = 0,
            settings: Mapping[str, str] = SETTINGS) -> MaterializeJob:  # fmt: skip
        self.runs += 1
        log = TableLog(store or Mortal(self.root), f"{self.runs:032x}", lambda key: f"file:{self.root}/{key}")
        options = Options(self.url, Subscription(frozenset({"orders"})))
        run = Run(open_source(self.url), options, table="t", log=log, writer=Scribe(self.root, log, lose))
        return run.to_the_end(settings, most, drops_expired=drop)

    def visible(self) -> list[Place]:
        """What who reads all files of all days finds."""
        return sorted(place for path in self.root.glob("dt=*/*.parquet") for place in read(path))

    def told_to_spark(self) -> list[Place]:
        """What Spark finds: the newest list, of which each file must be there."""
        told = {int(path.stem): path for path in (self.root / "_spark_metadata").glob("*.compact")}
        if not told:
            return []
        numbers = sorted(told)
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "Spark takes each to follow another"
        lines = told[numbers[-1]].read_text().splitlines()[1:]
        return sorted(place for line in lines for place in read(Path(json.loads(line)["path"].removeprefix("file:"))))


def rows(*offsets: range, broker: str = "a", queue: int = 0) -> list[Place]:
    return [(broker, queue, offset) for some in offsets for offset in some]


def test_each_run_takes_what_is_new_and_only_that(tmp_path: Path) -> None:
    table = Table(tmp_path)
    for number in range(3):
        table.a.write(100 * number, 0, 10 * number, 10, hour=0)
    done = table.run(most=12)
    assert (done.rows, done.table_rows, table.visible()) == (30, 30, rows(range(30)))
    again = table.run()
    assert (again.rows, again.commits) == (0, done.commits), "a run that finds nothing leaves nothing"
    table.a.write(300, 0, 30, 10, hour=0)
    ArchiveOnPaper(open_store(table.url), "b", "orders").write(0, 1, 0, 5, hour=0)
    expected = sorted(rows(range(40)) + rows(range(5), broker="b", queue=1))
    assert (table.run().rows, table.visible(), table.told_to_spark()) == (15, expected, expected)


def test_compaction_brings_no_row_twice_and_expiry_is_kept_or_followed(tmp_path: Path) -> None:
    table = Table(tmp_path)
    for number in range(3):
        table.a.write(100 * number, 0, 10 * number, 10, hour=0)
    table.run(most=10)
    keys = table.a.replace(0, 0, 30, hour=0)
    table.a.append(Deleted(keys=keys))
    assert (table.run().rows, table.visible()) == (0, rows(range(30)))
    table.a.append(Expire(keys=[], delete_after_ms=T0, minimums={"orders": {0: 14}}))
    assert (table.run().dropped_rows, table.visible()) == (0, rows(range(30)))
    done = table.run(drop=True)
    assert (done.dropped_rows, done.table_rows, table.visible()) == (14, 16, rows(range(14, 30)))
    assert table.told_to_spark() == rows(range(14, 30))
    assert table.run(drop=True).dropped_rows == 0


def test_what_was_erased_goes_from_the_table_whatever_is_kept(tmp_path: Path) -> None:
    table = Table(tmp_path)
    _, key, _ = (table.a.write(100 * first, 0, first, count, hour=0) for first, count in ((0, 3), (3, 2), (5, 5)))
    table.run()
    table.a.append(Erase(id="x", old=[key], new=[], rows=[("orders", 0, 3, 4)], delete_after_ms=T0))
    assert (table.run().dropped_rows, table.visible()) == (2, rows(range(3), range(5, 10)))
    assert table.run().dropped_rows == 0


def test_what_expired_before_any_run_saw_it_is_an_error(tmp_path: Path) -> None:
    table = Table(tmp_path)
    table.a.write(0, 0, 0, 5, hour=0)
    table.run()
    key = table.a.write(100, 0, 5, 5, hour=0)
    table.a.append(Expire(keys=[key], delete_after_ms=T0, minimums={"orders": {0: 10}}))
    table.a.append(Deleted(keys=[key]))
    with pytest.raises(DataLoss, match="offsets 5 to 9 expired"):
        table.run()
    assert table.visible() == rows(range(5))


def test_what_expired_since_the_last_run_and_is_not_deleted_yet_still_comes(tmp_path: Path) -> None:
    table = Table(tmp_path)
    table.a.write(0, 0, 0, 5, hour=0)
    table.run()
    key = table.a.write(100, 0, 5, 5, hour=0)
    table.a.append(Expire(keys=[key], delete_after_ms=T0, minimums={"orders": {0: 10}}))
    assert (table.run().rows, table.visible()) == (5, rows(range(10)))
    assert (table.run(drop=True).dropped_rows, table.visible(), table.told_to_spark()) == (10, [], [])


def test_fewer_rows_than_planned_are_not_committed(tmp_path: Path) -> None:
    table = Table(tmp_path)
    table.a.write(0, 0, 0, 10, hour=0)
    with pytest.raises(RowsDiffer, match="9 rows were written of 10"):
        table.run(lose=1)
    assert table.visible() == []
    assert (table.run().rows, table.visible()) == (10, rows(range(10)))


@pytest.mark.parametrize("after", [False, True])
def test_a_run_that_dies_anywhere_leaves_whole_commits_and_the_next_one_goes_on(tmp_path: Path, after: bool) -> None:
    first = Table(tmp_path / "first")
    for number in range(3):
        first.a.write(100 * number, 0, 10 * number, 10, hour=0)
    shutil.copytree(tmp_path / "first" / "archive", tmp_path / "then" / "archive")
    then = f"dir:{tmp_path}/then/archive"
    for number in range(3, 5):
        first.a.write(100 * number, 0, 10 * number, 10, hour=0)
    first.a.append(Expire(keys=[], delete_after_ms=T0, minimums={"orders": {0: 5}}))
    at, ended = 0, False
    while not ended:
        table = Table(tmp_path / str(at), then)
        table.run(most=20)
        table.url = first.url
        try:
            table.run(Mortal(table.root, at, after=after), most=10, drop=True)
            ended = True
        except Killed:
            told = table.told_to_spark()
            assert told in [rows(range(30)), *(rows(range(5, end)) for end in (30, 40, 50))], at
            seen = table.visible()
            assert set(seen) <= set(rows(range(50))), at
            assert len(seen) == len(set(seen)) or len(told) < len(seen), at
            with suppress(Killed):  # once again, in the middle of what it finds there
                table.run(Mortal(table.root, at % 5, after=not after), most=10, drop=True)
        done = table.run(most=10, drop=True)
        assert table.visible() == table.told_to_spark() == rows(range(5, 50)), at
        assert done.table_rows == 45
        assert list((table.root / "_neve" / "staging").rglob("*.parquet")) == []
        at += 1
    assert at > 15


class Flaky(Mortal):
    """One call fails, before it or after it has had its effect; the process goes on, and tidies up."""

    def _through(self, call: Callable[[], Any]) -> Any:
        is_it, self.calls = self.calls == self._at, self.calls + 1
        if is_it and not self._after:
            raise ConnectionError
        found = call()
        if is_it:
            raise ConnectionError
        return found


@pytest.mark.parametrize("after", [False, True])
def test_a_call_that_fails_anywhere_costs_no_row_of_a_commit_that_stands(tmp_path: Path, after: bool) -> None:
    first = Table(tmp_path)
    for number in range(2):
        first.a.write(100 * number, 0, 10 * number, 10, hour=0)
    at, ended = 0, False
    while not ended:
        table = Table(tmp_path / str(at), first.url)
        try:
            table.run(Flaky(table.root, at, after=after), most=10)
            ended = True
        except ConnectionError:
            pass
        assert table.run().table_rows == 20
        assert table.visible() == table.told_to_spark() == rows(range(20)), at
        at += 1
    assert at > 8


def test_a_run_that_is_overtaken_commits_nothing_more(tmp_path: Path) -> None:
    """The other finds its staging, and takes the table over before it deletes that."""
    table = Table(tmp_path)
    table.a.write(0, 0, 0, 10, hour=0)

    class Slow(Mortal):
        def put_new(self, key: str, data: bytes) -> None:
            if "commits" in key:
                assert table.run().rows == 10
            super().put_new(key, data)

    with pytest.raises(Overtaken):
        table.run(Slow(table.root))
    assert table.visible() == table.told_to_spark() == rows(range(10))


def test_whoever_may_read_a_directory_reads_what_a_run_wrote_there(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        DirectoryTable(tmp_path).put_new("_spark_metadata/0.compact", b"v1")
    finally:
        os.umask(before)
    assert [path.name for path in (tmp_path / "_spark_metadata").iterdir()] == ["0.compact"]
    assert (tmp_path / "_spark_metadata" / "0.compact").stat().st_mode & 0o777 == 0o644


def test_a_number_that_is_free_again_is_no_commit(tmp_path: Path) -> None:
    table = Table(tmp_path)
    for number in range(14):
        table.a.write(100 * number, 0, 10 * number, 10, hour=0)
    table.run(most=10)
    log = TableLog(Mortal(table.root), "f" * 32, str)
    with pytest.raises(Overtaken):
        log.commit(Commit(-1, "", SETTINGS))
    assert table.run().table_rows == 140


def test_a_table_that_was_begun_otherwise_is_refused(tmp_path: Path) -> None:
    table = Table(tmp_path)
    table.a.write(0, 0, 0, 10, hour=0)
    table.run()
    with pytest.raises(NoTable, match="begun with columns 'c', this run has 'd'"):
        table.run(settings=SETTINGS | {"columns": "d"})


def test_a_commit_is_what_it_was_when_it_is_read() -> None:
    file = TableFile("dt=d/x.parquet", 7, 3, (Span("a", 0, 1, 3),), "_neve/staging/a/x")
    commit = Commit(3, "a", SETTINGS, {"version": 1}, {"a": {"orders": {0: [(1, 3)]}}}, (file,), ("dt=d/y",))
    assert decode(encode(commit)) == commit
    with pytest.raises(NoTable, match="newer program"):
        decode(encode(commit).replace(b'"version": 1}', b'"version": 9}').replace(b'"version": 1', b'"version": 9'))
    with pytest.raises(NoTable):
        decode(b"{}")
