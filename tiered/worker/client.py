"""The broker's side of a tier worker: starts it on first use, starts it again when it dies, ends it when idle."""

import contextlib
import logging
import mmap
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infra.object_store import protocol
from neve.archive.journal import CommittedName, IntentName
from tiered.worker import frames
from tiered.write.entry_run import EntryRun
from tiered.write.merge import Merge
from tiered.write.uploader import ContentConflict, EncodeFailed, RowCounts

log = logging.getLogger(__name__)

_IDLE_SECONDS = 60.0
_GRACE_SECONDS = 5.0
MAPPED_MIN = 1 << 20  # what is smaller is copied: so much takes a tenth of a millisecond, and its decoding many
_ANSWER_SECONDS = 300.0
# What a store takes at least in a second, where no lower rate is set: an upload may take as long as that needs.
_SLOWEST_BYTES = 1 << 20


class WorkerFailed(Exception):
    """The worker answered with an error, or died twice over one request."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class DecodedGroup:
    """A row group out of the worker's memfd: mapped, or a small one copied.

    A mapping lives as long as a slice of it does, and holds a descriptor.
    """

    __slots__ = ("cached", "fetched", "is_mapped", "nbytes", "offsets", "positions", "tags", "times", "wire")

    def __init__(
        self, content: mmap.mmap | bytes, rows: int, wire_bytes: int, fetched: int = 0, cached: int = 0
    ) -> None:
        """`fetched` and `cached`: bytes that came from the store, and from the disk cache."""
        self.fetched, self.cached = fetched, cached
        numbers = np.frombuffer(content, np.int64, 4 * rows + 1)
        self.positions = numbers[: rows + 1]
        self.offsets, self.tags, self.times = np.split(numbers[rows + 1 :], 3)
        self.wire = memoryview(content)[numbers.nbytes : numbers.nbytes + wire_bytes].toreadonly()
        self.nbytes = len(content)
        self.is_mapped = isinstance(content, mmap.mmap)


Answer = CommittedName | DecodedGroup | frames.MayHold | int


class WorkerClient:
    """Thread-safe and synchronous; one process behind it. Use one for uploads and another for cold reads."""

    def __init__(
        self,
        *,
        work_dir: str | Path | None = None,
        idle_seconds: float = _IDLE_SECONDS,
        cache_dir: Path | None = None,
        cache_bytes: int = 0,
        answer_seconds: float = _ANSWER_SECONDS,
    ) -> None:
        """`cache_dir`: where the worker keeps what it has read, up to `cache_bytes`; None: nowhere.

        A worker that is silent for `answer_seconds`, and what an upload may take beyond that, hangs in its store.
        """
        self._answer_seconds = answer_seconds
        self._cache_arguments = ["--cache-dir", str(cache_dir), "--cache-bytes", str(cache_bytes)] if cache_dir else []
        self._work_dir = str(work_dir or tempfile.gettempdir())
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pending: dict[int, Future[Answer]] = {}
        self._next_id = 0
        self._closed = False
        self._rate = 0
        self._has_given_up = False
        self.starts = 0
        self.upload_waited = 0.0  # seconds that the upload rate held uploads back
        self.written = RowCounts()

    @property
    def pid(self) -> int | None:
        """The worker's process, or None while none runs."""
        process = self._process
        return process.pid if process is not None else None

    def encode_upload(
        self,
        store_url: str,
        name: IntentName,
        entries: Mapping[int, EntryRun],
        files: Sequence[tuple[str, int, int]],
        metadata: Mapping[str, str],
    ) -> CommittedName:
        """Raises ContentConflict, EncodeFailed, or an error of the object store."""
        filled = [(queue, run) for queue, run in sorted(entries.items()) if len(run.physical)]
        runs = [(queue, int(run.first_offset), len(run.physical)) for queue, run in filled]
        arrays: list[npt.NDArray[Any]] = [np.ascontiguousarray(run.physical, np.int64) for _, run in filled]
        arrays += [np.ascontiguousarray(run.sizes, np.int32) for _, run in filled]
        request = frames.EncodeUpload(0, store_url, name, runs, list(files), dict(metadata), self._work_dir)
        try:
            descriptor = frames.shared([array.data for array in arrays])
            try:
                answer = self._call(request, descriptor, sum(int(run.sizes.sum()) for _, run in filled))
            finally:
                os.close(descriptor)
        except WorkerFailed as error:
            raise _offload_error(error) from error
        except OSError as error:  # no memory or descriptor to hand it over, or no process to hand it to
            raise EncodeFailed(f"no worker for {name.key}: {error}") from error
        assert isinstance(answer, CommittedName)
        return answer

    def compact(self, store_url: str, name: IntentName, merge: Merge, metadata: Mapping[str, str]) -> CommittedName:
        """Raises ContentConflict, EncodeFailed, or an error of the object store."""
        if self._has_given_up:
            raise EncodeFailed(f"{name.key}: the broker stops")
        request = frames.Compact(0, store_url, name, list(merge.inputs), merge.below, dict(metadata), self._work_dir)
        try:
            answer = self._call(request, None, sum(one.wire_bytes for one in merge.inputs))
        except WorkerFailed as error:
            raise _offload_error(error) from error
        except OSError as error:
            raise EncodeFailed(f"no worker for {name.key}: {error}") from error
        assert isinstance(answer, CommittedName)
        return answer

    def give_up_compaction(self) -> None:
        """For good: what is under way fails soon, so that a stop need not wait for it."""
        with self._lock:
            self._has_given_up = True
            if self._socket is not None:
                try:
                    frames.send(self._socket, frames.GiveUpCompaction())
                except OSError:
                    self._hang_up()

    def set_upload_rate(self, bytes_per_second: int) -> None:
        """Holds at once, for an upload under way too; 0 is no limit."""
        with self._lock:
            if bytes_per_second == self._rate:
                return
            self._rate = bytes_per_second
            if self._socket is not None:
                self._send_rate(self._socket)

    def read_group(self, store_url: str, name: CommittedName, index: int) -> DecodedGroup:
        """Raises WorkerFailed."""
        group = name.row_groups[index]
        request = frames.ReadGroup(
            0, store_url, name.key, name.topic, name.size, name.footer, index, group.offset, group.length,
            group.wire_bytes, group.runs,
        )  # fmt: skip
        answer = self._call(request, None)
        assert isinstance(answer, DecodedGroup)
        return answer

    def may_hold(self, store_url: str, name: CommittedName, groups: list[int], word: bytes) -> frames.MayHold:
        """Which of an object's row groups may hold a word, by their bloom filters. Raises WorkerFailed."""
        answer = self._call(frames.AskFilters(0, store_url, name.key, name.size, name.footer, groups, word), None)
        assert isinstance(answer, frames.MayHold)
        return answer

    def may_span(self, store_url: str, name: CommittedName, groups: list[int], physical_offset: int) -> frames.MayHold:
        """Which of an object's row groups may hold the record from a place in the log. Raises WorkerFailed."""
        request = frames.AskBounds(0, store_url, name.key, name.size, name.footer, groups, physical_offset)
        answer = self._call(request, None)
        assert isinstance(answer, frames.MayHold)
        return answer

    def remove_stale_uploads(self, store_url: str, broker: str) -> int:
        """Abort a broker's uploads that nobody finished for a day; raises EncodeFailed or an error of the store."""
        try:
            answer = self._call(frames.RemoveStaleUploads(0, store_url, broker), None)
        except WorkerFailed as error:
            raise _offload_error(error) from error
        assert isinstance(answer, int)
        return answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._hang_up()

    # ---- the process

    def _call(self, request: frames.Request, descriptor: int | None, upload_bytes: int = 0) -> Answer:
        """Requests are safe to repeat: a read changes nothing, and an upload adopts what it finds."""
        try:
            return self._wait_for(request, descriptor, upload_bytes)
        except ConnectionError:
            try:
                return self._wait_for(request, descriptor, upload_bytes)
            except ConnectionError as error:
                raise WorkerFailed("WorkerDied", str(error)) from error

    def _wait_for(self, request: frames.Request, descriptor: int | None, upload_bytes: int) -> Answer:
        seconds = self._answer_seconds + upload_bytes / min(self._rate or _SLOWEST_BYTES, _SLOWEST_BYTES)
        future = self._submit(request, descriptor)
        try:
            return future.result(seconds)
        except TimeoutError as error:
            self._end()
            raise WorkerFailed("StoreUnavailable", f"the tier worker has not answered for {seconds:.0f} s") from error

    def _end(self) -> None:
        """It hangs, as a directory on a file server may: its successor gets a new start. What it owes is failed."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
            self._hang_up()

    def _submit(self, request: frames.Request, descriptor: int | None) -> Future[Answer]:
        with self._lock:
            if self._closed:
                raise WorkerFailed("Closed", "the worker was closed")
            sock = self._socket or self._start()
            self._next_id += 1
            request.id = self._next_id
            future: Future[Answer] = Future()
            self._pending[request.id] = future
            try:
                frames.send(sock, request, descriptor)
            except OSError:
                self._hang_up()
                raise
            return future

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        root = str(Path(__file__).resolve().parent.parent)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
        environment.setdefault(
            "OPENBLAS_NUM_THREADS", "1"
        )  # numpy's threads for linear algebra, which nobody does here
        with theirs:
            command = self._command(theirs.fileno())
            process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.DEVNULL)
        self._socket, self._process = ours, process
        self._pending = {}  # a successor's requests are not failed with those of the one before
        self.starts += 1
        if self._rate:
            self._send_rate(ours)
        receiver = threading.Thread(
            target=self._receive, args=(ours, process, self._pending), name="tier-worker", daemon=True
        )
        try:
            receiver.start()
        except RuntimeError as error:  # no thread to be had: nobody would hear the answers
            self._socket = self._process = None
            process.kill()
            process.wait()
            raise OSError(str(error)) from error
        return ours

    def _command(self, descriptor: int) -> list[str]:
        return [sys.executable, "-m", "tiered.worker.process", "--fd", str(descriptor), *self._cache_arguments]

    def _send_rate(self, sock: socket.socket) -> None:
        try:
            frames.send(sock, frames.SetUploadRate(self._rate))
        except OSError:
            self._hang_up()  # it died; its receiving thread says so, and a successor is told the rate

    def _hang_up(self) -> None:
        """Under the lock. The worker ends on EOF; its receiving thread reaps it and fails what was pending."""
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
                payload, descriptor = frames.receive(sock)
                self._settle(frames.decode_reply.decode(payload), descriptor, pending)
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
            unanswered = len(pending)
            for future in pending.values():
                future.set_exception(ConnectionError("the tier worker ended"))
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if unanswered and not self._closed:
                log.warning("the tier worker ended with %d; it owed %d answers", process.returncode, unanswered)

    def _wait(self, sock: socket.socket, pending: dict[int, Future[Answer]]) -> bool:
        """False: idle for so long that the worker may go."""
        poll = select.poll()  # select() refuses descriptors above 1023, and a broker has a file for each queue
        poll.register(sock, select.POLLIN)
        while not poll.poll(self._idle_seconds * 1000):
            with self._lock:
                if not pending:
                    if self._socket is sock:
                        self._socket = self._process = None
                    return False
        return True

    def _settle(self, reply: frames.Reply, descriptor: int | None, pending: dict[int, Future[Answer]]) -> None:
        """Whatever becomes of an answer, who waits for it is told."""
        with self._lock:
            future = pending.pop(reply.id)
        try:
            future.set_result(self._answer(reply, descriptor))
        except WorkerFailed as error:
            future.set_exception(error)
        except (OSError, ValueError) as error:
            future.set_exception(WorkerFailed(type(error).__name__, str(error)))
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _answer(self, reply: frames.Reply, descriptor: int | None) -> Answer:
        if isinstance(reply, frames.Failed):
            raise WorkerFailed(reply.kind, reply.message)
        if isinstance(reply, frames.Committed):
            self.upload_waited += reply.waited
            self.written = self.written.plus(reply.name.rows, reply.wire_rows, reply.damaged_rows)
            return reply.name
        if isinstance(reply, frames.Compacted):
            self.upload_waited += reply.waited
            return reply.name
        if isinstance(reply, frames.StaleRemoved):
            return reply.count
        if isinstance(reply, frames.MayHold):
            return reply
        if descriptor is None:  # the kernel drops one that the process has no room for
            raise WorkerFailed("OutOfDescriptors", "the answer's memory could not be handed over")
        return DecodedGroup(_content(descriptor), reply.rows, reply.wire_bytes, reply.fetched, reply.cached)


def _content(descriptor: int) -> mmap.mmap | bytes:
    """What the worker shared. A small piece is not worth a descriptor, and where there is none all are small."""
    size = os.fstat(descriptor).st_size
    if size >= MAPPED_MIN:
        with contextlib.suppress(OSError):
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    content = bytearray(size)
    view, position = memoryview(content), 0
    while position < size:
        position += os.preadv(descriptor, [view[position:]], position)
    return bytes(content)


def _offload_error(error: WorkerFailed) -> Exception:
    if error.kind == "Conflict":
        return ContentConflict(error.message)
    kind = getattr(protocol, error.kind, None)
    if isinstance(kind, type) and issubclass(kind, protocol.ObjectStoreError):
        return kind(error.message)
    return EncodeFailed(str(error))
