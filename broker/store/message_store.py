"""The local store: one log for all topics, an index per queue, one thread (see `appender` for the exceptions)."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec

from broker.store import reading
from broker.store.appender import Appender, PutResult
from broker.store.checkpoint import StateImage
from broker.store.commit_log import LogFile
from broker.store.config import StoreConfig
from broker.store.consume_queue import ConsumeQueue
from broker.store.due_checkpoint import DueCheckpoint
from broker.store.errors import StoreError, StoreFull
from broker.store.layout import QUEUE_ENTRY_SIZE
from broker.store.opening import open_store
from broker.store.reading import EntryRun, GetResult
from broker.store.recovery import RecoveryReport
from infra.disk import OutOfDescriptors
from neve.remoting.codes import GetMessageStatus

__all__ = ["EntryRun", "GetResult", "MessageStore", "PutResult", "RecoveryReport", "Segment", "StoreConfig"]

log = logging.getLogger(__name__)

_QUERY_LIMIT = 64
_ALL = 1 << 62


class Segment(msgspec.Struct, frozen=True):
    """One file of the log, as the lifecycle sees it; per topic its last record and newest store time."""

    base: int
    end: int
    sealed: bool
    newest_store_time: int
    topics: dict[str, tuple[int, int]]


class MessageStore(Appender):
    """See the module."""

    # -- start and stop

    def load(self) -> RecoveryReport:
        """Lock the directory, recover, and be ready to append."""
        self.directory.lock()
        try:
            report = open_store(self)
            self._open = True
            self._checkpoint_now()
            self.directory.end_recovery()
        except BaseException:
            self._open = False
            self.directory.release()
            raise
        return report

    def shutdown(self) -> None:
        """Bring everything to the disk and leave the directory clean; after a failed sync, leave it to recovery."""
        if not self._open:
            return
        self._limit = -1
        try:
            if self.failed is None:
                self._checkpoint_now()
                if not self.checkpoint_is_put_off:
                    self.directory.end()
        finally:
            self._open = False
            self.directory.release()

    # -- checkpoints

    @property
    def wants_upkeep(self) -> bool:
        """Whether `upkeep` has something to do."""
        return self._due is not None or self._wants_next

    def upkeep(self) -> None:
        """What no send waits for: the checkpoint that is due, the next file ahead. For a thread. Raises as `flush`.

        A checkpoint syncs each queue that was written to: thousands of files.
        """
        if self._wants_next:
            with suppress(StoreFull):  # the send that needs the file reports it
                self.log.prepare_next()
        with self._checkpoint_lock:
            due = self._due
            if due is None:
                return
            self.checkpoint_is_put_off = True  # until it is written
            if self.failed is not None or self._synced < due.content.physical:
                self.flush()  # it promises no more than what is on the disk
            if self._synced < due.content.physical:
                return
            try:
                self._complete_checkpoint(due)
            except OutOfDescriptors as error:  # no sync has failed: it comes again whole
                log.warning("a checkpoint waits until files can be opened again: %s", error)
            except OSError as error:
                raise self._sync_failed(error) from error

    @property
    def _wants_next(self) -> bool:
        """From the second half of a file on; the send that rolls then waits for nothing."""
        active = self._active
        return active is not None and not self.log.next_is_ready and self._appended - active.base >= active.size // 2

    def _complete_checkpoint(self, due: DueCheckpoint) -> None:
        due.sync(self.disk, self.config.root)
        try:
            self.log.write_tables(due.content.physical)
            self.directory.write_checkpoint(due.content)
        except OSError as error:  # a full disk only makes the next recovery longer
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
        else:
            self.checkpoint_is_put_off = False
            self.checkpointed = due.content.physical
        self._due = None

    def _checkpoint_now(self) -> None:
        if self._due is not None:
            self.upkeep()
        with self._checkpoint_lock:  # another one may still be due: it is taken along, and no upkeep is on the way
            self._due = self._describe_checkpoint()
        self._checkpoint_at = self._appended
        self.after_flush(self.flush())
        self.upkeep()

    def want_checkpoint(self, physical_offset: int) -> bool:
        """Have the next `upkeep` write a checkpoint; False: one stands at or above the offset already."""
        if self.checkpointed >= physical_offset:
            return False
        if self._due is None:
            self._due = self._describe_checkpoint()
            self._checkpoint_at, self._checkpoint_time = self._appended, self._clock.monotonic()
        return True

    def prepare_next(self) -> None:
        """Allocate the next log file ahead. For a thread. Raises `StoreFull`."""
        self.log.prepare_next()

    # -- queues

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        return self.table.get((topic, queue_id))

    def _min_offset(self, queue: ConsumeQueue) -> int:
        return queue.min_offset(max(self.min_physical_offset, self.state.deleted.get(queue.topic, 0)))

    def queues(self) -> dict[str, list[int]]:
        """The queues of each topic."""
        return {topic: self.queues_of(topic) for topic in sorted(self.table_by_topic)}

    def queues_of(self, topic: str) -> list[int]:
        """The queues of one topic."""
        return sorted(self.table_by_topic.get(topic, ()))

    def following_offsets(self) -> dict[str, dict[int, int]]:
        """Topic -> queue -> the offset that its next message gets, confirmed or not; also of queues that are gone."""
        return {topic: self.following_of(topic) for topic in self.following_topics()}

    def following_topics(self) -> list[str]:
        """Those that have queues here, or had."""
        return list(self.state.ended.keys() | self.table_by_topic.keys())

    def following_of(self, topic: str) -> dict[int, int]:
        """As `following_offsets`, of one topic."""
        ended = {int(name): end for name, end in self.state.ended.get(topic, {}).items()}
        return ended | {queue_id: queue.end for queue_id, queue in self.table_by_topic.get(topic, {}).items()}

    def deleted_below(self) -> dict[str, dict[int, int]]:
        """Topic -> queue -> where it ended when the topic was deleted last, unless it began again."""
        return {
            topic: {int(queue_id): end for queue_id, end in ends.items()} for topic, ends in self.state.ended.items()
        }

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The first offset that the local log has; 0 of an unknown queue."""
        queue = self._queue(topic, queue_id)
        return 0 if queue is None else min(self._min_offset(queue), queue.visible)

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The offset after the last confirmed message; 0 of an unknown queue."""
        queue = self._queue(topic, queue_id)
        return 0 if queue is None else queue.visible

    def next_offset(self, topic: str, queue_id: int) -> int:
        """The offset that the queue's next message gets; of a deleted queue, should it come again."""
        queue = self._queue(topic, queue_id)
        return queue.end if queue is not None else self.state.ended.get(topic, {}).get(str(queue_id), 0)

    def set_min_offset(self, topic: str, queue_id: int, offset: int) -> None:
        """Hide the messages below an offset, for good."""
        if self.hide_below(topic, {queue_id: offset}):
            self.save_queue_state()

    def save_queue_state(self) -> None:
        """What `hide_below` hid stays hidden."""
        self.directory.write_queue_state(self.state)

    def queue_state_image(self) -> StateImage:
        """As it is now, on the loop; `write_queue_state` is for any thread."""
        return self.directory.image_of(self.state)

    def write_queue_state(self, image: StateImage) -> None:
        """An older image never replaces a newer one."""
        self.directory.write_image(image)

    def gone_below(self, topic: str) -> int:
        """The physical offset below which a topic's records belong to an earlier life of it; 0: there was none."""
        return self.state.deleted.get(topic, 0)

    def hide_below(self, topic: str, offsets: Mapping[int, int]) -> bool:
        """Hide the messages of queues below offsets; for good once the state is written; whether that is new."""
        found = False
        for queue_id, offset in offsets.items():
            queue = self._queue(topic, queue_id)
            if queue is not None and offset > queue.floor:
                queue.floor = min(offset, queue.visible)
                self.state.floors.setdefault(topic, {})[str(queue_id)] = queue.floor
                found = True
        return found

    def expire_below(self, topic: str, offsets: Mapping[int, int], timestamp: int) -> bool:
        """As `hide_below`, of the messages that were stored before a time."""
        old = {
            queue_id: min(offset, self.offset_by_time(topic, queue_id, timestamp, upper=False))
            for queue_id, offset in offsets.items()
        }
        return self.hide_below(topic, old)

    def show_from(self, topic: str, queue_id: int, offset: int) -> int:
        """Show again what was hidden, from an offset on, as far down as the queue has it without a hole.

        Returns the queue's minimum then.
        """
        queue = self._queue(topic, queue_id)
        if queue is not None and offset < queue.floor:
            lowest = queue.floor
            for first, view in reversed(list(queue.slices(offset, queue.floor))):
                if first + len(view) // QUEUE_ENTRY_SIZE != lowest:
                    break
                lowest = first
            if lowest < queue.floor:
                queue.floor = lowest
                self.state.floors.setdefault(topic, {})[str(queue_id)] = lowest
                self.directory.write_queue_state(self.state)
        return self.min_offset(topic, queue_id)

    def create_queue_at(self, topic: str, queue_id: int, next_offset: int) -> None:
        """Make a queue go on at an offset, above what its archive or an earlier life of it has."""
        self._check_writable()
        queue = self._queue(topic, queue_id)
        if queue is not None and queue.end >= next_offset:
            return
        # recovery takes a hole only from below its checkpoint
        self._checkpoint_now()
        self._begin_at(topic, queue_id, next_offset)
        self._checkpoint_now()

    def _begin_at(self, topic: str, queue_id: int, next_offset: int) -> None:
        queue = self._queue(topic, queue_id) or self.add_queue(topic, queue_id)
        queue.settle()
        next_offset += queue.would_look_lost(next_offset)
        queue.create(next_offset, sync=True)
        queue.visible = next_offset
        self._mark_dirty(queue)

    def restore_queues(
        self, following: Mapping[str, Mapping[int, int]], ended: Mapping[str, Mapping[int, int]]
    ) -> None:
        """Give an empty store the queues that another had: each goes on at its offset, below it is nothing local.

        `ended` are the queues of topics that are gone, should they come again. May be repeated after a crash.
        """
        self._check_writable()
        for topic, ends in ended.items():
            self.state.ended[topic] = {str(queue_id): end for queue_id, end in ends.items()}
        self.directory.write_queue_state(self.state)
        self._checkpoint_now()
        for topic, ends in following.items():
            for queue_id, end in ends.items():
                queue = self._queue(topic, queue_id)
                if queue is None or queue.end < end:
                    self._begin_at(topic, queue_id, end)
        self._checkpoint_now()

    def delete_topic(self, topic: str, *, begin_again: bool = False) -> None:
        """Remove a topic's queues. Its records stay in the log until their files go, but no longer belong to it.

        Should the topic come again, its queues go on where they ended; with `begin_again` at 0, which only the caller
        can allow: nothing outside this store may know the offsets that would be given a second time.
        """
        doomed = list(self.table_by_topic.get(topic, {}).values())
        if not doomed:
            return
        if self._unconfirmed:
            self.after_flush(self.flush())
        self.state.deleted[topic] = self.max_physical_offset
        self.state.floors.pop(topic, None)
        if begin_again:
            self.state.ended.pop(topic, None)
        else:
            ended = self.state.ended.setdefault(topic, {})
            ended.update({str(queue.queue_id): queue.end for queue in doomed})
        self.directory.write_queue_state(self.state)
        for queue in doomed:
            self.drop_queue(queue)
            queue.delete()
        self.dirty_queues = [queue for queue in self.dirty_queues if queue.topic != topic]
        parent = self.config.root / "consumequeue"
        for name in self.disk.list_dir(parent / topic):
            # of a queue whose first file a power cut took
            self.disk.fsync_dir(parent / topic / name)
            self.disk.remove_dir(parent / topic / name)
        self.disk.fsync_dir(parent / topic)
        self.disk.remove_dir(parent / topic)
        self.disk.fsync_dir(parent)

    # -- reads

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
        """Read from an offset on; at least one message however large. The buffers are views of the mapped log.

        Of a read that begins below the physical offset `old_below`, the result says where in the log it lies.
        """
        queue = self._queue(topic, queue_id)
        if queue is None:
            return GetResult(GetMessageStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0)
        minimum = self._min_offset(queue)
        return reading.read(
            self.log,
            queue,
            minimum,
            offset,
            max_count,
            max_bytes,
            tag_codes=tag_codes,
            scan_entries=self.config.scan_entries,
            old_below=old_below,
        )

    def offset_by_time(self, topic: str, queue_id: int, timestamp: int, upper: bool) -> int:
        """The offset of a time: the first at or after it, or with `upper` the last at or before it."""
        queue = self._queue(topic, queue_id)
        if queue is None:
            return 0
        return reading.offset_by_time(self.log, queue, self._min_offset(queue), timestamp, upper=upper)

    def entry(self, topic: str, queue_id: int, offset: int) -> tuple[int, int, int] | None:
        """Physical offset, size and tags code of a message; None if the local queue has none there."""
        queue = self._queue(topic, queue_id)
        return queue.entry(offset) if queue is not None and 0 <= offset < queue.visible else None

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """Store time of a message, of a hidden one too; -1 if the local log has none there."""
        queue = self._queue(topic, queue_id)
        if queue is None:
            return -1
        return reading.store_time(self.log, queue, offset)

    def record_at(self, physical_offset: int) -> bytes | None:
        """The record at a physical offset, if one begins there and is confirmed."""
        return reading.record_at(self.log, physical_offset, self._confirmed)

    def newest_record(self) -> bytes | None:
        """The last record of the log, if it is confirmed."""
        last = max((tail.physical_offset for tail in self.tails.values()), default=-1)
        return self.record_at(last) if last >= 0 else None

    def file_at(self, physical_offset: int) -> LogFile | None:
        """The file of the log that holds an offset."""
        return self.log.at(physical_offset)

    def query(self, topic: str, key: str, max_num: int, begin: int, end: int) -> list[bytes]:
        """Records whose key has this key's hash, stored in [begin, end], newest first."""
        self.build_index()
        limit = min(max_num, _QUERY_LIMIT)
        lowest = self.state.deleted.get(topic, 0)
        found: list[bytes] = []
        for physical_offset in self.index.find(topic, key, begin, end):
            if len(found) >= limit:
                break
            record = self.record_at(physical_offset) if physical_offset >= lowest else None
            if record is not None and begin <= reading.store_time_at(self.log, physical_offset) <= end:
                found.append(record)
        return found

    # -- lifecycle

    @property
    def min_physical_offset(self) -> int:
        """Where the local log begins."""
        return self.log.files[0].base if self.log.files else 0

    @property
    def max_physical_offset(self) -> int:
        """Where the next record goes."""
        return self._appended

    @property
    def newest_store_time(self) -> int:
        """Of the last record, or what the store was told of later ones."""
        return self.last_time

    def go_on_after(self, store_time: int) -> None:
        """No record gets an earlier time, as long as the clock is not far behind."""
        self.last_time = max(self.last_time, store_time)

    @property
    def descriptors(self) -> int:
        """How many the log holds."""
        return self.log.descriptors

    @property
    def skipped_keys(self) -> int:
        """Keys that were not indexed since the start, for want of room."""
        return self.index.skipped

    @property
    def newest_segment_base(self) -> int:
        """Where the file that is being written begins."""
        return self.log.files[-1].base if self.log.files else 0

    def segments(self) -> list[Segment]:
        """The files of the log, oldest first; only the last is not sealed."""
        return [self._segment(file) for file in self.log.files]

    def _segment(self, file: LogFile) -> Segment:
        if file is self._active and not file.sealed:
            topics = self.topics_since(file.base)
            newest = max(self.last_time, self.high_time) if topics else 0
            return Segment(file.base, self._appended, False, newest, topics)
        return Segment(file.base, file.end, file.sealed, file.newest_store_time, file.topics)

    def roll(self) -> None:
        """End the active file, so that it may be archived whole. Raises `StoreFull`."""
        self._check_writable()
        if self._active is not None and self._position:
            self._start_file(self._active.end)

    def evict(self, base: int) -> None:
        """Remove the oldest file. The minimum of each queue follows.

        The checkpoint must lie above it: a start that finds it below the log can't tell an eviction from a lost file.
        Raises StoreFull if there is no room even for a checkpoint.
        """
        file = self.log.files[0] if self.log.files else None
        if file is None or file.base != base or file is self._active or file.end > self._flushed:
            raise StoreError(f"the file at {base} is not the oldest, or not sealed and flushed")
        if self.checkpointed < file.end:
            self._checkpoint_now()
        if self.checkpointed < file.end:  # the disk is full: the file that was prepared ahead makes room
            self.log.drop_next()
            self._checkpoint_now()
        if self.checkpointed < file.end:
            raise StoreFull(f"no room for a checkpoint above the file at {base}")
        self.log.evict(file)
        self.build_index()
        self.index.evict(self.min_physical_offset)

    def restart_log_at(self, physical_offset: int) -> None:
        """Go on in a new file at an offset above the log's end: what lies between was lost, its offsets are taken."""
        self._check_writable()
        if physical_offset < self._appended:
            raise StoreError(f"the log already reaches {self._appended}, above {physical_offset}")
        self._checkpoint_now()
        border = self._active.end if self._active is not None else 0
        self._start_file(max(physical_offset, border))
        self._checkpoint_now()

    def entries(self, topic: str, start_phys: int, end_phys: int) -> dict[int, EntryRun]:
        """Per queue the entries of records in [start, end), as arrays of their own."""
        return reading.joined(self.entry_slices(topic, start_phys, end_phys, _ALL))

    def entry_slices(self, topic: str, start_phys: int, end_phys: int, most: int) -> Iterator[reading.EntrySlice]:
        """The same, at most so many entries at a time: between two of them other work may have its turn."""
        # a queue's file may still have entries of log files that are evicted
        start = max(start_phys, self.state.deleted.get(topic, 0), self.min_physical_offset)
        for queue in list(self.table_by_topic.get(topic, {}).values()):
            yield from reading.entry_slices(queue, queue.first_at(start), queue.first_at(end_phys), most)

    def files(self, start: int, end: int) -> list[tuple[str, int, int]]:
        """Path, base and length of the log's files that meet [start, end)."""
        return [
            (str(file.path), file.base, file.size) for file in self.log.files if file.base < end and file.end > start
        ]
