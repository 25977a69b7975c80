"""Program of a tier worker: encodes and uploads named objects, and decodes row groups.

`python -m tiered.worker` starts it. It is a separate process, started by exec, so that pyarrow and the store's client
never share the broker's event loop. It takes no decisions: it writes no journal and deletes no object. It ends when its
socket is closed.
"""

import argparse
import contextlib
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow.parquet as pq

from infra.clock import SystemClock
from infra.disk.filesystem import RealDisk
from infra.objects.open import open_store
from infra.objects.store import ObjectStore
from neve.archive.format.keys import parse_data_key
from neve.archive.rows.row_groups import DecodedRows, decode_group, may_span
from neve.archive.rows.schema import DamagedObject, parse_footer
from tiered.worker import frames
from tiered.worker.disk_cache import DiskCache
from tiered.worker.writing import FAILURES, Encoded, GivenUp, NotEncoded, ObjectWriter, refused
from tiered.write.bloom_filter import filter_reads
from tiered.write.segment_writer import GROUP_SIZES, GroupSizes, MissingBytes
from tiered.write.upload_rate import UploadRate
from tiered.write.uploader import UPLOADS

T = TypeVar("T")

_FOOTERS = 256
_FORGOTTEN = 16_384  # objects, many more than are read concurrently
_THREADS = 4
_ENCODERS = 4  # at most; their Python code outside the libraries uses one processor together


class Worker:
    """Serves requests until the peer closes the socket."""

    def __init__(
        self,
        sock: socket.socket,
        cache: DiskCache | None = None,
        *,
        open_store: Callable[[str], ObjectStore] = open_store,
        group_sizes: GroupSizes = GROUP_SIZES,
        uploads: int = UPLOADS,
        encoders: int = 1,
    ) -> None:
        """`uploads`: limit of concurrent uploads. `encoders`: number of requests that are encoded concurrently."""
        self._socket = sock
        self._cache, self._open_store = cache, open_store
        self._sending = threading.Lock()
        self._rate = UploadRate(SystemClock())
        self._stores: dict[str, ObjectStore] = {}
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._forgotten: OrderedDict[str, None] = OrderedDict()  # recent keys: fetches in progress may still end
        self._footer_turns: dict[str, threading.Lock] = {}  # of footers that are being fetched
        self._shared = threading.Lock()
        self.writer = ObjectWriter(self._store, self._rate, group_sizes)
        self._given_up = 0  # requests up to this id are cancelled
        self.compaction_given_up = threading.Event()  # for good
        self._pool = ThreadPoolExecutor(_THREADS, "tier")
        self._encoder = ThreadPoolExecutor(encoders, "encode")
        self._uploads = ThreadPoolExecutor(uploads, "upload")

    def serve(self) -> None:
        try:
            while True:
                try:
                    payload, descriptor = frames.receive(self._socket)
                except (frames.PeerDisconnected, ConnectionError):
                    return
                self._begin(frames.decode_message.decode(payload), descriptor)
        finally:
            self.compaction_given_up.set()
            for pool in (self._encoder, self._uploads, self._pool):
                pool.shutdown(cancel_futures=True)  # the peer is gone, so no request is wanted

    def _begin(self, message: frames.Message, descriptor: int | None) -> None:
        if isinstance(message, frames.SetUploadRate):
            self._rate.set(message.bytes_per_second)
        elif isinstance(message, frames.GiveUp):
            self._given_up = message.through
        elif isinstance(message, frames.GiveUpCompaction):
            self.compaction_given_up.set()
        else:
            pool = self._encoder if isinstance(message, frames.EncodeUpload) else self._pool
            pool.submit(self._answer, message, descriptor).add_done_callback(_end_over_a_bug)

    def _answer(self, request: frames.Request, descriptor: int | None) -> None:
        try:
            if isinstance(request, frames.EncodeUpload):
                self._encode_upload(request, descriptor)
                return
            if isinstance(request, frames.Compact):
                reply: frames.Reply = self.compacted(request)
            elif isinstance(request, frames.RemoveStaleUploads):
                reply = frames.StaleRemoved(request.id, self._remove_stale(request))
            elif isinstance(request, frames.ForgetObjects):
                reply = self._forget(request)
            elif isinstance(request, frames.AskFilters):
                reply = self._may_hold(request)
            elif isinstance(request, frames.AskBounds):
                reply = self._may_span(request)
            else:
                reply = self.read_group(request, descriptor)
        except FAILURES as error:
            reply = frames.Failed(request.id, type(error).__name__, str(error))
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._send(reply)

    def _send(self, reply: frames.Reply) -> None:
        try:
            with self._sending:
                frames.send(self._socket, reply)
        except ConnectionError:
            return  # the broker is gone; the receiving side detects it and ends the process

    def _store(self, url: str) -> ObjectStore:
        with self._shared:
            if url not in self._stores:
                self._stores[url] = self._open_store(url)
            return self._stores[url]

    # ---- writing

    def _encode_upload(self, request: frames.EncodeUpload, descriptor: int | None) -> None:
        """Encode the objects of a request in an encoder thread; each is uploaded as soon as it is made."""
        group = _Group(len(request.objects))
        if request.id <= self._given_up:
            for number, asked in enumerate(request.objects):
                self._settle(request, group, number, refused(GivenUp(f"{asked.name.key} is not encoded")), 0.0)
            return
        for one in self.writer.encoded(request, descriptor):
            if isinstance(one, NotEncoded):
                self._settle(request, group, one.number, one.why, 0.0)
            else:
                self._uploads.submit(self._upload, request, group, one).add_done_callback(_end_over_a_bug)

    def _upload(self, request: frames.EncodeUpload, group: "_Group", one: Encoded) -> None:
        if request.id <= self._given_up:
            one.remove()
            self._settle(request, group, one.number, refused(GivenUp(f"{one.written.name.key} is not uploaded")), 0.0)
            return
        outcome, waited = self.writer.upload(request.store_url, one)
        self._settle(request, group, one.number, outcome, waited)

    def _settle(
        self,
        request: frames.EncodeUpload,
        group: "_Group",
        number: int,
        outcome: frames.Committed | frames.NotUploaded,
        waited: float,
    ) -> None:
        """Record an object's outcome. The last one of a request sends the answer."""
        with self._shared:
            group.outcomes[number] = outcome
            group.waited += waited
            if len(group.outcomes) < group.count:
                return
        outcomes = [group.outcomes[number] for number in range(group.count)]
        self._send(frames.Uploaded(request.id, outcomes, group.waited))

    def compacted(self, request: frames.Compact) -> frames.Compacted:
        """Execute a Compact request. Not in an encoder thread, so that a round does not wait for it."""
        name, waited = self.writer.merged(request, lambda: not self.compaction_given_up.is_set())
        return frames.Compacted(request.id, name, waited)

    def _remove_stale(self, request: frames.RemoveStaleUploads) -> int:
        """Remove unfinished uploads of the request's broker only: other brokers may use the same bucket."""

        def ours(key: str) -> bool:
            parts = parse_data_key(key)
            return parts is not None and parts.broker == request.broker

        return self._store(request.store_url).remove_stale_uploads(ours)

    # ---- reading

    def read_group(self, request: frames.ReadGroup, descriptor: int | None) -> frames.GroupRead:
        """Read a row group into the memory that came with the request."""
        if descriptor is None:  # the kernel drops the descriptor if the process has too many open
            raise MissingBytes("the row group's memory was not sent")
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
            rows = self._decoded(store, group, decode, got, keep=request.keep)
        except DamagedObject:
            self._forget_footer(footer)  # the footer may be the damaged part: no checksum covers it
            raise
        arrays = (rows.positions, rows.offsets, rows.tags, rows.times)
        parts = [np.ascontiguousarray(array, np.int64).data for array in arrays]
        frames.fill(descriptor, [*parts, rows.wire])
        return frames.GroupRead(request.id, len(rows.offsets), len(rows.wire), got.fetched, got.cached)

    def _may_hold(self, request: frames.AskFilters) -> frames.MayHold:
        """Return the row groups that may have a word. A group without complete filters may have any."""
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

    def _forget(self, request: frames.ForgetObjects) -> frames.Forgotten:
        with self._shared:
            self._forgotten |= dict.fromkeys(one.key for one in request.objects)
            while len(self._forgotten) > _FORGOTTEN:
                self._forgotten.popitem(last=False)
        for one in request.objects:
            footer = _Range(request.store_url, one.key, one.size - one.footer, one.footer)
            if self._cache is not None:
                for start, length in (*one.groups, *self._filters_at_hand(footer)):
                    self._cache.forget(_Range(request.store_url, one.key, start, length).name)
            self._forget_footer(footer)
        return frames.Forgotten(request.id)

    def _filters_at_hand(self, footer: "_Range") -> list[tuple[int, int]]:
        """Return (start, length) of the ranges in which an object's filters are read, by a cached footer.

        The footer is not fetched, because the object may be deleted.
        """
        with self._shared:
            metadata = self._footers.get(footer.key)
        data = self._cache.get(footer.name) if metadata is None and self._cache is not None else None
        if data is not None:
            with contextlib.suppress(DamagedObject):
                metadata = parse_footer(data)
        return [] if metadata is None else [(read.start, read.length) for read in filter_reads(metadata)]

    def _footer(self, store: ObjectStore, place: "_Range", got: "_Got") -> pq.FileMetaData:
        """Return a footer, with one fetch for concurrent requests: read-ahead begins several groups of an object."""
        with self._shared:
            known = self._known_footer(place)
            if known is not None:
                return known
            turn = self._footer_turns.setdefault(place.key, threading.Lock())
        with turn:
            with self._shared:
                known = self._known_footer(place)
            if known is not None:
                return known
            try:
                metadata = self._decoded(store, place, parse_footer, got)
                with self._shared:
                    if place.key not in self._forgotten:
                        self._footers[place.key] = metadata
                    if len(self._footers) > _FOOTERS:
                        self._footers.popitem(last=False)
            finally:
                with self._shared:
                    self._footer_turns.pop(place.key, None)
        return metadata

    def _known_footer(self, place: "_Range") -> pq.FileMetaData | None:
        known = self._footers.get(place.key)
        if known is not None:
            self._footers.move_to_end(place.key)
        return known

    def _forget_footer(self, place: "_Range") -> None:
        with self._shared:
            self._footers.pop(place.key, None)
        if self._cache is not None:
            self._cache.forget(place.name)

    def _decoded(
        self, store: ObjectStore, place: "_Range", decode: Callable[[bytes], T], got: "_Got", *, keep: bool = True
    ) -> T:
        """Decode a range from the cache if possible, else from the store. Only data that decodes is cached."""
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
        if self._cache is not None and keep:
            self._cache.put(place.name, data)
            if place.key in self._forgotten:  # checked after the put: a later `_forget` finds the entry in the cache
                self._cache.forget(place.name)
        return decoded


class _Range(NamedTuple):
    store_url: str
    key: str
    start: int
    length: int

    @property
    def name(self) -> str:
        """The cache key. Objects are never modified, so these bytes never change."""
        return f"{self.store_url} {self.key} {self.start}+{self.length}"


def _footer_of(request: frames.ReadGroup | frames.AskFilters | frames.AskBounds) -> _Range:
    return _Range(request.store_url, request.key, request.size - request.footer, request.footer)


@dataclass(slots=True)
class _Group:
    """The outcomes of a request's objects so far."""

    count: int
    outcomes: dict[int, frames.Committed | frames.NotUploaded] = field(default_factory=dict)
    waited: float = 0.0


@dataclass(slots=True)
class _Got:
    fetched: int = 0
    cached: int = 0


def _end_over_a_bug(done: Future[None]) -> None:
    """End the process on an unexpected error, so that the broker does not wait for an answer forever."""
    error = None if done.cancelled() else done.exception()
    if error is not None:
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(os.EX_SOFTWARE)


def _check_offsets(rows: DecodedRows, request: frames.ReadGroup) -> None:
    ranges = [np.arange(first, last + 1) for _, first, last in request.runs]
    if not np.array_equal(rows.offsets, np.concatenate(ranges)):
        raise DamagedObject(f"{request.key}: row group {request.index} has other rows than its journal says")


def encoders_of(processors: int) -> int:
    """Return the number of encoder threads: one processor is left to the broker."""
    return max(1, min(processors - 1, _ENCODERS))


def main() -> None:
    parser = argparse.ArgumentParser(prog="tiered.worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--cache-bytes", type=int, default=0)
    parser.add_argument("--uploads", type=int, default=UPLOADS)
    options = parser.parse_args()
    cache = DiskCache(RealDisk(), options.cache_dir, options.cache_bytes) if options.cache_dir else None
    gc.freeze()  # excludes the imported modules from collections, which would scan them repeatedly
    with socket.socket(fileno=options.fd) as sock:
        Worker(sock, cache, uploads=options.uploads, encoders=encoders_of(len(os.sched_getaffinity(0)))).serve()
