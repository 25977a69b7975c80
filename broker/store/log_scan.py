"""Scan of the log at a start: it verifies records from the checkpoint on, indexes them, and removes the rest.

Pages reach the disk in any order, so every record above the checkpoint is verified. The checks are: magic, length,
physical offset equal to the position, queue offset equal to the queue's next one, body CRC, and the CRC beside the log
if that became durable. Also, the store time may not be slightly before the previous one.

In records of a master (`followed`), queue offsets may skip values. Their store times are not checked, because the clock
of the next master may be behind.

The first record that fails ends the log. Everything above is zeroed, so that no later append can be continued by a
stale record.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from broker.store.commit_log import CommitLog, LogFile
from broker.store.consume_queue import ConsumeQueue
from broker.store.layout import (
    CRC_ENTRY,
    CRC_ENTRY_SIZE,
    END_SIZE,
    STANDS_STILL_MS,
    record_crc,
)
from broker.store.log_records import find_crc_position
from neve.record.codec import MalformedRecord, MessageRecord, decode_record
from neve.record.layout import (
    FIELDS,
    HEADS,
    I32,
    MAGIC_BLANK,
    MAGIC_V1,
    SIZE_AND_MAGIC,
    SYS_FLAG_AT,
    host_sizes,
    struct_without,
)

_CHUNK = 1 << 20
# A scan of verified records reads only the store time and the length of the body.
_UNSEEN = [name for name, _ in FIELDS if name not in {"store_timestamp", "body_length"}]
_WALKED = {(born, store): struct_without(*_UNSEEN, born=born, store=store) for born, store in HEADS}


@dataclass(slots=True)
class RecoveryReport:
    """Result of a recovery, for the log line of the start."""

    clean: bool
    start: int = 0
    end: int = 0
    records: int = 0
    records_without_crc: int = 0
    truncated_bytes: int = 0
    reason: str = ""


@dataclass(slots=True)
class Recovered:
    """A record that passed all checks."""

    record: MessageRecord
    tags_code: int


class LogScan:
    """Walk over the log from a position, with a callback for each record that passes."""

    def __init__(
        self,
        log: CommitLog,
        report: RecoveryReport,
        *,
        store_time: int,
        high_time: int,
        queue_of: Callable[[MessageRecord], ConsumeQueue | None],
        code_of: Callable[[MessageRecord], int],
        strict: bool,
        followed: bool = False,
        stop: int = 1 << 62,
    ) -> None:
        self._log = log
        self._report = report
        self._queue_of = queue_of
        self._code_of = code_of
        self._strict, self._followed, self._stop = strict, followed, stop
        self.store_time = store_time
        self.high_time = high_time  # of the file, from before the clock stepped back
        self.position = 0
        self.file: LogFile | None = None

    def run(self, start: int, accept: Callable[[Recovered], None], seal: Callable[[LogFile, int, int], None]) -> None:
        """Scan; afterwards, `file` and the position in it mark the end of the log.

        `seal` is called for each file that was passed, with the store time of its last record and its `high_time`.
        """
        log = self._log
        file = log.at(start) or log.ending_at(start) or log.empty_above(start)
        assert file is not None
        position = max(start - file.base, 0)
        file.crc_position = find_crc_position(file, position)
        while True:
            self.file, self.position = file, position
            if file.base + position >= self._stop:
                return
            if self._is_end(file, position):
                following = self._following(file)
                if following is None or following.base > self._stop:
                    self.position = file.size
                    return
                seal(file, self.store_time, self.high_time)
                file.sealed = True
                self.high_time = 0
                file, position = following, 0
                file.crc_position = 0
                continue
            found = self._check(file, position)
            if found is None:
                return
            accept(found)
            if position and found.record.store_timestamp < self.store_time:
                self.high_time = max(self.high_time, self.store_time)
            self.store_time = found.record.store_timestamp
            self._report.records += 1
            file.crc_position += CRC_ENTRY_SIZE
            position += found.record.size

    @staticmethod
    def _is_end(file: LogFile, position: int) -> bool:
        rest = file.size - position
        if rest < END_SIZE:
            return True
        size, magic = SIZE_AND_MAGIC.unpack_from(file.map, position)
        return bool(magic == MAGIC_BLANK and size == rest)

    def _following(self, file: LogFile) -> LogFile | None:
        index = self._log.files.index(file) + 1
        return self._log.files[index] if index < len(self._log.files) else None

    def _check(self, file: LogFile, position: int) -> Recovered | None:
        size, magic = SIZE_AND_MAGIC.unpack_from(file.map, position)
        if size == 0 and magic == 0:
            return None
        view = memoryview(file.map)[position : min(position + max(size, 0), file.size)]
        try:
            record = decode_record(view)
        except (MalformedRecord, IndexError) as error:
            return self._refuse(f"malformed: {error}")
        if record.physical_offset != file.base + position:
            return self._refuse(f"has the physical offset {record.physical_offset}")
        if not self._followed and 0 < self.store_time - record.store_timestamp <= STANDS_STILL_MS:
            return self._refuse(f"has the store time {record.store_timestamp}, before {self.store_time}")
        if zlib.crc32(record.body) & 0x7FFFFFFF != record.body_crc:
            return self._refuse("body CRC differs")
        tags = self._check_crc(file, position, record, view)
        if tags is None:
            return self._refuse("record CRC differs")
        queue = self._queue_of(record)
        if queue is not None and record.queue_offset != queue.end and self._is_no_next(queue, record.queue_offset):
            return self._refuse(f"is offset {record.queue_offset} of a queue that ends at {queue.end}")
        return Recovered(record, tags)

    def _is_no_next(self, queue: ConsumeQueue, queue_offset: int) -> bool:
        if self._followed:
            return queue_offset < queue.used_end
        return self._strict or queue_offset < queue.end

    def _refuse(self, reason: str) -> Recovered | None:
        assert self.file is not None
        self._report.reason = f"record at {self.file.base + self.position}: {reason}"
        return None

    def _check_crc(self, file: LogFile, position: int, record: MessageRecord, view: memoryview) -> int | None:
        """Return the tags code stored with the record, or a newly computed one if the CRC entry was lost;

        None if damaged.
        """
        flags = record.sys_flag
        head_size = HEADS[host_sizes(flags)].size
        head, tail = view[:head_size], view[head_size + len(record.body) :]
        if file.crc_position + CRC_ENTRY_SIZE > file.crc_size:
            self._log.grow_crc(file)
        mark, crc, tags = CRC_ENTRY.unpack_from(file.crc_map, file.crc_position)
        if mark == position + 1:
            return int(tags) if crc == record_crc(head, tail, tags) else None
        if b"\0" in record.properties_raw or "\0" in record.topic:
            # the page with its end was lost, so it was never flushed: a flush would have made the CRC entry durable too
            return None
        self._report.records_without_crc += 1
        made = self._code_of(record)
        CRC_ENTRY.pack_into(file.crc_map, file.crc_position, position + 1, record_crc(head, tail, made), made)
        return made


def zero_above(log: CommitLog, file: LogFile, position: int) -> int:
    """Remove everything above the end of the log; return the number of bytes that were not zero."""
    removed = sum(later.size for later in log.files if later.base > file.base and _holds_data(later))
    log.drop_after(file)
    for start in range(position, file.size, _CHUNK):
        chunk = file.map[start : min(start + _CHUNK, file.size)]
        used = len(chunk) - chunk.count(0)
        if used:
            removed += used
            file.map[start : start + len(chunk)] = bytes(len(chunk))
    rest = file.crc_map[file.crc_position :]
    if rest.count(0) != len(rest):
        file.crc_map[file.crc_position :] = bytes(len(rest))
    return removed


def _holds_data(file: LogFile) -> bool:
    return file.map[:END_SIZE] != bytes(END_SIZE)


class Walked(NamedTuple):
    """Topic table of a file, read from its records; the fields are those of `LogFile`."""

    topics: dict[str, tuple[int, int]]
    newest_store_time: int
    high_time: int


def walk_topics(file: LogFile, end: int = 1 << 62) -> Walked:
    """Read the topic table of a file below the checkpoint from its records, up to the position `end` in the file."""
    found: dict[bytes, tuple[int, int]] = {}
    last_time = high_time = 0
    position, view = 0, memoryview(file.map)
    while position < end and file.size - position >= END_SIZE:
        size, magic = SIZE_AND_MAGIC.unpack_from(view, position)
        if size <= 0 or magic == MAGIC_BLANK:
            break
        (sys_flag,) = I32.unpack_from(view, position + SYS_FLAG_AT)
        walked = _WALKED[host_sizes(sys_flag)]
        store_time, body_length = walked.unpack_from(view, position)
        topic_at = position + walked.size + body_length
        width = 1 if magic == MAGIC_V1 else 2
        name_at = topic_at + width
        name = bytes(view[name_at : name_at + int.from_bytes(view[topic_at:name_at], "big")])
        _, newest = found.get(name, (0, 0))
        found[name] = (file.base + position, max(newest, store_time))
        if store_time < last_time:
            high_time = max(high_time, last_time)
        last_time = store_time
        position += size
    topics = {name.decode("utf-8", "surrogateescape"): place for name, place in found.items()}
    return Walked(topics, max((newest for _, newest in found.values()), default=0), high_time)
