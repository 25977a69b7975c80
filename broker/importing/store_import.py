"""An empty data directory filled from an Apache broker's: `--import-from DIR`, before the broker's own start.

    <root>/import.json   {"source":…,"version":1}: an import is under way; its last step removes it

marker → log, record by record as a slave takes it → tables and groups' offsets → `ha/followed.json` → marker removed.
What is then here is what a slave of that broker would have; the start that comes next is its promotion, which finds
what waits for its time, is half, or is popped (`promotion`).

Invariant: while the marker stands nothing was served, and the log is a part of the source's. So an import that was cut
short goes on from where its log ends. The source is only read.
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
from broker.ha.stock_master import Life
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


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an import brings, or brought.

    `cut`: bytes behind the last whole record of a broker that was killed, up to the end of what it wrote.
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


class Tables(Protocol):
    """All that follow a master's."""

    def install_stock(self, image: StockImage) -> None:
        """Take them in place of what is here."""


class Flush(Protocol):
    """How the log comes to the disk."""

    async def flush_now(self) -> None:
        """All that it has is there; RuntimeError where it can't be."""

    async def upkeep_now(self) -> None:
        """The checkpoint that is due is there, and the next file."""


class Save(Protocol):
    """How tables come to the disk."""

    async def run(self) -> None:
        """All that changed are there."""


class StoreImport:
    """One import, from the marker to its removal; what fails is raised as StartupError. On the loop."""

    def __init__(self, config: BrokerConfig, disk: Disk, source: Path) -> None:
        self._config, self._disk, self._source = config, disk, StoredBroker(disk, source)
        self._marker = _marker(config, disk)
        self._log: StoredLog | None = None
        self._tables: StockImage | None = None
        self._end = 0  # of what is whole

    # ---- what is there

    def look(self) -> Report:
        """What there is to import, read from the source alone; nothing is written anywhere."""
        try:
            return self._look()
        except OSError as error:
            raise refused(f"{self._source.root} can't be read: {error}") from error

    def master(self) -> str:
        """Where the broker listened, by what is whole of its log. It was looked at before."""
        assert self._log is not None, "looked at"
        return self._source.store_host(self._log)

    def _look(self) -> Report:
        source, config = self._source, self._config
        source.check()
        self._log = found = source.log()
        self._end = found.end
        if found.behind > found.end:
            self._cut_at(found.end, found, "what is no record has whole ones behind it")
        if found.end == found.begin:
            raise refused(f"the log of {source.root} is empty")
        if found.file_size != config.mapped_file_size_commit_log:
            raise refused(f"its files have {found.file_size} bytes: set mappedFileSizeCommitLog={found.file_size}")
        self._tables = tables = source.tables(found)
        made = {config.broker_name: "brokerName", config.broker_cluster_name: "brokerClusterName"}
        for name, key in made.items():  # every broker makes a topic of each
            if name not in tables.topics.topics:
                raise refused(f"{source.root} is of another broker than {key}={name}")
        return self._report(dry_run=True)

    def _report(self, *, dry_run: bool = False) -> Report:
        found, tables = self._log, self._tables
        assert found is not None, "looked at"
        assert tables is not None, "looked at"
        return Report(
            source=str(self._source.root),
            log_begin=found.begin,
            log_end=self._end,
            cut=found.behind - self._end,
            topics=len(tables.topics.topics),
            groups=len(tables.groups.groups),
            was_killed=self._source.was_killed,
            dry_run=dry_run,
        )

    # ---- the steps, in order

    def begin(self) -> None:
        """Before anything in the directory is opened."""
        self.look()
        begun = self._marker.read()
        if begun is None:
            refuse_occupied(self._config, self._disk, "--import-from")
            self._disk.make_dirs(self._config.root)
            self._marker.write(Marker(str(self._source.root)))
            return
        if begun.source != str(self._source.root):
            raise refused(f"{self._config.root} has a part of {begun.source}: go on with that, or empty it")
        log.warning("going on with the import of %s", begun.source)

    async def copy(self, store: MessageStore, flush: Flush) -> None:
        """The log, from where it ends here; every record is looked at as if a master had sent it."""
        try:
            await self._copy(store, flush)
        except StoreFull as error:
            raise StartupError(f"{self._config.root}: {error}", EXIT_DISK) from error
        except (StoreError, OSError, RuntimeError) as error:
            raise StartupError(f"--import-from: {error}", EXIT_FAILED) from error

    async def _copy(self, store: MessageStore, flush: Flush) -> None:
        source, found = self._source, self._log
        assert found is not None, "begun"
        start = self._goes_on_at(store, found)
        synced = start
        for piece in source.pieces(start, found):
            try:
                store.append_replica(piece.data, piece.offset)
            except LogMismatch as error:
                self._cut_at(store.max_physical_offset, found, str(error))
                break
            if piece.offset - synced >= _FLUSH_EVERY:
                synced = piece.offset
                await flush.flush_now()
                await flush.upkeep_now()
                log.info("%d of %d MiB are here", (synced - found.begin) >> 20, (found.end - found.begin) >> 20)
        if source.grew_above(found):
            raise refused(f"{source.root} is written to: stop its broker, and do it again")
        await flush.flush_now()
        await flush.upkeep_now()

    def _goes_on_at(self, store: MessageStore, found: StoredLog) -> int:
        """What is here of an import that was cut short is the source's."""
        end = store.max_physical_offset
        newest = store.last_record(end) if end > 0 else None
        if newest is None:
            return found.begin
        offset, raw = newest
        if not found.begin <= offset < end <= found.end or self._source.raw_at(offset, len(raw), found) != raw:
            raise refused(f"what {self._config.root} has is not of {self._source.root}: empty it, and do it again")
        return end

    def _cut_at(self, end: int, found: StoredLog, why: str) -> None:
        """The log of a killed broker ends before its first damage if what lies there need not have come to the disk.

        Its own start would cut there in any case.
        """
        source = self._source
        damaged = f"the log of {source.root} is damaged at {end}: {why}"
        if not source.was_killed:
            raise refused(damaged)
        before_ms, synced_ms = source.time_before(end, found), source.synced_ms()
        if before_ms < synced_ms:
            raise refused(
                f"{damaged}. That its broker was killed does not explain it: what was stored up to {synced_ms} had "
                f"come to the disk, and the record before was stored at {before_ms}. A slave's file has the same bytes"
            )
        self._end = end
        log.warning("the broker was killed: %d bytes behind %d of its log are torn (%s)", found.behind - end, end, why)

    async def take_tables(self, store: MessageStore, tables: Tables, last_poll: LastPollFile, save: Save) -> None:
        """Behind the log, which has all that they speak of."""
        image, newest = self._tables, store.newest_record()
        assert image is not None, "begun"
        if newest is None:
            raise refused(f"no record of {self._source.root} is whole")
        record, end = decode_record(newest), store.max_physical_offset
        image = msgspec.structs.replace(image, log_begin=end, log_end=end)
        tables.install_stock(image)
        last_poll.take_stored(record.store_host, image, above=self._above(record.store_timestamp, end))
        try:
            await save.run()
        except ExceptionGroup as group:
            raise StartupError(f"{self._config.root}: {group.exceptions[0]}", EXIT_DISK) from group

    def _above(self, newest_ms: int, end: int) -> int:
        """What no table says yet was brought on its way above this."""
        found = self._log
        assert found is not None, "begun"
        for base, first in self._source.first_records(end, found):
            if first.store_timestamp <= newest_ms - TABLES_LAG_MS:
                return base
        return found.begin

    def finish(self, store: MessageStore) -> Report:
        """From here on it is a slave's directory, whose master is gone."""
        config, disk = self._config, self._disk
        newest = store.newest_record()
        assert newest is not None, "its tables are here"
        life = Life(
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
    """A start without `--import-from` must not take half an import for a broker."""
    begun = _marker(config, disk).read()
    if begun is not None:
        raise StartupError(
            f"{config.root}: an import has not ended here; start again with --import-from {begun.source}"
        )


def _marker(config: BrokerConfig, disk: Disk) -> VersionedFile[Marker]:
    return VersionedFile(disk, config.root / _NAME, Marker, partial(StartupError, exit_code=EXIT_FAILED))
