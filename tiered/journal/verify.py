"""Do the journal and the objects agree: each queue tiles without gap or overlap, each object is there, in its size.

Reads headers only; a deep check reads every object, in parts, and compares its checksum. Decoding belongs to a reader.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass, field

from infra.object_store.protocol import NotFound, ObjectStore
from neve.archive.catalog import Catalog
from neve.archive.journal import CommittedName

_PART = 8 << 20


@dataclass(slots=True)
class VerifyReport:
    objects: int = 0
    rows: int = 0
    bytes: int = 0
    gaps: int = 0
    open_names: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(catalog: Catalog, store: ObjectStore, *, deep: bool = False) -> VerifyReport:
    report = VerifyReport(gaps=catalog.gap_count, open_names=sum(map(len, catalog.open_intents().values())))
    for name in catalog.objects():
        report.objects += 1
        report.rows += name.rows
        report.bytes += name.size
        if _check_object(name, store, report) and deep:
            _check_bytes(name, store, report)
    for topic in catalog.topics():
        for queue in catalog.queues(topic):
            _check_tiles(catalog, topic, queue, report)
    return report


def _check_object(name: CommittedName, store: ObjectStore, report: VerifyReport) -> bool:
    """Whether there is an object of the right size."""
    try:
        info = store.head(name.key)
    except NotFound:
        report.problems.append(f"{name.key}: the object is missing")
        return False
    if info.size != name.size:
        report.problems.append(f"{name.key}: {info.size} bytes, the journal says {name.size}")
    elif name.etag and info.etag and info.etag != name.etag:
        report.problems.append(f"{name.key}: the object is another than the one committed (etag {info.etag})")
    counted = sum(last - first + 1 for first, last, _ in name.queues.values())
    grouped = sum(group.rows for group in name.row_groups)
    if not counted == grouped == name.rows:
        report.problems.append(f"{name.key}: {name.rows} rows, {counted} offsets, {grouped} rows in row groups")
    return info.size == name.size


def _check_bytes(name: CommittedName, store: ObjectStore, report: VerifyReport) -> None:
    algorithm, expected = name.checksum
    kind = algorithm.lower().replace("-", "")
    digest = hashlib.new(kind) if kind in {"sha256", "sha1", "md5"} else None
    crc, tail = 0, b""
    for start in range(0, name.size, _PART):
        part = store.get_range(name.key, start, min(_PART, name.size - start))
        crc, tail = zlib.crc32(part, crc), (tail + part)[-4:]
        if digest is not None:
            digest.update(part)
    found = digest.hexdigest() if digest is not None else f"{crc:08x}" if kind == "crc32" else expected
    if found.lower() != expected.lower():
        report.problems.append(f"{name.key}: {algorithm} {found}, the journal says {expected}")
    if tail != b"PAR1":
        report.problems.append(f"{name.key}: no Parquet file")


def _check_tiles(catalog: Catalog, topic: str, queue: int, report: VerifyReport) -> None:
    minimum = catalog.recorded_minimum(topic, queue)
    spans = [(run.first, run.last) for run in catalog.runs(topic, queue)]
    spans += catalog.gap_spans(topic, queue)
    following: int | None = None
    for first, last in sorted(span for span in spans if span[1] >= minimum):
        if following is not None and first != following:
            kind = "overlap" if first < following else "hole"
            report.problems.append(f"{topic} queue {queue}: {kind} between offsets {following} and {first}")
        following = max(last + 1, following or 0)
