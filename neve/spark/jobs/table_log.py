"""What a table holds: the newest of its commits says it, and one that is put if absent decides.

    <table>/_neve/commits/<number:020d>.json     a commit: all files of the table, which rows they have, and the
                                                 position in the archive's journals that comes next
    <table>/_neve/staging/<attempt>/…            what a run has written and not committed
    <table>/dt=<day>/<number>-<attempt>-<n>.parquet      committed files
    <table>/_spark_metadata/<number>.compact     the list as Spark's own: Spark reads these files and no other

A run writes aside, commits, and then moves its files to where readers look, tells Spark, and deletes what the commit
dropped. Whoever begins does the rest of the newest commit first: it is always the same, however often it is done. So a
run that dies before its commit leaves nothing that a reader sees, and one that dies after it has only not finished.

A run that finds what others left takes the table over before it deletes that: with a commit that changes nothing, so
that a run which is still at work can't commit any more what has been deleted under it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from neve.spark.jobs.table_store import TableStore
from neve.spark.planning.rows import Rows, count, rows_of, runs_of

VERSION = 1
KEPT = 10  # commits: what a reader that looked a moment ago may still ask for

_COMMITS, _STAGING, _OF_SPARK = "_neve/commits/", "_neve/staging/", "_spark_metadata/"
_COMMIT = re.compile(r"_neve/commits/(\d{20})\.json")
_COMPACT = re.compile(r"_spark_metadata/(\d+)\.compact")


class Overtaken(RuntimeError):
    """Another run has committed to the table meanwhile; what this one had committed before stays."""


class NoTable(ValueError):
    """What is there is no table of this program, or of a newer one."""


class Span(NamedTuple):
    """Which offsets of a queue a file has: some of them, from the first to the last."""

    broker: str
    queue: int
    first: int
    last: int


class TableFile(NamedTuple):
    """A file of the table; `staged`: where it lies until it is moved."""

    path: str
    size: int
    rows: int
    spans: tuple[Span, ...]
    staged: str = ""


class Commit(NamedTuple):
    """The whole state of a table."""

    number: int
    attempt: str
    settings: Mapping[str, str]
    position: Mapping[str, Any] | None = None  # None: nothing has been read yet
    rows: Mapping[str, Rows] = {}  # by broker
    files: tuple[TableFile, ...] = ()
    dropped: tuple[str, ...] = ()  # files that the commit before had

    @property
    def row_count(self) -> int:
        return sum(map(count, self.rows.values()))

    @property
    def file_rows(self) -> int:
        return sum(file.rows for file in self.files)


class TableLog:
    """Of one run. `full_path`: a key of the table as Spark is to read it."""

    def __init__(self, store: TableStore, attempt: str, full_path: Callable[[str], str]) -> None:
        self._store, self.attempt, self._full_path = store, attempt, full_path
        self._may_stand = False  # a commit of this run that has not been carried out: it names what lies in the staging

    def staging(self, after: Commit, name: str) -> str:
        """Where this run may write for the commit behind this one: each has a folder of its own, for good."""
        return f"{_STAGING}{self.attempt}/{after.number + 1}-{name}"

    def begin(self, settings: Mapping[str, str]) -> Commit:
        """The table as it stands, with the newest commit carried out and nothing left of runs that died.

        Raises:
            NoTable: a table is there that was begun with other settings, or a newer program wrote it.
            Overtaken: another run began at the same time.
        """
        newest = self.newest()
        if newest is not None:
            _check_settings(newest, settings)
            newest = self._carry_out(newest)
        left = self._left_behind(newest)
        if left:
            before = newest or Commit(-1, "", settings)
            newest = self.commit(before)
            for key in left:
                self._store.delete(key)
            for attempt in sorted({key.split("/")[2] for key in left if key.startswith(_STAGING)}):
                self._store.delete_below(f"{_STAGING}{attempt}/")
        return newest or Commit(-1, "", settings)

    def commit(self, after: Commit) -> Commit:
        """Puts it behind the one that it was made from, whose number it still has. Raises Overtaken."""
        files = {file.path for file in after.files}
        made = after._replace(number=after.number + 1, attempt=self.attempt)
        data = encode(made)
        key = _commit_key(made.number)
        self._may_stand = True
        try:
            self._store.put_new(key, data)
        except FileExistsError:
            if self._store.get(key) != data:  # else it is this one, whose answer was lost
                self._may_stand = False
                raise Overtaken(_OVERTAKEN) from None
        if max(self._numbers(), default=-1) != made.number:  # a number that was free again: nobody reads that
            raise Overtaken(_OVERTAKEN)
        assert not files & set(made.dropped)
        done = self._carry_out(made)
        self._may_stand = False
        return done

    def newest(self) -> Commit | None:
        """None: there is no table yet."""
        numbers = self._numbers()
        return decode(self._store.get(_commit_key(max(numbers)))) if numbers else None

    def staged(self, folder: str) -> dict[str, int]:
        """Parquet files that this run has written to a folder of its staging -> bytes."""
        below = self._store.sizes(f"{folder}/")
        found = {key: size for key, size in below.items() if key.endswith(".parquet") and "/_temporary/" not in key}
        for key in found:
            self._store.settle(key)
        return found

    def clear(self) -> None:
        """This run's staging goes, unless a commit may name what lies there and was not carried out to its end."""
        if not self._may_stand:
            self._store.delete_below(f"{_STAGING}{self.attempt}/")

    def _carry_out(self, commit: Commit) -> Commit:
        """As it stands then."""
        for file in commit.files:
            if file.staged:
                self._store.move(file.staged, file.path)
        self._tell_spark(commit)
        for path in commit.dropped:
            self._store.delete(path)
        for attempt in sorted({file.staged.split("/")[2] for file in commit.files if file.staged}):
            self._store.delete_below(f"{_STAGING}{attempt}/")
        for number in self._numbers():
            if number <= commit.number - KEPT:
                self._store.delete(_commit_key(number))
        return commit._replace(files=tuple(file._replace(staged="") for file in commit.files), dropped=())

    def _tell_spark(self, commit: Commit) -> None:
        """Spark takes the highest number, where there is one alone, or each follows another: so none is left out."""
        told = sorted(_found(_COMPACT, self._store.sizes(_OF_SPARK)))
        data = manifest((self._full_path(file.path), file.size) for file in commit.files)
        for number in range(told[-1] + 1 if told else commit.number, commit.number + 1):
            try:
                self._store.put_new(f"{_OF_SPARK}{number}.compact", data)
            except FileExistsError:
                continue  # by another that carries out the same
        for number in told:
            if number < commit.number - 1:
                self._store.delete(f"{_OF_SPARK}{number}.compact")

    def _left_behind(self, newest: Commit | None) -> list[str]:
        """What no commit names, of runs that are over or at work; after `_carry_out`."""
        named = {file.path for file in newest.files} if newest is not None else set()
        staged = list(self._store.sizes(_STAGING))
        return sorted(staged + [key for key in self._store.sizes("dt=") if key not in named])

    def _numbers(self) -> list[int]:
        return sorted(_found(_COMMIT, self._store.sizes(_COMMITS)))


_OVERTAKEN = "another run has committed to this table: this one ends, and what it had not committed is not in the table"


def encode(commit: Commit) -> bytes:
    """As it is stored."""
    told = commit._asdict() | {
        "version": VERSION,
        "rows": {
            broker: [[queue, first, last] for _, queue, first, last in runs_of(rows)]
            for broker, rows in sorted(commit.rows.items())
        },
        "files": [file._asdict() for file in commit.files],
    }
    return json.dumps(told, ensure_ascii=False, sort_keys=True).encode()


def decode(data: bytes) -> Commit:
    """Raises NoTable."""
    try:
        told = json.loads(data)
        if told["version"] > VERSION:
            raise NoTable(f"the table was written by a newer program (format {told['version']})")
        return Commit(
            number=told["number"],
            attempt=told["attempt"],
            settings=told["settings"],
            position=told["position"],
            rows={
                broker: rows_of((told["settings"]["topic"], *run) for run in runs)
                for broker, runs in told["rows"].items()
            },
            files=tuple(
                TableFile(**{**file, "spans": tuple(Span(*span) for span in file["spans"])}) for file in told["files"]
            ),
            dropped=tuple(told["dropped"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, NoTable):
            raise
        raise NoTable(f"the table's newest commit can't be read: {error!r}") from error


def manifest(files: Iterable[tuple[str, int]]) -> bytes:
    """Spark's list of a table's files, by full path; see `neve.spark.manifest`."""
    from neve.spark.manifest import manifest as lines

    return lines(files).encode()


def _check_settings(commit: Commit, settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        before = commit.settings.get(name)
        if before != value:
            raise NoTable(
                f"the table was begun with {name} {_shown(before)}, this run has {_shown(value)}: "
                "make another table, or run it as it was begun"
            )


def _shown(value: str | None) -> str:
    return repr(value if value is None or len(value) <= 300 else f"{value[:300]}…")


def _commit_key(number: int) -> str:
    return f"{_COMMITS}{number:020d}.json"


def _found(pattern: re.Pattern[str], keys: Iterable[str]) -> list[int]:
    return [int(match[1]) for key in keys if (match := pattern.fullmatch(key))]
