"""`verify`: decode every object of an archive and compare it with the journal, in Spark tasks.

The driver reads the journal and checks that each queue has each offset once. Tasks check objects by
`neve.archive.read.verify_rows`, in rounds; after each round the findings are collected and, if requested, noted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.archive.catalog.journal_reader import catalogs
from neve.archive.read.verify import Fault, VerifySource, object_faults, queue_faults
from neve.archive.store.source import open_source
from neve.spark.builder import is_remote
from neve.spark.known_topics import check_known
from neve.spark.verify_notes import VerifyNotes

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from neve.archive.catalog.catalog import Catalog
    from neve.archive.format.journal import CommittedObject

ROUND_OBJECTS = 256
ROUND_BYTES = 8 << 30
_TASKS_PER_SLOT = 3  # so that one slow task does not idle the other slots
_SLOTS_OF_A_SERVER = 16  # Spark Connect does not report how many tasks run at once

_FINDINGS = "at INT, unread STRING, topic STRING, key STRING, text STRING, queue INT, first BIGINT, last BIGINT"

Numbered = tuple[int, "CommittedObject"]


class VerifyProgress(NamedTuple):
    """Objects and bytes that are checked, of how many, and the faults so far."""

    objects: int
    of_objects: int
    bytes: int
    of_bytes: int
    faults: int


class VerifyJob(NamedTuple):
    """The result of a check.

    `resumed` counts objects that an interrupted check had checked. `faults` are (broker, fault). `unread` are
    (broker, key, reason): objects that may exist but could not be read.
    """

    store: str
    objects: int
    rows: int
    bytes: int
    gaps: int
    resumed: int
    faults: list[tuple[str, Fault]]
    unread: list[tuple[str, str, str]]

    @property
    def ok(self) -> bool:
        """Whether all objects were read and no fault was found."""
        return not self.faults and not self.unread

    def as_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        faults = [{"broker": broker, **fault._asdict()} for broker, fault in self.faults]
        unread = [{"broker": broker, "key": key, "reason": reason} for broker, key, reason in self.unread]
        counts = {name: getattr(self, name) for name in ("store", "objects", "rows", "bytes", "gaps", "resumed")}
        return {"job": "verify", "ok": self.ok, **counts, "faults": faults, "unread": unread}


def verify(
    spark: SparkSession,
    *,
    store: str,
    broker: str | None = None,
    topics: Collection[str] | None = None,
    deep: bool = True,
    resume: str | Path | None = None,
    progress: Callable[[VerifyProgress], None] = lambda _: None,
) -> VerifyJob:
    """Check all objects that readers see now, of all brokers and topics or of some.

    Args:
        deep: read objects whole; otherwise compare only their sizes.
        resume: a file of notes, from which an interrupted check resumes.
        progress: is called after each round of objects.

    Raises:
        FileNotFoundError: the store has no archive, or the archive does not have the topic.
        OtherCheck: `resume` contains notes of another store or depth.
    """
    source = open_source(store)
    known = catalogs(source, broker, whole=True)  # a check may take longer than checkpoints are kept
    for topic in topics or ():
        check_known(source, known, topic)
    check = _Check(spark, store, VerifyNotes(None if resume is None else Path(resume), store, deep=deep), deep=deep)
    names = list(_names(known, topics))
    resumed = check.resume(names)
    for some in _rounds([one for one in names if one[1].key not in check.found]):
        check.run(some)
        progress(check.progress)
    faults = [*_queue_faults(known, topics), *_still_live(check.faults(names), source, broker)]
    done = VerifyJob(
        store=store,
        objects=len(names),
        rows=sum(name.rows for _, name in names),
        bytes=sum(name.size for _, name in names),
        gaps=sum(catalog.gap_count for catalog in known.values()),
        resumed=resumed,
        faults=faults,
        unread=check.unread(names),
    )
    if not done.unread:
        check.finish()
    return done


def _rounds(names: Sequence[tuple[str, CommittedObject]]) -> Iterator[list[tuple[str, CommittedObject]]]:
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
    def __init__(self, spark: SparkSession, store: str, notes: VerifyNotes, *, deep: bool) -> None:
        self._spark, self._store, self._notes, self._deep = spark, store, notes, deep
        self.found: dict[str, list[Fault]] = {}  # by key
        self._unread: dict[str, str] = {}
        self.progress = VerifyProgress(0, 0, 0, 0, 0)

    def resume(self, names: Sequence[tuple[str, CommittedObject]]) -> int:
        self.progress = VerifyProgress(0, len(names), 0, sum(name.size for _, name in names), 0)
        for _, name in names:
            if (faults := self._notes.faults_of(name)) is not None:
                self.found[name.key] = faults
                self._count(name, len(faults))
        return len(self.found)

    def run(self, some: Sequence[tuple[str, CommittedObject]]) -> None:
        numbered = list(enumerate(name for _, name in some))
        units = balanced(numbered, lambda one: one[1].size, _TASKS_PER_SLOT * _slots(self._spark))
        found: list[list[Fault]] = [[] for _ in some]
        unread: dict[int, str] = {}
        for row in _findings(self._spark, units, partial(_check_objects, self._store, self._deep)):
            if row.unread is not None:
                unread[row.at] = row.unread
            else:
                found[row.at].append(Fault(row.topic, row.key, row.text, row.queue, row.first, row.last))
        done = [(name, found[at]) for at, (_, name) in enumerate(some) if at not in unread]
        self._notes.add(done)
        self.found |= {name.key: faults for name, faults in done}
        self._unread |= {some[at][1].key: reason for at, reason in unread.items()}
        for at, (_, name) in enumerate(some):
            self._count(name, len(found[at]))

    def _count(self, name: CommittedObject, faults: int) -> None:
        objects, of_objects, size, of_bytes, before = self.progress
        self.progress = VerifyProgress(objects + 1, of_objects, size + name.size, of_bytes, before + faults)

    def faults(self, names: Sequence[tuple[str, CommittedObject]]) -> list[tuple[str, CommittedObject, Fault]]:
        return [(broker, name, fault) for broker, name in names for fault in self.found.get(name.key, ())]

    def unread(self, names: Sequence[tuple[str, CommittedObject]]) -> list[tuple[str, str, str]]:
        return [(broker, name.key, self._unread[name.key]) for broker, name in names if name.key in self._unread]

    def finish(self) -> None:
        self._notes.finish()


def _slots(spark: SparkSession) -> int:
    """Return how many tasks run at once."""
    return _SLOTS_OF_A_SERVER if is_remote(spark) else int(spark.sparkContext.defaultParallelism)


def balanced(units: Sequence[Numbered], weight: Callable[[Numbered], int], parts: int) -> list[list[Numbered]]:
    """Divide units into at most `parts` parts of about the same weight."""
    shares: list[list[Numbered]] = [[] for _ in range(min(parts, len(units)))]
    weights = [0] * len(shares)
    for unit in sorted(units, key=weight, reverse=True):  # the heaviest first, each to the lightest part
        lightest = weights.index(min(weights))
        shares[lightest].append(unit)
        weights[lightest] += max(weight(unit), 1)
    return shares


def _findings(
    spark: SparkSession, units: Sequence[list[Numbered]], work: Callable[[list[Numbered]], Iterator[pa.RecordBatch]]
) -> list[Any]:
    """Run one task per unit, in Python on the workers, which need neve; Spark Connect is supported."""

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for at in batch["id"].to_pylist():
                yield from work(units[at])

    return list(spark.range(0, len(units), 1, max(len(units), 1)).mapInArrow(each, _FINDINGS).collect())


def _names(known: Mapping[str, Catalog], topics: Collection[str] | None) -> Iterator[tuple[str, CommittedObject]]:
    for broker, catalog in sorted(known.items()):
        for topic in catalog.topics() if topics is None else sorted(set(topics)):
            for name in catalog.topic(topic).names():
                yield broker, name


def _queue_faults(known: Mapping[str, Catalog], topics: Collection[str] | None) -> Iterator[tuple[str, Fault]]:
    for broker, catalog in sorted(known.items()):
        for topic in catalog.topics() if topics is None else sorted(set(topics)):
            for fault in queue_faults(catalog, topic):
                yield broker, fault


def _still_live(
    faults: Sequence[tuple[str, CommittedObject, Fault]], source: Any, only: str | None
) -> list[tuple[str, Fault]]:
    """Drop faults of objects that left the archive during the check: they may have been deleted."""
    if not faults:
        return []
    now = catalogs(source, only)
    return [(broker, fault) for broker, name, fault in faults if broker in now and now[broker].are_live([name])]


def _check_objects(store: str, deep: bool, names: Sequence[Numbered]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    types = {"INT": pa.int32(), "BIGINT": pa.int64(), "STRING": pa.string()}
    schema = pa.schema([(name, types[kind]) for name, kind in (one.split() for one in _FINDINGS.split(", "))])
    source = open_source(store)
    rows = [row for at, name in names for row in _rows_of_object(at, name, source, deep=deep)]
    yield pa.RecordBatch.from_pylist(rows, schema)


def _rows_of_object(at: int, name: CommittedObject, source: VerifySource, *, deep: bool) -> list[dict[str, Any]]:
    from neve.archive.read.verify_rows import row_faults

    try:
        faults = list(object_faults(name, source, row_faults if deep else None))
    except Exception as error:  # noqa: BLE001 - any error of a store is reported, and the other objects are checked
        return [{"at": at, "unread": f"{type(error).__name__}: {error}"}]
    return [{"at": at, **fault._asdict()} for fault in faults]
