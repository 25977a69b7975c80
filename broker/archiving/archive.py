"""The archive beside the broker: attached before the first send, its jobs in threads, its reads behind the hot ones.

Without `storeUrl` only local retention and TTL run. Nothing here is imported by the hot path.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Collection
from typing import Any

from broker.archiving.attach import Attached, attach
from broker.archiving.attachment import Attachment, Event, State
from broker.archiving.followed import FollowedMaster
from broker.archiving.going_on import go_on_above
from broker.archiving.local_side import LocalSide
from broker.archiving.overtaken import Overtaken
from broker.archiving.restore import Restore
from broker.archiving.tombstone import JournalTombstones, NoTombstones, Tombstones
from broker.ha.stock_reach import UNKNOWN, Look
from infra.objects.store import ObjectStoreError
from lifecycle.lifecycle import ArchiveLifecycle, LocalLifecycle
from lifecycle.safe_clock import SafeClock
from lifecycle.scheduler import JobScheduler
from neve.archive.format.broker_state import StateTooLarge
from neve.archive.format.journal import MalformedEntry, NewerFormat
from tiered.journal.errors import ArchiveRefused, Fenced
from tiered.journal.writer import ResumePoint
from tiered.worker.client import WorkerClient

log = logging.getLogger(__name__)

_FIRST_AS_MASTER = "checkpoint"  # a job that takes the EPOCH, and has little else to do
_SETTLE_AGAIN_S, _SETTLE_AGAIN_MAX_S = 0.2, 5.0
_TTL_SECONDS = 60.0
_UPLOAD_RATE_SECONDS = 5.0
_RETENTION_SECONDS = 10.0
_ERASED_SECONDS = 10.0  # `retention` follows the journal as often
_CLOCK_SECONDS = 10.0
_CHECKPOINT_SECONDS = 60.0
_SHORTEN_SECONDS = 3600.0
_FORGET_SECONDS = 3600.0
_SWEEP_SECONDS = 6 * 3600.0
# Jobs look at the end between two names; one that hangs in its store is left behind: what it began is begun again.
_STOP_SECONDS = 30.0


class NotSettled(Exception):
    """The archive lacks what this log alone has, and can't get it now."""


class WithoutArchive:
    """Only what concerns the broker's own disk; it is the same on a master and on a slave."""

    journal = None
    reader = None
    unsettled = ""

    def __init__(self, local: LocalSide) -> None:
        """Once the log is recovered."""
        self._local = local
        self._attachment = Attachment(archived=False)
        self.policy, self.capture = local.policy, local.capture
        self.safe_clock = local.safe_clock()
        self.lifecycle = LocalLifecycle(
            local.hot_store(),
            local.policy,
            local.clock,
            self.safe_clock,
            local.outside.threads,
            is_member=local.broker_set is not None,
        )
        self.tombstones: Tombstones = NoTombstones(local.disk, local.archive_files)
        self.jobs = JobScheduler(local.clock, local.outside.threads)

    @property
    def state(self) -> State:
        return self._attachment.state

    @property
    def log_uuid(self) -> str:
        return ""

    @property
    def eviction_frontier(self) -> int:
        """Where a new member's log begins: what this one no longer has nobody gets."""
        return self._local.store.min_physical_offset

    def is_same_log(self, log_uuid: str) -> None:
        """A master's, by which an archive knows it."""

    def was_same_log(self, log_uuid: str) -> None:
        """The same, of an earlier life."""

    def follow(self) -> None:
        """This member of a broker set is no master."""

    def lead(self, master_epoch: int) -> None:
        """This member is the master."""

    async def settle(self) -> bool:
        """It may lack what an archive names."""
        return True

    may_go_on_above = False

    def go_on(self) -> dict[str, dict[int, int]]:
        """Its log takes its own records."""
        return {}

    # ---- of the copy of an Apache master's log

    overtaken = None
    safe_below = UNKNOWN

    async def master_began_at(self, offset: int) -> None:
        """What it had above is not its any more."""

    def master_attached(self, boot_ms: int, end_at_start: int, flush_takes_s: float | None) -> None:
        """It is followed."""

    def master_looked_at(self, look: Look) -> None:
        """It says how safe its log is."""

    # ---- jobs

    def start_jobs(self) -> None:
        """The broker serves."""
        _plan_local_jobs(self.jobs, self.lifecycle, self.safe_clock, self._local.config.delete_hours)
        self.jobs.start()

    async def write_last_state(self) -> None:
        """There is no bucket to write it to."""

    async def shutdown(self) -> None:
        """The loop stays free for what jobs ask of the store."""
        self._attachment.happens(Event.STOP)
        self.lifecycle.stop()
        await _end_jobs(self.jobs, self._local)
        self._attachment.happens(Event.ENDED)

    def status(self) -> dict[str, Any]:
        """Asks the store through the loop: call it in a thread."""
        return self.lifecycle.status()


class Archive:
    """A broker's archive, settled."""

    def __init__(self, local: LocalSide, attachment: Attachment, attached: Attached) -> None:
        self._local, self._attachment, self._attached = local, attachment, attached
        self.policy, self.capture = local.policy, local.capture
        self.journal, self.reader = attached.journal, attached.reader
        self.safe_clock, self.lifecycle = attached.safe_clock, attached.lifecycle
        self.tombstones: Tombstones = JournalTombstones(
            attached.journal,
            local.outside.threads.in_line("tombstone"),
            is_member=local.broker_set is not None,
        )
        self.jobs = JobScheduler(local.clock, local.outside.threads)
        self._hanging: list[str] = []
        self.unsettled = ""  # why `settle` waits
        self._go_on_from: ResumePoint | None = None

    @property
    def state(self) -> State:
        return self._attachment.state

    @property
    def uploader(self) -> WorkerClient:
        """Who encodes and uploads."""
        return self._attached.uploader

    # ---- role, in a broker set; on the loop

    @property
    def log_uuid(self) -> str:
        """By which the archive knows this log, and those of the other members."""
        return self.journal.log_uuid

    @property
    def eviction_frontier(self) -> int:
        """Below it the log was needed for nothing, as of the last look at what may be evicted."""
        return max(self.lifecycle.evict.frontier, self._local.store.min_physical_offset)

    def is_same_log(self, log_uuid: str) -> None:
        """This member follows a master, whose log the archive knows by this."""
        self.journal.log_name.set_by_master(log_uuid)

    def was_same_log(self, log_uuid: str) -> None:
        """It was told so in an earlier life, and may have looked at no journal since."""
        self.journal.log_name.set_by_earlier_process(log_uuid)

    def follow(self) -> None:
        """This member is no master from here on: what is under way may end in the store, nothing more is begun."""
        self.journal.become_slave()

    def lead(self, master_epoch: int) -> None:
        """This member is the master, and has appended nothing yet. Its EPOCH is taken as soon as the store answers."""
        self._go_on_from = None
        self._local.reach.lead()
        self.journal.become_master(master_epoch, self._local.store.max_physical_offset)
        if _FIRST_AS_MASTER in self.jobs.names():
            self.jobs.run_now(_FIRST_AS_MASTER)

    async def settle(self) -> bool:
        """Of a new master that may lack what the archive names, before its log takes anything of its own.

        The journal's end is read, and what this log holds of what the archive misses goes there. Whatever is in the
        way, it is tried again: a master that gave up would neither lead nor make way. False: this reign is over.
        """
        reign, pause = self.journal.master_epoch, _SETTLE_AGAIN_S
        try:
            while reign is not None and self.journal.master_epoch == reign:
                try:
                    go_on = await self._local.outside.in_thread(self._settle)
                except Fenced:
                    return False
                except Exception as error:  # noqa: BLE001 - nobody else would try again
                    self._tell_unsettled(error)
                    pause = min(2 * pause, _SETTLE_AGAIN_MAX_S)
                else:
                    if go_on is not None and self.journal.master_epoch == reign:
                        self._go_on_from = go_on
                        return True
                    pause = _SETTLE_AGAIN_S
                await asyncio.sleep(pause)
            return False
        finally:
            if self.journal.master_epoch in {reign, None}:  # else another reign's are told
                self.unsettled = ""

    def _tell_unsettled(self, error: Exception) -> None:
        text = str(error) or repr(error)
        if text != self.unsettled:
            self.unsettled = text
            expected = isinstance(error, NotSettled | ObjectStoreError | ArchiveRefused | NewerFormat | MalformedEntry)
            log.error("nothing is appended until the archive is settled: %s", text, exc_info=not expected)

    def _settle(self) -> ResumePoint | None:
        """None: the set does not have yet what this member had at its promotion, or the broker stops."""
        go_on = self.journal.resume_above()
        if go_on.resume_at is None:
            return go_on
        if not self.lifecycle.is_settled():
            return None  # rounds would tell what is lost before they see all that is there
        failed = [text for report in self.lifecycle.salvage.run() for text in report.failed.values()]
        if failed:
            raise NotSettled(f"what it misses of this log can't go there: {failed[0]}")
        if self.state is State.STOPPING:
            return None  # rounds leave open what they have not begun
        return self.journal.resume_above()

    @property
    def may_go_on_above(self) -> bool:
        """Whether this member had to `settle`, so that `go_on` compares its log with the archive."""
        return self._go_on_from is not None

    def go_on(self) -> dict[str, dict[int, int]]:
        """After `settle`: the log takes its own records, above all that the archive names.

        Returns where queues go on above their last record.
        """
        if self._go_on_from is None:
            return {}
        return go_on_above(self._local.store, self._go_on_from, self.journal.catalog)

    # ---- of the copy of an Apache master's log; on the loop

    @property
    def overtaken(self) -> Overtaken | None:
        """Why nothing is archived any more: the log went on below what the archive has of it."""
        return None if self._local.followed is None else self._local.followed.overtaken

    @property
    def safe_below(self) -> int:
        """How far the log may be archived by what its master says; UNKNOWN, also where there is none."""
        return UNKNOWN if self._local.followed is None else self._local.followed.safe_below

    async def master_began_at(self, offset: int) -> None:
        """What it had above is not its any more."""
        why = f"the master lost its log above {offset}"
        await self._followed.log_ends_at(offset, why, self.journal, self._local.outside.in_thread)

    def master_attached(self, boot_ms: int, end_at_start: int, flush_takes_s: float | None) -> None:
        """All of the log is of this life of the master."""
        if flush_takes_s is None:
            log.error("the master's configuration does not say how often it flushes its log: nothing is archived")
        self._followed.attached(boot_ms, end_at_start, flush_takes_s)

    def master_looked_at(self, look: Look) -> None:
        """Of that life: how safe its log is."""
        self._followed.heard(look)

    @property
    def _followed(self) -> FollowedMaster:
        assert self._local.followed is not None
        return self._local.followed

    # ---- jobs

    def start_jobs(self) -> None:
        """The broker serves."""
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
        """A slave leaves it to its master; a master that a later one has deposed tells its set."""
        broker_set = self._local.broker_set
        if broker_set is None and self._local.followed is None:
            return work
        ask = self._local.outside.ask_loop()

        def run() -> object:
            if not self.journal.leads:
                return None
            try:
                return work()
            except Fenced:
                if self.journal.fenced:
                    if broker_set is not None:
                        ask.call(broker_set.deposed)
                    raise
                return None  # it is a slave by now

        return run

    def state_job(self) -> functools.partial[bool]:
        """Writes the broker's state into its bucket; made on the loop, run in a thread."""
        capture = functools.partial(self.capture.from_thread, self._local.outside.ask_loop())
        return functools.partial(self._attached.keeper.run, capture)

    async def write_last_state(self) -> None:
        """The broker has stopped giving out offsets: its bucket gets where it stands, unless the store is down."""
        if not self.journal.online or self._hanging:
            return
        state = self.capture.at_once()
        try:
            await self._local.outside.bounded(lambda: self._attached.keeper.run_last(state), _STOP_SECONDS)
        except (ObjectStoreError, Fenced, StateTooLarge, NewerFormat, TimeoutError) as error:
            log.warning("the last state is not in the archive: %s", error)

    async def shutdown(self) -> None:
        """The name that is being made ends first; the loop stays free for what it asks of the store."""
        self._attachment.happens(Event.STOP)
        self.lifecycle.stop()
        self._hanging = await _end_jobs(self.jobs, self._local)
        await self._attached.close(self._local.outside.in_thread)
        self._attachment.happens(Event.ENDED)

    def status(self) -> dict[str, Any]:
        """Asks the store through the loop: call it in a thread."""
        return self.lifecycle.status()


AnyArchive = WithoutArchive | Archive


async def open_archive(
    local: LocalSide, restore: Restore | None, *, cold_groups: int, promote: Callable[[], None] | None = None
) -> AnyArchive:
    """Once the log is recovered, before the first send; arguments as `attach`. StartupError with what to do."""
    if not local.config.store_url:
        if promote is not None:
            promote()
        return WithoutArchive(local)
    attachment = Attachment(archived=True)
    attached = await attach(local, attachment, restore, cold_groups=cold_groups, promote=promote)
    return Archive(local, attachment, attached)


def _plan_local_jobs(
    jobs: JobScheduler,
    lifecycle: LocalLifecycle | ArchiveLifecycle,
    clock: SafeClock,
    delete_hours: Collection[int] = (),
) -> None:
    jobs.every("clock", _CLOCK_SECONDS, clock.look)
    jobs.every("retention", _RETENTION_SECONDS, lifecycle.evict.run, at_hours=delete_hours)
    jobs.every("ttl", _TTL_SECONDS, lifecycle.expire.run)


async def _end_jobs(jobs: JobScheduler, local: LocalSide) -> list[str]:
    """Those that hang."""
    hanging = await local.outside.in_thread(jobs.shutdown, _STOP_SECONDS)
    if hanging:
        log.error("jobs that hang are left behind, the next start goes on with them: %s", ", ".join(hanging))
    return hanging
