"""The tier worker: encodes and uploads named objects, decodes row groups; `python -m tiered.worker.process --fd N`.

A process of its own, started by exec, so that pyarrow and the store's client never share the broker's loop. It decides
nothing: it writes no journal and deletes no object. It ends when its socket does.
"""

import argparse
import functools
import gc
import os
import socket
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infra import failpoint
from infra.clock import SystemClock
from infra.disk import RealDisk
from infra.object_store.open import open_store
from infra.object_store.protocol import NotFound, ObjectStore, ObjectStoreError, PreconditionFailed, UnknownOutcome
from neve.archive.groups import DecodedRows, decode_group, may_span
from neve.archive.journal import CommittedName, NewerFormat
from neve.archive.keys import parse_data_key
from neve.archive.schema import DamagedObject, ObjectFacts, describe, parse_footer
from tiered.worker import compacting, frames
from tiered.worker.disk_cache import DiskCache
from tiered.write.bloom_filter import filter_reads
from tiered.write.entry_run import PartOfRun
from tiered.write.segment_writer import GROUP_SIZES, GroupSizes, MissingBytes, WrittenObject, encode
from tiered.write.upload_rate import UploadRate

T = TypeVar("T")

_FOOTERS = 256
_THREADS = 4


class Conflict(ValueError):
    """An object of other content stands under the name."""


class Worker:
    """Serves requests until the peer goes."""

    def __init__(
        self,
        sock: socket.socket,
        cache: DiskCache | None = None,
        *,
        open_store: Callable[[str], ObjectStore] = open_store,
        group_sizes: GroupSizes = GROUP_SIZES,
    ) -> None:
        self._socket = sock
        self._cache, self._open_store, self._group_sizes = cache, open_store, group_sizes
        self._sending = threading.Lock()
        self._rate = UploadRate(SystemClock())
        self._stores: dict[str, ObjectStore] = {}
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._shared = threading.Lock()
        self.given_up = threading.Event()  # compaction, for good

    def serve(self) -> None:
        with ThreadPoolExecutor(_THREADS, "tier") as pool:
            while True:
                try:
                    payload, descriptor = frames.receive(self._socket)
                except (frames.PeerGone, ConnectionError):
                    return
                request = frames.decode_message.decode(payload)
                if isinstance(request, frames.SetUploadRate):
                    self._rate.set(request.bytes_per_second)
                    continue
                if isinstance(request, frames.GiveUpCompaction):
                    self.given_up.set()
                    continue
                pool.submit(self._answer, request, descriptor).add_done_callback(_end_over_a_bug)

    def _answer(self, request: frames.Request, descriptor: int | None) -> None:
        answer: int | None = None
        try:
            if isinstance(request, frames.EncodeUpload):
                before = self._rate.waited
                name, written = self._encode_upload(request, descriptor)
                waited = self._rate.waited - before
                reply: frames.Reply = frames.Committed(
                    request.id, name, waited, written.wire_rows, written.damaged_rows
                )
            elif isinstance(request, frames.Compact):
                before = self._rate.waited
                made = compacting.make(
                    request, self._store(request.store_url), self._upload, self._group_sizes, self._is_wanted
                )
                reply = frames.Compacted(request.id, made, self._rate.waited - before)
            elif isinstance(request, frames.RemoveStaleUploads):
                reply = frames.StaleRemoved(request.id, self._remove_stale(request))
            elif isinstance(request, frames.AskFilters):
                reply = self._may_hold(request)
            elif isinstance(request, frames.AskBounds):
                reply = self._may_span(request)
            else:
                reply, answer = self._read_group(request)
        except (ObjectStoreError, ValueError, OSError, pa.ArrowException) as error:
            reply = frames.Failed(request.id, type(error).__name__, str(error))
        finally:
            if descriptor is not None:
                os.close(descriptor)
        try:
            with self._sending:
                frames.send(self._socket, reply, answer)
        except ConnectionError:
            return  # the broker went; the reading side sees it too and ends the process
        finally:
            if answer is not None:
                os.close(answer)

    def _is_wanted(self) -> bool:
        return not self.given_up.is_set()

    def _store(self, url: str) -> ObjectStore:
        with self._shared:
            if url not in self._stores:
                self._stores[url] = self._open_store(url)
            return self._stores[url]

    # ---- writing

    def _encode_upload(
        self, request: frames.EncodeUpload, descriptor: int | None
    ) -> tuple[CommittedName, WrittenObject]:
        if descriptor is None:
            raise MissingBytes("the entries did not come along")
        name = request.name
        facts = ObjectFacts.of(name, request.metadata)
        with TemporaryDirectory(prefix="neve-offload-", dir=request.work_dir) as directory:
            runs = _runs(request.runs, descriptor)
            path, sizes = Path(directory) / "object.parquet", self._group_sizes
            written = encode(runs, request.files, path, facts=facts, key=name.key, sizes=sizes)
            failpoint.hit("offload.after_encode")
            return self._upload(self._store(request.store_url), written.path, written.name), written

    def _upload(self, store: ObjectStore, path: Path, name: CommittedName) -> CommittedName:
        try:
            outcome = store.put(name.key, path, if_absent=True, pace=self._rate.take)
        except PreconditionFailed:
            return self._adopt(store, name)
        except UnknownOutcome:
            try:
                return self._adopt(store, name)
            except NotFound:
                outcome = store.put(name.key, path, if_absent=True, pace=self._rate.take)
        return msgspec.structs.replace(name, etag=outcome.etag)

    def _adopt(self, store: ObjectStore, ours: CommittedName) -> CommittedName:
        """The object that stands there, if its rows are ours: an earlier attempt wrote it."""
        info = store.head(ours.key)
        tail = store.get_range(ours.key, max(0, info.size - 8), 8)
        footer = int.from_bytes(tail[:4], "little") + 8
        try:
            metadata = parse_footer(store.get_range(ours.key, info.size - footer, footer))
            same = info.size == ours.size and footer == ours.footer
            checksum = ours.checksum if same else ("", "")
            theirs = describe(metadata, key=ours.key, size=info.size, footer=footer, etag=info.etag, checksum=checksum)
        except (DamagedObject, NewerFormat, ValueError) as error:
            raise Conflict(f"{ours.key} exists and is no object of ours: {error}") from error
        if theirs.sha256 != ours.sha256 or theirs.queues != ours.queues:
            raise Conflict(f"{ours.key} exists with other records")
        return theirs

    def _remove_stale(self, request: frames.RemoveStaleUploads) -> int:
        """Other brokers' uploads into the same bucket are not ours to judge."""

        def ours(key: str) -> bool:
            parts = parse_data_key(key)
            return parts is not None and parts.broker == request.broker

        return self._store(request.store_url).remove_stale_uploads(ours)

    # ---- reading

    def _read_group(self, request: frames.ReadGroup) -> tuple[frames.Reply, int]:
        store = self._store(request.store_url)
        footer = _footer_of(request)
        group = _Range(request.store_url, request.key, request.offset, request.length)
        got = _Got()
        metadata = self._footer(store, footer, got)

        def decode(data: bytes) -> DecodedRows:
            rows = decode_group(
                metadata, request.index, request.offset, data,
                size=request.size, topic=request.topic, wire_bytes=request.wire_bytes,
            )  # fmt: skip
            _check_offsets(rows, request)
            return rows

        try:
            rows = self._decoded(store, group, decode, got)
        except DamagedObject:
            self._forget_footer(footer)  # no checksum covers it: it may be what lies
            raise
        arrays = (rows.positions, rows.offsets, rows.tags, rows.times)
        parts = [np.ascontiguousarray(array, np.int64).data for array in arrays]
        answer = frames.shared([*parts, rows.wire])
        return frames.GroupRead(request.id, len(rows.offsets), len(rows.wire), got.fetched, got.cached), answer

    def _may_hold(self, request: frames.AskFilters) -> frames.MayHold:
        """A row group without a whole filter may hold anything."""
        store, got = self._store(request.store_url), _Got()
        metadata = self._footer(store, _footer_of(request), got)
        wanted, without = set(request.groups), set(request.groups)
        may: set[int] = set()
        for read in filter_reads(metadata):
            if wanted.isdisjoint(read.groups):
                continue
            place = _Range(request.store_url, request.key, read.start, read.length)
            search = functools.partial(read.may_hold, word=request.word)
            try:
                may |= self._decoded(store, place, search, got)
            except DamagedObject:
                continue
            without.difference_update(read.groups)
        return frames.MayHold(request.id, sorted(wanted & may | without), got.fetched, got.cached)

    def _may_span(self, request: frames.AskBounds) -> frames.MayHold:
        got = _Got()
        metadata = self._footer(self._store(request.store_url), _footer_of(request), got)
        may = [group for group in request.groups if may_span(metadata, group, request.physical_offset)]
        return frames.MayHold(request.id, may, got.fetched, got.cached)

    def _footer(self, store: ObjectStore, place: "_Range", got: "_Got") -> pq.FileMetaData:
        with self._shared:
            known = self._footers.get(place.key)
            if known is not None:
                self._footers.move_to_end(place.key)
                return known
        metadata = self._decoded(store, place, parse_footer, got)
        with self._shared:
            self._footers[place.key] = metadata
            if len(self._footers) > _FOOTERS:
                self._footers.popitem(last=False)
        return metadata

    def _forget_footer(self, place: "_Range") -> None:
        with self._shared:
            self._footers.pop(place.key, None)
        if self._cache is not None:
            self._cache.forget(place.name)

    def _decoded(self, store: ObjectStore, place: "_Range", decode: Callable[[bytes], T], got: "_Got") -> T:
        """From the cache where that decodes, else from the store; only what has decoded is cached."""
        data = self._cache.get(place.name) if self._cache is not None else None
        if data is not None:
            try:
                decoded = decode(data)
            except DamagedObject:
                assert self._cache is not None
                self._cache.forget(place.name)
            else:
                got.cached += len(data)
                return decoded
        data = store.get_range(place.key, place.start, place.length)
        got.fetched += len(data)
        decoded = decode(data)
        if self._cache is not None:
            self._cache.put(place.name, data)
        return decoded


class _Range(NamedTuple):
    store_url: str
    key: str
    start: int
    length: int

    @property
    def name(self) -> str:
        """Objects are never modified: these bytes are always the same."""
        return f"{self.store_url} {self.key} {self.start}+{self.length}"


def _footer_of(request: frames.ReadGroup | frames.AskFilters | frames.AskBounds) -> _Range:
    return _Range(request.store_url, request.key, request.size - request.footer, request.footer)


@dataclass(slots=True)
class _Got:
    fetched: int = 0
    cached: int = 0


def _end_over_a_bug(done: Future[None]) -> None:
    """An error that nobody foresaw ends the process: the broker must not wait for an answer for ever."""
    error = done.exception()
    if error is not None:
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(os.EX_SOFTWARE)


def _check_offsets(rows: DecodedRows, request: frames.ReadGroup) -> None:
    said = [np.arange(first, last + 1) for _, first, last in request.runs]
    if not np.array_equal(rows.offsets, np.concatenate(said)):
        raise DamagedObject(f"{request.key}: row group {request.index} has other rows than its journal says")


def _runs(described: list[tuple[int, int, int]], descriptor: int) -> dict[int, PartOfRun]:
    total = sum(count for _, _, count in described)
    raw = os.pread(descriptor, total * 12, 0)
    if len(raw) != total * 12:
        raise MissingBytes(f"{len(raw)} bytes of entries came along, {total * 12} were named")
    physical, sizes = np.frombuffer(raw, np.int64, total), np.frombuffer(raw, np.int32, total, total * 8)
    runs: dict[int, PartOfRun] = {}
    position = 0
    for queue, first, count in described:
        part = slice(position, position + count)
        runs[queue] = PartOfRun(first, physical[part], sizes[part])
        position += count
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(prog="tiered.worker.process")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--cache-bytes", type=int, default=0)
    options = parser.parse_args()
    cache = DiskCache(RealDisk(), options.cache_dir, options.cache_bytes) if options.cache_dir else None
    gc.freeze()  # what was imported stays; to look through it again and again costs
    with socket.socket(fileno=options.fd) as sock:
        Worker(sock, cache).serve()


if __name__ == "__main__":
    main()
