"""Import of an Apache broker's directory into an empty one: `--import-from DIR`, before the broker's own start.

    <root>/import.json   {"source":…,"version":1}: an import is in progress; its last step removes it

marker → log, record by record as a slave takes it → tables and committed offsets → `ha/followed.json` → marker removed.
The result is the directory of that broker's slave. The start that follows is its promotion, which finds delayed, half
and popped messages (`promotion`).

Invariant: while the marker exists, no client was served, and the log is a part of the source's. An interrupted import
therefore resumes at the end of its log. The source is only read.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from broker.archiving.restore import refuse_occupied
from broker.config import BrokerConfig
from broker.ha.plain_slave import FollowedFile
from broker.ha.stock_master import MasterLife
from broker.importing.stored_broker import TABLES_LAG_MS, StoredBroker, StoredLog, refused
from broker.metadata.last_poll import LastPollFile
from broker.metadata.stock_tables import StockImage
from broker.store.errors import LogMismatch, StoreError, StoreFull
from broker.store.message_store import MessageStore
from infra.disk.filesystem import Disk
from infra.disk.versioned_file import VersionedFile
from infra.process.startup import EXIT_DISK, EXIT_FAILED, StartupError
from neve.record.codec import decode_record

log = logging.getLogger(__name__)

_NAME, _VERSION = "import.json", 1
_FLUSH_EVERY = 256 << 20


class ImportReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an import, or its preview.

    `cut`: bytes after the last valid record of a broker that was killed, up to the end of its writes.
    """

    source: str
    log_begin: int
    log_end: int
    cut: int
    topics: int
    groups: int
    was_killed: bool
    dry_run: bool = False


class Marker(msgspec.Struct):
    """The file `import.json`."""

    source: str
    version: int = 1


class ImportedTables(Protocol):
    """All tables that follow a master's."""

    def install_stock(self, image: StockImage) -> None:
        """Replace all tables."""


class Flush(Protocol):
    """Flusher of the log."""

    async def flush_now(self) -> None:
        """Make the whole log durable. Raise RuntimeError if that fails."""

    async def upkeep_now(self) -> None:
        """Write a due checkpoint, and prepare the next file."""


class TableSaver(Protocol):
    """Saver of the tables."""

    async def run(self) -> None:
        """Save all changed tables."""


class StoreImport:
    """One import, from the marker to its removal. Faults are raised as StartupError. Runs on the event loop."""

    def __init__(self, config: BrokerConfig, disk: Disk, source: Path) -> None:
        self._config, self._disk, self._source = config, disk, StoredBroker(disk, source)
        self._marker = _marker(config, disk)
        self._log: StoredLog | None = None
        self._tables: StockImage | None = None
        self._end = 0  # end of the valid part of the log

    # -- preview

    def look(self) -> ImportReport:
        """Return a preview of the import. Only the source is read, and nothing is written."""
        try:
            return self._look()
        except OSError as error:
            raise refused(f"{self._source.root} can't be read: {error}") from error

    def master(self) -> str:
        """Return the address of the broker, from the valid part of its log. Called after `look`."""
        assert self._log is not None, "looked at"
        return self._source.store_host(self._log)

    def _look(self) -> ImportReport:
        source, config = self._source, self._config
        source.check()
        self._log = found = source.log()
        self._end = found.end
        if found.behind > found.end:
            self._truncated_at(found.end, found, "valid records follow bytes that are not a record")
        if found.end == found.begin:
            raise refused(f"the log of {source.root} is empty")
        if found.file_size != config.mapped_file_size_commit_log:
            raise refused(f"its files have {found.file_size} bytes: set mappedFileSizeCommitLog={found.file_size}")
        self._tables = tables = source.tables(found)
        made = {config.broker_name: "brokerName", config.broker_cluster_name: "brokerClusterName"}
        for name, key in made.items():  # every broker creates a topic with each of these names
            if name not in tables.topics.topics:
                raise refused(f"{source.root} is of another broker than {key}={name}")
        return self._report(dry_run=True)

    def _report(self, *, dry_run: bool = False) -> ImportReport:
        found, tables = self._log, self._tables
        assert found is not None, "looked at"
        assert tables is not None, "looked at"
        return ImportReport(
            source=str(self._source.root),
            log_begin=found.begin,
            log_end=self._end,
            cut=found.behind - self._end,
            topics=len(tables.topics.topics),
            groups=len(tables.groups.groups),
            was_killed=self._source.was_killed,
            dry_run=dry_run,
        )

    # -- steps, in order

    def begin(self) -> None:
        """Begin or resume an import. Called before any file of the directory is opened."""
        self.look()
        marker = self._marker.read()
        if marker is None:
            refuse_occupied(self._config, self._disk, "--import-from")
            self._disk.make_dirs(self._config.root)
            self._marker.write(Marker(str(self._source.root)))
            return
        if marker.source != str(self._source.root):
            raise refused(f"{self._config.root} has a part of {marker.source}: resume that import, or empty it")
        log.warning("resuming the import of %s", marker.source)

    async def copy(self, store: MessageStore, flush: Flush) -> None:
        """Copy the log, from its end here. Every record is checked as if a master had sent it."""
        try:
            await self._copy(store, flush)
        except StoreFull as error:
            raise StartupError(f"{self._config.root}: {error}", EXIT_DISK) from error
        except (StoreError, OSError, RuntimeError) as error:
            raise StartupError(f"--import-from: {error}", EXIT_FAILED) from error

    async def _copy(self, store: MessageStore, flush: Flush) -> None:
        source, found = self._source, self._log
        assert found is not None, "begun"
        start = self._resume_offset(store, found)
        synced = start
        for piece in source.pieces(start, found):
            try:
                store.replica.append(piece.data, piece.offset)
            except LogMismatch as error:
                self._truncated_at(store.max_physical_offset, found, str(error))
                break
            if piece.offset - synced >= _FLUSH_EVERY:
                synced = piece.offset
                await flush.flush_now()
                await flush.upkeep_now()
                log.info("%d of %d MiB copied", (synced - found.begin) >> 20, (found.end - found.begin) >> 20)
        if source.grew_above(found):
            raise refused(f"{source.root} is written to: stop its broker, and start again")
        await flush.flush_now()
        await flush.upkeep_now()

    def _resume_offset(self, store: MessageStore, found: StoredLog) -> int:
        """Return where the copy resumes, after a check that the log so far is the source's."""
        end = store.max_physical_offset
        newest = store.reader.last_record(end) if end > 0 else None
        if newest is None:
            return found.begin
        offset, raw = newest
        if not found.begin <= offset < end <= found.end or self._source.raw_at(offset, len(raw), found) != raw:
            raise refused(
                f"the log in {self._config.root} is not that of {self._source.root}: empty the directory and retry"
            )
        return end

    def _truncated_at(self, end: int, found: StoredLog, why: str) -> None:
        """End the log of a killed broker before its first damage, if bytes there may not have been durable.

        RocketMQ's own start would truncate there in any case.
        """
        source = self._source
        damaged = f"the log of {source.root} is damaged at {end}: {why}"
        if not source.was_killed:
            raise refused(damaged)
        before_ms, synced_ms = source.time_before(end, found), source.synced_ms()
        if before_ms < synced_ms:
            raise refused(
                f"{damaged}. The kill of its broker does not explain it: records stored up to {synced_ms} were "
                f"synced, and the record before was stored at {before_ms}. A slave's file has the same bytes"
            )
        self._end = end
        log.warning("the broker was killed: %d bytes behind %d of its log are torn (%s)", found.behind - end, end, why)

    async def take_tables(
        self, store: MessageStore, tables: ImportedTables, last_poll: LastPollFile, save: TableSaver
    ) -> None:
        """Install the tables, after the log, which contains everything that they refer to."""
        image, newest = self._tables, store.reader.newest_record()
        assert image is not None, "begun"
        if newest is None:
            raise refused(f"{self._source.root} has no complete record")
        record, end = decode_record(newest), store.max_physical_offset
        image = msgspec.structs.replace(image, log_begin=end, log_end=end)
        tables.install_stock(image)
        last_poll.take_stored(record.store_host, image, above=self._above(record.store_timestamp, end))
        try:
            await save.run()
        except ExceptionGroup as group:
            raise StartupError(f"{self._config.root}: {group.exceptions[0]}", EXIT_DISK) from group

    def _above(self, newest_ms: int, end: int) -> int:
        """Return the offset above which deliveries may be missing from the tables."""
        found = self._log
        assert found is not None, "begun"
        for base, first in self._source.first_records(end, found):
            if first.store_timestamp <= newest_ms - TABLES_LAG_MS:
                return base
        return found.begin

    def finish(self, store: MessageStore) -> ImportReport:
        """Make the directory that of a slave whose master is gone."""
        config, disk = self._config, self._disk
        newest = store.reader.newest_record()
        assert newest is not None, "tables imported"
        life = MasterLife(
            config.broker_cluster_name,
            config.broker_name,
            boot_ms=decode_record(newest).store_timestamp,
            end_at_start=store.max_physical_offset,
        )
        followed = FollowedFile(disk, config.root)
        followed.load()
        followed.save(life)
        self._marker.remove()
        return self._report()


def refuse_unfinished_import(config: BrokerConfig, disk: Disk) -> None:
    """Raise StartupError for a start without `--import-from` on an unfinished import."""
    marker = _marker(config, disk).read()
    if marker is not None:
        raise StartupError(
            f"{config.root}: an import has not finished here; start again with --import-from {marker.source}"
        )


def _marker(config: BrokerConfig, disk: Disk) -> VersionedFile[Marker]:
    return VersionedFile(disk, config.root / _NAME, Marker, partial(StartupError, exit_code=EXIT_FAILED))
