"""The tier worker in the simulation's process: the real encoder and decoder, or a quick one for most seeds."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from infra import failpoint
from infra.objects.store import ObjectStoreError, PreconditionFailed, UnknownOutcome
from neve.archive.format.journal import CommittedObject, PlannedObject, RowGroup
from neve.record.codec import decode_record
from tests.kit.archive.deferred_uploads import DeferredUploads, in_order
from tests.kit.store.sim_disk import SimDisk
from tests.simulation.faulty_store import FaultyStore
from tiered.worker import frames
from tiered.worker.client import WorkerClient
from tiered.worker.failed import WorkerFailed
from tiered.worker.patience import Patience
from tiered.worker.pipeline import Pipeline
from tiered.worker.process import Worker
from tiered.worker.writing import NotEncoded
from tiered.write.entry_run import EntryRun
from tiered.write.merge import Merge
from tiered.write.segment_writer import GroupSizes
from tiered.write.uploader import ContentConflict, EncodeFailed, Outcome

Choose = Callable[[int], list[int]]  # Choose the uploads in flight that end next.
Row = tuple[int, int, bytes]  # queue, offset, record
GROUP_SIZES = GroupSizes(most=2000, at_queue_change=500)


class InProcessWorker(WorkerClient):
    """The worker's own code without its process: Parquet, adoption of existing objects, page checksums."""

    def __init__(self, disk: SimDisk, store: FaultyStore, choose: Choose = in_order) -> None:
        super().__init__(work_dir="/dev/shm")
        self._disk, self._choose = disk, choose
        ours, theirs = socket.socketpair()
        ours.close()
        theirs.close()
        self._worker = Worker(theirs, open_store=lambda url: store, group_sizes=GROUP_SIZES)

    def set_priority(self, priority: str) -> None:
        self.priority = priority

    def set_upload_rate(self, bytes_per_second: int) -> None:
        assert bytes_per_second == 0

    def uploads(self, store_url: str, metadata: Mapping[str, str]) -> Pipeline:
        """Complete some uploads in flight when they are awaited."""
        pipeline: Pipeline
        waiting: list[tuple[Future[Any], frames.EncodeUpload, int]] = []

        def submit(request: frames.EncodeUpload, descriptor: int) -> Future[Any]:
            future: Future[Any] = Future()
            request.id = len(waiting) + 1
            waiting.append((future, request, os.dup(descriptor)))
            return future

        class InTurn(Pipeline):
            def done(in_turn) -> Sequence[tuple[PlannedObject, Outcome]]:  # noqa: N805 - the worker is `self` here
                if waiting:
                    for number in sorted(self._choose(len(waiting)), reverse=True):
                        future, request, descriptor = waiting.pop(number)
                        try:
                            future.set_result(self._uploaded(request, descriptor))
                        finally:
                            os.close(descriptor)
                return super().done()

            def give_up(in_turn) -> None:  # noqa: N805
                for future, request, descriptor in waiting:
                    os.close(descriptor)
                    why = frames.NotUploaded("GivenUp", "not begun")
                    future.set_result(frames.Uploaded(request.id, [why for _ in request.objects], 0.0))
                waiting.clear()
                super().give_up()

        pipeline = InTurn(
            store_url, metadata, self._work_dir,
            submit=submit, patience=Patience(0.0, 1), hangs=_nothing_hangs, notify=lambda message: None,
        )  # fmt: skip
        return pipeline

    def _uploaded(self, request: frames.EncodeUpload, descriptor: int) -> frames.Uploaded:
        request.files = [(self._disk.open_path(Path(p)), base, size) for p, base, size in request.files]
        outcomes: dict[int, frames.Committed | frames.NotUploaded] = {}
        for one in self._worker.writer.encoded(request, descriptor):
            if isinstance(one, NotEncoded):
                outcomes[one.number] = one.why
            else:
                outcomes[one.number], _ = self._worker.writer.upload(request.store_url, one)
        return frames.Uploaded(request.id, [outcomes[number] for number in range(len(outcomes))], 0.0)

    def _wait_for(self, request: frames.Request, descriptor: int | None) -> Any:
        try:
            if isinstance(request, frames.Compact):
                return self._worker.compacted(request).name
            if isinstance(request, frames.RemoveStaleUploads):
                return self._worker._remove_stale(request)
            if isinstance(request, frames.AskFilters):
                return self._worker._may_hold(request)
            assert isinstance(request, frames.ReadGroup)
            assert descriptor is not None
            return self._worker.read_group(request, descriptor)
        except (ObjectStoreError, ValueError, OSError, pa.ArrowException) as error:
            raise WorkerFailed(type(error).__name__, str(error)) from error

    def rows(self, name: CommittedObject) -> list[Row]:
        found: list[Row] = []
        for index, group in enumerate(name.row_groups):
            decoded = self.read_group("sim:", name, index)
            places = [(queue, at) for queue, first, last in group.runs for at in range(first, last + 1)]
            for row, (queue, offset) in enumerate(places):
                record = decoded.wire[decoded.positions[row] : decoded.positions[row + 1]]
                found.append((queue, offset, bytes(record)))
        return found


class _Group:
    """The parts of a decoded row group that a search needs."""

    def __init__(self, records: list[bytes]) -> None:
        self.wire = memoryview(b"".join(records))
        self.positions = np.cumsum([0, *map(len, records)])


class SimulatedWorker:
    """A worker whose objects are lists of rows, with the same interface and the same failures as the real one."""

    upload_waited = starved = 0.0

    def __init__(self, disk: SimDisk, store: FaultyStore, choose: Choose = in_order) -> None:
        self._disk, self._store, self._choose = disk, store, choose

    def uploads(self, store_url: str, metadata: Mapping[str, str]) -> DeferredUploads:
        assert store_url == self._store.url
        return DeferredUploads(lambda one, files: self._encode_upload(one.name, one.entries, files), self._choose)

    def _encode_upload(
        self, name: PlannedObject, entries: Mapping[int, EntryRun], files: Sequence[tuple[str, int, int]]
    ) -> CommittedObject:
        rows: list[Row] = []
        for queue, run in sorted(entries.items()):
            places = zip(run.physical.tolist(), run.sizes.tolist(), strict=True)
            for offset, (physical, size) in enumerate(places, run.first_offset):
                rows.append((queue, offset, self._record(files, physical, size)))
        failpoint.hit("offload.after_encode")
        content = msgspec.msgpack.encode(rows)
        return _described(name, rows, content, self._upload(name.key, content))

    def compact(
        self, store_url: str, name: PlannedObject, merge: Merge, metadata: Mapping[str, str]
    ) -> CommittedObject:
        rows = [row for one in merge.inputs for row in self.rows(one) if is_taken_over(merge, row)]
        rows.sort()
        failpoint.hit("compact.after_encode")
        content = msgspec.msgpack.encode(rows)
        return _described(name, rows, content, self._upload(name.key, content))

    def _record(self, files: Sequence[tuple[str, int, int]], physical: int, size: int) -> bytes:
        found = [file for file in files if file[1] <= physical < file[1] + file[2]]
        if not found:
            raise EncodeFailed(f"{size} bytes at {physical} lie in none of the files")
        path, base, _ = found[0]
        return self._disk.read_at(Path(path), physical - base, size)

    def _upload(self, key: str, content: bytes) -> str:
        try:
            return self._store.put(key, content, if_absent=True).etag
        except (PreconditionFailed, UnknownOutcome) as error:
            if isinstance(error, UnknownOutcome) and key not in self._store.objects:
                return self._store.put(key, content, if_absent=True).etag
            if self._store.get(key) != content:
                raise ContentConflict(f"{key} holds other rows") from error
            return self._store.head(key).etag

    def rows(self, name: CommittedObject) -> list[Row]:
        return msgspec.msgpack.decode(self._store.get(name.key), type=list[Row])

    def may_hold(self, store_url: str, name: CommittedObject, groups: list[int], word: bytes) -> frames.MayHold:
        """Return True: an object has no filters; it is requested where they would be read."""
        try:
            self._store.head(name.key)
        except ObjectStoreError as error:
            raise WorkerFailed(type(error).__name__, str(error)) from error
        return frames.MayHold(0, groups, 0, 0)

    def read_group(self, store_url: str, name: CommittedObject, index: int) -> _Group:
        group = name.row_groups[index]
        try:
            rows = self.rows(name)[group.first_row : group.first_row + group.rows]
        except ObjectStoreError as error:
            raise WorkerFailed(type(error).__name__, str(error)) from error
        return _Group([record for _, _, record in rows])

    def set_priority(self, priority: str) -> None:
        self.priority = priority

    def set_upload_rate(self, bytes_per_second: int) -> None:
        assert bytes_per_second == 0

    def give_up_compaction(self) -> None:
        """Do nothing: no compaction is in progress, because jobs run sequentially."""

    def forget(self, store_url: str, names: Sequence[CommittedObject]) -> None:
        """Do nothing: it caches nothing."""

    def remove_stale_uploads(self, store_url: str, broker: str) -> int:
        return 0

    def close(self) -> None:
        """Do nothing: there is no process to end."""


def _nothing_hangs() -> None:
    raise AssertionError("what is under way has ended before it is waited for")


AnyWorker = InProcessWorker | SimulatedWorker


def is_taken_over(merge: Merge, row: Row) -> bool:
    """Return whether the new object contains the row."""
    queue, offset, _ = row
    spans = merge.erased.get(queue, ())
    return offset >= merge.below.get(queue, 0) and not any(first <= offset <= last for first, last in spans)


def _described(name: PlannedObject, rows: list[Row], content: bytes, etag: str) -> CommittedObject:
    groups: list[RowGroup] = []
    queues: dict[int, tuple[int, int, int]] = {}
    first = 0
    while first < len(rows):
        count, size = 0, 0
        while first + count < len(rows) and (not count or size + len(rows[first + count][2]) <= GROUP_SIZES.most):
            size += len(rows[first + count][2])
            count += 1
        groups.append(_group(first, rows[first : first + count], size))
        first += count
    for index, (queue, offset, _) in enumerate(rows):
        queues[queue] = (queues[queue][0], offset, queues[queue][2]) if queue in queues else (offset, offset, index)
    wire = hashlib.sha256(b"".join(row[2] for row in rows)).hexdigest()
    return CommittedObject(
        key=name.key, topic=name.topic, day=name.day, start=name.start, end=name.end, size=len(content), footer=8,
        etag=etag, checksum=("crc32", "0"), sha256=wire, rows=len(rows),
        wire_bytes=sum(len(row[2]) for row in rows), min_time=min(group.oldest_ms for group in groups),
        max_time=max(group.newest_ms for group in groups), queues=queues, row_groups=groups,
    )  # fmt: skip


def _group(first: int, rows: list[Row], size: int) -> RowGroup:
    times = [decode_record(record).store_timestamp for _, _, record in rows]
    runs: list[tuple[int, int, int]] = []
    for queue, offset, _ in rows:
        if runs and runs[-1][::2] == (queue, offset - 1):
            runs[-1] = (queue, runs[-1][1], offset)
        else:
            runs.append((queue, offset, offset))
    return RowGroup(first, len(rows), 4 + first, len(rows), max(times), min(times), size, runs)
