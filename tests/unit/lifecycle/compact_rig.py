"""Compaction with a worker in this process."""

from __future__ import annotations

import socket
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from infra.clock import Clock
from infra.objects.store import (
    AccessDenied,
    NotFound,
    PreconditionFailed,
    StoreUnavailable,
    UnknownOutcome,
)
from lifecycle.retention import RetentionPolicy
from neve.archive.catalog.journal_reader import read_catalog
from neve.archive.format.journal import (
    Commit,
    CommittedObject,
    Intent,
    PlannedObject,
    RowGroup,
    decode_entry,
)
from neve.archive.format.keys import data_key, journal_key
from neve.archive.read.reader import Archive
from neve.archive.read.verify import verify
from tests.kit.archive.catalog_state import expiring_keys
from tests.kit.archive.records import T0, TOPIC
from tests.kit.archive.sealed_objects import DAY, Sealed, SealedLog
from tests.kit.store.memory_store import MemoryStore
from tests.simulation.workers import is_taken_over
from tests.unit.lifecycle.fakes import FakeWorker, Rig
from tiered.worker.client import WorkerClient
from tiered.worker.process import Worker
from tiered.write.merge import Merge
from tiered.write.uploader import ContentConflict, EncodeFailed

HOUR = 3_600_000
Stored = tuple[CommittedObject, bytes]
Row = tuple[int, int, bytes]  # queue, offset, record


class CuttingStore(MemoryStore):
    """A store that truncates the nth body it returns for keys that contain `within`."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.cut = 0  # counts down
        self.within = ""

    def get(self, key: str) -> bytes:
        return self._cut(key, super().get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._cut(key, super().get_range(key, start, length))

    def _cut(self, key: str, data: bytes) -> bytes:
        self.cut -= self.within in key
        return data[: len(data) // 2] if self.cut == 0 and self.within in key else data


class _NoProcess:
    """The process handle of a worker that runs in this process."""

    pid, returncode = 1, 0

    def kill(self) -> None:
        """Do nothing: the worker ends when its socket closes."""

    def wait(self, timeout: float | None = None) -> int:
        return 0


class ThreadWorker(WorkerClient):
    """The real worker and client, connected by a socket, with the worker in a thread."""

    def __init__(self, store: MemoryStore, work_dir: Path) -> None:
        super().__init__(work_dir=work_dir)
        self.store = store
        self.before: Callable[[], None] = lambda: None  # called before each request

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._has_priority = self._priority
        self.inner = Worker(theirs, open_store=lambda url: self.store)
        threading.Thread(target=self.inner.serve, daemon=True).start()
        self._socket, self._pending = ours, {}
        arguments: Any = (ours, _NoProcess(), self._pending)
        threading.Thread(target=self._receive, args=arguments, daemon=True).start()
        return ours

    def _call(self, *arguments: Any) -> Any:
        self.before()
        return super()._call(*arguments)


class QuickWorker(FakeWorker):
    """A worker whose objects are lists of rows. It sends the same store requests and fails in the same ways."""

    def compact(
        self, store_url: str, name: PlannedObject, merge: Merge, metadata: Mapping[str, str]
    ) -> CommittedObject:
        rows = []
        for one in merge.inputs:
            data = self.store.get_range(one.key, 0, one.size)
            if len(data) != one.size:
                raise EncodeFailed("cut short")
            rows += msgspec.msgpack.decode(data, type=list[Row])
        content = quick_content(sorted(row for row in rows if is_taken_over(merge, row)))
        made = quick_name(name.key, name.start, name.end, content)
        try:
            return msgspec.structs.replace(made, etag=self._put(name.key, content))
        except NotFound as error:
            raise EncodeFailed(str(error)) from error

    def _put(self, key: str, content: bytes) -> str:
        try:
            return self.store.put(key, content, if_absent=True).etag
        except (PreconditionFailed, UnknownOutcome) as error:
            if isinstance(error, UnknownOutcome) and key not in self.store.objects:
                return self.store.put(key, content, if_absent=True).etag
            if self.store.get(key) != content:
                raise ContentConflict(key) from error
            return self.store.head(key).etag


def quick_content(rows: Sequence[Row]) -> bytes:
    return msgspec.msgpack.encode(rows)


def quick_name(key: str, start: int, end: int, content: bytes) -> CommittedObject:
    queues: dict[int, tuple[int, int, int]] = {}
    rows = msgspec.msgpack.decode(content, type=list[Row])
    for number, (queue, offset, _) in enumerate(rows):
        first, _, row = queues.get(queue, (offset, offset, number))
        queues[queue] = (first, offset, row)
    runs: list[tuple[int, int, int]] = []
    for queue, offset, _ in rows:
        if runs and runs[-1][0] == queue and runs[-1][2] + 1 == offset:
            runs[-1] = queue, runs[-1][1], offset
        else:
            runs.append((queue, offset, offset))
    size = sum(len(raw) for _, _, raw in rows)
    group = RowGroup(0, len(rows), 0, len(content), T0, T0, size, runs)
    return CommittedObject(
        key=key, topic=TOPIC, day=DAY, start=start, end=end, size=len(content), footer=8, etag="",
        checksum=("crc32", f"{zlib.crc32(content):08x}"), sha256="", rows=len(rows), wire_bytes=size, min_time=T0,
        max_time=T0, queues=queues, row_groups=[group],
    )  # fmt: skip


def quick(objects: Sequence[Stored], sealed: Sealed) -> list[Stored]:
    """Store the same rows as objects of a QuickWorker."""
    found = []
    for name, _ in objects:
        places = [(q, at) for q, (first, last, _) in sorted(name.queues.items()) for at in range(first, last + 1)]
        content = quick_content([(*place, sealed[place]) for place in places])
        found.append((quick_name(name.key, name.start, name.end, content), content))
    return found


def stored(log: SealedLog) -> list[Stored]:
    found = []
    for path, name in log.inputs:
        key = data_key("", TOPIC, DAY, "b", start=name.start, end=name.end, epoch=1)
        found.append((msgspec.structs.replace(name, key=key), path.read_bytes()))
    return found


class CompactRig(Rig):
    """A broker whose archive has the objects of a Log, and whose local log begins above them."""

    def __init__(
        self,
        directory: Path,
        objects: Sequence[Stored],
        policy: RetentionPolicy | None = None,
        *,
        is_quick: bool = False,
    ) -> None:
        super().__init__(directory / "state", policy)
        self.is_quick = is_quick
        self.store = self.cutting = CuttingStore(self.clock)
        work = directory / "work"
        work.mkdir()
        self.work = work
        self.encoder = ThreadWorker(self.store, work)
        self.worker = QuickWorker(self.store, self.hot) if is_quick else self.encoder  # type: ignore[assignment]
        self.directory = directory / "of-this-store"
        super().restart()
        names = [name for name, _ in objects]
        for name, content in objects:
            etag = self.store.put(name.key, content).etag
            names[names.index(name)] = msgspec.structs.replace(name, etag=etag)
        intended = [
            PlannedObject(
                one.key, one.topic, one.day, one.start, one.end, {q: (a, b) for q, (a, b, _) in one.queues.items()}
            )
            for one in names
        ]
        self.journal.append(Intent(round=1, names=intended))
        self.journal.append(Commit(round=1, names=names))
        self.names = names

    def compact(self) -> int:
        return self.lifecycle.compact.now()

    def data_keys(self) -> set[str]:
        return {key for key in self.store.objects if key.startswith("topic=")}

    def check_rows(self, sealed: Sealed) -> None:
        """Assert that an independent reader of the bucket finds each record once, byte for byte."""
        found: Sealed = {}
        if self.is_quick:
            catalog = read_catalog(self.store, "b")
            for name in catalog.objects(TOPIC):
                for queue, offset, raw in msgspec.msgpack.decode(self.store.objects[name.key][0], type=list[Row]):
                    if offset >= catalog.recorded_minimum(TOPIC, queue):
                        assert (queue, offset) not in found
                        found[queue, offset] = raw
            assert found == sealed
            return
        reader = Archive(self.store).topic(TOPIC, "b")
        for queue in reader.queues():
            first = reader.min_offset(queue)
            for at, record in enumerate(reader.read_raw(queue), 0 if first is None else first):
                found[queue, at] = bytes(record)
        assert found == sealed

    def check_end(self, sealed: Sealed) -> None:
        """Also assert that the bucket has no other objects after the grace and two sweeps."""
        assert self.lifecycle.unexpire.run()["objects"] == 0
        self.clock.advance(25 * HOUR)
        self.lifecycle.expire.run()
        self.clock.advance(49 * HOUR)
        self.lifecycle.sweep.run(repair=True)
        self.lifecycle.sweep.run(repair=True)
        catalog = read_catalog(self.store, "b")
        assert catalog.rounds.open_rewrites() == {} == catalog.rounds.open_intents()
        assert self.data_keys() == {name.key for name in catalog.objects()}
        assert expiring_keys(catalog) == {}
        problems = verify(catalog, self.store, deep=True).problems
        assert [problem for problem in problems if not (self.is_quick and "not a Parquet file" in problem)] == []
        assert list(self.work.iterdir()) == []
        self.check_rows(sealed)

    def entries(self, *kinds: type) -> list[Any]:
        found = []
        for seq in range(self.journal.catalog.next_seq):
            entry = decode_entry(self.store.objects[journal_key("", "b", seq)][0])
            if isinstance(entry, kinds):
                found.append(entry)
        return found


FAULTS: dict[str, tuple[Exception | None, bool]] = {
    "refused": (StoreUnavailable("connection refused"), False),
    "5xx before": (StoreUnavailable("503"), False),
    "5xx after the effect": (StoreUnavailable("500"), True),
    "timeout before": (UnknownOutcome("timeout"), False),
    "timeout after": (UnknownOutcome("timeout"), True),
    "reset": (UnknownOutcome("connection reset"), True),
    "412": (PreconditionFailed("412"), False),
    "412 of the own retry": (PreconditionFailed("412"), True),
    "403": (AccessDenied("403"), False),
    "truncated body": (None, False),
}

STEPS = [
    *(("journal.before_put", nth) for nth in (1, 2)),
    ("compact.before_intent", 1),
    ("compact.after_intent", 1),
    ("compact.after_upload", 1),
    ("compact.before_replace", 1),
    ("compact.after_replace", 1),
]
