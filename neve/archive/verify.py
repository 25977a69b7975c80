"""Do the journal and the objects agree: each queue tiles without hole or overlap, each object is there, in its size.

Reads headers only; a deep check reads every object, in parts, and compares its checksum. Decoding belongs to a reader.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from neve.archive.catalog import Catalog
from neve.archive.journal import CommittedName

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


def verify(catalog: Catalog, source: VerifySource, *, deep: bool = False) -> VerifyReport:
    """What one broker's journal says, against what its store has."""
    report = VerifyReport(gaps=catalog.gap_count, open_names=sum(map(len, catalog.open_intents().values())))
    for name in catalog.each_object():
        report.objects += 1
        report.rows += name.rows
        report.bytes += name.size
        report.problems += (f"{name.key}: {text}" for text in _object_faults(name, source, deep=deep))
    for topic in catalog.topics():
        for queue in catalog.queues(topic):
            spans = [(run.first, run.last) for run in catalog.runs(topic, queue)]
            spans += catalog.gap_spans(topic, queue)
            faults = tiling_faults(spans, catalog.recorded_minimum(topic, queue))
            report.problems += (f"{topic} queue {queue}: {text}" for text in faults)
    return report


def _object_faults(name: CommittedName, source: VerifySource, *, deep: bool) -> Iterator[str]:
    """The object is there, as large as the journal says, and holds the rows that it says."""
    try:
        found = source.head(name.key)
    except FileNotFoundError:
        yield "the object is missing"
        return
    if found.size != name.size:
        yield f"{found.size} bytes, the journal says {name.size}"
    elif name.etag and found.etag and found.etag != name.etag:
        yield f"the object is another than the one committed (etag {found.etag})"
    counted = sum(last - first + 1 for first, last, _ in name.queues.values())
    grouped = sum(group.rows for group in name.row_groups)
    if not counted == grouped == name.rows:
        yield f"{name.rows} rows, {counted} offsets, {grouped} rows in row groups"
    if deep and found.size == name.size:
        yield from _content_faults(name, source)


def _content_faults(name: CommittedName, source: VerifySource) -> Iterator[str]:
    algorithm, expected = name.checksum
    kind = algorithm.lower().replace("-", "")
    digest = hashlib.new(kind) if kind in {"sha256", "sha1", "md5"} else None
    crc, tail = 0, b""
    for start in range(0, name.size, _PART):
        part = source.get_range(name.key, start, min(_PART, name.size - start))
        crc, tail = zlib.crc32(part, crc), (tail + part)[-4:]
        if digest is not None:
            digest.update(part)
    found = digest.hexdigest() if digest is not None else f"{crc:08x}" if kind == "crc32" else expected
    if found.lower() != expected.lower():
        yield f"{algorithm} {found}, the journal says {expected}"
    if tail != b"PAR1":
        yield "no Parquet file"


def tiling_faults(spans: Iterable[tuple[int, int]], minimum: int) -> Iterator[str]:
    """What is wrong with the order of (first, last) of a queue's runs and gaps, from its minimum on. Pure."""
    following: int | None = None
    for first, last in sorted(spans):
        if following is not None and first > following and first > minimum:
            yield f"hole at offsets {max(following, minimum)}…{first - 1}, which are nowhere"
        elif following is not None and first < following and last >= minimum:
            yield f"overlap at offsets {first}…{min(last, following - 1)}, which are in two places"
        following = max(last + 1, following or 0)
