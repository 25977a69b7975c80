"""Writing in a tier worker: encodes named objects from the log's files, verifies them, and uploads them.

Few threads encode and many upload. An encoded object waits for its upload in memory, or on the disk if it is large. The
broker limits how much it requests. Files on the disk are not fsynced: they are not used after a crash.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from infra import failpoint
from infra.objects.store import NotFound, ObjectStore, ObjectStoreError, PreconditionFailed, UnknownOutcome
from neve.archive.format.journal import CommittedObject, NewerFormat
from neve.archive.rows.row_encoder import Entries
from neve.archive.rows.schema import DamagedObject, ObjectFacts, describe, parse_footer
from tiered.worker import compacting, frames
from tiered.worker.work_dir import own_prefix
from tiered.write.entry_run import PartOfRun
from tiered.write.segment_writer import GroupSizes, LogFiles, MissingBytes, WrittenObject, encode
from tiered.write.small_objects import SmallObject, encode_small, is_small
from tiered.write.upload_rate import UploadRate

#: Expected errors of a request; any other error is a defect of the program.
FAILURES = (ObjectStoreError, ValueError, OSError, pa.ArrowException)


class Conflict(ValueError):
    """An object with other content exists under the name."""


class GivenUp(ValueError):
    """The broker no longer wants the object."""


class Encoded:
    """An object that is not uploaded yet; `number` is its index in the request."""

    def __init__(self, number: int, written: WrittenObject, directory: TemporaryDirectory[str] | None = None) -> None:
        self.number, self.written, self._directory = number, written, directory

    def remove(self) -> None:
        """Delete the object's file, if it has one."""
        if self._directory is not None:
            self._directory.cleanup()


class NotEncoded(msgspec.Struct):
    """The reason why an object of a request could not be encoded."""

    number: int
    why: frames.NotUploaded


def refused(error: Exception) -> frames.NotUploaded:
    return frames.NotUploaded(type(error).__name__, str(error))


class ObjectWriter:
    """Executes EncodeUpload requests in two steps, and Compact requests. Thread-safe."""

    def __init__(self, store: Callable[[str], ObjectStore], rate: UploadRate, sizes: GroupSizes) -> None:
        self._store, self._rate, self._sizes = store, rate, sizes

    # ---- encoding

    def encoded(self, request: frames.EncodeUpload, descriptor: int | None) -> Iterator[Encoded | NotEncoded]:
        """Yield each object of a request once, in any order, and encode the next one only when it is requested."""
        entries = _entries(request.objects, descriptor)
        borders = np.cumsum([0, *(_rows(one) for one in request.objects)])
        through = np.concatenate([[0], np.cumsum(entries.size, dtype=np.int64)])
        small = [number for number, size in enumerate(np.diff(through[borders])) if is_small(int(size), self._sizes)]
        made = self._encoded_together(request, small, entries, borders)
        for number in made:
            yield Encoded(number, made[number])
        for number, one in enumerate(request.objects):
            if number not in made:
                yield self._encoded_alone(request, number, one, entries.at(slice(borders[number], borders[number + 1])))

    def _encoded_together(
        self, request: frames.EncodeUpload, numbers: Sequence[int], entries: Entries, borders: npt.NDArray[np.int64]
    ) -> dict[int, WrittenObject]:
        """Encode small objects together. Objects without a result have to be encoded alone, which reports the fault."""
        if not numbers:
            return {}
        objects = [request.objects[number] for number in numbers]
        small = [SmallObject(one.name.key, _facts(request, one), one.runs) for one in objects]
        rows = np.concatenate([np.arange(borders[number], borders[number + 1]) for number in numbers])
        try:
            with LogFiles(request.files) as log:
                written = encode_small(small, entries.at(rows), log)
        except FAILURES:
            return {}
        return {number: one for number, one in zip(numbers, written, strict=True) if one is not None}

    def _encoded_alone(
        self, request: frames.EncodeUpload, number: int, one: frames.ObjectToWrite, entries: Entries
    ) -> Encoded | NotEncoded:
        directory = None
        try:
            directory = TemporaryDirectory(prefix=own_prefix("offload"), dir=request.work_dir)
            path = Path(directory.name) / "object.parquet"
            runs, facts = _runs(one.runs, entries), _facts(request, one)
            written = encode(runs, request.files, path, facts=facts, key=one.name.key, sizes=self._sizes)
        except FAILURES as error:
            if directory is not None:
                directory.cleanup()
            return NotEncoded(number, refused(error))
        return Encoded(number, written, directory)

    # ---- uploading

    def upload(self, store_url: str, encoded: Encoded) -> tuple[frames.Committed | frames.NotUploaded, float]:
        """Upload an object. Returns its outcome, and the seconds for which the rate delayed it."""
        pace = _Pace(self._rate)
        written = encoded.written
        outcome: frames.Committed | frames.NotUploaded
        content = written.content if isinstance(written.content, Path) else written.content.to_pybytes()
        try:
            failpoint.hit("offload.after_encode")
            name = _put(self._store(store_url), content, written.name, pace)
            outcome = frames.Committed(name, written.wire_rows, written.damaged_rows)
        except FAILURES as error:
            outcome = refused(error)
        finally:
            encoded.remove()
        return outcome, pace.waited

    def merged(self, request: frames.Compact, is_wanted: Callable[[], bool]) -> tuple[CommittedObject, float]:
        """Merge and upload an object. Returns it, and the seconds for which the rate delayed it. Raises FAILURES."""
        pace, store = _Pace(self._rate), self._store(request.store_url)

        def put(path: Path, name: CommittedObject) -> CommittedObject:
            return _put(store, path, name, pace)

        return compacting.make(request, store, put, self._sizes, is_wanted), pace.waited


class _Pace:
    """The shared upload rate as seen by one upload, whose parts may be uploaded concurrently."""

    def __init__(self, rate: UploadRate) -> None:
        self._rate, self._lock = rate, threading.Lock()
        self.waited = 0.0

    def __call__(self, count: int) -> None:
        waited = self._rate.take(count)
        with self._lock:
            self.waited += waited


def _put(
    store: ObjectStore, content: Path | bytes, name: CommittedObject, pace: Callable[[int], None]
) -> CommittedObject:
    try:
        outcome = store.put(name.key, content, if_absent=True, pace=pace)
    except PreconditionFailed:
        return _adopted(store, name)
    except UnknownOutcome:
        try:
            return _adopted(store, name)
        except NotFound:
            outcome = store.put(name.key, content, if_absent=True, pace=pace)
    return msgspec.structs.replace(name, etag=outcome.etag)


def _adopted(store: ObjectStore, ours: CommittedObject) -> CommittedObject:
    """Return the object in the store if an earlier attempt wrote it with the same rows. Raises Conflict otherwise."""
    info = store.head(ours.key)
    tail = store.get_range(ours.key, max(0, info.size - 8), 8)
    footer = int.from_bytes(tail[:4], "little") + 8
    try:
        metadata = parse_footer(store.get_range(ours.key, info.size - footer, footer))
        same = info.size == ours.size and footer == ours.footer
        checksum = ours.checksum if same else ("", "")
        theirs = describe(metadata, key=ours.key, size=info.size, footer=footer, etag=info.etag, checksum=checksum)
    except (DamagedObject, NewerFormat, ValueError) as error:
        raise Conflict(f"{ours.key} exists and is not an object of neve: {error}") from error
    if theirs.sha256 != ours.sha256 or theirs.queues != ours.queues:
        raise Conflict(f"{ours.key} exists with other records")
    return theirs


# ---- parsing of requests


def _rows(one: frames.ObjectToWrite) -> int:
    return sum(count for _, _, count in one.runs)


def _entries(objects: Sequence[frames.ObjectToWrite], descriptor: int | None) -> Entries:
    if descriptor is None:
        raise MissingBytes("the entries were not sent")
    runs = np.array([run for one in objects for run in one.runs], np.int64).reshape(-1, 3)
    total = int(runs[:, 2].sum())
    raw = os.pread(descriptor, total * 12, 0)
    if len(raw) != total * 12:
        raise MissingBytes(f"{len(raw)} bytes of entries received, expected {total * 12}")
    begins = np.concatenate([[0], np.cumsum(runs[:, 2])[:-1]]) if len(runs) else np.empty(0, np.int64)
    return Entries(
        np.repeat(runs[:, 0], runs[:, 2]).astype(np.int32),
        np.repeat(runs[:, 1] - begins, runs[:, 2]) + np.arange(total),
        np.frombuffer(raw, np.int64, total),
        np.frombuffer(raw, np.int32, total, total * 8),
    )


def _runs(described: Sequence[tuple[int, int, int]], entries: Entries) -> dict[int, PartOfRun]:
    runs: dict[int, PartOfRun] = {}
    position = 0
    for queue, first, count in described:
        part = slice(position, position + count)
        runs[queue] = PartOfRun(first, entries.physical[part], entries.size[part])
        position += count
    return runs


def _facts(request: frames.EncodeUpload, one: frames.ObjectToWrite) -> ObjectFacts:
    return ObjectFacts.of(one.name, request.metadata)
