"""Client of a tier worker: starts it on first use, restarts it when it dies, and ends it when it is idle."""

import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import numpy as np

from infra.process.priority import NORMAL
from infra.process.processor import ProcessorDemand, processor_demand
from neve.archive.format.journal import CommittedObject, PlannedObject
from tiered.worker import frames
from tiered.worker.failed import MadeRoom, WorkerFailed, of_an_upload
from tiered.worker.group_memory import GroupMemory, MemoryPiece
from tiered.worker.patience import Patience
from tiered.worker.pipeline import Pipeline
from tiered.worker.work_dir import clear
from tiered.write.merge import Merge
from tiered.write.uploader import UPLOADS, EncodeFailed, RowCounts

log = logging.getLogger(__name__)
T = TypeVar("T")

_IDLE_SECONDS = 60.0
_GRACE_SECONDS = 5.0
_DEATHS = 2  # number of worker deaths that fail a request
MAPPED_MIN = 1 << 20  # smaller groups are copied, which takes 0.1 ms, much less than decoding
_ANSWER_SECONDS = 300.0


_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # the worker uses no linear algebra of numpy
    # Keep the memory of a row group for the next one: new pages cost more than filling them.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}


class DecodedGroup:
    """A row group in shared memory as decoded by the worker, or copied out of it if it is small.

    The memory is reused only after its last slice is gone. Until then it holds descriptors.
    """

    __slots__ = ("begins", "cached", "fetched", "is_mapped", "nbytes", "offsets", "positions", "tags", "times", "wire")

    def __init__(
        self, content: memoryview | bytes, rows: int, wire_bytes: int, fetched: int = 0, cached: int = 0
    ) -> None:
        """`fetched` and `cached`: bytes from the store, and from the disk cache."""
        self.fetched, self.cached = fetched, cached
        numbers = np.frombuffer(content, np.int64, 4 * rows + 1)
        self.positions = numbers[: rows + 1]
        # Equal to `positions`, for access to single items: an array creates an object for each.
        self.begins = memoryview(content)[: 8 * (rows + 1)].cast("q")
        self.offsets, self.tags, self.times = np.split(numbers[rows + 1 :], 3)
        self.wire = memoryview(content)[numbers.nbytes : numbers.nbytes + wire_bytes].toreadonly()
        self.nbytes = len(content)
        self.is_mapped = not isinstance(content, bytes)


Answer = frames.Uploaded | CommittedObject | frames.GroupRead | frames.MayHold | int


class WorkerClient:
    """Client of one worker process. Thread-safe and blocking. Use one for uploads and another for cold reads."""

    def __init__(
        self,
        *,
        work_dir: str | Path | None = None,
        idle_seconds: float = _IDLE_SECONDS,
        cache_dir: Path | None = None,
        cache_bytes: int = 0,
        answer_seconds: float = _ANSWER_SECONDS,
        uploads: int = UPLOADS,
        priority: str = NORMAL,
    ) -> None:
        """Configure the client; the process starts on first use.

        Args:
            uploads: limit of concurrent uploads.
            priority: see `infra.process.priority`.
            cache_dir: directory of the worker's disk cache, up to `cache_bytes`; None: no cache.
            answer_seconds: seconds without an answer, plus the time for uploads, until a worker counts as hung.
                Time without a processor is not counted, unless the worker sleeps.
        """
        self._patience = Patience(answer_seconds, uploads, self._look)
        self._uploads, self._priority = uploads, priority
        self._has_priority = priority  # priority of the current process
        self._cache_arguments = ["--cache-dir", str(cache_dir), "--cache-bytes", str(cache_bytes)] if cache_dir else []
        self._work_dir = str(work_dir or tempfile.gettempdir())
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pending: dict[int, Future[Answer]] = {}
        self._next_id = 0
        self._closed = False
        self._compaction = 0  # id of the last Compact request
        self._has_given_up = False
        self._memory = GroupMemory()
        self.starts = 0
        self.upload_waited = 0.0  # seconds for which the rate delayed uploads
        self.written = RowCounts()

    @property
    def pid(self) -> int | None:
        """The process id of the worker; None if none runs."""
        process = self._process
        return process.pid if process is not None else None

    def uploads(self, store_url: str, metadata: Mapping[str, str]) -> Pipeline:
        """Return the uploads of one round, for use by one thread. Several may exist."""
        return Pipeline(
            store_url,
            metadata,
            self._work_dir,
            submit=self._submit,
            patience=self._patience,
            hangs=self._end,
            notify=self._notify,
            gives_way=lambda: self._has_priority != self._priority,
            make_room=self._make_room_now,
        )

    def compact(
        self, store_url: str, name: PlannedObject, merge: Merge, metadata: Mapping[str, str]
    ) -> CommittedObject:
        """Merge and upload objects. Raises ContentConflict, EncodeFailed, or an error of the object store."""
        erased = {queue: list(spans) for queue, spans in merge.erased.items()}
        request = frames.Compact(
            0, store_url, name, list(merge.inputs), merge.below, erased, dict(metadata), self._work_dir
        )
        try:
            answer = self._call(request)
        except WorkerFailed as error:
            raise of_an_upload(error) from error
        except OSError as error:  # no process to hand it to
            raise EncodeFailed(f"no worker for {name.key}: {error}") from error
        assert isinstance(answer, CommittedObject)
        return answer

    def give_up_compaction(self) -> None:
        """Stop compaction for good; one in progress fails soon, so that a stop need not wait for it."""
        with self._lock:
            self._has_given_up = True
            if self._socket is not None:
                self._send_quietly(self._socket, frames.GiveUpCompaction())

    def set_upload_rate(self, bytes_per_second: int) -> None:
        """Set the rate in bytes per second, effective at once also for uploads in progress; 0 for no limit."""
        with self._lock:
            if bytes_per_second == self._patience.rate:
                return
            self._patience.rate = bytes_per_second
            if self._socket is not None:
                self._send_quietly(self._socket, frames.SetUploadRate(bytes_per_second))

    def set_priority(self, priority: str) -> None:
        """Set the priority of the next worker process, because a process can't raise its own.

        The process is replaced at the first request while nothing but a compaction is in progress. The compaction
        starts again in the new process. Until then a round requests nothing more, so that its uploads end.

        If a round waits because this process gets no processor, the process is replaced at once, and the requests in
        progress start again in the new one. Without requests, the current process completes its work.
        """
        with self._lock:
            self._priority = priority

    def read_group(self, store_url: str, name: CommittedObject, index: int, *, keep: bool = True) -> DecodedGroup:
        """Fetch and decode a row group. `keep`: whether to add it to the disk cache. Raises WorkerFailed."""
        group = name.row_groups[index]
        request = frames.ReadGroup(
            0, store_url, name.key, name.topic, name.size, name.footer, index, group.offset, group.length,
            group.wire_bytes, group.runs, keep,
        )  # fmt: skip
        size = frames.size_of_group(group.rows, group.wire_bytes)
        try:
            return self._twice(lambda: self._read_into_memory(request, size))
        except OSError as error:
            raise WorkerFailed(type(error).__name__, f"no memory or descriptor for {name.key}: {error}") from error

    def _read_into_memory(self, request: frames.ReadGroup, size: int) -> DecodedGroup:
        piece = self._memory.take(size)
        is_kept = False
        try:
            reply = self._wait_for(request, piece.descriptor)
            assert isinstance(reply, frames.GroupRead)
            content, is_kept = self._content(piece, size)
        finally:
            if not is_kept:
                piece.drop()  # the worker may still write to it
        return DecodedGroup(content, reply.rows, reply.wire_bytes, reply.fetched, reply.cached)

    def _content(self, piece: MemoryPiece, size: int) -> tuple[memoryview | bytes, bool]:
        """Return the content, and whether the memory can be reused."""
        if size < MAPPED_MIN:
            content = piece.content(size)
            self._memory.give_back(piece)
            return content, True
        try:
            return self._memory.lend(piece), True
        except OSError:  # without a descriptor or mapping, copy it as a small one
            return piece.content(size), False

    def may_hold(self, store_url: str, name: CommittedObject, groups: list[int], word: bytes) -> frames.MayHold:
        """Return the row groups that may have a word, by their bloom filters. Raises WorkerFailed."""
        answer = self._call(frames.AskFilters(0, store_url, name.key, name.size, name.footer, groups, word))
        assert isinstance(answer, frames.MayHold)
        return answer

    def may_span(
        self, store_url: str, name: CommittedObject, groups: list[int], physical_offset: int
    ) -> frames.MayHold:
        """Return the row groups that may have the record at a CommitLog offset. Raises WorkerFailed."""
        request = frames.AskBounds(0, store_url, name.key, name.size, name.footer, groups, physical_offset)
        answer = self._call(request)
        assert isinstance(answer, frames.MayHold)
        return answer

    def forget(self, store_url: str, names: Sequence[CommittedObject]) -> None:
        """Remove rows and footers of objects from the disk cache. Raises WorkerFailed.

        Filters are removed only if a cached footer shows their places.
        """
        if not self._cache_arguments:
            return
        objects = [
            frames.ObjectParts(
                name.key, name.size, name.footer, [(group.offset, group.length) for group in name.row_groups]
            )
            for name in names
        ]
        try:
            self._call(frames.ForgetObjects(0, store_url, objects))
        except OSError as error:  # no worker process can be started
            raise WorkerFailed(type(error).__name__, f"no worker to clear the disk cache: {error}") from error

    def remove_stale_uploads(self, store_url: str, broker: str) -> int:
        """Abort a broker's uploads that are unfinished for a day. Raises EncodeFailed or an error of the store."""
        try:
            answer = self._call(frames.RemoveStaleUploads(0, store_url, broker))
        except WorkerFailed as error:
            raise of_an_upload(error) from error
        assert isinstance(answer, int)
        return answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._hang_up()
        self._memory.close()

    # ---- the process

    def _call(self, request: frames.Request) -> Answer:
        return self._twice(lambda: self._wait_for(request, None))

    def _twice(self, attempt: Callable[[], T]) -> T:
        """Repeat an attempt if the worker dies. Requests are idempotent."""
        deaths = 0
        while True:
            try:
                return attempt()
            except MadeRoom:
                continue
            except ConnectionError as error:
                deaths += 1
                if deaths == _DEATHS:
                    raise WorkerFailed("WorkerDied", str(error)) from error

    def _wait_for(self, request: frames.Request, descriptor: int | None) -> Answer:
        future = self._submit(request, descriptor)
        ended, waited = self._patience.first_of([future])
        if ended:
            return future.result()
        self._end()
        raise WorkerFailed("StoreUnavailable", f"the tier worker has not answered for {waited:.0f} s")

    def _end(self) -> None:
        """Kill a hung worker, so that a new one starts, and fail its requests. It hangs if its store does."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
            self._hang_up()

    def _submit(self, request: frames.Request, descriptor: int | None) -> Future[Answer]:
        with self._lock:
            if self._closed:
                raise WorkerFailed("Closed", "the worker was closed")
            if self._has_given_up and isinstance(request, frames.Compact):
                raise WorkerFailed("Closed", "the broker stops")  # applies also to a repetition by a new process
            if self._has_priority != self._priority and self._pending.keys() <= {self._compaction}:
                self._make_room()  # a process can't raise its own priority; a compaction starts again in the next one
            sock = self._socket or self._start()
            self._next_id += 1
            request.id = self._next_id
            future: Future[Answer] = Future()
            if isinstance(request, frames.Compact):
                self._compaction = request.id
                self._patience.uploads(sum(one.wire_bytes for one in request.inputs), future)
            self._pending[request.id] = future
            try:
                frames.send(sock, request, descriptor)
            except OSError:
                self._hang_up()
                raise
            return future

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        root = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
        for name, value in _ENVIRONMENT.items():
            environment.setdefault(name, value)
        with theirs:
            command = self._command(theirs.fileno())
            process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.DEVNULL)
        self._socket, self._process = ours, process
        self._pending = {}  # a new object: the receiver of the last process fails only that process's requests
        self.starts += 1
        if self._patience.rate:
            self._send_quietly(ours, frames.SetUploadRate(self._patience.rate))
        receiver = threading.Thread(
            target=self._receive, args=(ours, process, self._pending), name="tier-worker", daemon=True
        )
        try:
            receiver.start()
        except RuntimeError as error:  # no thread can be started to receive the answers
            self._socket = self._process = None
            process.kill()
            process.wait()
            raise OSError(str(error)) from error
        return ours

    def _command(self, descriptor: int) -> list[str]:
        self._has_priority = self._priority
        options = ["--fd", str(descriptor), "--uploads", str(self._uploads), *self._cache_arguments]
        return [sys.executable, "-m", "tiered.worker", self._priority, *options]

    def _notify(self, message: frames.GiveUp) -> None:
        with self._lock:
            if self._socket is not None:
                self._send_quietly(self._socket, message)

    def _send_quietly(self, sock: socket.socket, message: frames.Message) -> None:
        """Send a message without an answer. Under the lock."""
        try:
            frames.send(sock, message)
        except OSError:
            self._hang_up()  # it died; its receiver thread reports that, and its successor gets the rate at its start

    @property
    def starved(self) -> float:
        """Seconds for which callers waited for a worker that wanted a processor and had none."""
        return self._patience.starved

    def _look(self) -> ProcessorDemand | None:
        pid = self.pid
        return None if pid is None else processor_demand(pid)

    def _make_room_now(self) -> None:
        """Kill the process for a successor with another priority, and fail its requests with MadeRoom."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
            self._make_room()

    def _make_room(self) -> None:
        """End the process for a successor with another priority; its requests fail with MadeRoom. Under the lock."""
        if self._socket is None:
            return  # it ended by itself, and its receiver thread fails its requests
        still_pending = list(self._pending.values())
        self._pending.clear()
        self._hang_up()
        for future in still_pending:
            future.set_exception(MadeRoom("the tier worker was replaced by another"))

    def _hang_up(self) -> None:
        """Close the connection. The worker ends on EOF; its receiver thread reaps it and fails pending requests.

        Under the lock.
        """
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                self._socket = self._process = None
                return
        self._socket = self._process = None

    def _receive(
        self, sock: socket.socket, process: subprocess.Popen[bytes], pending: dict[int, Future[Answer]]
    ) -> None:
        try:
            while self._wait(sock, pending):
                self._settle(frames.decode_reply.decode(frames.receive_reply(sock)), pending)
        except OSError:
            process.kill()
        except ValueError as error:
            process.kill()
            log.error(
                "the tier worker's answer can't be read (%s): was neve replaced under the running broker? restart it",
                error,
            )
        finally:
            with self._lock:
                if self._socket is sock:
                    self._socket = self._process = None
                sock.close()
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            try:
                clear(self._work_dir, process.pid)
            except OSError as error:
                log.warning("files of the tier worker remain until the next start: %s", error)
            unanswered = len(pending)
            for future in pending.values():
                future.set_exception(ConnectionError("the tier worker ended"))
            if unanswered and not self._closed:
                log.warning("the tier worker ended with %d, unanswered requests: %d", process.returncode, unanswered)

    def _wait(self, sock: socket.socket, pending: dict[int, Future[Answer]]) -> bool:
        """Wait for a reply. Returns False if the worker has been idle for so long that it may end."""
        poll = select.poll()  # select() rejects descriptors above 1023, and a broker has a file for each queue
        poll.register(sock, select.POLLIN)
        while not poll.poll(self._idle_seconds * 1000):
            with self._lock:
                if not pending:
                    if self._socket is sock:
                        self._socket = self._process = None
                    return False
        return True

    def _settle(self, reply: frames.Reply, pending: dict[int, Future[Answer]]) -> None:
        with self._lock:
            future = pending.pop(reply.id, None) or Future()  # none if the request failed with MadeRoom
        if isinstance(reply, frames.Failed):
            future.set_exception(WorkerFailed(reply.kind, reply.message))
        else:
            future.set_result(self._answer(reply))

    def _answer(self, reply: frames.Answered) -> Answer:
        if isinstance(reply, frames.Uploaded):
            self.upload_waited += reply.waited
            for one in reply.outcomes:
                if isinstance(one, frames.Committed):
                    self.written = self.written.plus(one.name.rows, one.wire_rows, one.damaged_rows)
            return reply
        if isinstance(reply, frames.Compacted):
            self.upload_waited += reply.waited
            return reply.name
        if isinstance(reply, frames.StaleRemoved):
            return reply.count
        if isinstance(reply, frames.Forgotten):
            return 0
        return reply
