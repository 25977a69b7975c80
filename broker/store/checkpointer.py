"""Checkpoints, which limit how much of the log a start has to read again.

A checkpoint has two steps:

    described  on the event loop: its content, and the files that have to be synced before it may be written
    written    on a thread: the log is synced up to it, then the queues, the index and their directories, then the
               checkpoint file is replaced

Invariant: `checkpointed` is the offset in the file on the disk, and everything below it is durable. A description stays
due until it is written, and there is no other one meanwhile. If it could not be written for lack of descriptors or disk
space, it is retried as a whole.
"""

from __future__ import annotations

import errno
import logging
from contextlib import suppress
from pathlib import Path

import msgspec

from broker.store.checkpoint import StoreCheckpoint, write_checkpoint
from broker.store.commit_log import CommitLog
from broker.store.config import StoreConfig
from broker.store.consume_queue import ConsumeQueue
from broker.store.errors import StoreNotWritable
from broker.store.key_index import KeyIndex
from broker.store.log_end import LogEnd
from broker.store.queue_table import QueueTable
from broker.store.visibility import Visibility
from infra.clock import Clock
from infra.disk.filesystem import Disk, OutOfDescriptors
from infra.loop.locks import Lock, NewLock, new_lock
from infra.loop.parts import Parts

log = logging.getLogger(__name__)


class DueCheckpoint(msgspec.Struct):
    """A described checkpoint, with the files to sync before it is written."""

    content: StoreCheckpoint
    queues: list[ConsumeQueue]
    index_paths: list[Path]
    is_written: bool = False

    def sync(self, disk: Disk, root: Path) -> None:
        """Sync the queues, the index files and the queue directory, on a thread."""
        for queue in self.queues:
            queue.sync()
        for path in self.index_paths:
            with suppress(FileNotFoundError):  # evicted meanwhile
                disk.fdatasync(path)
        disk.fsync_dir(root / "consumequeue")


class Checkpointer:
    """Describes and writes checkpoints; the content comes from the log end, the queues and the key index."""

    def __init__(
        self,
        config: StoreConfig,
        disk: Disk,
        clock: Clock,
        *,
        log: CommitLog,
        end: LogEnd,
        queues: QueueTable,
        index: KeyIndex,
        visibility: Visibility,
        new_lock: NewLock = new_lock,
    ) -> None:
        self._config, self._disk, self._clock = config, disk, clock
        self._log, self._end, self._queues, self._index, self._visibility = log, end, queues, index, visibility
        self._writing = new_lock()
        self._due: DueCheckpoint | None = None
        self._described_at = 0
        self._described_time = clock.monotonic()
        self.checkpointed = 0
        self.is_put_off = False

    def adopt(self, physical: int) -> None:
        """Set the checkpoint that a start read from the file."""
        self.checkpointed = physical

    def pause_lock(self) -> Lock:
        """Return a lock; while it is held, no thread writes a checkpoint."""
        return self._writing

    def leave(self) -> None:
        """Discard the due checkpoint, because the log is replaced. The caller holds `pause_lock`."""
        self._due, self.is_put_off = None, False

    def take_over(self, other: Checkpointer) -> None:
        """Adopt the checkpoint that another checkpointer of this directory has written."""
        assert self._due is None and other._due is None
        self.checkpointed = other.checkpointed
        self._described_at, self._described_time = other._described_at, other._described_time

    @property
    def is_due(self) -> bool:
        """Whether a described checkpoint is not written yet."""
        return self._due is not None

    # -- on the loop

    def look(self) -> None:
        """Describe a checkpoint if enough bytes were appended, or if the last one is old enough."""
        grown = self._end.appended - self._described_at
        now = self._clock.monotonic()
        if self._due is None and (
            grown >= self._config.checkpoint_bytes
            or (grown and (now - self._described_time) * 1000 >= self._config.checkpoint_interval)
        ):
            self._describe()

    def want(self, physical_offset: int) -> bool:
        """Describe a checkpoint unless one is due; return False if the written one is at or above the offset."""
        if self.checkpointed >= physical_offset:
            return False
        if self._due is None:
            self._describe()
        return True

    def write_parts(self) -> Parts[bool]:
        """Describe and write a checkpoint now, for a caller that can't continue without it; the parts do the I/O.

        Return whether a checkpoint of now was written; if not, it or an earlier one is put off.
        """
        while (due := self._due) is not None:
            yield self.write_due
            if self._due is due:
                return False
        due = self._describe()
        yield self._visibility.flush
        self._visibility.after_flush(self._visibility.synced)
        yield self.write_due
        return due.is_written

    def _describe(self) -> DueCheckpoint:
        assert self._due is None, "a thread may be writing it"
        self._index.build()
        base, count = self._index.state()
        # before the queues are marked clean, because dirty queues show which topics may have changed
        topics = self._end.topics()
        end = self._end
        content = StoreCheckpoint(end.appended, end.last_time, base, count, topics, end.high_time)
        self._due = DueCheckpoint(content, self._queues.take_dirty(), self._index.take_dirty())
        self._described_at, self._described_time = self._end.appended, self._clock.monotonic()
        return self._due

    # -- on a thread

    def write_due(self) -> None:
        """Write the due checkpoint, if the log could be synced up to it. Raises StoreNotWritable as `flush` does.

        This syncs each queue that was written to, which may be thousands of files.
        """
        with self._writing:
            due = self._due
            if due is None:
                return
            try:
                self._flush_and_write(due)
            finally:
                self.is_put_off = not due.is_written

    def _flush_and_write(self, due: DueCheckpoint) -> None:
        if self._end.failure is not None or self._visibility.synced < due.content.physical:
            self._visibility.flush()  # a checkpoint covers only durable records
        if self._visibility.synced < due.content.physical:
            return
        try:
            self._write(due)
        except OutOfDescriptors as error:  # no sync has failed: the whole checkpoint is retried
            log.warning("checkpoint delayed until files can be opened again: %s", error)
        except OSError as error:
            self._end.fail(error)
            raise StoreNotWritable(f"a sync to the disk failed: {error}") from error

    def _write(self, due: DueCheckpoint) -> None:
        physical = due.content.physical
        assert self.checkpointed <= physical <= self._visibility.synced
        due.sync(self._disk, self._config.root)
        try:
            self._log.write_tables(physical)
            write_checkpoint(self._config.root, self._disk, due.content)
        except OSError as error:  # a full disk only makes the next recovery longer
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
        else:
            due.is_written = True
            self.checkpointed = physical
        self._due = None
