"""Local store: one log for all topics and a consume queue per queue (RocketMQ's DefaultMessageStore).

This module is the facade. The parts can be read on their own:

    commit_log          files of the log                 log_end        write position, file change, store time
    consume_queue       entries of one queue             queue_table    existing and deleted queues, minimum offsets
    key_index           messages by key                  topic_tails    newest record of each topic
    appender            messages to bytes                visibility     appended, synced, confirmed, visible; callbacks
    replica_appender    a master's bytes, on a slave     truncation     removal of a tail that no set confirmed
    recovery            the files at a start             checkpointer   limits what a start has to read again
    reading             entries to slices of the log     data_directory, queue_state, checkpoint: small state files
    erased              offsets that stay in the log but that no request returns

Everything runs on the event loop's thread, with these exceptions. `flush`, `upkeep` and `prepare_next` run on a thread
each. `write_queue_state` may be called from any thread. The parts that `truncation` yields run on a thread.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from broker.store import described, erased, reading, truncation
from broker.store.appender import Appender, PutResult, Send
from broker.store.checkpointer import Checkpointer
from broker.store.commit_log import CommitLog, LogFile
from broker.store.config import StoreConfig
from broker.store.consume_queue import ConsumeQueue
from broker.store.data_directory import DataDirectory
from broker.store.erased import Spans
from broker.store.errors import LogIsCut, StoreError, StoreFull, StoreNotWritable
from broker.store.key_index import KeyIndex
from broker.store.log_end import LogEnd
from broker.store.log_scan import RecoveryReport
from broker.store.queue_state import StateImage
from broker.store.queue_table import QueueTable, pieces
from broker.store.reading import EntryRun, GetResult
from broker.store.recovery import Recovery
from broker.store.replica_appender import ReplicaAppender
from broker.store.topic_tails import TopicTails
from broker.store.visibility import AppendCallback, Run, Visibility
from infra.clock import Clock
from infra.disk.filesystem import Disk, OutOfDescriptors
from infra.loop.locks import NewLock, new_lock
from infra.loop.parts import Parts, nothing, run_here
from neve.record.codec import decode_record
from neve.remoting.codes import GetMessageStatus

__all__ = ["EntryRun", "GetResult", "MessageStore", "PutResult", "RecoveryReport", "Segment", "StoreConfig"]

log = logging.getLogger(__name__)

_QUERY_LIMIT = 64
# Records that one step of a query by key examines, about 1 ms, and records of all steps of one query, about 1 s.
QUERY_STEP, _QUERY_STEP_BYTES = 64, 1 << 20
QUERY_LOOKS_MAX = 100_000
_ALL = 1 << 62
# Queues whose visible end is lowered in one turn of the event loop, about 1 ms.
_QUEUES_AT_ONCE = 2_000


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


class MessageStore:
    """Facade of the local store."""

    def __init__(
        self,
        config: StoreConfig,
        disk: Disk,
        clock: Clock,
        new_lock: NewLock = new_lock,
        *,
        successor_of: MessageStore | None = None,
    ) -> None:
        """`successor_of`: a store whose log is being truncated, and that adopts the state this one recovers."""
        self.config, self.disk = config, disk
        self.log_uuid = ""
        #: Changes at the begin and the end of each truncation, after which the removed offsets are assigned again.
        self.cuts = 0
        self._clock, self._now, self._new_lock = clock, clock.now_ms, new_lock
        self._directory: DataDirectory = (
            DataDirectory(config.root, disk) if successor_of is None else successor_of._directory
        )
        self._log = CommitLog(config, disk, new_lock)
        self._tails = TopicTails()
        state_file = None if successor_of is None else successor_of._queues.state_file
        self._queues: QueueTable = QueueTable(config, disk, self._log, self._tails, new_lock, file=state_file)
        self._index = KeyIndex(config, disk)
        self._end = LogEnd(config, self._log, self._tails, new_lock)
        self._visibility = Visibility(config, self._log, self._end, new_lock)
        self._described = described.Described()
        self._appender = Appender(config, self._end, self._queues, self._index, self._visibility, self._described)
        self._replica = ReplicaAppender(config, self._end, self._queues, self._index, self._tails, self._visibility)
        #: `Appender.append` without a wrapper, because the express lane calls it for each batch.
        self.append = self._appender.append
        #: Budget of queue files for `queue_for` and `append`, for callers that append many sends at once.
        self.rooms = self._queues.rooms
        self._checkpointer = Checkpointer(
            config,
            disk,
            clock,
            log=self._log,
            end=self._end,
            queues=self._queues,
            index=self._index,
            visibility=self._visibility,
            new_lock=new_lock,
        )
        # while the `following` mark exists: the physical offset where this broker's own records begin
        self._own_from: int | None = None
        # called after the truncation; None if none is in progress
        self._cut_ended: list[Callable[[], None]] | None = None

    # -- start and stop

    def load(self, *, following: bool = False, confirmed: int | None = None) -> RecoveryReport:
        """Lock the directory, recover, and accept records of this broker, or of a master if `following`.

        `confirmed` is the last known confirm offset of the broker set; records above it are not visible.
        """
        self._directory.lock()
        try:
            report = self._recover()
            self._begin_again(confirmed)
        except BaseException:
            self._directory.release()
            raise
        if following:
            self.follow()
        else:
            if self._directory.is_following:
                self._end_following_at_start()
            self._end.open()
        return report

    def _recover(self) -> RecoveryReport:
        found = Recovery(
            self.config,
            self.disk,
            directory=self._directory,
            log=self._log,
            tails=self._tails,
            queues=self._queues,
            index=self._index,
        ).run()
        self.log_uuid = found.log_uuid
        end = found.end
        self._end.adopt(end.file, end.position, last_time=end.last_time, high_time=end.high_time)
        self._visibility.adopt(end.physical)
        self._checkpointer.adopt(found.checkpointed)
        return found.report

    def _begin_again(self, confirmed: int | None) -> None:
        """Make the recovered state durable. This must come before any append behind a truncation."""
        run_here(self._checkpointer.write_parts())
        if truncation.read_truncation(self.config.root, self.disk) is not None:
            if self.checkpoint_is_put_off:
                raise StoreFull("no room for a checkpoint where the log is cut")
            truncation.is_done(self.config.root, self.disk)
        self._directory.end_recovery()
        if confirmed is not None:
            confirmed = min(confirmed, self._end.appended)
            self._visibility.hide(confirmed, self._runs_above(confirmed))

    def _runs_above(self, confirmed: int) -> Iterator[Run]:
        for physical_offset, size, tags_code in self._log.records_ending_above(confirmed):
            file = self._log.at(physical_offset)
            assert file is not None
            position = physical_offset - file.base
            record = decode_record(memoryview(file.map)[position : position + size])
            queue = self._queues.get(record.topic, record.queue_id)
            if queue is not None and physical_offset >= self._queues.gone_below(record.topic):
                yield physical_offset + size, [(queue, record.queue_offset, tags_code)], ()

    # -- role

    @property
    def is_following(self) -> bool:
        """Whether this is the log of a slave, which stores only bytes of its master."""
        return self._end.is_following

    def follow(self) -> None:
        """Become a slave. Messages that are delayed or otherwise waiting in the log are handled by the master.

        Own records are rejected from now on, whatever happens. If the mark cannot be written, all records are rejected,
        and OSError is raised.
        """
        self._described.forget()
        self._own_from = None
        self._end.follow()
        try:
            self._directory.begin_following()
        except OSError as error:
            self._end.fail(error)
            raise

    def prepare_to_lead(self) -> None:
        """Allocate the file for own records on a thread, so that `lead` does not wait for it."""
        if self._end.is_at_a_border:
            with suppress(StoreFull):  # `lead` reports it
                self._log.prepare_next()

    def lead(self) -> None:
        """Become a master: accept records of this broker. Raises StoreFull or StoreNotWritable.

        No queue is synced here: a start rebuilds queues and keys from the log, which was synced before the own epoch
        began. The mark of a slave stays until a checkpoint covers the master's records. A crash before that checkpoint
        is recovered as a slave's, own records included. If it lowers queues that this broker raised, no record of the
        log raises them yet, and the next promotion raises them again.
        """
        self._end.check_following()
        self._replica.forget()
        self._begin_to_lead()
        self._end.open()

    def _begin_to_lead(self) -> None:
        self._end.begin_to_lead()
        self._own_from = self._end.appended
        self._forget_following()

    def _end_following_at_start(self) -> None:
        with suppress(StoreFull):  # the mark stays, and the first append creates the file or reports the error
            self._begin_to_lead()

    def _forget_following(self) -> None:
        """Remove the mark of a slave if a checkpoint covers all records of a master; on the event loop."""
        is_covered = self._own_from is not None and self.checkpointed >= self._own_from
        if is_covered and not self.checkpoint_is_put_off:
            self._directory.end_following()
            self._own_from = None

    # -- replication

    def append_replica(self, data: bytes | memoryview, at: int, description: bytes | memoryview = b"") -> None:
        """Store bytes of the master from an offset on, which is `replica_offset` or the end of the log.

        `description` is the master's `described_append` of exactly these bytes. Raises LogMismatch, StoreNotWritable or
        StoreFull. Records stored before the error stay stored; the end of the log shows how far.
        """
        self._replica.append(data, at, description)

    @property
    def replica_offset(self) -> int:
        """Offset of the next bytes of the same stream; another stream begins at the end of the log."""
        return self._replica.next_offset

    def go_on_with_master_at(self, physical_offset: int) -> None:
        """Continue at the begin of the master's next file, behind a hole. Raises as `append_replica`.

        This log must end at the end of a file.
        """
        self._replica.go_on_at(physical_offset)

    def record_start(self, physical_offset: int) -> int:
        """Return the highest offset at or below the given one to which the log could be truncated."""
        return min(self._log.record_start(physical_offset), self._end.appended)

    def last_record(self, end: int) -> tuple[int, bytes] | None:
        """Return begin and bytes of the newest record that ends at or below `end`, a possible truncation offset."""
        found = self._log.last_record_below(end)
        return None if found is None else (decode_record(found).physical_offset, bytes(found))

    def truncate(self, to: int, *, epoch: int, floor: int, by_operator: bool = False) -> Path | None:
        """Run `truncation` on this thread."""
        return run_here(self.truncation(to, epoch=epoch, floor=floor, by_operator=by_operator))

    def truncation(self, to: int, *, epoch: int, floor: int, by_operator: bool = False) -> Parts[Path | None]:
        """Truncate a slave's log at the begin of a record; return the file with the removed tail.

        The yielded parts have to run on a thread, because they take all of the time. Nothing is appended meanwhile.
        From the decision on, every change of the store raises LogIsCut, and readers see the state below the truncation
        offset. In the turn in which this ends, the caller suspends the tables that are ahead of the log, and loads them
        again. `floor` is the confirmed offset: only an operator truncates below it.

        Raises TruncationRefused, LogMismatch, StoreFull or another StoreError; then nothing was truncated. After
        StoreNotWritable and unexpected exceptions the truncation is incomplete. The store then rejects appends until
        the next start completes it.
        """
        self._end.check_following()
        end, root, disk, kept = self._end.appended, self.config.root, self.disk, list[Path]()
        shown: dict[ConsumeQueue, int] = {}  # queues with visible messages in the tail, and the first such offset
        truncation.check(self._log, to, end, 0 if by_operator else floor)
        self._replica.forget()
        if to == end:
            return None
        yield self.flush
        self.after_flush(self._visibility.synced)
        if self._visibility.synced < end:
            raise StoreFull("the log can't be synced before it is cut")

        def keep() -> None:
            self.save_deletions()
            kept.append(truncation.keep(self._log, to, end, epoch=epoch, root=root, disk=disk))
            if self._visibility.confirmed > to:  # nothing is appended, so the thread finds no incomplete record
                for _, ((queue, queue_offset, _),), _ in self._runs_above(to):
                    shown.setdefault(queue, queue_offset)

        yield keep
        self._end.check_following()
        assert self._end.appended == end, "nothing is appended while the log is cut"
        log.warning("the log is cut from %d to %d: %s keeps what lay above", end, to, kept[0])

        def decide() -> None:
            try:
                truncation.decide(root, disk, to)
            except OSError as error:
                if not truncation.is_decided(root, disk):
                    raise
                # The next start truncates the log: a record appended until then would be lost.
                self._end.fail(error)
                raise StoreNotWritable(f"the log may be cut to {to} at the next start: {error}") from error

        yield decide
        self._end.close()
        self.cuts += 1
        self._cut_ended = []
        try:
            yield from self._hide_above(to, shown)
            yield from self._cut()
            self.cuts += 1
        except (OSError, StoreError) as error:
            self._end.fail(error if isinstance(error, OSError) else OSError(str(error)))
            raise StoreNotWritable(f"the log could not be cut to {to}: {error}") from error
        except BaseException as error:
            self._end.fail(OSError(errno.EIO, f"the log could not be cut to {to}: {error!r}"))
            raise
        finally:
            ended, self._cut_ended = self._cut_ended, None
            for callback in ended:
                callback()
        self._end.follow()
        return kept[0]

    def check_whole(self) -> None:
        """Raise LogIsCut during a truncation: the recovered state would not contain the change."""
        if self._cut_ended is not None:
            raise LogIsCut("the log is being cut: the store changes nothing until that is done")

    def when_whole(self, callback: Callable[[], None]) -> None:
        """Call back on the event loop when no truncation is in progress; immediately if there is none."""
        if self._cut_ended is None:
            callback()
        else:
            self._cut_ended.append(callback)

    def _hide_above(self, to: int, shown: Mapping[ConsumeQueue, int]) -> Parts[None]:
        self._visibility.hide_above(to)
        for number, (queue, queue_offset) in enumerate(shown.items(), 1):
            queue.visible = min(queue.visible, queue_offset)
            if number % _QUEUES_AT_ONCE == 0:
                yield nothing

    def _cut(self) -> Parts[None]:
        """Let a successor recover the directory on a thread, as at a start, and adopt its state.

        Between the parts this store is unchanged on the event loop, because `check_whole` rejects changes. Threads of
        this store wait for the locks. After `leave` they have no work to do.
        """
        self._end.check_not_failed()
        self._index.drop_waiting()
        maps, found = self._queues.take_maps(), list[MessageStore]()

        def recover() -> None:
            while maps:  # the successor needs their descriptors
                maps.pop()
            self.save_deletions()
            # in the order in which a checkpoint acquires them, because it may sync the log
            with (
                self._checkpointer.standing_still(),
                self._queues.removal.standing_still(),
                self._log.unchanged(),
                self._log.files_stay(),
            ):
                for part in (self._checkpointer, self._queues.removal, self._log):
                    part.leave()
                successor = MessageStore(self.config, self.disk, self._clock, self._new_lock, successor_of=self)
                successor._recover()
                successor._begin_again(self._visibility.set_has)
                found.append(successor)

        yield recover
        self._end.check_not_failed()
        successor = found[0]
        with self._visibility.standing_still():  # the old log is synced, so no flush holds the lock for long
            self._log.exchange(successor._log)
            self._tails.exchange(successor._tails)
            self._queues.exchange(successor._queues)
            self._index.exchange(successor._index)
            self._end.take_over(successor._end)
            self._visibility.take_over(successor._visibility)
            self._checkpointer.take_over(successor._checkpointer)
        yield successor._let_go

    def _let_go(self) -> None:
        """Unmap the replaced files on a thread, because that takes a tenth of a second for a large file."""
        self._queues.close()
        self._index.close()
        while self._log.files:
            self._log.files.pop()

    def log_bytes(self, start: int, end: int, limit: int, *, padding: bool = False) -> tuple[int, memoryview]:
        """Return bytes of the log in [start, end), and the offset where they begin, for slaves.

        They are limited by `limit`, the end of the file and the end of the log; empty if nothing is available yet. They
        begin above `start` if it is in a hole between files, or, without `padding`, behind an END record.
        """
        return reading.log_bytes(self._log, start, min(end, self._end.appended), limit, padding=padding)

    def describe_appends(self, wanted: bool) -> None:
        """Set whether any slave uses descriptions of appends."""
        self._described.want(wanted)

    def described_append(self, start: int) -> described.Append | None:
        """Return the append that starts at an offset of the log, with its description for slaves."""
        return self._described.at(start)

    def shutdown(self) -> None:
        """Make everything durable, and mark the directory as clean; after a failed sync, leave it to recovery."""
        if not self._end.is_open:
            return
        self._end.close()
        try:
            if self.failed is None:
                self.save_deletions()
                self.checkpoint()
                if not self.checkpoint_is_put_off:
                    self._directory.end()
        finally:
            self._directory.release()

    def abandon(self) -> None:
        """Release the directory as it is, as a crash would; the next start recovers it."""
        self._directory.release()

    @property
    def failed(self) -> OSError | None:
        """The write or sync error after which nothing is appended; None if there was none."""
        return self._end.failure

    def fail(self, error: OSError) -> None:
        """Reject all appends and syncs, because a logged operation failed; the next start repeats it."""
        self._end.fail(error)

    # -- append

    def queue_for(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the queue to append to; create it if missing. Raises as `put`."""
        return self._queues.by_name.get((topic, queue_id)) or self._new_queue(topic, queue_id)

    def _new_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        self._end.check_writable()
        return self._queues.create(topic, queue_id)

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
        """Append a message. Raises StoreFull, StoreNotWritable or MessageIllegal; then nothing was stored.

        With `beside`, both records are stored next to each other, or neither.
        """
        queue = self.queue_for(topic, queue_id)
        names = f"{unique_key or ''} {keys or ''}" if keys or unique_key else ""
        send = (
            queue, body, properties, tags_code, names, flag, sys_flag, born_timestamp, reconsume_times,
            prepared_transaction_offset,
        )  # fmt: skip
        if beside is None:
            ((physical_offset, size, queue_offset),) = self._appender.append([send], born_host, self._now())
        else:
            (physical_offset, size, queue_offset), _ = self._appender.append_both(send, beside, born_host, self._now())
        return PutResult(physical_offset, queue_offset, size, self._end.last_time)

    def put_first(self, append: Callable[[], None]) -> None:
        """Store nothing else before `append` has succeeded; it may raise StoreFull or StoreNotWritable.

        If it fails, every later append first calls it again, and fails with the same error. Raises StoreNotWritable on
        a slave.
        """
        self._end.put_first(append)

    # -- flush and visibility

    def join_set(self, confirmed: int) -> None:
        """From now on make only confirmed records visible. Visible ones stay visible."""
        self._visibility.join_set(confirmed)

    def confirm(self, offset: int) -> None:
        """Set the confirmed offset. It never decreases: a lower offset is ignored."""
        self._visibility.confirm(offset)

    def leave_set(self) -> None:
        """From now on make records visible without a set's confirmation."""
        self._visibility.leave_set()

    def tell(self, callback: AppendCallback) -> None:
        """Call back with all messages that become visible from now on."""
        self._visibility.tell(callback)

    @property
    def confirmed_offset(self) -> int:
        """The physical offset below which records are visible."""
        return self._visibility.confirmed

    @property
    def shows_after_sync(self) -> bool:
        """Whether only durable records are visible."""
        return self._visibility.waits_for_sync

    @property
    def flushed_offset(self) -> int:
        """The physical offset below which the log is durable."""
        return self._visibility.flushed

    @property
    def dirty(self) -> bool:
        """Whether there is something to flush, or a failure to report."""
        return self._visibility.is_dirty

    def flush(self) -> int:
        """Sync the log on a thread; return the offset to pass to `after_flush`.

        After a failed sync, every call raises StoreNotWritable, because the kernel may have dropped the pages.
        """
        return self._visibility.flush()

    def after_flush(self, offset: int) -> None:
        """Make messages visible that are durable below `offset`, the result of `flush`; on the event loop."""
        self._visibility.after_flush(offset)
        if self._cut_ended is None:
            self._index.build()
            self._checkpointer.look()
            self._forget_following()

    # -- upkeep

    @property
    def wants_upkeep(self) -> bool:
        """Whether `upkeep` has work to do."""
        queues = self._queues
        return self._cut_ended is None and (
            self._checkpointer.is_due
            or self._end.wants_next
            or queues.removal.is_pending
            or queues.has_unsaved_deletions
        )

    def upkeep(self) -> None:
        """Write the due checkpoint, allocate the next file, and remove files of deleted queues.

        For a thread. Raises as `flush`.
        """
        if self._end.wants_next:
            with suppress(StoreFull):  # the send that needs the file reports it
                self._log.prepare_next()
        self._checkpointer.write_due()
        if self._end.failure is None:
            try:
                self.save_deletions()
                self._queues.remove_deleted()
            except OutOfDescriptors as error:
                log.warning("a deletion can't be saved now, it is tried again: error=%s", error)
            except OSError as error:
                self._end.fail(error)
                raise StoreNotWritable(f"the files of deleted queues can't be removed: {error}") from error

    def prepare_next(self) -> None:
        """Allocate the next log file ahead, on a thread. Raises StoreFull."""
        if self._cut_ended is None:  # a truncation allocates none, and would make this thread wait
            self._log.prepare_next()

    @property
    def checkpointed(self) -> int:
        """The physical offset of the durable checkpoint."""
        return self._checkpointer.checkpointed

    @property
    def checkpoint_is_put_off(self) -> bool:
        """Whether a checkpoint could not be written."""
        return self._checkpointer.is_put_off

    def want_checkpoint(self, physical_offset: int) -> bool:
        """Make the next `upkeep` write a checkpoint at or above the offset; return False if there is one already."""
        self.check_whole()
        return self._checkpointer.want(physical_offset)

    def checkpoint(self) -> None:
        """Flush and write a checkpoint on this thread."""
        run_here(self.checkpoint_parts())

    def checkpoint_parts(self) -> Parts[None]:
        """Flush and write a checkpoint; the yielded parts have to run on a thread."""
        self.check_whole()
        yield from self._checkpointer.write_parts()
        self._forget_following()

    # -- queues

    def queues(self) -> dict[str, list[int]]:
        """Return the queue ids of each topic."""
        return self._queues.names()

    def topics(self) -> list[str]:
        """Return the topics that have queues, unordered."""
        return self._queues.topics()

    def queues_of(self, topic: str) -> list[int]:
        """Return the queue ids of one topic."""
        return self._queues.names_of(topic)

    def following_offsets(self) -> dict[str, dict[int, int]]:
        """Return topic -> queue -> the offset of the next message, confirmed or not; includes deleted queues."""
        return {topic: self.following_of(topic) for topic in self.following_topics()}

    def queue_ends(self) -> dict[str, dict[int, int]]:
        """Return topic -> queue -> the offset of the next message, confirmed or not; only of existing queues."""
        return self._queues.ends()

    def following_topics(self) -> list[str]:
        """Return the topics that have or had queues here."""
        return self._queues.following_topics()

    def following_of(self, topic: str) -> dict[int, int]:
        """Return `following_offsets` of one topic."""
        return self._queues.following_of(topic)

    def deleted_below(self) -> dict[str, dict[int, int]]:
        """Return topic -> queue -> its end at the last deletion of the topic, unless it restarted at 0."""
        return self._queues.ended()

    def deleted_topics(self) -> list[str]:
        """Return the deleted topics that still have state here; they may exist again."""
        return self._queues.deleted()

    def image_without(self, topics: Collection[str]) -> StateImage | None:
        """Return the state without deleted topics that have no data left, here or elsewhere, for `write_queue_state`.

        Returns None if there are none. In a broker set there are none, because the other members keep that state.
        """
        self.check_whole()
        if self._visibility.set_has is not None:
            return None
        return self._queues.image_without(topics, self._log.min_offset)

    def forget_deleted(self, image: StateImage) -> int:
        """Forget the topics omitted from a written `image_without`; return their number.

        If created again they start at 0.
        """
        self.check_whole()
        return self._queues.forget_deleted(image)

    def ended_at(self, topic: str, queue_id: int) -> int:
        """Return the end of the queue at the last deletion of its topic; 0 if none.

        Lower offsets belong to the deleted topic.
        """
        return self._queues.ended_at(topic, queue_id)

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Return the lowest offset that the local log has; 0 of an unknown queue."""
        return self._queues.min_offset(topic, queue_id)

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset behind the last visible message; 0 of an unknown queue."""
        queue = self._queues.get(topic, queue_id)
        return 0 if queue is None else queue.visible

    def next_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of the queue's next message; for a deleted queue, the one it would get if created again."""
        return self._queues.next_offset(topic, queue_id)

    def gone_below(self, topic: str) -> int:
        """Return the physical offset below which a topic's records belong to a deleted topic of its name; 0 if none."""
        return self._queues.gone_below(topic)

    def former_ends(self, topics: Collection[str]) -> dict[str, int]:
        """Return topic -> the physical offset below which records of that name belong to a deleted topic.

        For a topic without queues this is the end of the log. Only topics that may have such records in the log are
        included.
        """
        ends = {
            topic: self.gone_below(topic) if self._queues.of_topic(topic) else self._end.appended for topic in topics
        }
        return {topic: end for topic, end in ends.items() if end > self._log.min_offset}

    def set_min_offset(self, topic: str, queue_id: int, offset: int) -> None:
        """Permanently hide the messages below an offset."""
        if self.hide_below(topic, {queue_id: offset}):
            self.save_queue_state()

    def hide_below(self, topic: str, offsets: Mapping[int, int]) -> bool:
        """Hide the messages of queues below offsets; return whether any are newly hidden.

        Durable once the state is saved.
        """
        self.check_whole()
        return self._queues.hide_below(topic, offsets)

    def expire_below(self, topic: str, offsets: Mapping[int, int], timestamp: int) -> Generator[None, None, bool]:
        """Hide as `hide_below`, but only messages that were stored before a time. Yields as `offset_by_time`."""
        hidden = False
        for queue_id, offset in offsets.items():
            if self._queues.get(topic, queue_id) is not None:
                before = yield from self.offset_by_time(topic, queue_id, timestamp, upper=False)
                self.check_whole()
                hidden |= self._queues.hide_below(topic, {queue_id: min(offset, before)})
        return hidden

    def show_from(self, topic: str, queue_id: int, offset: int) -> int:
        """Make hidden messages visible again, from an offset on, as far down as the queue has no hole.

        Returns the queue's new minimum.
        """
        self.check_whole()
        return self._queues.show_from(topic, queue_id, offset)

    def erased_places(self) -> list[tuple[str, int]]:
        """Return the topics and queues with erased offsets whose records are still in the log."""
        return self._queues.erased_places()

    def erased_of(self, topic: str, queue_id: int) -> Spans:
        """Return the erased offsets of a queue, which no request returns."""
        return self._queues.erased_of(topic, queue_id)

    def erasable(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return the range [low, end) of offsets whose local records may be erased."""
        return self._queues.erasable(topic, queue_id)

    def set_erased(self, topic: str, queue_id: int, before: Spans, spans: Spans) -> bool:
        """Set the erased offsets of a queue; durable once the state is saved.

        Returns False if they are no longer `before`.

        `entries`, `store_time` and `offset_by_time` still include them for the lifecycle, because the records are in
        the log.
        """
        self.check_whole()
        return self._queues.set_erased(topic, queue_id, before, spans)

    def shown_near(self, topic: str, queue_id: int, offset: int, *, below: bool) -> int:
        """Return the nearest offset at or above the given one that is not erased.

        With `below`, return the nearest one at or below it, or -1 if there is none.
        """
        spans = self._queues.erased_of(topic, queue_id)
        return erased.before(spans, offset) if below else erased.behind(spans, offset)

    def save_queue_state(self) -> None:
        """Make the queue state durable on this thread, for example after `hide_below`."""
        self.check_whole()
        self._queues.save()

    def queue_state_image(self) -> StateImage:
        """Return an image of the queue state, on the event loop; `write_queue_state` may be called on any thread."""
        self.check_whole()
        return self._queues.image()

    def write_queue_state(self, image: StateImage) -> None:
        """Write an image. An older image never replaces a newer one."""
        self._queues.write(image)

    def create_queue_at(self, topic: str, queue_id: int, next_offset: int) -> None:
        """Let a queue continue at an offset above those of its archive or of a deleted queue of its name."""
        self.create_queues_at({topic: {queue_id: next_offset}})

    def create_queues_at(self, following: Mapping[str, Mapping[int, int]]) -> None:
        """Do `create_queue_at` for many queues.

        Those that end as high or higher are unchanged. Repeatable after a crash.
        """
        self._end.check_writable()
        run_here(self.create_queues_parts(following))

    def create_queues_parts(self, following: Mapping[str, Mapping[int, int]], *, by_image: bool = False) -> Parts[None]:
        """Do `create_queues_at`, also on a slave; the yielded parts have to run on a thread.

        `by_image` is as in `QueueTable.begin_at`.
        """
        self.check_whole()
        lower: dict[str, dict[int, int]] = {}
        for piece in pieces(following):
            for topic, offsets in piece.items():
                known = self._queues.by_id(topic)
                for queue_id, offset in offsets.items():
                    if (queue := known.get(queue_id)) is None or queue.end < offset:
                        lower.setdefault(topic, {})[queue_id] = offset
            yield nothing
        if not lower:
            return
        yield from self.checkpoint_parts()  # recovery accepts a hole only below a checkpoint
        self.check_whole()
        yield from self._queues.begin_at(lower, by_image=by_image)
        yield from self.checkpoint_parts()

    def restore_queues(
        self, following: Mapping[str, Mapping[int, int]], ended: Mapping[str, Mapping[int, int]]
    ) -> None:
        """Give an empty store the queues of another one: each continues at its offset, with no local messages below.

        `ended` are the end offsets of queues of deleted topics. Repeatable after a crash.
        """
        self._end.check_writable()
        self._queues.remember_ended(ended)
        self._queues.save()
        run_here(self.create_queues_parts(following, by_image=True))

    def begin_queues(self, ends: Mapping[str, Mapping[int, int]], log_end: int) -> None:
        """Add queues of which a slave's log has no record, so that they continue as at the master and never start at 0.

        `ends` belong to the log end offset `log_end`, up to which this log is confirmed. So all messages that such a
        queue had then are below the first offset of this log. A topic that was deleted since is not changed.
        """
        missing: dict[str, dict[int, int]] = {}
        for topic, queues in ends.items():
            known = self._queues.by_id(topic)
            lacking = {queue_id: end for queue_id, end in queues.items() if end and queue_id not in known}
            if lacking and self.gone_below(topic) <= log_end:
                missing[topic] = lacking
        run_here(self.create_queues_parts(missing, by_image=True))

    def raise_queues(self, following: Mapping[str, Mapping[int, int]], *, said_at: int | None = None) -> None:
        """Let queues continue at offsets above those that the archive may have assigned; hide lower local messages.

        On a slave a record of the master sets the offsets; it ends at `said_at`. Messages from these offsets on
        stay visible. Repeatable.
        """
        run_here(self.raise_queues_parts(following, said_at=said_at))

    def raise_queues_parts(
        self, following: Mapping[str, Mapping[int, int]], *, said_at: int | None = None
    ) -> Parts[None]:
        """Do `raise_queues`; the yielded parts have to run on a thread."""
        yield from self.create_queues_parts(following)
        has_changed = False
        for piece in pieces(following):
            self.check_whole()
            self._queues.show_to(piece)
            for topic, offsets in piece.items():
                has_changed |= self._queues.hide_below(topic, offsets)
            if said_at is not None:
                has_changed |= self.remember_raised(piece, said_at)
            yield nothing
        if has_changed:
            yield partial(self._queues.write, self._queues.image())

    def remember_raised(self, following: Mapping[str, Mapping[int, int]], said_at: int) -> bool:
        """Record that the log raises queues, in a record that ends at `said_at`; return whether this is new.

        Nothing lowers them while the log has the record. Durable once the state is saved.
        """
        self.check_whole()
        return self._queues.remember_raised(following, said_at)

    def goes_on_higher(self, topic: str, queue_id: int) -> bool:
        """Return whether a queue continues above its last record: raised or restored, without a message since."""
        queue = self._queues.get(topic, queue_id)
        return queue is not None and queue.used_end < queue.end

    def remember_ended(self, ended: Mapping[str, Mapping[int, int]]) -> None:
        """Set the end offsets of deleted topics, as their master has them."""
        self.check_whole()
        if self._queues.remember_ended(ended):
            self._queues.save()

    def delete_topic(self, topic: str, *, begin_again: bool = False, below: int | None = None) -> None:
        """Drop a topic's queues.

        Its records stay in the log until their files are evicted, but belong to no topic any longer.

        This does no I/O: `save_deletions` makes it durable, and `upkeep` removes the files.

        A slave drops only records `below` the physical offset at which its master deleted the topic: the topic may have
        been created again since.

        If the topic is created again, its queues continue at their end offsets. With `begin_again` they start at 0. The
        caller may allow that only if nothing outside this store knows the offsets that are then assigned again. The
        members of a set know them, so a set never starts at 0.
        """
        self.check_whole()
        if not self._queues.of_topic(topic):
            return
        begin_again = begin_again and self._visibility.set_has is None
        below = self._end.appended if below is None else min(below, self._end.appended)
        self._queues.delete(topic, below, begin_again=begin_again)

    @property
    def has_unsaved_deletions(self) -> bool:
        """Whether a `delete_topic` is not durable yet."""
        return self._queues.has_unsaved_deletions

    def save_deletions(self) -> None:
        """Return when all deletions decided so far are durable, so that a start finds none of their queues; any thread.

        Raises StoreNotWritable if that failed. The store then rejects everything until the next start, which finds the
        deletion in the metadata log. Raises OutOfDescriptors if the caller should retry.
        """
        if self._end.failure is not None and self._queues.has_unsaved_deletions:
            raise StoreNotWritable(f"a deletion can't be saved, the disk failed: {self._end.failure}")
        try:
            self._queues.write_deletions()
        except OutOfDescriptors:
            raise
        except OSError as error:
            self._end.fail(error)
            raise StoreNotWritable(f"a deletion can't be saved: {error}") from error

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
            scan_entries=self.config.scan_entries,
            old_below=old_below,
        )

    def offset_by_time(self, topic: str, queue_id: int, timestamp: int, upper: bool) -> Generator[None, None, int]:
        """Return the offset of the first message at or after a store time, or with `upper` of the last at or before it.

        Erased messages are included. Yields where the caller may yield to the event loop, which happens only in files
        in which the clock was set back. The search restarts if the queue was replaced meanwhile.
        """
        wanted = timestamp + 1 if upper else timestamp
        searched, cuts, at = None, self.cuts, 0
        while (queue := self._queues.get(topic, queue_id)) is not None:
            if queue is not searched or cuts != self.cuts:
                searched, cuts, at = queue, self.cuts, 0
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

    def shows(self, topic: str, queue_id: int, offset: int, physical_offset: int) -> bool:
        """Return whether readers may get a message of the local log; see `QueueTable.shows`."""
        return self._queues.shows(topic, queue_id, offset, physical_offset)

    def shown_record_at(self, physical_offset: int) -> bytes | None:
        """Return the record that begins at a physical offset if readers may get it; for all requests of clients."""
        found = reading.record_at(self._log, physical_offset, self._visibility.confirmed)
        if found is None:
            return None
        record = decode_record(found)
        return found if self.shows(record.topic, record.queue_id, record.queue_offset, physical_offset) else None

    def record_at(self, physical_offset: int) -> bytes | None:
        """Return the record at a physical offset if one begins there, is confirmed and is not erased.

        For the broker's own bookkeeping, which also needs records below a queue's minimum. Requests of clients use
        `shown_record_at`.
        """
        found = reading.record_at(self._log, physical_offset, self._visibility.confirmed)
        return None if found is not None and self._queues.has_erased and self._is_erased(found) else found

    def _is_erased(self, raw: bytes) -> bool:
        record = decode_record(raw)
        spans = self._queues.erased_of(record.topic, record.queue_id)
        return erased.behind(spans, record.queue_offset) != record.queue_offset

    def newest_record(self) -> bytes | None:
        """Return the last record of the log if it is confirmed."""
        last = self._tails.newest()
        return reading.record_at(self._log, last, self._visibility.confirmed) if last >= 0 else None

    def records_from(self, physical_offset: int) -> Iterator[bytes]:
        """Yield the records that end above a physical offset, in log order; nothing may be appended meanwhile."""
        for place, size, _ in self._log.records_ending_above(physical_offset):
            file = self._log.at(place)
            assert file is not None
            yield bytes(memoryview(file.map)[place - file.base : place - file.base + size])

    def file_at(self, physical_offset: int) -> LogFile | None:
        """Return the file of the log that contains an offset."""
        return self._log.at(physical_offset)

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
        looked = in_step = size = 0
        for place in self._index.find(topic, key, begin, end):
            if place is None or in_step >= QUERY_STEP or size >= _QUERY_STEP_BYTES:
                in_step = size = 0
                yield
            if place is None or place < self._queues.gone_below(topic):
                continue
            looked += 1
            in_step += 1
            store_time = reading.store_time_at(self._log, place)
            if looked > QUERY_LOOKS_MAX:
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

    # -- for the lifecycle

    @property
    def min_physical_offset(self) -> int:
        """The first physical offset of the local log."""
        return self._log.min_offset

    @property
    def max_physical_offset(self) -> int:
        """The physical offset of the next record."""
        return self._end.appended

    @property
    def newest_segment_base(self) -> int:
        """The first physical offset of the file that is being written."""
        return self._log.files[-1].base if self._log.files else 0

    @property
    def newest_store_time(self) -> int:
        """Store time of the last record, or a later one set by `go_on_after`."""
        return self._end.last_time

    @property
    def steps_back(self) -> int:
        """The number of times that the clock stepped back since the start."""
        return self._end.steps_back

    def go_on_after(self, store_time: int) -> None:
        """Give later records no earlier store time than this, unless the clock is far behind."""
        self._end.reach_time(store_time)

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

    def roll(self) -> None:
        """End the active file, so that it may be archived as a whole. Raises StoreFull."""
        self._end.roll()

    def take_out(self, base: int) -> Callable[[], bool]:
        """Let the log begin above its oldest file, and return a function that deletes the file; minimum offsets follow.

        The function may run on any thread, because it waits for the disk and for memory to be released. Until then a
        start finds the file again. A truncation finds it too and keeps it; the function then returns False.

        The checkpoint must be above the file, because a start that finds it below the log cannot distinguish an
        eviction from a lost file. Raises StoreFull if there is no room for a checkpoint, and StoreError if the file
        must not be evicted.
        """
        self.check_whole()
        file = self._log.files[0] if self._log.files else None
        if file is None or file.base != base or file is self._end.file or file.end > self._visibility.flushed:
            raise StoreError(f"the file at {base} is not the oldest, or not sealed and flushed")
        if self.checkpointed < file.end:
            self.checkpoint()
        if self.checkpointed < file.end:  # the disk is full: deleting the file prepared ahead makes room
            self._log.drop_next()
            self.checkpoint()
        if self.checkpointed < file.end:
            raise StoreFull(f"no room for a checkpoint above the file at {base}")
        remove = self._log.take_out(file)
        self._index.build()
        self._index.evict(self._log.min_offset)
        return remove

    def restart_log_at(self, physical_offset: int) -> None:
        """Continue in a new file at an offset above the log's end, because the records between were lost."""
        self._end.check_writable()
        run_here(self.restart_log_parts(physical_offset))

    def restart_log_parts(self, physical_offset: int) -> Parts[None]:
        """Do `restart_log_at`, also on a slave that follows no master; the yielded parts have to run on a thread.

        Nothing is appended meanwhile.
        """
        self._end.check_usable()
        end = self._end.appended
        if physical_offset < end:
            raise StoreError(f"the log already reaches {end}, above {physical_offset}")
        yield from self.checkpoint_parts()
        yield partial(self._log.prepare_at, self._end.base_above(physical_offset))
        self.check_whole()
        assert self._end.appended == end, "nothing is appended while the log restarts"
        self._replica.forget()
        self._end.go_on_at(physical_offset)
        yield from self.checkpoint_parts()

    def entries(self, topic: str, start_phys: int, end_phys: int) -> dict[int, EntryRun]:
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
        start = max(start_phys, self._queues.gone_below(topic), self._log.min_offset)
        for queue in self._queues.of_topic(topic):
            yield from reading.entry_slices(queue, queue.first_at(start), queue.first_at(end_phys), most)
            yield None

    def first_offsets(self, topic: str, start_phys: int) -> dict[int, int]:
        """Return for each queue the first offset whose record is at or above a physical offset, or the queue's end."""
        return {queue.queue_id: queue.first_at(start_phys) for queue in self._queues.of_topic(topic)}

    def files(self, start: int, end: int) -> list[tuple[str, int, int]]:
        """Return path, base and size of the log files that overlap [start, end)."""
        return [
            (str(file.path), file.base, file.size) for file in self._log.files if file.base < end and file.end > start
        ]

    # -- resource usage

    @property
    def descriptors(self) -> int:
        """The number of file descriptors that the log holds."""
        return self._log.descriptors

    @property
    def mapped_queue_files(self) -> int:
        """The number of mapped consume queue files, which is bounded."""
        return self._queues.mapped_files

    @property
    def next_file_is_ready(self) -> bool:
        """Whether the log's next file is allocated ahead."""
        return self._log.next_is_ready

    @property
    def skipped_keys(self) -> int:
        """Keys that were not indexed since the start, for lack of disk space."""
        return self._index.skipped
