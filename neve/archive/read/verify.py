"""Do the journal and the objects agree: each queue tiles without hole or overlap, each object is there, in its size.

Reads headers only; a deep check reads every object, in parts, and compares its checksum. What decoding its rows tells
is a room of its own (`neve.archive.read.verify_rows`).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import CommittedObject

_PART = 8 << 20


class StoredObject(Protocol):
    """What a store says of an object. An empty etag says nothing: a copy of a bucket may have others."""

    @property
    def size(self) -> int: ...

    @property
    def etag(self) -> str: ...


class VerifySource(Protocol):
    """What a check asks of a store; both raise FileNotFoundError where there is no object."""

    def head(self, key: str) -> StoredObject: ...

    def get_range(self, key: str, start: int, length: int) -> bytes: ...


@dataclass(slots=True)
class VerifyReport:
    """How much was looked at, and what is wrong."""

    objects: int = 0
    rows: int = 0
    bytes: int = 0
    gaps: int = 0
    open_names: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


class Fault(NamedTuple):
    """What is wrong; of which offsets of which queue, where it is not the whole object's."""

    topic: str
    key: str  # of an object; empty: the queue's itself
    text: str
    queue: int | None = None
    first: int | None = None
    last: int | None = None

    def told(self) -> str:
        """In one line."""
        return f"{self.key or f'{self.topic} queue {self.queue}'}: {self.text}"


class Untiled(NamedTuple):
    """Offsets that are nowhere, or in two places."""

    is_hole: bool
    first: int
    last: int

    def told(self) -> str:
        """In words."""
        kind, where = ("hole", "nowhere") if self.is_hole else ("overlap", "in two places")
        return f"{kind} at offsets {self.first}…{self.last}, which are {where}"


def verify(catalog: Catalog, source: VerifySource, *, deep: bool = False) -> VerifyReport:
    """What one broker's journal says, against what its store has."""
    report = VerifyReport(gaps=catalog.gap_count, open_names=sum(map(len, catalog.rounds.open_intents().values())))
    for name in catalog.each_object():
        report.objects += 1
        report.rows += name.rows
        report.bytes += name.size
        report.problems += (one.told() for one in _object_faults(name, source, deep=deep))
    for topic in catalog.topics():
        report.problems += (one.told() for one in queue_faults(catalog, topic))
    return report


def queue_faults(catalog: Catalog, topic: str) -> Iterator[Fault]:
    """Whether each queue of a topic has each of its offsets once; the catalog alone tells."""
    for queue in catalog.queues(topic):
        held = catalog.queue(topic, queue)
        spans = [*((run.first, run.last) for run in held.runs()), *held.gap_spans()]
        for one in untiled(spans, held.minimum):
            yield Fault(topic, "", one.told(), queue, one.first, one.last)


def _object_faults(name: CommittedObject, source: VerifySource, *, deep: bool) -> Iterator[Fault]:
    is_whole = True
    for fault, is_readable in head_faults(name, source):
        is_whole &= is_readable
        yield fault
    if deep and is_whole:
        content = Content(name)
        for start in range(0, name.size, _PART):
            content.add(source.get_range(name.key, start, min(_PART, name.size - start)))
        yield from content.faults()


def head_faults(name: CommittedObject, source: VerifySource) -> Iterator[tuple[Fault, bool]]:
    """The object is there, as large as the journal says, which counts its rows right; else, whether it can be read."""
    try:
        found = source.head(name.key)
    except FileNotFoundError:
        yield Fault(name.topic, name.key, "the object is missing"), False
        return
    if found.size != name.size:
        yield Fault(name.topic, name.key, f"{found.size} bytes, the journal says {name.size}"), False
    elif name.etag and found.etag and found.etag != name.etag:
        text = f"the object is another than the one committed (etag {found.etag})"
        yield Fault(name.topic, name.key, text), True
    counted = sum(last - first + 1 for _, first, last in name.runs)
    grouped = sum(group.rows for group in name.row_groups)
    if not counted == grouped == name.rows:
        text = f"{name.rows} rows, {counted} offsets, {grouped} rows in row groups"
        yield Fault(name.topic, name.key, text), True


class Content:
    """An object's bytes as they come, in order and without a hole: their checksum, and whether they are Parquet's."""

    def __init__(self, name: CommittedObject) -> None:
        self._name = name
        self._algorithm, self._expected = name.checksum
        self._kind = self._algorithm.lower().replace("-", "")
        self._digest = hashlib.new(self._kind) if self._kind in {"sha256", "sha1", "md5"} else None
        self._crc, self._tail = 0, b""

    def add(self, part: bytes | memoryview) -> None:
        """The next ones."""
        self._crc, self._tail = zlib.crc32(part, self._crc), (self._tail + bytes(part[-4:]))[-4:]
        if self._digest is not None:
            self._digest.update(part)

    def faults(self) -> Iterator[Fault]:
        """Once all of them have come."""
        found = self._expected
        if self._digest is not None:
            found = self._digest.hexdigest()
        elif self._kind == "crc32":
            found = f"{self._crc:08x}"
        if found.lower() != self._expected.lower():
            text = f"{self._algorithm} {found}, the journal says {self._expected}"
            yield Fault(self._name.topic, self._name.key, text)
        if self._tail != b"PAR1":
            yield Fault(self._name.topic, self._name.key, "no Parquet file")


def tiling_faults(spans: Iterable[tuple[int, int]], minimum: int) -> Iterator[str]:
    """`untiled`, in words."""
    return (one.told() for one in untiled(spans, minimum))


def untiled(spans: Iterable[tuple[int, int]], minimum: int) -> Iterator[Untiled]:
    """What is wrong with the order of (first, last) of a queue's runs and gaps, from its minimum on. Pure."""
    following: int | None = None
    for first, last in sorted(spans):
        if following is not None and first > following and first > minimum:
            yield Untiled(True, max(following, minimum), first - 1)
        elif following is not None and first < following and last >= minimum:
            yield Untiled(False, first, min(last, following - 1))
        following = max(last + 1, following or 0)
