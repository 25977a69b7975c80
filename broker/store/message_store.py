"""The local store: one log for all topics, an index per queue, one thread. RocketMQ's DefaultMessageStore.

This is the front; each thing has an owner that can be read alone:

    commit_log      the files of the log            log_end        where the next record goes, rolling, store time
    consume_queue   one queue's index               queue_table    which queues there are and were, their minimums
    key_index       messages by key                 topic_tails    the newest record of each topic
    appender        messages to bytes               visibility     appended, synced, confirmed, shown; who is told
    replica_appender    a slave's: bytes that its master laid out           truncation   what of it no set confirmed
    recovery        what a start finds              checkpointer   how little a start has to read again
    reading         entries to slices of the log    data_directory, queue_state, checkpoint: the small files
    erased          offsets that stay in the log and that no request returns

Everything here runs on one thread, the broker's loop, except `flush`, `upkeep` and `prepare_next`, which are made for a
thread of their own each, `write_queue_state`: for any, and the parts of `truncation`.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import suppress
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
from broker.store.queue_table import QueueTable
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
# Records that one step of a query by key looks at, about 1 ms, and all steps of one query, about 1 s.
QUERY_STEP, _QUERY_STEP_BYTES = 64, 1 << 20
QUERY_LOOKS_MAX = 100_000
_ALL = 1 << 62
# Queues whose visible end one turn of the loop lowers, about 1 ms.
_QUEUES_AT_ONCE = 2_000


class Segment(msgspec.Struct, frozen=True):
    """One file of the log, as the lifecycle sees it; per topic its last record and newest store time."""

    base: int
    end: int
    sealed: bool
    newest_store_time: int
    topics: dict[str, tuple[int, int]]


class KeyHits(NamedTuple):
    """Records with a key, newest first; where the search ended early, the store time that it had reached."""

    records: list[bytes]
    unsearched_from: int | None = None


class MessageStore:
    """See the module."""

    def __init__(
        self,
        config: StoreConfig,
        disk: Disk,
        clock: Clock,
        new_lock: NewLock = new_lock,
        *,
        successor_of: MessageStore | None = None,
    ) -> None:
        """`successor_of`: a store whose log is cut, and that takes over what this one recovers from its directory."""
        self.config, self.disk = config, disk
        self.log_uuid = ""
        #: Changes at the begin and at the end of each cut of the log: offsets above the cut are given again.
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
        #: Messages of one sender in their order: `Appender.append` without a layer, for the express lane comes by here.
        self.append = self._appender.append
        #: Of `queue_for` and `append`, for who takes many sends at once.
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
        self._own_from: int | None = None  # where this broker's own records begin, while the mark of a slave is there
        self._cut_ended: list[Callable[[], None]] | None = None  # called after the cut; None: none is under way

    # -- start and stop

    def load(self, *, following: bool = False, confirmed: int | None = None) -> RecoveryReport:
        """Lock the directory, recover, and be ready to append; or, `following`, to take what a master wrote.

        `confirmed`: how far the set that it is a member of has it, as was known last; readers see no further.
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
        """What was found is brought to the disk; before a cut is there, nothing may come behind it."""
        self._checkpointer.write_now()
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
        """A slave's: it takes what its master wrote, and every append of this broker's own is refused."""
        return self._end.is_following

    def follow(self) -> None:
        """From now on the log is a slave's. What waits in it is its master's to bring on its way.

        It takes no more of its own whatever happens; where the disk can't be told so, it takes nothing at all: OSError.
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
        """Allocate the file for own records, so that `lead` does not wait for it. For a thread."""
        if self._end.is_at_a_border:
            with suppress(StoreFull):  # `lead` reports it
                self._log.prepare_next()

    def lead(self) -> None:
        """From now on the log takes records of this broker's own. Raises `StoreFull`, `StoreNotWritable`.

        No queue is synced here: a start rebuilds queues and keys from the log, which was synced before the own epoch
        began. The mark of a slave stays until a checkpoint covers the master's records. A crash before that checkpoint
        is recovered as a slave's, own records included. A queue that this broker raises above its last record is not
        lowered by that: `_create_at` writes a checkpoint first, and the mark goes with it.
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
        with suppress(StoreFull):  # then the mark stays, and the first append makes the file, or says why not
            self._begin_to_lead()

    def _forget_following(self) -> None:
        """Remove the mark as soon as a checkpoint covers all that a master laid out; on the loop, as `follow`."""
        is_covered = self._own_from is not None and self.checkpointed >= self._own_from
        if is_covered and not self.checkpoint_is_put_off:
            self._directory.end_following()
            self._own_from = None

    # -- a slave's append

    def append_replica(self, data: bytes | memoryview, at: int, description: bytes | memoryview = b"") -> None:
        """Store what the master has from an offset on: `replica_offset`, or the end of the log.

        `description`: as the master's `described_append` told it of just these bytes. Raises LogMismatch,
        StoreNotWritable, StoreFull. What was stored then stays so: the end of the log says how far.
        """
        self._replica.append(data, at, description)

    @property
    def replica_offset(self) -> int:
        """Where the next bytes of the same stream begin; those of another begin at the end of the log."""
        return self._replica.next_offset

    def go_on_with_master_at(self, physical_offset: int) -> None:
        """The master's next file begins here, behind a hole; this log ends with a file. Raises as `append_replica`."""
        self._replica.go_on_at(physical_offset)

    def record_start(self, physical_offset: int) -> int:
        """The highest place at or below an offset of the log to which it could be cut."""
        return min(self._log.record_start(physical_offset), self._end.appended)

    def last_record(self, end: int) -> tuple[int, bytes] | None:
        """The newest that ends at or below a place to which the log could be cut: where it begins, and its bytes."""
        found = self._log.last_record_below(end)
        return None if found is None else (decode_record(found).physical_offset, bytes(found))

    def truncate(self, to: int, *, epoch: int, floor: int, by_operator: bool = False) -> Path | None:
        """Run `truncation` on this thread."""
        return run_here(self.truncation(to, epoch=epoch, floor=floor, by_operator=by_operator))

    def truncation(self, to: int, *, epoch: int, floor: int, by_operator: bool = False) -> Parts[Path | None]:
        """Cut a slave's log down to the begin of a record; return the file that keeps the removed tail.

        The yielded parts are for a thread: they are all that takes its time. Nothing is appended meanwhile. From the
        decision on every change of the store is refused (`LogIsCut`), and readers see it as it was below the cut. In
        the turn in which this ends the caller suspends the tables that hold more than the log, and reads them again.
        `floor` is confirmed: below it only an operator cuts. Raises TruncationRefused, LogMismatch, StoreFull and other
        StoreErrors; then nothing is cut. StoreNotWritable, and what nobody expects: the cut is incomplete, and the
        store refuses appends until the next start completes it.
        """
        self._end.check_following()
        end, root, disk, kept = self._end.appended, self.config.root, self.disk, list[Path]()
        shown: dict[ConsumeQueue, int] = {}  # those of which readers see some of the tail, and where that begins
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
            if self._visibility.confirmed > to:  # nothing is appended, so the thread finds no record half made
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
                # The next start cuts the log: a record that is appended until then would be lost.
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
        """Raises LogIsCut: no change is possible, because a successor recovers the files and would not have it."""
        if self._cut_ended is not None:
            raise LogIsCut("the log is being cut: the store changes nothing until that is done")

    def when_whole(self, callback: Callable[[], None]) -> None:
        """Call back on the loop when no cut is under way: at once, if there is none."""
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
        """Have a successor recover the directory on the thread, as a start does, and take over what it has found.

        Between the parts the loop finds this store as it was. It changes nothing: `check_whole` refuses. The threads
        of the store wait for the locks, and find nothing to do behind `leave`.
        """
        self._end.check_not_failed()
        self._index.drop_waiting()
        maps, found = self._queues.take_maps(), list[MessageStore]()

        def recover() -> None:
            while maps:  # their descriptors are for the successor
                maps.pop()
            self.save_deletions()
            # in the order in which a checkpoint takes them: it may sync the log on its way
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
        with self._visibility.standing_still():  # all of the old log is synced: no flush takes its time
            self._log.exchange(successor._log)
            self._tails.exchange(successor._tails)
            self._queues.exchange(successor._queues)
            self._index.exchange(successor._index)
            self._end.take_over(successor._end)
            self._visibility.take_over(successor._visibility)
            self._checkpointer.take_over(successor._checkpointer)
        yield successor._let_go

    def _let_go(self) -> None:
        """Unmap what a cut has replaced, for a thread: of a large file that takes a tenth of a second."""
        self._queues.close()
        self._index.close()
        while self._log.files:
            self._log.files.pop()

    def log_bytes(self, start: int, end: int, limit: int, *, padding: bool = False) -> tuple[int, memoryview]:
        """The log as it is, for those who follow: bytes of [start, end), and where they begin.

        At most `limit`, not past a file's end, nor past the end of the log. None: there is nothing yet. They begin
        above `start` where a hole lies between files, or, without `padding`, where `start` lies behind an END record.
        """
        return reading.log_bytes(self._log, start, min(end, self._end.appended), limit, padding=padding)

    def describe_appends(self, wanted: bool) -> None:
        """Whether a slave takes what is known of the records of an append beside their bytes."""
        self._described.want(wanted)

    def described_append(self, start: int) -> described.Append | None:
        """The append that began at an offset of the log, with what a slave may be told of its records."""
        return self._described.at(start)

    def shutdown(self) -> None:
        """Bring everything to the disk and leave the directory clean; after a failed sync, leave it to recovery."""
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
        """Let go of the directory as it is, like a process that dies: the next start recovers it."""
        self._directory.release()

    @property
    def failed(self) -> OSError | None:
        """Why nothing is appended any more: a write or a sync failed."""
        return self._end.failure

    def fail(self, error: OSError) -> None:
        """What the log has already could not be done: nothing is appended or synced any more, and a start does it."""
        self._end.fail(error)

    # -- append

    def queue_for(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue to append to; made with its first message. Raises as `put`."""
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
            ((physical_offset, size, queue_offset),) = self._appender.append([send], born_host, self._now())
        else:
            (physical_offset, size, queue_offset), _ = self._appender.append_both(send, beside, born_host, self._now())
        return PutResult(physical_offset, queue_offset, size, self._end.last_time)

    def put_first(self, append: Callable[[], None]) -> None:
        """Store nothing else before this has: it appends, and raises StoreFull or StoreNotWritable where it can't now.

        Then every later append tries it again, and is refused as it was. A slave owes nothing: StoreNotWritable.
        """
        self._end.put_first(append)

    # -- flush, and what readers see

    def join_set(self, confirmed: int) -> None:
        """From now on readers see no further than the set has confirmed. What they see already stays."""
        self._visibility.join_set(confirmed)

    def confirm(self, offset: int) -> None:
        """The set has what lies below; it never takes that back, and a lower offset says nothing new."""
        self._visibility.confirm(offset)

    def leave_set(self) -> None:
        """From now on readers see what this broker alone would show."""
        self._visibility.leave_set()

    def tell(self, callback: AppendCallback) -> None:
        """Call back with all messages that readers see from then on."""
        self._visibility.tell(callback)

    @property
    def confirmed_offset(self) -> int:
        """Readers see what lies below."""
        return self._visibility.confirmed

    @property
    def shows_after_sync(self) -> bool:
        """Whether readers see only what is on the disk."""
        return self._visibility.waits_for_sync

    @property
    def flushed_offset(self) -> int:
        """What lies below is on the disk."""
        return self._visibility.flushed

    @property
    def dirty(self) -> bool:
        """Whether there is something to flush, or a failure to tell."""
        return self._visibility.is_dirty

    def flush(self) -> int:
        """Bring the log to the disk; returns the offset to hand to `after_flush`. For a thread.

        A sync that failed is never tried again: the kernel may have dropped the pages. Raises `StoreNotWritable`.
        """
        return self._visibility.flush()

    def after_flush(self, offset: int) -> None:
        """On the loop, after `flush` returned `offset`: show what is confirmed by it."""
        self._visibility.after_flush(offset)
        if self._cut_ended is None:
            self._index.build()
            self._checkpointer.look()
            self._forget_following()

    # -- upkeep

    @property
    def wants_upkeep(self) -> bool:
        """Whether `upkeep` has something to do."""
        queues = self._queues
        return self._cut_ended is None and (
            self._checkpointer.is_due
            or self._end.wants_next
            or queues.removal.is_pending
            or queues.has_unsaved_deletions
        )

    def upkeep(self) -> None:
        """Write the checkpoint that is due, allocate the next file, remove files of deleted queues.

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
        """Allocate the next log file ahead. For a thread. Raises `StoreFull`."""
        if self._cut_ended is None:  # a cut allocates none, and makes threads wait that ask for a file
            self._log.prepare_next()

    @property
    def checkpointed(self) -> int:
        """The log position of the checkpoint on the disk."""
        return self._checkpointer.checkpointed

    @property
    def checkpoint_is_put_off(self) -> bool:
        """Whether one could not be written."""
        return self._checkpointer.is_put_off

    def want_checkpoint(self, physical_offset: int) -> bool:
        """Have the next `upkeep` write a checkpoint; False: one stands at or above the offset already."""
        self.check_whole()
        return self._checkpointer.want(physical_offset)

    def checkpoint(self) -> None:
        """Write one now: it flushes, too."""
        self.check_whole()
        self._checkpointer.write_now()
        self._forget_following()

    # -- queues

    def queues(self) -> dict[str, list[int]]:
        """The queues of each topic."""
        return self._queues.names()

    def topics(self) -> list[str]:
        """Those that have queues, in no order."""
        return self._queues.topics()

    def queues_of(self, topic: str) -> list[int]:
        """The queues of one topic."""
        return self._queues.names_of(topic)

    def following_offsets(self) -> dict[str, dict[int, int]]:
        """Topic -> queue -> the offset that its next message gets, confirmed or not; also of queues that are gone."""
        return {topic: self.following_of(topic) for topic in self.following_topics()}

    def queue_ends(self) -> dict[str, dict[int, int]]:
        """Topic -> queue -> the offset that its next message gets, confirmed or not; of the queues that exist."""
        return self._queues.ends()

    def following_topics(self) -> list[str]:
        """Those that have queues here, or had."""
        return self._queues.following_topics()

    def following_of(self, topic: str) -> dict[int, int]:
        """As `following_offsets`, of one topic."""
        return self._queues.following_of(topic)

    def deleted_below(self) -> dict[str, dict[int, int]]:
        """Topic -> queue -> where it ended when the topic was deleted last, unless it began again."""
        return self._queues.ended()

    def deleted_topics(self) -> list[str]:
        """Topics that were, and of which something is kept here: they may have come again."""
        return self._queues.deleted()

    def image_without(self, topics: Collection[str]) -> StateImage | None:
        """The state without deleted topics of which nothing is left, here or elsewhere, for `write_queue_state`.

        None: there is none of them. The members of a set know each other's, so there none is.
        """
        self.check_whole()
        if self._visibility.set_has is not None:
            return None
        return self._queues.image_without(topics, self._log.min_offset)

    def forget_deleted(self, image: StateImage) -> int:
        """Of an `image_without` that is written: how many are forgotten now, and begin at 0 if they come again."""
        self.check_whole()
        return self._queues.forget_deleted(image)

    def ended_at(self, topic: str, queue_id: int) -> int:
        """Where the queue ended when its topic was deleted last: below is an earlier life. 0: it was not."""
        return self._queues.ended_at(topic, queue_id)

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The first offset that the local log has; 0 of an unknown queue."""
        return self._queues.min_offset(topic, queue_id)

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The offset after the last confirmed message; 0 of an unknown queue."""
        queue = self._queues.get(topic, queue_id)
        return 0 if queue is None else queue.visible

    def next_offset(self, topic: str, queue_id: int) -> int:
        """The offset that the queue's next message gets; of a deleted queue, should it come again."""
        return self._queues.next_offset(topic, queue_id)

    def gone_below(self, topic: str) -> int:
        """The physical offset below which a topic's records belong to an earlier life of it; 0: there was none."""
        return self._queues.gone_below(topic)

    def former_ends(self, topics: Collection[str]) -> dict[str, int]:
        """Topic -> the physical offset below which its records are of a deleted topic; the log's end without queues.

        Only of topics that may have such records in the log.
        """
        ends = {
            topic: self.gone_below(topic) if self._queues.of_topic(topic) else self._end.appended for topic in topics
        }
        return {topic: end for topic, end in ends.items() if end > self._log.min_offset}

    def set_min_offset(self, topic: str, queue_id: int, offset: int) -> None:
        """Hide the messages below an offset, for good."""
        if self.hide_below(topic, {queue_id: offset}):
            self.save_queue_state()

    def hide_below(self, topic: str, offsets: Mapping[int, int]) -> bool:
        """Hide the messages of queues below offsets; for good once the state is saved; whether that is new."""
        self.check_whole()
        return self._queues.hide_below(topic, offsets)

    def expire_below(self, topic: str, offsets: Mapping[int, int], timestamp: int) -> Generator[None, None, bool]:
        """As `hide_below`, of the messages that were stored before a time. Yields as `offset_by_time`."""
        hidden = False
        for queue_id, offset in offsets.items():
            if self._queues.get(topic, queue_id) is not None:
                before = yield from self.offset_by_time(topic, queue_id, timestamp, upper=False)
                self.check_whole()
                hidden |= self._queues.hide_below(topic, {queue_id: min(offset, before)})
        return hidden

    def show_from(self, topic: str, queue_id: int, offset: int) -> int:
        """Show again what was hidden, from an offset on, as far down as the queue has it without a hole.

        Returns the queue's minimum then.
        """
        self.check_whole()
        return self._queues.show_from(topic, queue_id, offset)

    def erased_places(self) -> list[tuple[str, int]]:
        """Topics and queues of which something was erased that is still here."""
        return self._queues.erased_places()

    def erased_of(self, topic: str, queue_id: int) -> Spans:
        """What was erased of a queue: no request returns it."""
        return self._queues.erased_of(topic, queue_id)

    def erasable(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The offsets [low, end) of which records are here that may be erased."""
        return self._queues.erasable(topic, queue_id)

    def set_erased(self, topic: str, queue_id: int, before: Spans, spans: Spans) -> bool:
        """No request returns these; for good once the state is saved. False: it was another than `before` by now.

        The lifecycle goes on seeing them, by `entries`, `store_time` and `offset_by_time`: they are in the log.
        """
        self.check_whole()
        return self._queues.set_erased(topic, queue_id, before, spans)

    def shown_near(self, topic: str, queue_id: int, offset: int, *, below: bool) -> int:
        """An offset itself, where it was not erased; else the first above that was not, or the last `below`, or -1."""
        spans = self._queues.erased_of(topic, queue_id)
        return erased.before(spans, offset) if below else erased.behind(spans, offset)

    def save_queue_state(self) -> None:
        """What `hide_below` hid stays hidden."""
        self.check_whole()
        self._queues.save()

    def queue_state_image(self) -> StateImage:
        """As it is now, on the loop; `write_queue_state` is for any thread."""
        self.check_whole()
        return self._queues.image()

    def write_queue_state(self, image: StateImage) -> None:
        """An older image never replaces a newer one."""
        self._queues.write(image)

    def create_queue_at(self, topic: str, queue_id: int, next_offset: int) -> None:
        """Make a queue go on at an offset, above what its archive or an earlier life of it has."""
        self.create_queues_at({topic: {queue_id: next_offset}})

    def create_queues_at(self, following: Mapping[str, Mapping[int, int]]) -> None:
        """The same of many. One that is there and reaches as high stays as it is; may be repeated after a crash."""
        self._end.check_writable()
        self._create_at(following)

    def _create_at(self, following: Mapping[str, Mapping[int, int]], *, by_image: bool = False) -> None:
        self.check_whole()
        lower = [
            (topic, queue_id, offset)
            for topic, offsets in following.items()
            for queue_id, offset in offsets.items()
            if (queue := self._queues.get(topic, queue_id)) is None or queue.end < offset
        ]
        if not lower:
            return
        self.checkpoint()  # recovery takes a hole only from below it
        self._queues.begin_at(lower, by_image=by_image)
        self.checkpoint()

    def restore_queues(
        self, following: Mapping[str, Mapping[int, int]], ended: Mapping[str, Mapping[int, int]]
    ) -> None:
        """Give an empty store the queues that another had: each goes on at its offset, below it is nothing local.

        `ended` are the queues of topics that are gone, should they come again. May be repeated after a crash.
        """
        self._end.check_writable()
        self._queues.remember_ended(ended)
        self._queues.save()
        self._create_at(following, by_image=True)

    def begin_queues(self, ends: Mapping[str, Mapping[int, int]], log_end: int) -> None:
        """Of queues that a slave's log has no record of: they go on where they do at its master, and never begin at 0.

        The log is confirmed up to `log_end`, to which these ends belong: all that such a queue had by then lies below
        the log's begin. A topic that was deleted since is as it was deleted.
        """
        missing: dict[str, dict[int, int]] = {}
        for topic, queues in ends.items():
            known = self._queues.by_id(topic)
            lacking = {queue_id: end for queue_id, end in queues.items() if end and queue_id not in known}
            if lacking and self.gone_below(topic) <= log_end:
                missing[topic] = lacking
        self._create_at(missing, by_image=True)

    def raise_queues(self, following: Mapping[str, Mapping[int, int]], *, said_at: int | None = None) -> None:
        """Queues go on at offsets, above what the archive has named. What lies below is there, or lost: hidden here.

        On a slave by its master's word, of which the record ends at `said_at`; one that has messages from there on
        keeps them. May be repeated.
        """
        self._create_at(following)
        self._queues.show_to(following)
        hidden = [self._queues.hide_below(topic, offsets) for topic, offsets in following.items()]
        is_new = said_at is not None and self.remember_raised(following, said_at)
        if any(hidden) or is_new:
            self._queues.save()

    def remember_raised(self, following: Mapping[str, Mapping[int, int]], said_at: int) -> bool:
        """The log says, in a record that ends here, that queues go on at offsets: nothing lowers them while it does.

        For good once the state is saved; whether that is new.
        """
        self.check_whole()
        return self._queues.remember_raised(following, said_at)

    def goes_on_higher(self, topic: str, queue_id: int) -> bool:
        """Whether a queue goes on above its last record: it was raised, or begins here, and nothing came since."""
        queue = self._queues.get(topic, queue_id)
        return queue is not None and queue.used_end < queue.end

    def remember_ended(self, ended: Mapping[str, Mapping[int, int]]) -> None:
        """Where queues of deleted topics go on, should these come again, as their master knows it."""
        self.check_whole()
        if self._queues.remember_ended(ended):
            self._queues.save()

    def delete_topic(self, topic: str, *, begin_again: bool = False, below: int | None = None) -> None:
        """Drop a topic's queues. Its records stay in the log until their files go, but no longer belong to it.

        This does no I/O: `save_deletions` makes it durable, and `upkeep` removes the files.

        A slave drops only records `below` the physical offset at which its master deleted the topic: the topic may have
        been created again since.

        If the topic is created again, its queues continue at their end offsets. With `begin_again` they start at 0.
        The caller may allow that only if nothing outside this store knows the offsets that are then assigned again.
        The members of a set know them, so a set never starts at 0.
        """
        self.check_whole()
        if not self._queues.of_topic(topic):
            return
        begin_again = begin_again and self._visibility.set_has is None
        below = self._end.appended if below is None else min(below, self._end.appended)
        self._queues.delete(topic, below, begin_again=begin_again)

    @property
    def has_unsaved_deletions(self) -> bool:
        """Whether a `delete_topic` is not on the disk."""
        return self._queues.has_unsaved_deletions

    def save_deletions(self) -> None:
        """Returns when all deletions decided by now are on the disk: a start finds none of their queues. Any thread.

        Raises StoreNotWritable: it failed, and the store takes nothing until the next start, which knows the deletion
        by its record in the metadata log. OutOfDescriptors: it is to be tried again.
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
        """Read from an offset on; at least one message however large. The buffers are views of the mapped log.

        Of a read that begins below the physical offset `old_below`, the result says where in the log it lies.
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
        """The offset of a time: the first at or after it, or with `upper` the last at or before it; erased or not.

        Yields where other work may have its turn, which happens only in files in which the clock was set back. The
        search begins again if the queue is another one by then.
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
        """Physical offset, size and tags code of a message; None if the local queue has none there that is returned."""
        queue = self._queues.get(topic, queue_id)
        if queue is None or not 0 <= offset < queue.visible or erased.behind(queue.erased, offset) != offset:
            return None
        return queue.entry(offset)

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """Store time of a message, of a hidden one too; -1 if the local log has none there."""
        queue = self._queues.get(topic, queue_id)
        return -1 if queue is None else reading.store_time(self._log, queue, offset)

    def shown_time(self, topic: str, queue_id: int, offset: int) -> int:
        """The same; of one that was erased that of the next, which is what a reader gets there, or else of the last."""
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
        """Return the record that begins at a physical offset if readers may get it: for every request of a client."""
        found = reading.record_at(self._log, physical_offset, self._visibility.confirmed)
        if found is None:
            return None
        record = decode_record(found)
        return found if self.shows(record.topic, record.queue_id, record.queue_offset, physical_offset) else None

    def record_at(self, physical_offset: int) -> bytes | None:
        """The record at a physical offset, if one begins there, is confirmed and was not erased.

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
        """The last record of the log, if it is confirmed."""
        last = self._tails.newest()
        return reading.record_at(self._log, last, self._visibility.confirmed) if last >= 0 else None

    def records_from(self, physical_offset: int) -> Iterator[bytes]:
        """In the order of the log, each that ends above a place; while nothing is appended."""
        for place, size, _ in self._log.records_ending_above(physical_offset):
            file = self._log.at(place)
            assert file is not None
            yield bytes(memoryview(file.map)[place - file.base : place - file.base + size])

    def file_at(self, physical_offset: int) -> LogFile | None:
        """The file of the log that holds an offset."""
        return self._log.at(physical_offset)

    def query(
        self, topic: str, key: str, max_num: int, begin: int, end: int, *, is_hit: Callable[[bytes], bool]
    ) -> Generator[None, None, KeyHits]:
        """The newest records with a key, stored in [begin, end], newest first.

        `is_hit` compares key and topic, because the index has hashes only, and decides whether clients may see the
        record: only hits count towards `max_num`. A step looks at `QUERY_STEP` records or `_QUERY_STEP_BYTES` of them.
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

    # -- the log as the lifecycle sees it

    @property
    def min_physical_offset(self) -> int:
        """Where the local log begins."""
        return self._log.min_offset

    @property
    def max_physical_offset(self) -> int:
        """Where the next record goes."""
        return self._end.appended

    @property
    def newest_segment_base(self) -> int:
        """Where the file that is being written begins."""
        return self._log.files[-1].base if self._log.files else 0

    @property
    def newest_store_time(self) -> int:
        """Of the last record, or what the store was told of later ones."""
        return self._end.last_time

    @property
    def steps_back(self) -> int:
        """How often the clock went back, since the start."""
        return self._end.steps_back

    def go_on_after(self, store_time: int) -> None:
        """No record gets an earlier time, as long as the clock is not far behind."""
        self._end.reach_time(store_time)

    def segments(self) -> list[Segment]:
        """The files of the log, oldest first; only the last is not sealed."""
        return [self._segment(file) for file in self._log.files]

    def _segment(self, file: LogFile) -> Segment:
        if file is self._end.file and not file.sealed:
            topics, newest = self._end.table()
            return Segment(file.base, self._end.appended, False, newest, topics)
        # The last stays: a slave's may be whole, until the first byte of the next comes.
        sealed = file.sealed and file is not self._end.file
        return Segment(file.base, file.end, sealed, file.newest_store_time, file.topics)

    def roll(self) -> None:
        """End the active file, so that it may be archived whole. Raises `StoreFull`."""
        self._end.roll()

    def take_out(self, base: int) -> Callable[[], bool]:
        """The log begins above its oldest file from here on, and the minimum of each queue follows.

        What is returned takes the file from the disk, for any thread: it waits for the disk, and for memory to be given
        back. Until then a start finds the file again, and so does a cut, behind which it stays: False. The checkpoint
        must lie above it: a start that finds it below the log can't tell an eviction from a lost file.
        Raises StoreFull if there is no room even for a checkpoint.
        """
        self.check_whole()
        file = self._log.files[0] if self._log.files else None
        if file is None or file.base != base or file is self._end.file or file.end > self._visibility.flushed:
            raise StoreError(f"the file at {base} is not the oldest, or not sealed and flushed")
        if self.checkpointed < file.end:
            self.checkpoint()
        if self.checkpointed < file.end:  # the disk is full: the file that was prepared ahead makes room
            self._log.drop_next()
            self.checkpoint()
        if self.checkpointed < file.end:
            raise StoreFull(f"no room for a checkpoint above the file at {base}")
        remove = self._log.take_out(file)
        self._index.build()
        self._index.evict(self._log.min_offset)
        return remove

    def restart_log_at(self, physical_offset: int) -> None:
        """Go on in a new file at an offset above the log's end: what lies between was lost, its offsets are taken."""
        self._end.check_writable()
        if physical_offset < self._end.appended:
            raise StoreError(f"the log already reaches {self._end.appended}, above {physical_offset}")
        self.checkpoint()
        self._end.go_on_at(physical_offset)
        self.checkpoint()

    def entries(self, topic: str, start_phys: int, end_phys: int) -> dict[int, EntryRun]:
        """Per queue the entries of records in [start, end), as arrays of their own."""
        slices = self.entry_slices(topic, start_phys, end_phys, _ALL)
        return reading.joined(piece for piece in slices if piece is not None)

    def entry_slices(
        self, topic: str, start_phys: int, end_phys: int, most: int
    ) -> Iterator[reading.EntrySlice | None]:
        """The same, at most so many entries at a time: between two of them other work may have its turn.

        None ends each queue, also one without any: that it has none had to be looked up.
        """
        # a queue's file may still have entries of log files that are evicted
        start = max(start_phys, self._queues.gone_below(topic), self._log.min_offset)
        for queue in self._queues.of_topic(topic):
            yield from reading.entry_slices(queue, queue.first_at(start), queue.first_at(end_phys), most)
            yield None

    def first_offsets(self, topic: str, start_phys: int) -> dict[int, int]:
        """Per queue the first offset whose record lies at or above; the queue's end if there is none."""
        return {queue.queue_id: queue.first_at(start_phys) for queue in self._queues.of_topic(topic)}

    def files(self, start: int, end: int) -> list[tuple[str, int, int]]:
        """Path, base and length of the log's files that meet [start, end)."""
        return [
            (str(file.path), file.base, file.size) for file in self._log.files if file.base < end and file.end > start
        ]

    # -- how much of what it holds

    @property
    def descriptors(self) -> int:
        """How many the log holds."""
        return self._log.descriptors

    @property
    def mapped_queue_files(self) -> int:
        """How many files of queues are mapped; bounded."""
        return self._queues.mapped_files

    @property
    def next_file_is_ready(self) -> bool:
        """Whether the log's next file is allocated ahead."""
        return self._log.next_is_ready

    @property
    def skipped_keys(self) -> int:
        """Keys that were not indexed since the start, for want of room."""
        return self._index.skipped
