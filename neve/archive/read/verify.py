"""Verify an archive: each queue is contiguous without holes or overlaps, and each object is as its journal records it.

By default only HEAD requests are made. A content check reads the objects as well: `checksum_faults` compares their
checksums; `neve.archive.read.verify_rows.row_faults` also decodes their rows, and needs pyarrow.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import CommittedObject

PART_BYTES = 8 << 20  # of an object that is read at once


class StoredObject(Protocol):
    """The answer to a HEAD request; an empty etag is unknown, because copies of a bucket may have other etags."""

    @property
    def size(self) -> int: ...

    @property
    def etag(self) -> str: ...


class VerifySource(Protocol):
    """The store of an archive; both methods raise FileNotFoundError if there is no such object."""

    def head(self, key: str) -> StoredObject: ...

    def get_range(self, key: str, start: int, length: int) -> bytes: ...


@dataclass(slots=True)
class VerifyReport:
    """The verified objects and the problems found."""

    objects: int = 0
    rows: int = 0
    bytes: int = 0
    gaps: int = 0
    open_names: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


class Fault(NamedTuple):
    """A problem of an object, of some of its offsets, or of a queue."""

    topic: str
    key: str  # empty for a problem of a queue
    text: str
    queue: int | None = None
    first: int | None = None
    last: int | None = None

    def message(self) -> str:
        """Return the fault in one line."""
        return f"{self.key or f'{self.topic} queue {self.queue}'}: {self.text}"


class TilingFault(NamedTuple):
    """A range of offsets that is missing, or present twice."""

    is_hole: bool
    first: int
    last: int

    def message(self) -> str:
        """Return the fault in words."""
        return f"{'hole' if self.is_hole else 'overlap'} at offsets {self.first}…{self.last}"


#: Yields the faults in the content of an existing object. Raises FileNotFoundError if it is deleted meanwhile.
ContentCheck = Callable[[CommittedObject, VerifySource], Iterator[Fault]]


def verify(catalog: Catalog, source: VerifySource, *, deep: bool = False) -> VerifyReport:
    """Verify the archive of one broker; with `deep`, also the checksums of all objects."""
    report = VerifyReport(gaps=catalog.gap_count, open_names=sum(map(len, catalog.rounds.open_intents().values())))
    for name in catalog.each_object():
        report.objects += 1
        report.rows += name.rows
        report.bytes += name.size
        report.problems += (one.message() for one in object_faults(name, source, checksum_faults if deep else None))
    for topic in catalog.topics():
        report.problems += (one.message() for one in queue_faults(catalog, topic))
    return report


def queue_faults(catalog: Catalog, topic: str) -> Iterator[Fault]:
    """Yield the offsets of a topic's queues that are missing or present twice; no request is made."""
    for queue in catalog.queues(topic):
        held = catalog.queue(topic, queue)
        spans = [*((run.first, run.last) for run in held.runs()), *held.gap_spans()]
        for one in tiling_faults(spans, held.minimum):
            yield Fault(topic, "", one.message(), queue, one.first, one.last)


def object_faults(name: CommittedObject, source: VerifySource, content: ContentCheck | None = None) -> Iterator[Fault]:
    """Yield the faults of an object.

    Args:
        name: the object as its journal records it.
        source: the store; its errors are raised, except FileNotFoundError.
        content: checks the content of the object if its size is right.
    """
    is_readable = True
    for fault, readable in _head_faults(name, source):
        is_readable &= readable
        yield fault
    if is_readable and content is not None:
        try:
            yield from content(name, source)
        except FileNotFoundError:
            yield Fault(name.topic, name.key, "the object was deleted while it was read")


def _head_faults(name: CommittedObject, source: VerifySource) -> Iterator[tuple[Fault, bool]]:
    """Yield (fault, whether the content can be read all the same)."""
    try:
        found = source.head(name.key)
    except FileNotFoundError:
        yield Fault(name.topic, name.key, "the object is missing"), False
        return
    if found.size != name.size:
        yield Fault(name.topic, name.key, f"{found.size} bytes, the journal records {name.size}"), False
    elif name.etag and found.etag and found.etag != name.etag:
        yield Fault(name.topic, name.key, f"the object is not the committed one (etag {found.etag})"), True
    counted = sum(last - first + 1 for _, first, last in name.runs)
    grouped = sum(group.rows for group in name.row_groups)
    if not counted == grouped == name.rows:
        text = f"{name.rows} rows, {counted} offsets, {grouped} rows in row groups"
        yield Fault(name.topic, name.key, text), True


def checksum_faults(name: CommittedObject, source: VerifySource) -> Iterator[Fault]:
    """Read an object in parts, and compare its checksum and its magic."""
    content = ObjectChecksum(name)
    for start in range(0, name.size, PART_BYTES):
        content.add(source.get_range(name.key, start, min(PART_BYTES, name.size - start)))
    yield from content.faults()


class ObjectChecksum:
    """The checksum of an object whose bytes are added in order."""

    def __init__(self, name: CommittedObject) -> None:
        self._name = name
        self._algorithm, self._expected = name.checksum
        self._kind = self._algorithm.lower().replace("-", "")
        self._digest = hashlib.new(self._kind) if self._kind in {"sha256", "sha1", "md5"} else None
        self._crc, self._tail = 0, b""

    def add(self, part: bytes | memoryview) -> None:
        """Add the next bytes."""
        self._crc, self._tail = zlib.crc32(part, self._crc), (self._tail + bytes(part[-4:]))[-4:]
        if self._digest is not None:
            self._digest.update(part)

    def faults(self) -> Iterator[Fault]:
        """Yield the faults, after all bytes were added."""
        found = self._expected
        if self._digest is not None:
            found = self._digest.hexdigest()
        elif self._kind == "crc32":
            found = f"{self._crc:08x}"
        if found.lower() != self._expected.lower():
            text = f"{self._algorithm} {found}, the journal records {self._expected}"
            yield Fault(self._name.topic, self._name.key, text)
        if self._tail != b"PAR1":
            yield Fault(self._name.topic, self._name.key, "not a Parquet file")


def tiling_faults(spans: Iterable[tuple[int, int]], minimum: int) -> Iterator[TilingFault]:
    """Yield the holes and overlaps, from the minimum on, of a queue's runs and gaps, given as (first, last)."""
    following: int | None = None
    for first, last in sorted(spans):
        if following is not None and first > following and first > minimum:
            yield TilingFault(True, max(following, minimum), first - 1)
        elif following is not None and first < following and last >= minimum:
            yield TilingFault(False, first, min(last, following - 1))
        following = max(last + 1, following or 0)
