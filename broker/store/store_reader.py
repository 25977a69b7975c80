"""Reads of the local store: by clients, by slaves, by the broker for itself, and by the lifecycle.

    clients       visible messages only, by the one rule of `QueueTable.shows`: `get`, `shown_time`, `shown_near`,
                  `shown_record_at`, `query`
    the broker    also records below a queue's minimum: `record_at`, `newest_record`, `entry`
    slaves        bytes of the log up to its end: `log_bytes`, `last_record`, `record_start`
    lifecycle     files, entries and store times, erased messages included: `segments`, `files`, `entries`,
                  `first_offsets`, `store_time`, `offset_by_time`

Everything runs on the event loop's thread. Searches yield where the caller may yield to the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from typing import NamedTuple

import msgspec

from broker.store import erased, log_records, reading
from broker.store.commit_log import CommitLog, LogFile
from broker.store.config import StoreConfig
from broker.store.key_index import KeyIndex
from broker.store.log_end import LogEnd
from broker.store.queue_table import QueueTable
from broker.store.reading import EntryArrays, GetResult
from broker.store.topic_tails import TopicTails
from broker.store.truncation import TruncationState
from broker.store.visibility import Visibility
from neve.record.codec import decode_record
from neve.remoting.codes import GetMessageStatus

_QUERY_LIMIT = 64
# Records that one step of a query by key examines, about 1 ms, and records of all steps of one query, about 1 s.
QUERY_STEP, _QUERY_STEP_BYTES = 64, 1 << 20
QUERY_LOOKS_MAX = 100_000
_ALL = 1 << 62


class Segment(msgspec.Struct, frozen=True):
    """One file of the log for the lifecycle;

    `topics` has the offset of each topic's last record and its newest store time.
    """

    base: int
    end: int
    sealed: bool
    newest_store_time: int
    topics: dict[str, tuple[int, int]]


class KeyHits(NamedTuple):
    """Records with a key, newest first.

    If the search ended early, `unsearched_from` is the store time that it reached.
    """

    records: list[bytes]
    unsearched_from: int | None = None


class StoreReader:
    """Reads of one local store, from the parts that own its state."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        log: CommitLog,
        end: LogEnd,
        queues: QueueTable,
        tails: TopicTails,
        index: KeyIndex,
        visibility: Visibility,
        truncations: TruncationState,
    ) -> None:
        self._scan_entries = config.scan_entries
        self._log, self._end, self._queues, self._tails = log, end, queues, tails
        self._records = queues.records
        self._index, self._visibility, self._truncations = index, visibility, truncations

    def get(  # noqa: PLR0917 - the protocol's own order
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        max_bytes: int,
        tag_codes: frozenset[int] | None = None,
        *,
        old_below: int = 0,
    ) -> GetResult:
        """Read from an offset on; at least one message, whatever its size. The buffers are views of the mapped log.

        If the read begins below the physical offset `old_below`, the result contains the physical offsets of its
        buffers.
        """
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return GetResult(GetMessageStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0)
        return reading.read(
            self._log,
            queue,
            self._queues.minimum(queue),
            offset,
            max_count,
            max_bytes,
            tag_codes=tag_codes,
            scan_entries=self._scan_entries,
            old_below=old_below,
        )

    def offset_by_time(self, topic: str, queue_id: int, timestamp: int, upper: bool) -> Generator[None, None, int]:
        """Return the offset of the first message at or after a store time, or with `upper` of the last at or before it.

        Erased messages are included. Yields where the caller may yield to the event loop, which happens only in files
        in which the clock was set back. The search restarts if the queue was replaced meanwhile.
        """
        wanted = timestamp + 1 if upper else timestamp
        searched, truncation_count, at = None, self._truncations.count, 0
        while (queue := self._queues.get(topic, queue_id)) is not None:
            if queue is not searched or truncation_count != self._truncations.count:
                searched, truncation_count, at = queue, self._truncations.count, 0
            minimum = self._queues.minimum(queue)
            at, is_found = reading.first_stored(self._log, queue, max(minimum, at), wanted)
            if is_found:
                return max(at - 1, minimum) if upper else at
            yield
        return 0

    def entry(self, topic: str, queue_id: int, offset: int) -> tuple[int, int, int] | None:
        """Return physical offset, size and tags code of a message;

        None if the local queue has none that may be returned.
        """
        queue = self._queues.get(topic, queue_id)
        if queue is None or not 0 <= offset < queue.visible or erased.behind(queue.erased, offset) != offset:
            return None
        return queue.entry(offset)

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """Return the store time of a message, hidden or not; -1 if the local log does not have it."""
        queue = self._queues.get(topic, queue_id)
        return -1 if queue is None else reading.store_time(self._log, queue, offset)

    def shown_time(self, topic: str, queue_id: int, offset: int) -> int:
        """Return the store time of a visible message; -1 if there is none.

        For an erased offset, the store time of the next visible message, which is what a reader gets there, or else of
        the last one.
        """
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return -1
        if queue.erased and offset < queue.visible:
            near = erased.behind(queue.erased, offset)
            offset = near if near < queue.visible else erased.before(queue.erased, offset)
        return reading.store_time(self._log, queue, offset)

    def shown_near(self, topic: str, queue_id: int, offset: int, *, below: bool) -> int:
        """Return the nearest offset at or above the given one that is not erased.

        With `below`, return the nearest one at or below it, or -1 if there is none.
        """
        spans = self._records.erased_of(topic, queue_id)
        return erased.before(spans, offset) if below else erased.behind(spans, offset)

    def shown_record_at(self, physical_offset: int) -> bytes | None:
        """Return the record that begins at a physical offset if readers may get it; for all requests of clients."""
        found = reading.record_at(self._log, physical_offset, self._visibility.confirmed)
        if found is None:
            return None
        record = decode_record(found)
        return (
            found if self._queues.shows(record.topic, record.queue_id, record.queue_offset, physical_offset) else None
        )

    def record_at(self, physical_offset: int) -> bytes | None:
        """Return the record at a physical offset if one begins there, is confirmed and is not erased.

        For the broker's own bookkeeping, which also needs records below a queue's minimum. Requests of clients use
        `shown_record_at`.
        """
        found = reading.record_at(self._log, physical_offset, self._visibility.confirmed)
        return None if found is not None and self._records.has_erased and self._is_erased(found) else found

    def _is_erased(self, raw: bytes) -> bool:
        record = decode_record(raw)
        spans = self._records.erased_of(record.topic, record.queue_id)
        return erased.behind(spans, record.queue_offset) != record.queue_offset

    def newest_record(self) -> bytes | None:
        """Return the last record of the log if it is confirmed."""
        last = self._tails.newest()
        return reading.record_at(self._log, last, self._visibility.confirmed) if last >= 0 else None

    def query(
        self, topic: str, key: str, max_num: int, begin: int, end: int, *, is_hit: Callable[[bytes], bool]
    ) -> Generator[None, None, KeyHits]:
        """Return the newest records with a key that were stored in [begin, end], newest first. Yields after each step.

        `is_hit` compares key and topic, because the index has only hashes, and decides whether clients may see the
        record. Only hits count towards `max_num`. A step examines `QUERY_STEP` records or `_QUERY_STEP_BYTES` of them.
        """
        self._index.build()
        limit, text = min(max_num, _QUERY_LIMIT), key.encode("utf-8", "surrogatepass")
        hits: list[bytes] = []
        examined = in_step = size = 0
        for place in self._index.find(topic, key, begin, end):
            if place is None or in_step >= QUERY_STEP or size >= _QUERY_STEP_BYTES:
                in_step = size = 0
                yield
            if place is None or place < self._queues.deleted_up_to(topic):
                continue
            examined += 1
            in_step += 1
            store_time = reading.store_time_at(self._log, place)
            if examined > QUERY_LOOKS_MAX:
                return KeyHits(hits, store_time)
            if not begin <= store_time <= end:
                continue
            record_size, has_text = reading.find_text(self._log, place, text)
            size += record_size
            record = self.shown_record_at(place) if has_text else None
            if record is not None and is_hit(record):
                hits.append(record)
                if len(hits) >= limit:
                    break
        return KeyHits(hits)

    def records_from(self, physical_offset: int) -> Iterator[bytes]:
        """Yield the records that end above a physical offset, in log order; nothing may be appended meanwhile."""
        for place, size, _ in log_records.records_ending_above(self._log, physical_offset):
            file = self._log.at(place)
            assert file is not None
            yield bytes(memoryview(file.map)[place - file.base : place - file.base + size])

    def last_record(self, end: int) -> tuple[int, bytes] | None:
        """Return begin and bytes of the newest record that ends at or below `end`, a possible truncation offset."""
        found = log_records.last_record_below(self._log, end)
        return None if found is None else (decode_record(found).physical_offset, bytes(found))

    def record_start(self, physical_offset: int) -> int:
        """Return the highest offset at or below the given one to which the log could be truncated."""
        return min(log_records.record_start(self._log, physical_offset), self._end.appended)

    def segments(self) -> list[Segment]:
        """Return the files of the log, oldest first; only the last is not sealed."""
        return [self._segment(file) for file in self._log.files]

    def _segment(self, file: LogFile) -> Segment:
        if file is self._end.file and not file.sealed:
            topics, newest = self._end.table()
            return Segment(file.base, self._end.appended, False, newest, topics)
        # The last one does not count as sealed: a slave's file may be complete before the next one begins.
        sealed = file.sealed and file is not self._end.file
        return Segment(file.base, file.end, sealed, file.newest_store_time, file.topics)

    def files(self, start: int, end: int) -> list[tuple[str, int, int]]:
        """Return path, base and size of the log files that overlap [start, end)."""
        return [
            (str(file.path), file.base, file.size) for file in self._log.files if file.base < end and file.end > start
        ]

    def entries(self, topic: str, start_phys: int, end_phys: int) -> dict[int, EntryArrays]:
        """Return for each queue the entries of records in [start_phys, end_phys), as copies."""
        slices = self.entry_slices(topic, start_phys, end_phys, _ALL)
        return reading.joined(piece for piece in slices if piece is not None)

    def entry_slices(
        self, topic: str, start_phys: int, end_phys: int, most: int
    ) -> Iterator[reading.EntrySlice | None]:
        """Yield as `entries`, at most `most` entries at a time; the caller may yield to the event loop in between.

        None marks the end of each queue, also of one without entries.
        """
        # the files of a queue may still have entries of evicted log files
        start = max(start_phys, self._queues.deleted_up_to(topic), self._log.min_offset)
        for queue in self._queues.of_topic(topic):
            yield from reading.entry_slices(queue, queue.first_at(start), queue.first_at(end_phys), most)
            yield None

    def first_offsets(self, topic: str, start_phys: int) -> dict[int, int]:
        """Return for each queue the first offset whose record is at or above a physical offset, or the queue's end."""
        return {queue.queue_id: queue.first_at(start_phys) for queue in self._queues.of_topic(topic)}

    def former_ends(self, topics: Collection[str]) -> dict[str, int]:
        """Return topic -> the physical offset below which records of that name belong to a deleted topic.

        For a topic without queues this is the end of the log. Only topics that may have such records in the log are
        included.
        """
        ends = {
            topic: self._queues.deleted_up_to(topic) if self._queues.of_topic(topic) else self._end.appended
            for topic in topics
        }
        return {topic: end for topic, end in ends.items() if end > self._log.min_offset}
