"""`verify`: every object of an archive read, decoded and compared with the journal, on all machines of a Spark.

The journal is read here, and tells whether each queue has each offset once; objects are checked where tasks run, by
`neve.archive.read.verify_rows`. What is found comes back after each round of objects, and is noted if it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.archive.catalog.journal_reader import catalogs
from neve.archive.read.verify import Fault, VerifySource, head_faults, queue_faults
from neve.archive.store.source import open_source
from neve.spark.jobs.checked import Checked
from neve.spark.jobs.spread import shared_out, slots, spread
from neve.spark.known_topics import check_known

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from neve.archive.catalog.catalog import Catalog
    from neve.archive.format.journal import CommittedObject

ROUND_OBJECTS = 256
ROUND_BYTES = 8 << 30
_TASKS_OF_A_SLOT = 3  # so that a slow one does not keep the others waiting

_FOUND = "at INT, unread STRING, topic STRING, key STRING, text STRING, queue INT, first BIGINT, last BIGINT"

Numbered = tuple[int, "CommittedObject"]


class Progress(NamedTuple):
    """How far a check is."""

    objects: int
    of_objects: int
    bytes: int
    of_bytes: int
    faults: int


class VerifyJob(NamedTuple):
    """What was looked at, and what is wrong."""

    store: str
    objects: int
    rows: int
    bytes: int
    gaps: int
    taken_over: int  # objects that a check before this one, broken off, had behind it
    faults: list[tuple[str, Fault]]  # broker, what is wrong
    unread: list[tuple[str, str, str]]  # broker, key, why the store did not give it although it may be there

    @property
    def ok(self) -> bool:
        """Nothing is wrong, and all was read."""
        return not self.faults and not self.unread

    def as_json(self) -> dict[str, Any]:
        """The report that a program reads."""
        faults = [{"broker": broker, **fault._asdict()} for broker, fault in self.faults]
        unread = [{"broker": broker, "key": key, "reason": reason} for broker, key, reason in self.unread]
        counts = {name: getattr(self, name) for name in ("store", "objects", "rows", "bytes", "gaps", "taken_over")}
        return {"job": "verify", "ok": self.ok, **counts, "faults": faults, "unread": unread}


def verify(
    spark: SparkSession,
    *,
    store: str,
    broker: str | None = None,
    topics: Collection[str] | None = None,
    deep: bool = True,
    resume: str | Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> VerifyJob:
    """All objects that readers see now, of all brokers and topics or of some.

    Args:
        deep: objects are read whole; otherwise their sizes alone are compared.
        resume: a file in which it is noted what has been checked; a check that is broken off goes on with it.
        progress: told after each round of objects.

    Raises:
        FileNotFoundError: the store holds no archive, or there is no such topic in it.
        OtherCheck: `resume` is of a check of another store, or of the other depth.
    """
    source = open_source(store)
    known = catalogs(source, broker, whole=True)  # for hours, in which checkpoints may go
    for topic in topics or ():
        check_known(source, known, topic)
    check = _Check(spark, store, Checked(None if resume is None else Path(resume), store, deep=deep), deep=deep)
    names = list(_names(known, topics))
    taken_over = check.take_over(names)
    for some in _rounds([one for one in names if one[1].key not in check.found]):
        check.run(some)
        progress(check.progress)
    faults = [*_queue_faults(known, topics), *_still_there(check.faults(names), source, broker)]
    done = VerifyJob(
        store=store,
        objects=len(names),
        rows=sum(name.rows for _, name in names),
        bytes=sum(name.size for _, name in names),
        gaps=sum(catalog.gap_count for catalog in known.values()),
        taken_over=taken_over,
        faults=faults,
        unread=check.unread(names),
    )
    if not done.unread:
        check.finish()
    return done


def _rounds(names: Sequence[tuple[str, CommittedObject]]) -> Iterator[list[tuple[str, CommittedObject]]]:
    """So many objects, or bytes, at once: what is found is told, and noted, after each."""
    some: list[tuple[str, CommittedObject]] = []
    bytes_of_some = 0
    for one in names:
        some.append(one)
        bytes_of_some += one[1].size
        if len(some) == ROUND_OBJECTS or bytes_of_some >= ROUND_BYTES:
            yield some
            some, bytes_of_some = [], 0
    if some:
        yield some


class _Check:
    def __init__(self, spark: SparkSession, store: str, checked: Checked, *, deep: bool) -> None:
        self._spark, self._store, self._checked, self._deep = spark, store, checked, deep
        self.found: dict[str, list[Fault]] = {}  # by key
        self._unread: dict[str, str] = {}
        self.progress = Progress(0, 0, 0, 0, 0)

    def take_over(self, names: Sequence[tuple[str, CommittedObject]]) -> int:
        self.progress = Progress(0, len(names), 0, sum(name.size for _, name in names), 0)
        for _, name in names:
            if (faults := self._checked.faults_of(name)) is not None:
                self.found[name.key] = faults
                self._behind(name, len(faults))
        return len(self.found)

    def run(self, some: Sequence[tuple[str, CommittedObject]]) -> None:
        units = shared_out(list(enumerate(name for _, name in some)), _size, _TASKS_OF_A_SLOT * slots(self._spark))
        work = partial(_check_objects, self._store, self._deep)
        found: list[list[Fault]] = [[] for _ in some]
        unread: dict[int, str] = {}
        for row in spread(self._spark, units, work, _FOUND).collect():
            if row.unread is not None:
                unread[row.at] = row.unread
            else:
                found[row.at].append(Fault(row.topic, row.key, row.text, row.queue, row.first, row.last))
        done = [(name, found[at]) for at, (_, name) in enumerate(some) if at not in unread]
        self._checked.add(done)
        self.found |= {name.key: faults for name, faults in done}
        self._unread |= {some[at][1].key: reason for at, reason in unread.items()}
        for at, (_, name) in enumerate(some):
            self._behind(name, len(found[at]))

    def _behind(self, name: CommittedObject, faults: int) -> None:
        """Counted as they are checked: an archive may have a million objects, and a round has 256."""
        objects, of_objects, size, of_bytes, before = self.progress
        self.progress = Progress(objects + 1, of_objects, size + name.size, of_bytes, before + faults)

    def faults(self, names: Sequence[tuple[str, CommittedObject]]) -> list[tuple[str, CommittedObject, Fault]]:
        return [(broker, name, fault) for broker, name in names for fault in self.found.get(name.key, ())]

    def unread(self, names: Sequence[tuple[str, CommittedObject]]) -> list[tuple[str, str, str]]:
        return [(broker, name.key, self._unread[name.key]) for broker, name in names if name.key in self._unread]

    def finish(self) -> None:
        self._checked.finish()


def _size(one: Numbered) -> int:
    return one[1].size


def _names(known: Mapping[str, Catalog], topics: Collection[str] | None) -> Iterator[tuple[str, CommittedObject]]:
    for broker, catalog in sorted(known.items()):
        for topic in catalog.topics() if topics is None else sorted(set(topics)):
            for name in catalog.from_oldest(topic):
                yield broker, name


def _queue_faults(known: Mapping[str, Catalog], topics: Collection[str] | None) -> Iterator[tuple[str, Fault]]:
    for broker, catalog in sorted(known.items()):
        for topic in catalog.topics() if topics is None else sorted(set(topics)):
            for fault in queue_faults(catalog, topic):
                yield broker, fault


def _still_there(
    faults: Sequence[tuple[str, CommittedObject, Fault]], source: Any, only: str | None
) -> list[tuple[str, Fault]]:
    """Without those of objects that have left the readers' view meanwhile: they may have been deleted since."""
    if not faults:
        return []
    now = catalogs(source, only)
    return [(broker, fault) for broker, name, fault in faults if broker in now and now[broker].are_live([name])]


def _check_objects(store: str, deep: bool, names: Sequence[Numbered]) -> Iterator[pa.RecordBatch]:
    """On the machine that runs a task."""
    import pyarrow as pa

    kinds = {"INT": pa.int32(), "BIGINT": pa.int64(), "STRING": pa.string()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in (one.split() for one in _FOUND.split(", "))])
    source = open_source(store)
    rows = [row for at, name in names for row in _found(at, name, source, deep=deep)]
    yield pa.RecordBatch.from_pylist(rows, schema)


def _found(at: int, name: CommittedObject, source: VerifySource, *, deep: bool) -> list[dict[str, Any]]:
    from neve.archive.read.verify_rows import whole_object_faults

    try:
        faults = list(whole_object_faults(name, source) if deep else (fault for fault, _ in head_faults(name, source)))
    except Exception as error:  # noqa: BLE001 - whatever a store says: the other objects are checked, and it is told
        return [{"at": at, "unread": f"{type(error).__name__}: {error}"}]
    return [{"at": at, **fault._asdict()} for fault in faults]
