"""The writing side of the store: append, flush, confirm, describe the checkpoint that is due.

Everything here runs on one thread, the broker's loop, except `flush`, `upkeep` and `prepare_next`, which are made for a
thread of their own each: senders wait for `flush`, and it waits for nothing but the log. A message is written at once
and visible once it is confirmed: at the append (ASYNC_FLUSH), or when `after_flush` says that it is on the disk
(SYNC_FLUSH).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct

import msgspec
from zlib_ng.zlib_ng import crc32

from broker.store.born_hosts import BornHost, BornHosts
from broker.store.checkpoint import Checkpoint, DataDirectory, QueueState
from broker.store.commit_log import CommitLog, LogFile
from broker.store.config import SYNC_FLUSH, StoreConfig
from broker.store.consume_queue import ConsumeQueue, MappedFiles, TopicTail
from broker.store.due_checkpoint import DueCheckpoint
from broker.store.errors import MessageIllegal, StoreFull, StoreNotWritable
from broker.store.key_index import IndexItem, KeyIndex
from broker.store.layout import (
    CRC_ENTRY,
    CRC_ENTRY_SIZE,
    END_SIZE,
    QUEUE_ENTRY,
    QUEUE_ENTRY_SIZE,
    SHORT,
    STANDS_STILL_MS,
)
from infra import failpoint
from infra.clock import Clock
from infra.disk import Disk, OutOfDescriptors
from neve.record.codec import pack_host
from neve.record.layout import HOST_FLAGS, PROPERTIES_LENGTH_MAX

log = logging.getLogger(__name__)

# Queue, body, properties, tags code, keys in one string, flag, system flag, born time, reconsume times, prepared
# transaction offset: a tuple, because an object would cost the hot path more than all its checks.
Send = tuple[ConsumeQueue, bytes | memoryview, bytes, int, str, int, int, int, int, int]
# Physical offset, size and queue offset of what was appended.
Place = tuple[int, int, int]
# Queue, queue offset and tags code of a message that readers see from now on.
Shown = tuple[ConsumeQueue, int, int]
AppendCallback = Callable[[list[Shown]], None]

_RECORD_OVERHEAD = 64 << 10
_INDEX_BATCH = 256
_entry_pack_into = QUEUE_ENTRY.pack_into
_length_pack = SHORT.pack


@lru_cache(256)
def _crc_entries(count: int) -> Struct:
    return Struct(CRC_ENTRY.format[:1] + CRC_ENTRY.format[1:] * count)


class PutResult(msgspec.Struct, frozen=True, gc=False):
    """Where a message was stored."""

    physical_offset: int
    queue_offset: int
    size: int
    store_timestamp: int


class Appender:
    """See the module; `MessageStore` adds the rest."""

    def __init__(self, config: StoreConfig, disk: Disk, clock: Clock) -> None:
        self.config = config
        self.disk = disk
        self.log = CommitLog(config, disk)
        self.directory = DataDirectory(config.root, disk)
        self.index = KeyIndex(config, disk)
        self.maps = MappedFiles(config.mapped_queue_files, disk)
        self.table: dict[tuple[str, int], ConsumeQueue] = {}
        self.table_by_topic: dict[str, dict[int, ConsumeQueue]] = {}
        self.tails: dict[str, TopicTail] = {}
        self.state = QueueState()
        self.on_append: list[AppendCallback] = []
        self.failed: OSError | None = None
        self.log_uuid = ""
        self.checkpoint_is_put_off = False
        self.dirty_queues: list[ConsumeQueue] = []
        # What `topics_since` told last, of which file and with which `high_time`; and the topics that may have had a
        # record since the queues were clean: each dirty queue's is among them.
        self._table: dict[str, tuple[int, int]] = {}
        self._table_of = (-1, 0)
        self._touched: set[str] = set()
        self.pending_index: list[IndexItem] = []
        self._clock = clock
        self._now = clock.now_ms
        self._open = False
        self._sync = config.flush_disk_type == SYNC_FLUSH
        self._unconfirmed: deque[tuple[int, list[Shown]]] = deque()
        self._max_record = config.max_message_size + _RECORD_OVERHEAD
        self._store_host = pack_host(config.store_host)
        self._hosts = BornHosts(self._store_host)
        self._flush_lock = threading.Lock()
        self._checkpoint_lock = threading.Lock()
        self._due: DueCheckpoint | None = None
        self._checkpoint_at = 0
        self._checkpoint_time = clock.monotonic()
        self.checkpointed = 0  # the log position of the checkpoint on the disk
        # the end of the log: the active file, the position inside it, the limit for a record's end (-1: refuse)
        self._active: LogFile | None = None
        self._position = 0
        self._limit = -1
        self._owed: Callable[[], None] | None = None  # what must be stored before anything else; see `put_first`
        self._appended = self._confirmed = self._flushed = self._synced = 0
        # The newest record's store time. It stands still while the clock is a little behind it, so that times in the
        # log run backwards only by larger steps: then the clock was ahead, or is behind.
        self.last_time = 0
        self.high_time = 0  # of the active file, from before such a step; 0: there was none
        self.steps_back = 0

    def set_end(self, file: LogFile | None, position: int) -> None:
        """Say where the log ends (recovery)."""
        self._active = file
        self._position = position
        self._limit = file.size - END_SIZE if file is not None else -1
        end = file.base + position if file is not None else 0
        self._table_of = (-1, 0)  # recovery sets tails by itself
        self._appended = self._confirmed = self._flushed = self._synced = end

    # -- append

    def put(
        self,
        topic: str,
        queue_id: int,
        body: bytes | memoryview,
        properties: bytes,
        *,
        flag: int,
        sys_flag: int,
        born_timestamp: int,
        born_host: tuple[str, int],
        reconsume_times: int = 0,
        tags_code: int = 0,
        keys: str | None = None,
        unique_key: str | None = None,
        prepared_transaction_offset: int = 0,
        beside: Send | None = None,
    ) -> PutResult:
        """Append a message. Raises `StoreFull`, `StoreNotWritable`, `MessageIllegal`; then nothing was stored.

        With `beside` both are stored, next to each other, or neither.
        """
        queue = self.queue_for(topic, queue_id)
        names = f"{unique_key or ''} {keys or ''}" if keys or unique_key else ""
        send = (
            queue, body, properties, tags_code, names, flag, sys_flag, born_timestamp, reconsume_times,
            prepared_transaction_offset,
        )  # fmt: skip
        if beside is None:
            ((physical_offset, size, queue_offset),) = self.append([send], born_host, self._now())
        else:
            (physical_offset, size, queue_offset), _ = self._append_both(send, beside, born_host, self._now())
        return PutResult(physical_offset, queue_offset, size, self.last_time)

    def append(self, sends: Sequence[Send], born_host: tuple[str, int], now: int) -> list[Place]:
        """Append messages of one sender in their order, those that fit together with one write; returns their places.

        Fewer than were given: the next one can't be stored; appended alone, it says why. Raises as `put` if that is the
        first.
        """
        host = self._hosts[born_host]
        self._set_time(now)
        places: list[Place] = []
        while len(places) < len(sends):
            try:
                self._make_room(sends[len(places)], host[1].size)
            except (StoreFull, MessageIllegal, StoreNotWritable):
                if places:
                    break
                raise
            self._append_run(sends, places, host)
        return places

    def _append_both(self, send: Send, beside: Send, born_host: tuple[str, int], now: int) -> list[Place]:
        """Two records of two queues with one write."""
        host = self._hosts[born_host]
        self._set_time(now)
        size = self._make_room(beside, host[1].size)
        self._make_room(send, host[1].size, behind=size)
        places: list[Place] = []
        self._append_run([send, beside], places, host)
        return places

    def put_first(self, append: Callable[[], None]) -> None:
        """Store nothing else before this has: it appends, and raises StoreFull or StoreNotWritable where it can't now.

        Then every later append tries it again, and is refused as it was.
        """
        self._owed, self._limit = append, -1
        try:
            self._settle()
        except (StoreFull, StoreNotWritable) as error:
            log.warning("nothing is stored before what the last stop left to be done: %s", error)

    def _settle(self) -> None:
        append, file = self._owed, self._active
        assert append is not None
        self._owed, self._limit = None, file.size - END_SIZE if file is not None else -1
        try:
            append()
        except BaseException:
            self._owed, self._limit = append, -1
            raise

    def _set_time(self, now: int) -> None:
        if now > self.last_time:
            self.last_time = now
        elif self.last_time - now > STANDS_STILL_MS:
            self._step_back(now)

    def _step_back(self, now: int) -> None:
        """A delay that was stored ahead of its time must not hold up those stored after it for as long."""
        log.warning("the clock is %.1f s behind the newest record: store times go back", (self.last_time - now) / 1000)
        self.high_time, self.last_time = max(self.high_time, self.last_time), now
        self.steps_back += 1

    def _make_room(self, send: Send, head_size: int, *, behind: int = 0) -> int:
        """See to it that the next record has a place in the log, in the CRC file and in its queue, or raise.

        Also a record of `behind` bytes that comes right behind it. Returns the record's size.
        """
        queue, body, properties = send[:3]
        size = head_size + len(body) + len(queue.topic_part) + 2 + len(properties)
        if size > self._max_record or len(properties) > PROPERTIES_LENGTH_MAX:
            raise MessageIllegal(f"a record of {size} bytes with {len(properties)} of properties is too large")
        if self._position + size + behind > self._limit:
            self._roll_for(size + behind)
        file = self._active
        assert file is not None
        if file.crc_position + (2 if behind else 1) * CRC_ENTRY_SIZE > file.crc_size:
            self.log.grow_crc(file)
        if queue.map is None or queue.position + QUEUE_ENTRY_SIZE > queue.limit:
            queue.make_room()
        self.log.open_writer(file)
        return size

    def _append_run(self, sends: Sequence[Send], places: list[Place], host: BornHost) -> None:
        """The sends from the first without a place on, as far as there is room; for that one there is."""
        file, now, store_host = self._active, self.last_time, self._store_host
        assert file is not None
        assert file.writer is not None
        base, position, limit, max_record = file.base, self._position, self._limit, self._max_record
        born, head_struct, host_flags = host
        head_pack, head_size = head_struct.pack, head_struct.size
        first = len(places)
        crc_room = (file.crc_size - file.crc_position) // CRC_ENTRY_SIZE
        pieces: list[bytes | memoryview] = []
        marks: list[int] = []
        shown: list[Shown] = []
        indexed = len(self.pending_index)
        for (
            queue, body, properties, tags_code, keys, flag, sys_flag, born_timestamp, reconsume_times, prepared
        ) in sends[first : first + crc_room]:  # fmt: skip
            properties_length, body_length = len(properties), len(body)
            tail = b"".join((queue.topic_part, _length_pack(properties_length & 0xFFFF), properties))
            size = head_size + body_length + len(tail)
            entry_position, entry_map, queue_offset = queue.position, queue.map, queue.end
            if (
                position + size > limit
                or size > max_record
                or properties_length > PROPERTIES_LENGTH_MAX
                or entry_map is None
                or entry_position + QUEUE_ENTRY_SIZE > queue.limit
            ):
                break
            physical_offset = base + position
            head = head_pack(
                size, queue.magic, crc32(body) & 0x7FFFFFFF, queue.queue_id, flag, queue_offset, physical_offset,
                sys_flag & ~HOST_FLAGS | host_flags, born_timestamp, born, now, store_host, reconsume_times, prepared,
                body_length,
            )  # fmt: skip
            pieces += (head, body, tail)
            marks += (position + 1, crc32(tail, crc32(head, (tags_code ^ tags_code >> 32) & 0xFFFFFFFF)), tags_code)
            # Nobody sees the entry before the record is written: readers stop at `visible`, recovery checks the log.
            _entry_pack_into(entry_map, entry_position, physical_offset, size, tags_code)
            queue.position, queue.end = entry_position + QUEUE_ENTRY_SIZE, queue_offset + 1
            if keys:
                self.pending_index.append((queue.topic, keys, physical_offset, now))
            places.append((physical_offset, size, queue_offset))
            shown.append((queue, queue_offset, tags_code))
            position += size
        try:
            file.writer.write(b"".join(pieces), self._position)
        except OSError as error:
            self._take_back(shown, error)
            del places[first:], self.pending_index[indexed:]
            raise StoreNotWritable(f"a write to the log failed: {error}") from error
        _crc_entries(len(shown)).pack_into(file.crc_map, file.crc_position, *marks)
        file.crc_position += len(shown) * CRC_ENTRY_SIZE
        self._position, self._appended = position, base + position
        for (queue, _, _), (physical_offset, _, _) in zip(shown, places[first:], strict=True):
            queue.topic_tail.physical_offset, queue.topic_tail.store_time = physical_offset, now
            queue.used = True
            if not queue.dirty:
                self._mark_dirty(queue)
        if len(self.pending_index) >= _INDEX_BATCH:
            self.build_index()
        if self._sync:
            self._unconfirmed.append((self._appended, shown))
        else:
            self._confirmed = self._appended
            self._show(shown)

    def _take_back(self, shown: list[Shown], error: OSError) -> None:
        """A write failed: as after a failed sync, nothing is appended any more."""
        for queue, queue_offset, _ in reversed(shown):
            queue.position, queue.end = queue.position - QUEUE_ENTRY_SIZE, queue_offset
        self.failed = error
        self._limit = -1

    def _show(self, shown: list[Shown]) -> None:
        for queue, queue_offset, _ in shown:
            queue.visible = queue_offset + 1
        for callback in self.on_append:
            callback(shown)

    def queue_for(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue to append to; made with its first message. Raises as `put`."""
        return self.table.get((topic, queue_id)) or self.new_queue(topic, queue_id)

    def tell(self, callback: AppendCallback) -> None:
        """Call back with all messages that readers see from then on."""
        self.on_append.append(callback)

    def new_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Make the queue of the first message; above an earlier life of it. Raises as `put`."""
        self._check_writable()
        first = self.state.ended.get(topic, {}).get(str(queue_id), 0)
        queue = self.add_queue(topic, queue_id)
        try:
            queue.create(first, sync=False)
        except StoreFull:
            self.drop_queue(queue)
            raise
        queue.visible = first
        return queue

    def add_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Put an empty queue into the table, without a file."""
        if not topic or topic[0] == "." or "/" in topic or "\0" in topic or queue_id < 0 or len(topic.encode()) > 255:
            raise MessageIllegal(f"topic {topic!r}, queue {queue_id}: not a name that can be stored")
        queue = ConsumeQueue(self.config, self.maps, topic, queue_id, self.tail_of(topic))
        queue.floor = self.state.floors.get(topic, {}).get(str(queue_id), 0)
        self.table[topic, queue_id] = queue
        self.table_by_topic.setdefault(topic, {})[queue_id] = queue
        return queue

    def drop_queue(self, queue: ConsumeQueue) -> None:
        """Take a queue out of the table."""
        del self.table[queue.topic, queue.queue_id]
        of_topic = self.table_by_topic[queue.topic]
        del of_topic[queue.queue_id]
        if not of_topic:
            del self.table_by_topic[queue.topic]

    def tail_of(self, topic: str) -> TopicTail:
        """The object that knows the topic's newest record."""
        tail = self.tails.get(topic)
        if tail is None:
            tail = self.tails[topic] = TopicTail()
        return tail

    def _mark_dirty(self, queue: ConsumeQueue) -> None:
        if not queue.dirty:
            queue.dirty = True
            self.dirty_queues.append(queue)
            self._touched.add(queue.topic)

    def _check_writable(self) -> None:
        if self.failed is not None:
            raise StoreNotWritable(f"the disk failed: {self.failed}")
        if not self._open:
            raise StoreNotWritable("the store is not open")

    def _roll_for(self, size: int) -> None:
        """Go on in the next file."""
        self._check_writable()
        if self._owed is not None:
            self._settle()
            if self._position + size <= self._limit:
                return
        if size + END_SIZE > self.config.commit_log_file_size:
            raise MessageIllegal(f"a record of {size} bytes does not fit into a CommitLog file")
        self._start_file(self._active.end if self._active is not None else 0)

    def _start_file(self, base: int) -> None:
        previous = self._active
        file = self.log.allocate(base)
        if previous is not None:
            self.seal(previous, self._position)
        self.high_time = 0
        self._active = file
        self._position = 0
        self._limit = file.size - END_SIZE if self._owed is None else -1
        self._appended = base
        if not self._unconfirmed:
            self._confirmed = base if not self._sync else self._confirmed
        failpoint.hit("store.roll")

    def seal(self, file: LogFile, position: int) -> None:
        """Close a file and fix its topic table."""
        file.topics = self.topics_since(file.base)
        file.newest_store_time = max(self.last_time, self.high_time) if file.topics else 0
        self.log.seal(file, position)

    def topics_since(self, base: int) -> dict[str, tuple[int, int]]:
        """Topics that have a record at or above an offset, of the active file: last record, newest store time.

        After a step back the newest that any record of the file has: too late rather than too early.

        A broker may have ten thousand topics: only those that may have changed are looked at again.
        """
        tails, high_time = self.tails, self.high_time
        if self._table_of != (base, high_time):
            self._table, self._table_of = {}, (base, high_time)
            self._touched.update(tails)
        for topic in self._touched:
            tail = tails[topic]
            if tail.physical_offset >= base:
                self._table[topic] = (tail.physical_offset, max(tail.store_time, high_time))
        return self._table.copy()

    # -- flush

    @property
    def confirmed_offset(self) -> int:
        """Readers see what lies below."""
        return self._confirmed

    @property
    def flushed_offset(self) -> int:
        """What lies below is on the disk."""
        return self._flushed

    @property
    def dirty(self) -> bool:
        """Whether there is something to flush, or a failure to tell."""
        return self._appended > self._flushed or self.failed is not None

    def flush(self) -> int:
        """Bring the log to the disk; returns the offset to hand to `after_flush`. For a thread.

        A sync that failed is never tried again: the kernel may have dropped the pages. Raises `StoreNotWritable`.
        """
        with self._flush_lock:
            if self.failed is not None:
                raise StoreNotWritable(f"the disk failed: {self.failed}")
            target = self._appended
            try:
                failpoint.hit("store.flush")
                for file in list(self.log.files):
                    if file.end > self._synced and file.base < target:
                        self.log.sync(file)
                        if file.sealed and file.end <= target:
                            self.log.release_writers(file)
                self._synced = target
            except OutOfDescriptors as error:  # no sync has failed: what was not begun comes with the next flush
                log.warning("the log is not synced until files can be opened again: %s", error)
                return self._synced
            except OSError as error:
                raise self._sync_failed(error) from error
        return target

    def _sync_failed(self, error: OSError) -> StoreNotWritable:
        self.failed = error
        self._limit = -1
        return StoreNotWritable(f"a sync to the disk failed: {error}")

    def after_flush(self, offset: int) -> None:
        """On the loop, after `flush` returned `offset`: show what is confirmed by it."""
        self._flushed = max(self._flushed, offset)
        if self._sync:
            self._confirm(offset)
        self.build_index()
        grown = self._appended - self._checkpoint_at
        now = self._clock.monotonic()
        if self._due is None and (
            grown >= self.config.checkpoint_bytes
            or (grown and (now - self._checkpoint_time) * 1000 >= self.config.checkpoint_interval)
        ):
            self._due = self._describe_checkpoint()
            self._checkpoint_at, self._checkpoint_time = self._appended, now

    def _confirm(self, offset: int) -> None:
        self._confirmed = max(self._confirmed, offset)
        waiting = self._unconfirmed
        while waiting and waiting[0][0] <= offset:
            self._show(waiting.popleft()[1])

    def _describe_checkpoint(self) -> DueCheckpoint:
        self.build_index()
        base, count = self.index.state()
        topics = self.topics_since(self._active.base) if self._active is not None else {}
        content = Checkpoint(self._appended, self.last_time, base, count, topics)
        queues, self.dirty_queues = self.dirty_queues, []
        for queue in queues:
            queue.dirty = False
        self._touched.clear()
        return DueCheckpoint(content, queues, self.index.take_dirty()).after(self._due)

    def build_index(self) -> None:
        """Index the keys of messages appended since the last call."""
        if self.pending_index:
            items, self.pending_index = self.pending_index, []
            if self.config.index_enabled:
                self.index.add(items)
