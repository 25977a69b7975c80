"""Attachment of a broker's archive: verify that it belongs to this log and where both resume, before the first send.

Each obstacle ends the start with a StartupError that instructs the operator. The states of an attachment:

    OFF         no storeUrl: nothing is archived; only local retention and the TTL run
    DETACHED    a storeUrl is set; the store has not been accessed
    ATTACHING   the owner of the archive and the offset where the local log resumes are being determined
    RESTORING   the archive is taken over and an empty data directory restored from it
    ATTACHED    the broker may assign offsets, jobs may run. Whether the store is reachable and whether another broker
                took the archive over later is the journal's state (`tiered/journal/state`)
    REFUSED     the start fails; the error message names the remedy
    STOPPING    jobs begin no further step
    STOPPED     the worker processes have ended

`TRANSITIONS` alone decides the transitions. A pair that it maps to None is a programming error: the caller raised
events out of order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from broker.archiving.archivable_limit import ANOTHER_ARCHIVE, FollowedMaster
from broker.archiving.environment import InThread
from broker.archiving.hot_store import LoopHotStore
from broker.archiving.local_side import LocalSide
from broker.archiving.log_resume import restarted_topics, resume_log_above
from broker.archiving.restore import Restore
from infra.disk.filesystem import Disk
from infra.objects.store import BadStoreUrl, ObjectStoreError
from infra.process.startup import EXIT_ARCHIVE, StartupError
from infra.state_table import next_state, row
from lifecycle.lifecycle import ArchiveLifecycle, SharedLog
from lifecycle.safe_clock import SafeClock
from lifecycle.state_keeper import StateKeeper
from neve.archive.format.broker_state import StateTooLarge
from neve.archive.format.journal import CommittedObject, MalformedEntry, NewerFormat
from neve.archive.format.keys import NameTooLong
from tiered.journal.errors import ArchiveRefused, Fenced
from tiered.journal.log_name import Proof
from tiered.journal.ownership import WAY_OUT, ResumePoint
from tiered.journal.writer import JournalWriter
from tiered.read.cold_reader import ColdReader
from tiered.worker.client import WorkerClient
from tiered.write.own_range import is_archive_of
from tiered.write.round_names import LIMITS

_NAMED_MOST = 5  # topics named in one error message
_WAY_OUT_OF_A_SLAVE = "bring that data directory back, or give storeUrl a prefix of this slave's own"


class State(Enum):
    """State of an attachment; the module's docstring explains each."""

    OFF = auto()
    DETACHED = auto()
    ATTACHING = auto()
    RESTORING = auto()
    ATTACHED = auto()
    REFUSED = auto()
    STOPPING = auto()
    STOPPED = auto()


class Event(Enum):
    """Event of an attachment."""

    ATTACH = auto()
    RESTORE = auto()
    SETTLED = auto()
    REFUSED = auto()
    STOP = auto()
    ENDED = auto()


TRANSITIONS: Mapping[State, Mapping[Event, State | None]] = {
    State.OFF: row(Event, stop=State.STOPPING),
    State.DETACHED: row(Event, attach=State.ATTACHING, restore=State.RESTORING, stop=State.STOPPING),
    State.ATTACHING: row(Event, settled=State.ATTACHED, refused=State.REFUSED, stop=State.STOPPING),
    State.RESTORING: row(Event, settled=State.ATTACHED, refused=State.REFUSED, stop=State.STOPPING),
    State.ATTACHED: row(Event, stop=State.STOPPING),
    State.REFUSED: row(Event, stop=State.STOPPING),
    State.STOPPING: row(Event, ended=State.STOPPED),
    State.STOPPED: row(Event),
}


class Attachment:
    """Current state of a broker's archive attachment."""

    def __init__(self, *, archived: bool) -> None:
        self.state = State.DETACHED if archived else State.OFF

    def happens(self, event: Event) -> None:
        """Change the state by an event."""
        self.state = next_state(TRANSITIONS, self.state, event, owner="an archive")


@dataclass(frozen=True, slots=True)
class AttachedArchive:
    """Attached archive of a broker, with its workers and jobs."""

    journal: JournalWriter
    keeper: StateKeeper
    uploader: WorkerClient
    fetcher: WorkerClient
    reader: ColdReader
    safe_clock: SafeClock
    lifecycle: ArchiveLifecycle

    async def close(self, in_thread: InThread) -> None:
        """Close the reader and stop the worker processes."""
        self.reader.close()
        for worker in (self.uploader, self.fetcher):
            await in_thread(worker.close)


async def attach(
    local: LocalSide,
    attachment: Attachment,
    restore: Restore | None,
    *,
    cold_groups: int,
    promote: Callable[[], None] | None,
) -> AttachedArchive:
    """Attach the archive; a member of a broker set follows it until it is promoted.

    `cold_groups` limits the descriptors of row groups in memory. `promote` turns the copy of an Apache master's log
    into this broker's own; it is called when no archive state forbids it. Raises StartupError.
    """
    if restore is not None and local.broker_set is not None:
        raise StartupError(
            "--restore-from makes a single broker: restore it first, then add members to it", EXIT_ARCHIVE
        )
    if restore is not None and local.followed is not None:
        raise StartupError("--restore-from with brokerRole=SLAVE: the log is the copy of its master's", EXIT_ARCHIVE)
    if local.followed is not None:
        local.followed.load()
    elif (divergence := local.divergence_file.load()) is not None and local.store.max_physical_offset > divergence.at:
        raise StartupError(f"archive {local.config.store_url}: {divergence.text}", EXIT_ARCHIVE)
    attachment.happens(Event.ATTACH if restore is None else Event.RESTORE)
    try:
        attached = await _settle(local, restore, cold_groups, promote)
    except StartupError:
        attachment.happens(Event.REFUSED)
        raise
    attachment.happens(Event.SETTLED)
    return attached


async def _settle(
    local: LocalSide, restore: Restore | None, cold_groups: int, promote: Callable[[], None] | None
) -> AttachedArchive:
    config, in_thread = local.config, local.environment.in_thread
    resume_point: ResumePoint | None = None
    with _refusing(config.store_url):
        store = local.environment.open_store(config.store_url)
        journal = JournalWriter(
            store,
            "",
            config.broker_name,
            local.store.log_uuid,
            local=local.archive_files,
            disk=local.disk,
            clock=local.clock,
            cluster=config.broker_cluster_name,
            checkpoint_entries=config.journal_checkpoint_entries,
            proof=None if local.broker_set is None else _proof(local),
            way_out=WAY_OUT if local.followed is None else _WAY_OUT_OF_A_SLAVE,
        )
        if local.broker_set is not None:
            await in_thread(journal.ownership.attach_following)
        elif local.followed is not None:
            await _attach_following_apache(local, local.followed, journal)
        elif restore is None:
            resume_point = await in_thread(journal.ownership.attach, local.store.max_physical_offset)
        else:
            take_over = restore.takes_over
            await in_thread(lambda: journal.ownership.attach_restoring(restore.claim, take_over=take_over))
    safe_clock = local.safe_clock()
    uploader = local.environment.make_worker(
        work_dir=_work_dir(local.disk, local.archive_files),
        uploads=config.archive_uploads,
        priority=config.archive_worker_priority,
    )
    fetcher = _fetcher(local)
    reader = _cold_reader(local, journal, fetcher, cold_groups)
    hot = local.hot_store()
    lifecycle = ArchiveLifecycle(
        hot,
        journal,
        uploader,
        local.policy,
        local.clock,
        safe_clock,
        cluster=config.broker_cluster_name,
        threads=local.environment.threads,
        shared=_shared_log(local, hot, journal),
        forget=functools.partial(_forget, reader, fetcher, config.store_url),
        limits=LIMITS._replace(names=8 * config.archive_uploads, bytes=config.archive_upload_bytes),
    )
    keeper = StateKeeper(journal, local.clock)
    attached = AttachedArchive(journal, keeper, uploader, fetcher, reader, safe_clock, lifecycle)
    try:
        if restore is not None:
            await _fill(local, restore, attached)
        elif resume_point is not None:
            await _resume_log_above(local, resume_point, journal, lifecycle, promote)
        else:
            await in_thread(lifecycle.hot_erasure.run)  # hide rows erased by the journal's local copy before any read
    except BaseException:
        await attached.close(in_thread)
        raise
    return attached


async def _attach_following_apache(local: LocalSide, followed: FollowedMaster, journal: JournalWriter) -> None:
    """Attach the archive of the copy of an Apache master's log.

    The copy resumes where its master's log does. It can't resume above the offsets that the archive names. If the
    archive reaches higher, archiving stops.
    """
    if followed.divergence is not None:
        await local.environment.in_thread(journal.ownership.attach_following, followed.divergence.text)
        return
    end = local.store.max_physical_offset
    await local.environment.in_thread(lambda: journal.ownership.attach(end, is_copy=True))
    await followed.log_ends_at(end, f"the log ended at {end} at a start", journal, local.environment.in_thread)


def _shared_log(local: LocalSide, hot: LoopHotStore, journal: JournalWriter) -> SharedLog | None:
    """Return the log as other brokers hold it; None if this broker alone has it."""
    if local.followed is not None:
        return SharedLog(lambda: hot.flush() >= journal.ownership.reaches, local.followed.settled_below)
    return None if local.broker_set is None else SharedLog(hot.is_settled)


def _proof(local: LocalSide) -> Proof:
    """Return a proof that the archive holds a member's log, though under another log id."""
    hot, read_at = local.hot_store(), local.disk.read_at
    return lambda catalog: is_archive_of(catalog, hot, read_at)


@contextlib.contextmanager
def _refusing(url: str) -> Iterator[None]:
    try:
        yield
    except (ArchiveRefused, BadStoreUrl, ObjectStoreError, NewerFormat, MalformedEntry, NameTooLong) as error:
        reason = str(error).removeprefix(f"{url}: ")
        raise StartupError(f"archive {url}: {reason}", EXIT_ARCHIVE) from error


def _work_dir(disk: Disk, archive_files: Path) -> Path:
    """Create the directory for encoding and remove the files of a crash.

    It is beside the log, because an object may be as large as a segment.
    """
    work = archive_files / "encode"
    disk.make_dirs(work)
    for name in disk.list_dir(work):
        for file in disk.list_dir(work / name):
            disk.remove(work / name / file)
        disk.remove_dir(work / name)
    return work


def _fetcher(local: LocalSide) -> WorkerClient:
    config = local.config
    # A directory store is on a disk already, so a disk cache would gain nothing.
    cache_bytes = 0 if config.store_url.startswith("dir:") else config.cold_cache_disk_bytes
    cache_dir = local.root / "coldcache" if cache_bytes else None
    priority = config.cold_read_priority
    return local.environment.make_worker(cache_dir=cache_dir, cache_bytes=cache_bytes, priority=priority)


def _forget(reader: ColdReader, fetcher: WorkerClient, store_url: str, names: Sequence[CommittedObject]) -> None:
    """Remove objects from the disk cache first, then from memory, which is filled from there. Raises WorkerFailed."""
    try:
        fetcher.forget(store_url, names)
    finally:
        reader.forget(names)


def _cold_reader(local: LocalSide, journal: JournalWriter, fetcher: WorkerClient, cold_groups: int) -> ColdReader:
    config = local.config
    return ColdReader(
        journal.catalog,
        fetcher,
        config.store_url,
        config.cold_cache_bytes,
        mapped_max=cold_groups,
        fetch_budget=config.cold_fetch_bytes,
        is_current=lambda: journal.ownership.online,
        clock=local.clock,
    )


# ---- a log that resumes


async def _resume_log_above(
    local: LocalSide,
    resume_point: ResumePoint,
    journal: JournalWriter,
    lifecycle: ArchiveLifecycle,
    promote: Callable[[], None] | None,
) -> None:
    if promote is not None:
        _refuse_restarted_topics(local, resume_point, journal)
    if resume_point.resume_at is not None:
        await _salvage(local, lifecycle, online=resume_point.online)
    if promote is not None:
        promote()
    await resume_log_above(local.store, resume_point, journal.catalog, local.environment)


def _refuse_restarted_topics(local: LocalSide, resume_point: ResumePoint, journal: JournalWriter) -> None:
    again = restarted_topics(local.store, resume_point.queue_next, journal.catalog)
    if again:
        more = ", …" if len(again) > _NAMED_MOST else ""
        raise StartupError(
            f"archive {local.config.store_url}: {', '.join(again[:_NAMED_MOST])}{more} ({len(again)} in all) began "
            "again at offset 0 at the former master, and the archive has earlier messages under these offsets: a "
            f"master would hide the new ones. Begin another archive first: {ANOTHER_ARCHIVE}",
            EXIT_ARCHIVE,
        )


async def _salvage(local: LocalSide, lifecycle: ArchiveLifecycle, *, online: bool) -> None:
    """Upload what the shortened log still holds. Raises StartupError if that fails."""
    why = "it can't be reached"
    if online:
        try:
            reports = await local.environment.in_thread(lifecycle.salvage.run)
        except (ObjectStoreError, Fenced) as error:
            why = str(error)
        else:
            failed = [text for report in reports for text in report.failed.values()]
            if not failed:
                return
            why = failed[0]
    raise StartupError(
        f"the local log ends below its archive {local.config.store_url}, which must get the remaining messages "
        f"before the log resumes: {why}",
        EXIT_ARCHIVE,
    )


# ---- restore into an empty log


async def _fill(local: LocalSide, restore: Restore, attached: AttachedArchive) -> None:
    """Restore the empty store from the archive, which this broker owns now."""
    journal, in_thread = attached.journal, local.environment.in_thread
    try:
        await in_thread(attached.lifecycle.salvage.run)  # closes the intents that the former owner left open
        plan = await in_thread(restore.plan, journal)
        restore.apply(local.store, local.tables, plan)
        await in_thread(restore.record_gaps, journal, plan)
        # State of the new log's start: a later restore must begin above it, even if nothing was archived in between.
        state = local.capture.at_once()
        await in_thread(attached.keeper.run, lambda: state)
    except (ObjectStoreError, Fenced, NewerFormat, MalformedEntry, StateTooLarge) as error:
        raise StartupError(
            f"archive {local.config.store_url}: the restore stopped: {error}; the same command resumes it",
            EXIT_ARCHIVE,
        ) from error
    restore.end()
