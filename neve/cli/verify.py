"""Checking an archive from its store alone: journal against objects, queues without hole or overlap."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from neve.archive.follow import catalogs
from neve.cli.store import Source, open_source

if TYPE_CHECKING:
    from neve.archive.catalog import Catalog
    from neve.archive.journal import CommittedName


def verify_store(store: str, broker: str | None, *, deep: bool) -> tuple[list[str], dict[str, int]]:
    """Findings, and how much was looked at."""
    source = open_source(store)
    findings: list[str] = []
    objects = rows = 0
    for name, catalog in sorted(catalogs(source, broker).items()):
        for one in catalog.objects():
            objects += 1
            rows += one.rows
            findings += check_object(source, one, deep=deep)
        findings += [f"broker {name}: {text}" for topic in catalog.topics() for text in check_queues(catalog, topic)]
    return findings, {"objects": objects, "rows": rows}


def check_object(source: Source, one: CommittedName, *, deep: bool) -> Iterator[str]:
    """The object is there, as large as the journal says, and holds the rows that it says."""
    try:
        size = source.size(one.key)
    except FileNotFoundError:
        yield f"{one.key}: missing"
        return
    if size != one.size:
        yield f"{one.key}: {size} bytes, the journal says {one.size}"
    counted = sum(group.rows for group in one.row_groups)
    in_queues = sum(last - first + 1 for first, last, _ in one.queues.values())
    if not one.rows == counted == in_queues:
        yield f"{one.key}: {one.rows} rows, {counted} in its row groups, {in_queues} in its queues"
    if deep and size == one.size:
        yield from _check_bytes(source, one)


def _check_bytes(source: Source, one: CommittedName) -> Iterator[str]:
    algorithm, expected = one.checksum
    data = source.get(one.key)
    found = _digest(algorithm, data)
    if found is not None and found.lower() != expected.lower():
        yield f"{one.key}: {algorithm} {found}, the journal says {expected}"
    if data[-4:] != b"PAR1":
        yield f"{one.key}: no Parquet file"


def _digest(algorithm: str, data: bytes) -> str | None:
    kind = algorithm.lower().replace("-", "")
    if kind == "crc32":
        return f"{zlib.crc32(data):08x}"
    if kind in {"sha256", "sha1", "md5"}:
        return hashlib.new(kind, data).hexdigest()
    return None


def check_queues(catalog: Catalog, topic: str) -> Iterator[str]:
    """Runs of a queue follow each other; what is missing between two is a GAP or below the queue's minimum."""
    for queue in catalog.queues(topic):
        floor = catalog.recorded_minimum(topic, queue)
        runs = [(run.first, run.last) for run in catalog.runs(topic, queue)]
        yield from (f"{topic} queue {queue}: {text}" for text in tiling(runs, catalog.gap_spans(topic, queue), floor))


def tiling(runs: Iterable[tuple[int, int]], gaps: Iterable[tuple[int, int]], floor: int) -> Iterator[str]:
    """What is wrong with the order of (first, last) pairs, where `gaps` may fill holes. Pure."""
    holes = sorted(gaps)
    expected: Any = None
    for first, last in sorted(runs):
        if expected is not None and first < expected:
            yield f"offsets {first}…{expected - 1} are in two objects"
        if expected is not None and first > expected and first > floor:
            missing = max(expected, floor)
            for gap_first, gap_last in holes:
                if gap_first <= missing <= gap_last:
                    missing = gap_last + 1
            if missing < first:
                yield f"offsets {missing}…{first - 1} are nowhere"
        expected = max(last + 1, expected or 0)
