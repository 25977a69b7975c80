"""Recovery at a start: it reads the files into the objects that own them, verifies them, and makes them consistent.

Everything below the checkpoint is trusted. Everything above is verified record by record (`log_scan`), up to the offset
of a pending truncation (`truncation`). The result contains what no file states: the end of the log, its store time, and
a report.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.store.checkpoint import StoreCheckpoint, read_checkpoint
from broker.store.commit_log import CommitLog, LogFile
from broker.store.config import StoreConfig
from broker.store.consume_queue import ConsumeQueue
from broker.store.data_directory import DataDirectory
from broker.store.erased_offsets import ErasedOffsets
from broker.store.errors import StoreCorrupt
from broker.store.key_index import KeyIndex
from broker.store.log_records import last_record_below
from broker.store.log_scan import LogScan, Recovered, RecoveryReport, Walked, walk_topics, zero_above
from broker.store.queue_loading import QueueLoading
from broker.store.queue_table import QueueTable
from broker.store.topic_tails import TopicTails
from broker.store.truncation import read_truncation
from infra.disk.filesystem import Disk
from neve.record.codec import MessageRecord, decode_record
from neve.record.properties import PROPERTY_KEYS, PROPERTY_UNIQUE_KEY

_NO_STOP = 1 << 62


@dataclass(frozen=True, slots=True)
class RecoveredEnd:
    """End of the log: file, position in it, and the store times of `log_end`."""

    file: LogFile | None
    position: int
    last_time: int
    high_time: int = 0

    @property
    def physical(self) -> int:
        """The physical offset of the next record."""
        return self.file.base + self.position if self.file is not None else 0


@dataclass(frozen=True, slots=True)
class RecoveredStore:
    """Result of a recovery; the files belong to the objects that were passed to it."""

    log_uuid: str
    checkpointed: int
    end: RecoveredEnd
    report: RecoveryReport


class Recovery:
    """One recovery of a locked data directory."""

    def __init__(
        self,
        config: StoreConfig,
        disk: Disk,
        *,
        directory: DataDirectory,
        log: CommitLog,
        tails: TopicTails,
        queues: QueueTable,
        index: KeyIndex,
    ) -> None:
        self._config, self._disk, self._directory = config, disk, directory
        self._log, self._tails, self._queues, self._index = log, tails, queues, index

    def run(self) -> RecoveredStore:
        """Read all files, and determine the end of the log."""
        directory, log = self._directory, self._log
        checkpoint = read_checkpoint(self._config.root, self._disk)
        self._queues.records.load()
        log.open()
        log.sweep_evicted()
        log_uuid = directory.log_uuid(log_is_empty=not log.files)
        truncation = read_truncation(self._config.root, self._disk)
        clean = directory.begin() and truncation is None
        strict, followed = checkpoint is not None, directory.is_following
        if truncation is not None and checkpoint is not None and checkpoint.physical > truncation.to:
            checkpoint = self._below(checkpoint, truncation.to)
        if checkpoint is None:
            clean = not log.files
            checkpoint = StoreCheckpoint(log.min_offset)
        start = checkpoint.physical
        unsynced = not clean and directory.begin_recovery()
        loading = QueueLoading(self._config, self._disk, self._queues)
        loading.load(start, scrub=not clean, unsynced=unsynced)
        self._index.load(checkpoint.index_base, checkpoint.index_count, scrub=not clean)
        report = RecoveryReport(clean, start, start)
        end = RecoveredEnd(None, 0, checkpoint.store_time)
        if log.files:
            stop = _NO_STOP if truncation is None else truncation.to
            end = self._replay(checkpoint, report, strict=strict, followed=followed, stop=stop)
            report.end = end.physical
        elif start:
            raise StoreCorrupt(f"the CommitLog reached {start} and is gone from {log.directory}")
        assert end.physical >= start
        loading.end_at(report.end, lower=followed and not clean)
        ErasedOffsets(log, self._queues).cut()
        self._index.build()
        return RecoveredStore(log_uuid, start, end, report)

    def _replay(
        self, checkpoint: StoreCheckpoint, report: RecoveryReport, *, strict: bool, followed: bool, stop: int
    ) -> RecoveredEnd:
        log = self._log
        first = log.at(checkpoint.physical)
        if first is None and followed:  # a slave's file may end before the next one begins
            first = log.ending_at(checkpoint.physical) or log.empty_above(checkpoint.physical)
        if first is None:
            raise StoreCorrupt(
                f"the CommitLog has no file for the checkpoint at {checkpoint.physical}: is one missing?"
            )
        for topic, (physical_offset, store_time) in checkpoint.topics.items():
            self._tails.touch(topic, physical_offset, store_time)
        for file in log.files:
            if file.end <= first.base:
                file.sealed = True
                if not file.table_written:
                    file.topics, file.newest_store_time, file.high_time = walk_topics(file)
        # at a border between files, the table is that of the earlier file
        rows = (row for row in checkpoint.topics.values() if row[0] >= first.base)
        newest = max((store_time for _, store_time in rows), default=0)
        high_time = checkpoint.high_time if checkpoint.physical > first.base else 0
        scan = LogScan(
            log,
            report,
            store_time=checkpoint.store_time,
            high_time=max(newest, high_time) if newest > checkpoint.store_time else high_time,
            queue_of=self._queue_of,
            code_of=self._config.code_of,
            strict=strict,
            followed=followed,
            stop=stop,
        )
        scan.run(checkpoint.physical, self._accept, self._seal)
        last = scan.file
        assert last is not None
        log.forget_table(last)
        if not report.clean:
            report.truncated_bytes = zero_above(log, last, scan.position)
            # After this, readers may see the recovered records. After a kill they may be only in the page cache, so
            # sync them.
            for file in log.files:
                if file.end > first.base:
                    self._disk.fdatasync(file.path)
                    self._disk.fdatasync(file.crc_path)
        else:
            log.drop_after(last)  # at most one file, prepared ahead and never used
        return RecoveredEnd(last, scan.position, scan.store_time, scan.high_time)

    def _below(self, checkpoint: StoreCheckpoint, to: int) -> StoreCheckpoint:
        """Return a checkpoint at the truncation offset.

        Its content is durable, because a later checkpoint covered it.
        """
        file = self._log.at(to)
        topics, newest, stepped = walk_topics(file, to - file.base) if file is not None else Walked({}, 0, 0)
        last = last_record_below(self._log, to)
        store_time = decode_record(last).store_timestamp if last is not None else 0
        # the clock stepped back: a time that is too late is safe, one that is too early is not
        high = newest if newest > store_time else 0
        topics = {topic: (place, max(time, high)) for topic, (place, time) in topics.items()}
        base, count = self._index.below(to, checkpoint.index_base, checkpoint.index_count)
        return StoreCheckpoint(to, store_time, base, count, topics, max(high, stepped))

    def _seal(self, file: LogFile, last_time: int, high_time: int) -> None:
        """Set the tables of a file whose records have all been accepted."""
        file.topics, file.high_time = self._tails.since(file.base, high_time), high_time
        file.newest_store_time = max(last_time, high_time) if file.topics else 0

    def _queue_of(self, record: MessageRecord) -> ConsumeQueue | None:
        if record.physical_offset < self._queues.deleted_up_to(record.topic):
            return None
        return self._queues.get(record.topic, record.queue_id)

    def _accept(self, found: Recovered) -> None:
        record, queues = found.record, self._queues
        self._tails.touch(record.topic, record.physical_offset, record.store_timestamp)
        if record.physical_offset < queues.deleted_up_to(record.topic):
            return
        queue = queues.go_to(record.topic, record.queue_id, record.queue_offset)
        assert queue is not None and queue.end == record.queue_offset, "the scan has asked"
        queues.mark_dirty(queue)
        queue.append(record.physical_offset, record.size, found.tags_code)
        properties = record.properties
        keys = f"{properties.get(PROPERTY_UNIQUE_KEY, '')} {properties.get(PROPERTY_KEYS, '')}"
        if not keys.isspace():
            self._index.want([(record.topic, keys, record.physical_offset, record.store_timestamp)])
