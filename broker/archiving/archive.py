"""Archive of a broker: attached before the first send, jobs in threads, cold reads apart from hot ones.

Without `storeUrl`, only local retention and TTL run. The hot path imports nothing of this module.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Collection
from typing import Any

from broker.archiving.archivable_limit import Divergence, FollowedMaster
from broker.archiving.attach import AttachedArchive, Attachment, Event, State, attach
from broker.archiving.deletion import JournalTombstones, NoTombstones, Tombstones
from broker.archiving.local_side import LocalSide
from broker.archiving.log_resume import resume_log_above
from broker.archiving.restore import Restore
from broker.ha.stock_archivable_limit import UNKNOWN, Observation
from infra.objects.store import ObjectStoreError
from lifecycle.lifecycle import ArchiveLifecycle
from lifecycle.retention_jobs import RetentionJobs
from lifecycle.safe_clock import SafeClock
from lifecycle.scheduler import JobScheduler
from neve.archive.format.broker_state import StateTooLarge
from neve.archive.format.journal import MalformedEntry, NewerFormat
from tiered.journal.errors import ArchiveRefused, Fenced
from tiered.journal.ownership import ResumePoint
from tiered.worker.client import WorkerClient

log = logging.getLogger(__name__)

_FIRST_AS_MASTER = "checkpoint"  # a short job that records the EPOCH of a new master
_SETTLE_AGAIN_S, _SETTLE_AGAIN_MAX_S = 0.2, 5.0
_TTL_SECONDS = 60.0
_UPLOAD_RATE_SECONDS = 5.0
_RETENTION_SECONDS = 10.0
_ERASED_SECONDS = 10.0  # as often as `retention` follows the journal
_CLOCK_SECONDS = 10.0
_CHECKPOINT_SECONDS = 60.0
_SHORTEN_SECONDS = 3600.0
_FORGET_SECONDS = 3600.0
_SWEEP_SECONDS = 6 * 3600.0
# A stopping job ends after its current object. A job that hangs in its store is abandoned; the next start resumes it.
_STOP_SECONDS = 30.0


class NotSettled(Exception):
    """The archive lacks messages that only this log has, and they can't be uploaded now."""


class WithoutArchive:
    """Local retention and TTL of a broker without `storeUrl`; the same on a master and on a slave."""

    journal = None
    reader = None
    unsettled = ""

    def __init__(self, local: LocalSide) -> None:
        """Create the jobs; the log has to be recovered."""
        self._local = local
        self._attachment = Attachment(archived=False)
        self.policy, self.capture = local.policy, local.capture
        self.safe_clock = local.safe_clock()
        self.lifecycle = RetentionJobs(
            local.hot_store(),
            local.policy,
            local.clock,
            self.safe_clock,
            local.environment.threads,
            is_member=local.broker_set is not None,
        )
        self.tombstones: Tombstones = NoTombstones(local.disk, local.archive_files)
        self.jobs = JobScheduler(local.clock, local.environment.threads)

    @property
    def state(self) -> State:
        return self._attachment.state

    @property
    def log_uuid(self) -> str:
        return ""

    @property
    def eviction_frontier(self) -> int:
        """First physical offset that a new member can copy from this one."""
        return self._local.store.min_physical_offset

    def is_same_log(self, log_uuid: str) -> None:
        """Ignore the archive's id of the master's log: there is no archive."""

    def was_same_log(self, log_uuid: str) -> None:
        """Ignore the id that an earlier process received from its master."""

    def follow(self) -> None:
        """Do nothing on becoming a slave."""

    def lead(self, master_epoch: int) -> None:
        """Do nothing on becoming the master."""

    async def settle(self) -> bool:
        """Return True: there is no archive whose offsets this log could lack."""
        return True

    async def resume_log(self) -> dict[str, dict[int, int]]:
        """Return no queues: none has to resume above its last record."""
        return {}

    # ---- copy of an Apache master's log

    divergence = None
    safe_below = UNKNOWN

    async def master_began_at(self, offset: int) -> None:
        """Ignore that the master lost its log above `offset`."""

    def master_attached(self, boot_ms: int, end_at_start: int, flush_takes_s: float | None) -> None:
        """Ignore that the slave follows a master."""

    def master_observed(self, observation: Observation) -> None:
        """Ignore the master's report of how far its log is durable."""

    # ---- jobs

    def start_jobs(self) -> None:
        """Start the jobs; the broker serves requests."""
        _plan_local_jobs(self.jobs, self.lifecycle, self.safe_clock, self._local.config.delete_hours)
        self.jobs.start()

    async def write_last_state(self) -> None:
        """Do nothing: there is no bucket."""

    async def shutdown(self) -> None:
        """End the jobs. The event loop must run, because jobs call the store on it."""
        self._attachment.happens(Event.STOP)
        self.lifecycle.stop()
        await _end_jobs(self.jobs, self._local)
        self._attachment.happens(Event.ENDED)

    def status(self) -> dict[str, Any]:
        """Return the status. Blocks on calls to the event loop, so call it in a thread."""
        return self.lifecycle.status()


class BrokerArchive:
    """Attached archive of a broker."""

    def __init__(self, local: LocalSide, attachment: Attachment, attached: AttachedArchive) -> None:
        self._local, self._attachment, self._attached = local, attachment, attached
        self.policy, self.capture = local.policy, local.capture
        self.journal, self.reader = attached.journal, attached.reader
        self.safe_clock, self.lifecycle = attached.safe_clock, attached.lifecycle
        self.tombstones: Tombstones = JournalTombstones(
            attached.journal,
            local.environment.threads.in_line("tombstone"),
            is_member=local.broker_set is not None,
        )
        self.jobs = JobScheduler(local.clock, local.environment.threads)
        self._hanging: list[str] = []
        self.unsettled = ""  # why `settle` has not succeeded yet
        self._resume_point: ResumePoint | None = None

    @property
    def state(self) -> State:
        return self._attachment.state

    @property
    def uploader(self) -> WorkerClient:
        """Worker process that encodes and uploads."""
        return self._attached.uploader

    # ---- role in a broker set; on the event loop

    @property
    def log_uuid(self) -> str:
        """Id under which the archive stores this log; all members of a set share it."""
        return self.journal.log_uuid

    @property
    def eviction_frontier(self) -> int:
        """Physical offset below which nothing needed the log, by the last run of the eviction job."""
        return max(self.lifecycle.evict.frontier, self._local.store.min_physical_offset)

    def is_same_log(self, log_uuid: str) -> None:
        """Adopt the id under which the archive stores the log of the followed master."""
        self.journal.log_name.set_by_master(log_uuid)

    def was_same_log(self, log_uuid: str) -> None:
        """Adopt the id that an earlier process received from its master; the journal may not have been read since."""
        self.journal.log_name.set_by_earlier_process(log_uuid)

    def follow(self) -> None:
        """Become a slave: writes in progress may end in the store, no further ones begin."""
        self.journal.ownership.become_slave()

    def lead(self, master_epoch: int) -> None:
        """Become the master, before the first append. The EPOCH is written as soon as the store is reachable."""
        self._resume_point = None
        self._local.limit.lead()
        self.journal.ownership.become_master(master_epoch, self._local.store.max_physical_offset)
        if _FIRST_AS_MASTER in self.jobs.names():
            self.jobs.run_now(_FIRST_AS_MASTER)

    async def settle(self) -> bool:
        """Settle the archive of a new master that may lack offsets named there, before its log appends records.

        Read the journal's end and upload the messages that the archive lacks and this log has. All errors are retried
        with backoff: a master that stopped here would neither lead nor make room for another. Return False if the
        leadership term has ended.
        """
        term, pause = self.journal.ownership.master_epoch, _SETTLE_AGAIN_S
        try:
            while term is not None and self.journal.ownership.master_epoch == term:
                try:
                    resume_point = await self._local.environment.in_thread(self._settle)
                except Fenced:
                    return False
                except Exception as error:  # noqa: BLE001 - no other task would retry
                    self._log_unsettled(error)
                    pause = min(2 * pause, _SETTLE_AGAIN_MAX_S)
                else:
                    if resume_point is not None and self.journal.ownership.master_epoch == term:
                        self._resume_point = resume_point
                        return True
                    pause = _SETTLE_AGAIN_S
                await asyncio.sleep(pause)
            return False
        finally:
            if self.journal.ownership.master_epoch in {term, None}:  # else the text belongs to a later term
                self.unsettled = ""

    def _log_unsettled(self, error: Exception) -> None:
        text = str(error) or repr(error)
        if text != self.unsettled:
            self.unsettled = text
            expected = isinstance(error, NotSettled | ObjectStoreError | ArchiveRefused | NewerFormat | MalformedEntry)
            log.error("appends wait until the archive is settled: %s", text, exc_info=not expected)

    def _settle(self) -> ResumePoint | None:
        """Return where the log resumes.

        None if the set does not have all that this member had at its promotion, or if the broker stops.
        """
        resume_point = self.journal.ownership.resume_above()
        if resume_point.resume_at is None:
            return resume_point
        if not self.lifecycle.is_settled():
            return None  # rounds would record messages as lost that readers can't see yet
        failed = [text for report in self.lifecycle.salvage.run() for text in report.failed.values()]
        if failed:
            raise NotSettled(f"messages that the archive lacks can't be uploaded: {failed[0]}")
        if self.state is State.STOPPING:
            return None  # a stopped round leaves messages that are not uploaded
        return self.journal.ownership.resume_above()

    async def resume_log(self) -> dict[str, dict[int, int]]:
        """Make the log resume above all offsets that the archive names, after `settle` and before the first append.

        Return the next offsets of queues that resume above their last record, by topic and queue; none without a
        `settle`.
        """
        if self._resume_point is None:
            return {}
        return await resume_log_above(
            self._local.store, self._resume_point, self.journal.catalog, self._local.environment
        )

    # ---- copy of an Apache master's log; on the event loop

    @property
    def divergence(self) -> Divergence | None:
        """Mark that stops archiving for good, because the log resumed below archived offsets; None without one."""
        return None if self._local.followed is None else self._local.followed.divergence

    @property
    def safe_below(self) -> int:
        """Physical offset below which the log is durable at the followed master; UNKNOWN if there is no report."""
        return UNKNOWN if self._local.followed is None else self._local.followed.safe_below

    async def master_began_at(self, offset: int) -> None:
        """Handle that the master lost its log above `offset`: what this broker has above it is no longer the log."""
        why = f"the master lost its log above {offset}"
        await self._followed.log_ends_at(offset, why, self.journal, self._local.environment.in_thread)

    def master_attached(self, boot_ms: int, end_at_start: int, flush_takes_s: float | None) -> None:
        """Note the master's process that the slave follows; `boot_ms`, its start time, identifies it."""
        if flush_takes_s is None:
            log.error("nothing is archived: the master's configuration has no flush interval")
        self._followed.attached(boot_ms, end_at_start, flush_takes_s)

    def master_observed(self, observation: Observation) -> None:
        """Process a report of the followed master on how far its log is durable."""
        self._followed.observe(observation)

    @property
    def _followed(self) -> FollowedMaster:
        assert self._local.followed is not None
        return self._local.followed

    # ---- jobs

    def start_jobs(self) -> None:
        """Start the jobs; the broker serves requests."""
        config, lifecycle, jobs = self._local.config, self.lifecycle, self.jobs
        jobs.every("offload", config.archive_period / 1000, self._as_master(lifecycle.offload.run))
        jobs.every("upload-rate", _UPLOAD_RATE_SECONDS, lifecycle.throttle.adjust)
        jobs.every("state", config.state_period / 1000, self._as_master(self.state_job()))
        jobs.every("compaction", config.archive_compaction_period / 1000, self._as_master(lifecycle.compact.run))
        jobs.every("erasure", config.archive_compaction_period / 1000, self._as_master(lifecycle.erase.run))
        jobs.every("delta", config.archive_delta_period / 1000, self._as_master(lifecycle.delta.run))
        jobs.every("checkpoint", _CHECKPOINT_SECONDS, self._as_master(lifecycle.checkpoint.run))
        jobs.every("journal", _SHORTEN_SECONDS, self._as_master(lifecycle.shorten.run))
        jobs.every("names", _FORGET_SECONDS, self._as_master(lifecycle.forget.run))
        jobs.every("sweep", _SWEEP_SECONDS, self._as_master(lifecycle.sweep.run))
        jobs.every("erased", _ERASED_SECONDS, lifecycle.hot_erasure.run)
        _plan_local_jobs(jobs, lifecycle, self.safe_clock)
        jobs.start()

    def _as_master(self, work: Callable[[], object]) -> Callable[[], object]:
        """Wrap a job so that it runs on the master only.

        If the archive has the EPOCH of a later master, the broker set is notified.
        """
        broker_set = self._local.broker_set
        if broker_set is None and self._local.followed is None:
            return work
        ask = self._local.environment.ask_loop()

        def run() -> object:
            if not self.journal.ownership.leads:
                return None
            try:
                return work()
            except Fenced:
                if self.journal.ownership.fenced:
                    if broker_set is not None:
                        ask.call(broker_set.deposed)
                    raise
                return None  # this broker is a slave now

        return run

    def state_job(self) -> functools.partial[bool]:
        """Return the job that writes the broker's state to the bucket. Call on the loop, run the job in a thread."""
        capture = functools.partial(self.capture.from_thread, self._local.environment.ask_loop())
        return functools.partial(self._attached.keeper.run, capture)

    async def write_last_state(self) -> None:
        """Write the final state to the bucket, unless the store is unreachable. Offset assignment has ended."""
        if not self.journal.ownership.online or self._hanging:
            return
        state = self.capture.at_once()
        try:
            await self._local.environment.bounded(lambda: self._attached.keeper.run_last(state), _STOP_SECONDS)
        except (ObjectStoreError, Fenced, StateTooLarge, NewerFormat, TimeoutError) as error:
            log.warning("the last state is not in the archive: %s", error)

    async def shutdown(self) -> None:
        """End the jobs after their current object. The event loop must run, because jobs call the store on it."""
        self._attachment.happens(Event.STOP)
        self.lifecycle.stop()
        self._hanging = await _end_jobs(self.jobs, self._local)
        await self._attached.close(self._local.environment.in_thread)
        self._attachment.happens(Event.ENDED)

    def status(self) -> dict[str, Any]:
        """Return the status. Blocks on calls to the event loop, so call it in a thread."""
        return self.lifecycle.status()


AnyArchive = WithoutArchive | BrokerArchive


async def open_archive(
    local: LocalSide, restore: Restore | None, *, cold_groups: int, promote: Callable[[], None] | None = None
) -> AnyArchive:
    """Open the archive after the log's recovery, before the first send; for the arguments see `attach`.

    Raises StartupError with instructions for the operator.
    """
    if not local.config.store_url:
        if promote is not None:
            promote()
        return WithoutArchive(local)
    attachment = Attachment(archived=True)
    attached = await attach(local, attachment, restore, cold_groups=cold_groups, promote=promote)
    return BrokerArchive(local, attachment, attached)


def _plan_local_jobs(
    jobs: JobScheduler,
    lifecycle: RetentionJobs | ArchiveLifecycle,
    clock: SafeClock,
    delete_hours: Collection[int] = (),
) -> None:
    jobs.every("clock", _CLOCK_SECONDS, clock.look)
    jobs.every("retention", _RETENTION_SECONDS, lifecycle.evict.run, at_hours=delete_hours)
    jobs.every("ttl", _TTL_SECONDS, lifecycle.expire.run)


async def _end_jobs(jobs: JobScheduler, local: LocalSide) -> list[str]:
    """End the jobs and return the names of those that hang."""
    hanging = await local.environment.in_thread(jobs.shutdown, _STOP_SECONDS)
    if hanging:
        log.error("jobs that hang are abandoned, the next start resumes them: %s", ", ".join(hanging))
    return hanging
