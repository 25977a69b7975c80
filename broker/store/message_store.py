"""Local store: one log for all topics and a consume queue per queue (RocketMQ's DefaultMessageStore).

`MessageStore` opens its parts, and has the operations that need several of them. Each part can be read on its own:

    commit_log          files of the log                 log_end        write position, file change, store time
    log_records         records by their CRC entries     queue_changes  deletion, hidden messages, higher offsets
    consume_queue       entries of one queue             queue_table    existing and deleted queues, minimum offsets
    key_index           messages by key                  topic_tails    newest record of each topic
    appender            messages to bytes                visibility     appended, synced, confirmed, visible; callbacks
    replica_appender    a master's bytes, on a slave     truncation     removal of a tail that no set confirmed
    recovery            the files at a start             checkpointer   limits what a start has to read again
    store_reader        what readers get                 data_directory, queue_state, checkpoint: small state files
    reading             entries to slices of the log
    queue_records       facts beside the queue files     queue_loading  the queue files at a start
    queue_raises        queues behind a hole             erased_offsets hidden messages that are still in the log

Everything runs on the event loop's thread, with these exceptions. `visibility.flush`, `upkeep` and `prepare_next` run
on a thread each. `queues.records.write` may be called from any thread. The parts that `truncation` yields run on a
thread.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from broker.store import described, reading, truncation
from broker.store.appender import Appender, PutResult, Send
from broker.store.checkpointer import Checkpointer
from broker.store.commit_log import CommitLog
from broker.store.config import StoreConfig
from broker.store.consume_queue import ConsumeQueue
from broker.store.data_directory import DataDirectory
from broker.store.erased_offsets import ErasedOffsets
from broker.store.errors import StoreError, StoreFull, StoreNotWritable
from broker.store.key_index import KeyIndex
from broker.store.log_end import LogEnd
from broker.store.log_records import records_ending_above
from broker.store.log_scan import RecoveryReport
from broker.store.queue_changes import QueueChanges
from broker.store.queue_table import QueueTable
from broker.store.recovery import Recovery
from broker.store.replica_appender import ReplicaAppender
from broker.store.store_reader import StoreReader
from broker.store.topic_tails import TopicTails
from broker.store.visibility import Run, Visibility
from infra.clock import Clock
from infra.disk.filesystem import Disk, OutOfDescriptors
from infra.loop.locks import NewLock, new_lock
from infra.loop.parts import Parts, nothing, run_here
from neve.record.codec import decode_record

__all__ = ["MessageStore", "PutResult", "RecoveryReport", "StoreConfig"]

log = logging.getLogger(__name__)

# Queues whose visible end is lowered in one turn of the event loop, about 1 ms.
_QUEUES_AT_ONCE = 2_000


class MessageStore:
    """The parts of the local store, and the operations that need several of them.

    Callers use a part directly for all other operations. Each part is the same object for the life of the store, so a
    caller may keep it. During a truncation the queue state must not be changed by a part: see `TruncationState`.
    """

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
        self.truncations = truncation.TruncationState()
        self._clock, self._now, self._new_lock = clock, clock.now_ms, new_lock
        self._directory: DataDirectory = (
            DataDirectory(config.root, disk) if successor_of is None else successor_of._directory
        )
        self.log = CommitLog(config, disk, new_lock)
        self._tails = TopicTails()
        state_file = None if successor_of is None else successor_of.queues.records.file
        self.queues: QueueTable = QueueTable(config, disk, self.log, self._tails, new_lock, file=state_file)
        self.erased_offsets = ErasedOffsets(self.log, self.queues)
        self.index = KeyIndex(config, disk)
        self.end = LogEnd(config, self.log, self._tails, new_lock)
        self.visibility = Visibility(config, self.log, self.end, new_lock)
        self.described = described.Described()
        self._appender = Appender(config, self.end, self.queues, self.index, self.visibility, self.described)
        self.replica = ReplicaAppender(config, self.end, self.queues, self.index, self._tails, self.visibility)
        #: `Appender.append` without a wrapper, because the express lane calls it for each batch.
        self.append = self._appender.append
        self.checkpoints = Checkpointer(
            config,
            disk,
            clock,
            log=self.log,
            end=self.end,
            queues=self.queues,
            index=self.index,
            visibility=self.visibility,
            new_lock=new_lock,
        )
        self.reader = StoreReader(
            config,
            log=self.log,
            end=self.end,
            queues=self.queues,
            tails=self._tails,
            index=self.index,
            visibility=self.visibility,
            truncations=self.truncations,
        )
        self.queue_changes = QueueChanges(
            self.checkpoint_parts,
            log=self.log,
            end=self.end,
            queues=self.queues,
            erased_offsets=self.erased_offsets,
            visibility=self.visibility,
            reader=self.reader,
            truncations=self.truncations,
        )
        # while the mark of the name exists: the physical offset that a checkpoint has to cover before it is removed,
        # which is the recovered end of the log, and the begin of this broker's own records
        self._recovering: int | None = None
        self._following: int | None = None

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
            self.end.open()
        return report

    def _recover(self) -> RecoveryReport:
        found = Recovery(
            self.config,
            self.disk,
            directory=self._directory,
            log=self.log,
            tails=self._tails,
            queues=self.queues,
            index=self.index,
        ).run()
        self.log_uuid = found.log_uuid
        end = found.end
        self.end.adopt(end.file, end.position, last_time=end.last_time, high_time=end.high_time)
        self.visibility.adopt(end.physical)
        self.checkpoints.adopt(found.checkpointed)
        return found.report

    def _begin_again(self, confirmed: int | None) -> None:
        """Make the recovered state durable. This must come before any append behind a truncation."""
        run_here(self.checkpoints.write_parts())
        if truncation.read_truncation(self.config.root, self.disk) is not None:
            if self.checkpoints.is_put_off:
                raise StoreFull("no room for a checkpoint at the truncation")
            truncation.is_done(self.config.root, self.disk)
        self._recovering = self.end.appended
        self._remove_marks()
        if confirmed is not None:
            confirmed = min(confirmed, self.end.appended)
            self.visibility.hide(confirmed, self._runs_above(confirmed))

    def _runs_above(self, confirmed: int) -> Iterator[Run]:
        for physical_offset, size, tags_code in records_ending_above(self.log, confirmed):
            file = self.log.at(physical_offset)
            assert file is not None
            position = physical_offset - file.base
            record = decode_record(memoryview(file.map)[position : position + size])
            queue = self.queues.get(record.topic, record.queue_id)
            if queue is not None and physical_offset >= self.queues.deleted_up_to(record.topic):
                yield physical_offset + size, [(queue, record.queue_offset, tags_code)], ()

    # -- role

    def follow(self) -> None:
        """Become a slave. Messages that are delayed or otherwise waiting in the log are handled by the master.

        Own records are rejected from now on, whatever happens. If the mark cannot be written, all records are rejected,
        and OSError is raised.
        """
        self.described.forget()
        self._following = None
        self.end.follow()
        try:
            self._directory.begin_following()
        except OSError as error:
            self.end.fail(error)
            raise

    def prepare_to_lead(self) -> None:
        """Allocate the file for own records on a thread, so that `lead` does not wait for it."""
        if self.end.is_at_a_border:
            with suppress(StoreFull):  # `lead` reports it
                self.log.prepare_next()

    def lead(self) -> None:
        """Become a master: accept records of this broker. Raises StoreFull or StoreNotWritable.

        No queue is synced here: a start rebuilds queues and keys from the log, which was synced before the own epoch
        began. The mark of a slave stays until a checkpoint covers the master's records. A crash before that checkpoint
        is recovered as a slave's, own records included. If it lowers queues that this broker raised, no record of the
        log raises them yet, and the next promotion raises them again.
        """
        self.end.check_following()
        self.replica.forget()
        self._begin_to_lead()
        self.end.open()

    def _begin_to_lead(self) -> None:
        self.end.begin_to_lead()
        self._following = self.end.appended
        self._remove_marks()

    def _end_following_at_start(self) -> None:
        with suppress(StoreFull):  # the mark stays, and the first append creates the file or reports the error
            self._begin_to_lead()

    def _remove_marks(self) -> None:
        """Remove the marks of a recovery and of a slave if a checkpoint covers their records; on the event loop."""
        checkpointed = -1 if self.checkpoints.is_put_off else self.checkpoints.checkpointed
        if self._recovering is not None and checkpointed >= self._recovering:
            self._directory.end_recovery()
            self._recovering = None
        if self._following is not None and checkpointed >= self._following:
            self._directory.end_following()
            self._following = None

    # -- replication

    def truncate(self, to: int, *, epoch: int, floor: int, by_operator: bool = False) -> Path | None:
        """Run `truncation` on this thread."""
        return run_here(self.truncation(to, epoch=epoch, floor=floor, by_operator=by_operator))

    def truncation(self, to: int, *, epoch: int, floor: int, by_operator: bool = False) -> Parts[Path | None]:
        """Truncate a slave's log at the begin of a record; return the file with the removed tail.

        The yielded parts have to run on a thread, because they take all of the time. Nothing is appended meanwhile.
        From the decision on, every change of the store raises TruncationRunning, and readers see the state below the
        truncation offset. In the turn in which this ends, the caller suspends the tables that are ahead of the log, and
        loads them again. `floor` is the confirmed offset: only an operator truncates below it.

        Raises TruncationRefused, LogMismatch, StoreFull or another StoreError; then nothing was truncated. After
        StoreNotWritable and unexpected exceptions the truncation is incomplete. The store then rejects appends until
        the next start completes it.
        """
        self.end.check_following()
        end, root, disk, kept = self.end.appended, self.config.root, self.disk, list[Path]()
        shown: dict[ConsumeQueue, int] = {}  # queues with visible messages in the tail, and the first such offset
        truncation.check(self.log, to, end, 0 if by_operator else floor)
        self.replica.forget()
        if to == end:
            return None
        yield self.visibility.flush
        self.after_flush(self.visibility.synced)
        if self.visibility.synced < end:
            raise StoreFull("the log can't be synced before its truncation")

        def keep() -> None:
            self.queue_changes.save_deletions()
            kept.append(truncation.keep(self.log, to, end, epoch=epoch, root=root, disk=disk))
            if self.visibility.confirmed > to:  # nothing is appended, so the thread finds no incomplete record
                for _, ((queue, queue_offset, _),), _ in self._runs_above(to):
                    shown.setdefault(queue, queue_offset)

        yield keep
        self.end.check_following()
        assert self.end.appended == end, "an append during a truncation"
        log.warning("log truncated: from=%d to=%d kept=%s", end, to, kept[0])

        def decide() -> None:
            try:
                truncation.decide(root, disk, to)
            except OSError as error:
                if not truncation.is_decided(root, disk):
                    raise
                # The next start truncates the log: a record appended until then would be lost.
                self.end.fail(error)
                raise StoreNotWritable(f"the log may be truncated to {to} at the next start: {error}") from error

        yield decide
        self.end.close()
        self.truncations.begin()
        try:
            yield from self._hide_above(to, shown)
            yield from self._truncate()
        except (OSError, StoreError) as error:
            self.end.fail(error if isinstance(error, OSError) else OSError(str(error)))
            raise StoreNotWritable(f"the log could not be truncated to {to}: {error}") from error
        except BaseException as error:
            self.end.fail(OSError(errno.EIO, f"the log could not be cut to {to}: {error!r}"))
            raise
        finally:
            self.truncations.end()
        self.end.follow()
        return kept[0]

    def _hide_above(self, to: int, shown: Mapping[ConsumeQueue, int]) -> Parts[None]:
        self.visibility.hide_above(to)
        for number, (queue, queue_offset) in enumerate(shown.items(), 1):
            queue.visible = min(queue.visible, queue_offset)
            if number % _QUEUES_AT_ONCE == 0:
                yield nothing

    def _truncate(self) -> Parts[None]:
        """Let a successor recover the directory on a thread, as at a start, and adopt its state.

        Between the parts this store is unchanged on the event loop, because `TruncationState.check_whole` rejects
        changes. Threads of this store wait for the locks. After `leave` they have no work to do.
        """
        self.end.check_not_failed()
        self.index.drop_waiting()
        maps, found = self.queues.take_maps(), list[MessageStore]()

        def recover() -> None:
            while maps:  # the successor needs their descriptors
                maps.pop()
            self.queue_changes.save_deletions()
            # in the order in which a checkpoint acquires them, because it may sync the log
            with (
                self.checkpoints.pause_lock(),
                self.queues.removal.pause_lock(),
                self.log.unchanged(),
                self.log.files_stay(),
            ):
                for part in (self.checkpoints, self.queues.removal, self.log):
                    part.leave()
                successor = MessageStore(self.config, self.disk, self._clock, self._new_lock, successor_of=self)
                successor._recover()
                successor._begin_again(self.visibility.set_has)
                found.append(successor)

        yield recover
        self.end.check_not_failed()
        successor = found[0]
        with self.visibility.pause_lock():  # the old log is synced, so no flush holds the lock for long
            self.log.exchange(successor.log)
            self._tails.exchange(successor._tails)
            self.queues.exchange(successor.queues)
            self.index.exchange(successor.index)
            self.end.take_over(successor.end)
            self.visibility.take_over(successor.visibility)
            self.checkpoints.take_over(successor.checkpoints)
        yield successor._let_go

    def _let_go(self) -> None:
        """Unmap the replaced files on a thread, because that takes a tenth of a second for a large file."""
        self.queues.close()
        self.index.close()
        while self.log.files:
            self.log.files.pop()

    def log_bytes(self, start: int, end: int, limit: int, *, padding: bool = False) -> tuple[int, memoryview]:
        """Return bytes of the log in [start, end), and the offset where they begin, for slaves.

        They are limited by `limit`, the end of the file and the end of the log; empty if nothing is available yet. They
        begin above `start` if it is in a hole between files, or, without `padding`, behind an END record.
        """
        return reading.log_bytes(self.log, start, min(end, self.end.appended), limit, padding=padding)

    def shutdown(self) -> None:
        """Make everything durable, and mark the directory as clean; after a failed sync, leave it to recovery."""
        if not self.end.is_open:
            return
        self.end.close()
        try:
            if self.end.failure is None:
                self.queue_changes.save_deletions()
                self.checkpoint()
                if not self.checkpoints.is_put_off:
                    self._directory.end()
        finally:
            self._directory.release()

    def abandon(self) -> None:
        """Release the directory as it is, as a crash would; the next start recovers it."""
        self._directory.release()

    # -- append

    def queue_for(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the queue to append to; create it if missing. Raises as `put`."""
        return self.queues.by_name.get((topic, queue_id)) or self._new_queue(topic, queue_id)

    def _new_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        self.end.check_writable()
        return self.queues.create(topic, queue_id)

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
        return PutResult(physical_offset, queue_offset, size, self.end.last_time)

    def after_flush(self, offset: int) -> None:
        """Make messages visible that are durable below `offset`, returned by `visibility.flush`; on the event loop."""
        self.visibility.after_flush(offset)
        if not self.truncations.is_running:
            self.index.build()
            self.checkpoints.look()
            self._remove_marks()

    # -- upkeep

    @property
    def wants_upkeep(self) -> bool:
        """Whether `upkeep` has work to do."""
        queues = self.queues
        return not self.truncations.is_running and (
            self.checkpoints.is_due
            or self.end.wants_next
            or queues.removal.is_pending
            or queues.records.has_unsaved_deletions
        )

    def upkeep(self) -> None:
        """Write the due checkpoint, allocate the next file, and remove files of deleted queues.

        For a thread. Raises as `visibility.flush`.
        """
        if self.end.wants_next:
            with suppress(StoreFull):  # the send that needs the file reports it
                self.log.prepare_next()
        self.checkpoints.write_due()
        if self.end.failure is None:
            try:
                self.queue_changes.save_deletions()
                self.queues.remove_deleted()
            except OutOfDescriptors as error:
                log.warning("a deletion can't be saved now, retrying: error=%s", error)
            except OSError as error:
                self.end.fail(error)
                raise StoreNotWritable(f"the files of deleted queues can't be removed: {error}") from error

    def prepare_next(self) -> None:
        """Allocate the next log file ahead, on a thread. Raises StoreFull."""
        if not self.truncations.is_running:  # a truncation allocates none, and would make this thread wait
            self.log.prepare_next()

    def want_checkpoint(self, physical_offset: int) -> bool:
        """Make the next `upkeep` write a checkpoint at or above the offset; return False if there is one already.

        If an older checkpoint is due, the next `upkeep` writes that one: ask again after it.
        """
        self.truncations.check_whole()
        return self.checkpoints.want(physical_offset)

    def checkpoint(self) -> None:
        """Flush and write a checkpoint on this thread."""
        run_here(self.checkpoint_parts())

    def checkpoint_parts(self) -> Parts[bool]:
        """Flush and write a checkpoint; the yielded parts have to run on a thread. Return whether it was written."""
        self.truncations.check_whole()
        is_written = yield from self.checkpoints.write_parts()
        self._remove_marks()
        return is_written

    # -- for the lifecycle

    @property
    def min_physical_offset(self) -> int:
        """The first physical offset of the local log."""
        return self.log.min_offset

    @property
    def max_physical_offset(self) -> int:
        """The physical offset of the next record."""
        return self.end.appended

    @property
    def newest_segment_base(self) -> int:
        """The first physical offset of the file that is being written."""
        return self.log.files[-1].base if self.log.files else 0

    def take_out(self, base: int) -> Callable[[], bool]:
        """Let the log begin above its oldest file, and return a function that deletes the file; minimum offsets follow.

        The function may run on any thread, because it waits for the disk and for memory to be released. Until then a
        start finds the file again. A truncation finds it too and keeps it; the function then returns False.

        The checkpoint must be above the file, because a start that finds it below the log cannot distinguish an
        eviction from a lost file. Raises StoreFull if there is no room for a checkpoint, and StoreError if the file
        must not be evicted.
        """
        self.truncations.check_whole()
        file = self.log.files[0] if self.log.files else None
        if file is None or file.base != base or file is self.end.file or file.end > self.visibility.flushed:
            raise StoreError(f"the file at {base} is not the oldest, or not sealed and flushed")
        if self.checkpoints.checkpointed < file.end:
            self.checkpoint()
        if self.checkpoints.checkpointed < file.end:  # the disk is full: deleting the file prepared ahead makes room
            self.log.drop_next()
            self.checkpoint()
        if self.checkpoints.checkpointed < file.end:
            raise StoreFull(f"no room for a checkpoint above the file at {base}")
        remove = self.log.take_out(file)
        self.index.build()
        self.index.evict(self.log.min_offset)
        return remove

    def restart_log_at(self, physical_offset: int) -> None:
        """Continue in a new file at an offset above the log's end, because the records between were lost."""
        self.end.check_writable()
        run_here(self.restart_log_parts(physical_offset))

    def restart_log_parts(self, physical_offset: int) -> Parts[None]:
        """Do `restart_log_at`, also on a slave that follows no master; the yielded parts have to run on a thread.

        Nothing is appended meanwhile.
        """
        self.end.check_usable()
        end = self.end.appended
        if physical_offset < end:
            raise StoreError(f"the log already reaches {end}, above {physical_offset}")
        yield from self.checkpoint_parts()
        yield partial(self.log.prepare_at, self.end.base_above(physical_offset))
        self.truncations.check_whole()
        assert self.end.appended == end, "nothing is appended while the log restarts"
        self.replica.forget()
        self.end.continue_at(physical_offset)
        yield from self.checkpoint_parts()
