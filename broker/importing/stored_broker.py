"""Data directory of an Apache RocketMQ broker. It is only read.

    commitlog/<base, 20 digits>     its log: files of one size; records, an END record, and zeros above the log's end
    abort                           exists while the broker runs, and after it was killed
    checkpoint                      identifies the directory (`rocketmqs_store`); its first number is the store time up
                                    to which the log was durable, written a minute late or less
    config/topics.json              as the answer to 21         config/consumerOffset.json        as 43
    config/subscriptionGroup.json   as 201                      config/delayOffset.json           as 45
    config/messageRequestMode.json  as 402                      config/timercheck                 as 60, in a page
    config/<name>.json.bak          the previous one, for a file that is missing, empty or torn

A table is written after the events that it records: delays every 10 s, groups every 5 s, timers every second; topics
and groups at every change. Deliveries of a killed broker that no table has are therefore in the last part of its log.

Source: RocketMQ's ConfigManager, TimerCheckpoint, MappedFileQueue, StorePathConfigHelper.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import TypeVar

import msgspec

from broker import rocketmqs_store
from broker.metadata.stock_tables import (
    StockDelays,
    StockGroups,
    StockImage,
    StockModes,
    StockOffsets,
    StockTables,
    StockTopics,
    TimerCheckPoint,
    image_of,
)
from infra.disk.filesystem import Disk
from infra.process.startup import EXIT_CONFIG, StartupError
from neve.errors import ProtocolError
from neve.record.codec import MalformedRecord, MessageRecord, decode_record
from neve.record.layout import MAGIC_BLANK, MAGIC_V1, MAGIC_V2, RECORD_SIZE_MIN, SIZE_AND_MAGIC, struct_of
from neve.remoting.body import ANSWER_NODES, DataVersion, NodeBudget, loads_as

_CHUNK = 4 << 20
_BASE_DIGITS = 20
_CHECK_POINT = Struct(">4q")
_SYNCED_MS = Struct(">q")
_PLACE = struct_of("size", "physical_offset")
_RECORD_MAGIC = re.compile(
    b"|".join(re.escape(magic.to_bytes(4, "big", signed=True)) for magic in (MAGIC_V1, MAGIC_V2))
)
#: No table is further behind: RocketMQ's slowest is saved every ten seconds, and a disk may be slow.
TABLES_LAG_MS = 600_000
# Files with which it keeps state in stores of other kinds.
_ELSEWHERE = {
    "kvStore": "the state of pops (popConsumerKVServiceEnable)",
    "config/rdb": "its tables (configManagerVersion=v2)",
    "config/topics": "its tables (storeType=defaultRocksDB)",
    "dledgerCommitlog": "its log (enableDLegerCommitLog)",
}

_T = TypeVar("_T", bound=msgspec.Struct)


class LogPiece(msgspec.Struct, frozen=True):
    """Bytes of the log at an offset."""

    offset: int
    data: bytes


class StoredLog(msgspec.Struct, frozen=True, kw_only=True):
    """Extent of a log. `end` is the end of the last record with a valid frame.

    `behind`: end of the last record after a damaged frame at `end`; equal to `end` if there is none.
    """

    begin: int
    end: int
    behind: int
    file_size: int
    files: int


class StoredBroker:
    """Reader of the directory. Each method reads again. StartupError has the reason why it can't be imported."""

    def __init__(self, disk: Disk, root: Path) -> None:
        self._disk, self.root = disk, root

    def check(self) -> None:
        """Check that it is such a directory, and that all its state is in files that are read here."""
        disk, root = self._disk, self.root
        if not disk.exists(root):
            raise refused(f"{root}: there is no such directory")
        if not rocketmqs_store.is_one(disk, root):
            raise refused(f"{root} is not a store of RocketMQ: it has no valid checkpoint")
        for name, what in _ELSEWHERE.items():
            path = root / name
            if disk.exists(path) and disk.list_dir(path):
                raise refused(f"{path}: the broker kept {what} there, which can't be imported")
        if not disk.exists(root / "commitlog"):
            raise refused(f"{root / 'commitlog'} is missing: with storePathCommitLog elsewhere, link it there")

    @property
    def was_killed(self) -> bool:
        """Return whether the broker was killed, or is running."""
        return self._disk.exists(self.root / "abort")

    def synced_ms(self) -> int:
        """Return the store time in ms before which all records were durable; 0: unknown."""
        return int(_SYNCED_MS.unpack_from(self._disk.read(self.root / "checkpoint"))[0])

    # ---- the log

    def log(self) -> StoredLog:
        """Return the extent of the log. An empty one begins and ends at 0."""
        bases = self._bases()
        if not bases:
            return StoredLog(begin=0, end=0, behind=0, file_size=0, files=0)
        size = self._disk.size(self._file(bases[0]))
        for base in bases:
            if self._disk.size(self._file(base)) != size or size <= 0:
                raise refused(f"{self._file(base)} has another size than {self._file(bases[0])}: {size}")
        for before, after in pairwise(bases):
            if before + size != after:
                raise refused(f"a file of the log is missing between {before} and {after}")
        used = [base for base in bases if self._is_used(base)]
        newest, end = self._end_of(used[-1], size) if used else (-1, bases[0])
        newest_ms = self._store_time(newest, size) if newest >= 0 else -1
        behind = self._behind(end, bases[-1] + size, size, newest_ms)
        return StoredLog(begin=bases[0], end=end, behind=behind, file_size=size, files=len(used))

    def pieces(self, start: int, log: StoredLog) -> Iterator[LogPiece]:
        """Yield the log from a record's start on. No piece crosses the end of a file."""
        while start < log.end:
            base = start - start % log.file_size
            size = min(_CHUNK, base + log.file_size - start, log.end - start)
            yield LogPiece(start, self._disk.read_at(self._file(base), start - base, size))
            start += size

    def grew_above(self, log: StoredLog) -> bool:
        """Return whether the log has changed since `log` was read: the broker is running."""
        now = self.log()
        return (now.end, now.behind) != (log.end, log.behind)

    def raw_at(self, offset: int, size: int, log: StoredLog) -> bytes:
        """Return bytes of one file."""
        return self._read(offset, size, log.file_size)

    def time_before(self, offset: int, log: StoredLog) -> int:
        """Return the store time of the last record before `offset`, if all before it are valid; -1: there is none."""
        while offset > log.begin:
            base = offset - 1 - (offset - 1) % log.file_size
            newest, _ = self._end_of(base, log.file_size, offset)
            if newest >= 0:
                return self._store_time(newest, log.file_size)
            offset = base
        return -1

    def first_records(self, below: int, log: StoredLog) -> Iterator[tuple[int, MessageRecord]]:
        """Yield base and first record of each file below an offset, the newest first."""
        for number in reversed(range(log.files)):
            base = log.begin + number * log.file_size
            if base < below:
                yield base, self._record_at(base, log.file_size)

    def store_host(self, log: StoredLog) -> str:
        """Return the address of the broker from the first record of its newest file, or of an earlier one."""
        for number in reversed(range(log.files)):
            # in a killed broker's file it may be torn: the copy checks it
            with contextlib.suppress(StartupError):
                return self._record_at(log.begin + number * log.file_size, log.file_size).store_host
        raise refused(f"no file of the log of {self.root} begins with a complete record")

    def _record_at(self, offset: int, file_size: int) -> MessageRecord:
        size: int = SIZE_AND_MAGIC.unpack(self._read(offset, SIZE_AND_MAGIC.size, file_size))[0]
        try:
            return decode_record(self._read(offset, max(size, 0), file_size))
        except (MalformedRecord, IndexError) as error:
            raise refused(f"the record at {offset} of {self.root} is damaged: {error}") from error

    def _read(self, offset: int, size: int, file_size: int) -> bytes:
        position = offset % file_size
        return self._disk.read_at(self._file(offset - position), position, min(size, file_size - position))

    def _bases(self) -> list[int]:
        names = self._disk.list_dir(self.root / "commitlog")
        odd = [name for name in names if not (len(name) == _BASE_DIGITS and name.isascii() and name.isdigit())]
        if odd:
            raise refused(f"{self.root / 'commitlog' / odd[0]}: not a name of a log file")
        bases = sorted(map(int, names))
        while bases and self._disk.size(self._file(bases[-1])) == 0:  # RocketMQ's own start deletes it
            bases.pop()
        return bases

    def _file(self, base: int) -> Path:
        return self.root / "commitlog" / f"{base:0{_BASE_DIGITS}}"

    def _is_used(self, base: int) -> bool:
        return any(self._disk.read_at(self._file(base), 0, SIZE_AND_MAGIC.size))

    def _end_of(self, base: int, file_size: int, below: int | None = None) -> tuple[int, int]:
        """Return the start of the last record with a valid frame, or -1, and its end. Contents are not checked here."""
        path, position, newest = self._file(base), 0, -1
        buffer, begins = b"", 0
        last = file_size if below is None else below - base
        while last - position >= SIZE_AND_MAGIC.size:
            if not begins <= position <= begins + len(buffer) - SIZE_AND_MAGIC.size:
                begins, buffer = position, self._disk.read_at(path, position, min(_CHUNK, file_size - position))
            size, magic = SIZE_AND_MAGIC.unpack_from(buffer, position - begins)
            if magic == MAGIC_BLANK:
                return newest, base + file_size
            if not RECORD_SIZE_MIN <= size <= file_size - position:
                break
            newest = base + position
            position += size
        return newest, base + position

    def _store_time(self, offset: int, file_size: int) -> int:
        try:
            return self._record_at(offset, file_size).store_timestamp
        except StartupError:
            return -1  # perhaps torn: then no record counts as older

    def _behind(self, start: int, end: int, file_size: int, newest_ms: int) -> int:
        """Return the end of the last record above `start` that has its own offset and is no older than the newest.

        Older ones were truncated by a start of RocketMQ, and remain in the file until they are overwritten.
        """
        behind = position = start
        while position < end:
            size = min(_CHUNK, file_size - position % file_size)
            buffer, following = self._read(position, size, file_size), position + size
            if position % file_size + size < file_size:
                following -= _PLACE.size  # a head that is split between two reads
            for found in _RECORD_MAGIC.finditer(buffer, 4):
                at = found.start() - 4
                if at + _PLACE.size > len(buffer) or position + at < behind:
                    continue
                length, *_, place = _PLACE.unpack_from(buffer, at)
                if place == position + at and self._is_record(place, file_size, newest_ms):
                    behind = place + length
            position = max(following, position + 1)
        return behind

    def _is_record(self, offset: int, file_size: int, newest_ms: int) -> bool:
        try:
            return self._record_at(offset, file_size).store_timestamp >= newest_ms
        except StartupError:
            return False

    # ---- the tables

    def tables(self, log: StoredLog) -> StockImage:
        """Return the tables as the broker would have sent them to a slave."""
        topics = self._table("topics", StockTopics)
        if topics is None:
            raise refused(f"{self.root / 'config' / 'topics.json'} is missing: the topics are unknown")
        version = DataVersion()
        tables = StockTables(
            topics=topics,
            groups=self._table("subscriptionGroup", StockGroups) or StockGroups({}, version),
            modes=self._table("messageRequestMode", StockModes) or StockModes({}),
            delays=self._table("delayOffset", StockDelays) or StockDelays({}),
            offsets=self._table("consumerOffset", StockOffsets) or StockOffsets({}),
        )
        try:
            return image_of(tables, log_begin=log.end, log_end=log.end, timers=self._timers(), elsewhere=[])
        except ProtocolError as error:
            raise refused(f"{self.root / 'config'}: {error.remark}") from error

    def _table(self, name: str, kind: type[_T]) -> _T | None:
        """Read a table, or its backup, as RocketMQ's own start does; None: neither exists."""
        path, reasons = self.root / "config" / f"{name}.json", list[str]()
        for one in (path, path.with_name(f"{path.name}.bak")):
            data = self._disk.read(one) if self._disk.exists(one) else b""
            if not data.strip():
                continue
            try:
                return loads_as(data, kind, NodeBudget(ANSWER_NODES))
            except ProtocolError as error:
                reasons.append(f"{one}: {error.remark}")
        if reasons:
            raise refused(f"a table can't be read: {'; '.join(reasons)}")
        return None

    def _timers(self) -> TimerCheckPoint | None:
        path = self.root / "config" / "timercheck"
        if not self._disk.exists(path):
            return None
        page = self._disk.read(path)
        if len(page) < _CHECK_POINT.size:
            raise refused(f"{path}: {len(page)} bytes are not a checkpoint of timers")
        read_ms, _, next_offset, _ = _CHECK_POINT.unpack_from(page)
        return TimerCheckPoint(read_ms, next_offset)


def refused(reason: str) -> StartupError:
    """Return the error of a refused import."""
    return StartupError(f"--import-from: {reason}", EXIT_CONFIG)
