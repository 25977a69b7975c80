"""The archive beside the broker: attached before the first send, its jobs in threads, its reads behind the hot ones.

Without `storeUrl` only local retention and TTL run. Nothing here is imported by the hot path.
"""

import asyncio
import functools
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from broker.archiving.loop_hot_store import LoopHotStore
from broker.archiving.restore import Restore
from broker.archiving.state_capture import capture_state
from broker.broker_context import BrokerContext
from broker.pop.pop_book import revive_log
from infra.bounded_thread import run_bounded
from infra.disk import Disk
from infra.object_store.open import open_store
from infra.object_store.protocol import BadStoreUrl, ObjectStore, ObjectStoreError
from infra.startup import EXIT_ARCHIVE, StartupError
from lifecycle.lifecycle import ArchiveLifecycle, LocalLifecycle
from lifecycle.retention import Policy
from lifecycle.safe_clock import ClockMark, SafeClock
from lifecycle.scheduler import JobScheduler
from lifecycle.state_keeper import StateKeeper
from neve.archive.journal import MalformedEntry, NewerFormat, Topic
from neve.archive.keys import NameTooLong
from neve.archive.state import StateTooLarge
from neve.errors import BrokerError
from neve.remoting import names
from neve.remoting.codes import ResponseCode
from tiered.journal.writer import ArchiveRefused, Attachment, Fenced, JournalWriter
from tiered.read.cold_reader import ColdReader
from tiered.worker.client import WorkerClient

log = logging.getLogger(__name__)

_TTL_SECONDS = 60.0
_UPLOAD_RATE_SECONDS = 5.0
_RETENTION_SECONDS = 10.0
_CLOCK_SECONDS = 10.0
_CHECKPOINT_SECONDS = 60.0
_SWEEP_SECONDS = 6 * 3600.0
# Jobs look at the end between two names; one that hangs in its store is left behind: what it began is begun again.
_STOP_SECONDS = 30.0


class ArchiveWiring:
    def __init__(self, context: BrokerContext, disk: Disk, *, cold_groups: int) -> None:
        """`cold_groups`: how many row groups of the archive the process may keep mapped."""
        self._context, self._disk, self._cold_groups = context, disk, cold_groups
        self._local = context.root / "archive"
        self.store: ObjectStore | None = None
        self.journal: JournalWriter | None = None
        self.lifecycle: LocalLifecycle | ArchiveLifecycle | None = None
        self._state: StateKeeper | None = None
        self.jobs = JobScheduler(context.clock)
        self._delete_hours = context.config.delete_hours
        self._uploader: WorkerClient | None = None
        self._reader_worker: WorkerClient | None = None
        self.reader: ColdReader | None = None
        self.safe_clock: SafeClock | None = None
        self._hanging: list[str] = []

    def policy(self) -> Policy:
        config, topics, store = self._context.config, self._context.topics, self._context.store
        internal = {*names.PINNED_TOPICS, revive_log(config.broker_cluster_name)}

        def ttl_hours(topic: str) -> int | None:
            found = topics.select(topic)
            if found is None:
                return None  # its TTL is not known: kept until somebody says more
            hours = int(found.attributes.get(names.RESERVE_TIME, -1))
            hours = config.default_ttl_hours if hours == -1 else hours
            return None if hours <= 0 else hours

        archiving = bool(config.store_url)
        crowded = config.disk_max_used_space_ratio / 100
        forced = config.disk_space_clean_forcibly_ratio / 100 if config.clean_file_forcibly_enable else math.inf
        return Policy(
            archive_min_bytes=config.archive_min_bytes,
            archive_max_age_ms=config.archive_max_age,
            reserved_ms=config.file_reserved_time * 3_600_000,
            delete_hours=None if archiving else self._delete_hours,
            disk_mark=crowded,
            force_mark=crowded if archiving else forced,
            grace_ms=config.expire_grace,
            upload_bytes_per_second=config.archive_upload_bytes_per_second,
            archived=lambda topic: archiving and not topics.is_system(topic),
            internal=internal.__contains__,
            gone_below=store.gone_below,
            ttl_hours=ttl_hours,
        )

    async def attach(self, restore: Restore | None = None) -> None:
        """Settle whose archive this is before the first send; raises StartupError with what to do."""
        attachment, context = None, self._context
        if context.config.store_url:
            attachment = await self._open(restore)
        newest = context.store.newest_store_time
        self.safe_clock = SafeClock(context.clock, ClockMark(context.root / "clock", self._disk), newest)
        context.trusted_ms = self.safe_clock.now_ms
        loop = asyncio.get_running_loop()
        starting = self._lifecycle(LoopHotStore(context, loop, starting=True))
        if isinstance(starting, ArchiveLifecycle):
            if restore is not None:
                await self._restore(restore, starting)
            elif attachment is not None:
                await self._go_on_above(attachment, starting)
        self.lifecycle = self._lifecycle(LoopHotStore(context, loop))

    async def _open(self, restore: Restore | None) -> Attachment | None:
        """The store and its journal, and all that stands on them; None where a restore takes the archive over."""
        config, context = self._context.config, self._context
        attachment: Attachment | None = None
        try:
            self.store = open_store(config.store_url)
            self.journal = JournalWriter(
                self.store,
                "",
                config.broker_name,
                context.store.log_uuid,
                local=self._local,
                disk=self._disk,
                clock=context.clock,
                cluster=config.broker_cluster_name,
                checkpoint_entries=config.journal_checkpoint_entries,
            )
            if restore is None:
                attachment = await asyncio.to_thread(self.journal.attach, context.store.max_physical_offset)
            else:
                await asyncio.to_thread(self.journal.attach_restoring, restore.claim, take_over=restore.takes_over)
        except (ArchiveRefused, BadStoreUrl, ObjectStoreError, NewerFormat, MalformedEntry, NameTooLong) as error:
            reason = str(error).removeprefix(f"{config.store_url}: ")
            raise StartupError(f"archive {config.store_url}: {reason}", EXIT_ARCHIVE) from error
        self._state = StateKeeper(self.journal, context.clock)
        self._uploader = WorkerClient(work_dir=self._work_dir())
        self.reader = self._cold_reader(self.journal)
        context.tiered.attach(self.reader)
        return attachment

    def _work_dir(self) -> Path:
        """Where objects are encoded: beside the log, for they may be as large as a segment. What a crash left goes."""
        work = self._local / "encode"
        self._disk.make_dirs(work)
        for name in self._disk.list_dir(work):
            for file in self._disk.list_dir(work / name):
                self._disk.remove(work / name / file)
            self._disk.remove_dir(work / name)
        return work

    def _cold_reader(self, journal: JournalWriter) -> ColdReader:
        config, context = self._context.config, self._context
        # A directory is a disk already: a second copy of it would gain nothing.
        cache_bytes = 0 if config.store_url.startswith("dir:") else config.cold_cache_disk_bytes
        cache_dir = context.root / "coldcache" if cache_bytes else None
        self._reader_worker = WorkerClient(cache_dir=cache_dir, cache_bytes=cache_bytes)
        return ColdReader(
            journal.catalog,
            self._reader_worker,
            config.store_url,
            config.cold_cache_bytes,
            mapped_max=self._cold_groups,
            fetch_budget=config.cold_fetch_bytes,
            is_current=lambda: journal.online,
            clock=context.clock,
        )

    def _lifecycle(self, hot: LoopHotStore) -> LocalLifecycle | ArchiveLifecycle:
        context, safe_clock = self._context, self.safe_clock
        assert safe_clock is not None
        if self.journal is None or self._uploader is None:
            return LocalLifecycle(hot, self.policy, context.clock, safe_clock)
        cluster = context.config.broker_cluster_name
        return ArchiveLifecycle(
            hot, self.journal, self._uploader, self.policy, context.clock, safe_clock, cluster=cluster
        )

    async def _go_on_above(self, attachment: Attachment, lifecycle: ArchiveLifecycle) -> None:
        """No offset that the archive ever named is given again, whatever the local log has lost."""
        store = self._context.store
        if attachment.resume_at is not None:
            await self._salvage(lifecycle, online=attachment.online)
            if store.max_physical_offset < attachment.resume_at:
                store.restart_log_at(attachment.resume_at)
        for (topic, queue), following in attachment.queue_next.items():
            if store.next_offset(topic, queue) < following:
                store.create_queue_at(topic, queue, following)
                # What lies below is in the archive or lost; read here, it would end in a hole.
                store.set_min_offset(topic, queue, store.max_offset(topic, queue))
        self._keep_minimums()

    def _keep_minimums(self) -> None:
        """What the archive has recorded as expired or deleted stays so, though an older copy of the log has it."""
        journal, store = self.journal, self._context.store
        assert journal is not None
        hidden = False
        for topic, queues in store.queues().items():
            recorded = {queue: journal.catalog.recorded_minimum(topic, queue) for queue in queues}
            hidden |= store.hide_below(
                topic, {queue: offset for queue, offset in recorded.items() if offset > store.min_offset(topic, queue)}
            )
        if hidden:
            store.save_queue_state()

    async def _restore(self, restore: Restore, lifecycle: ArchiveLifecycle) -> None:
        """The archive is ours now: fill the empty store from it."""
        journal = self.journal
        assert journal is not None
        try:
            await asyncio.to_thread(lifecycle.salvage.run)  # closes what the former owner left open
            plan = await asyncio.to_thread(restore.plan, journal)
            restore.apply(self._context, plan)
            await asyncio.to_thread(restore.record_gaps, journal, plan)
            # Where this log begins: a further restore must begin above it, though nothing was archived in between.
            assert self._state is not None
            state = capture_state(self._context)
            await asyncio.to_thread(self._state.run, lambda: state)
        except (ObjectStoreError, Fenced, NewerFormat, MalformedEntry, StateTooLarge) as error:
            raise StartupError(
                f"archive {self._context.config.store_url}: the restore stopped: {error}; "
                "the same command goes on with it",
                EXIT_ARCHIVE,
            ) from error
        restore.end()

    async def _salvage(self, lifecycle: ArchiveLifecycle, *, online: bool) -> None:
        """What the shortened log still holds goes into the archive first."""
        why = "it can't be reached"
        if online:
            try:
                reports = await asyncio.to_thread(lifecycle.salvage.run)
            except (ObjectStoreError, Fenced) as error:
                why = str(error)
            else:
                failed = [text for report in reports for text in report.failed.values()]
                if not failed:
                    return
                why = failed[0]
        raise StartupError(
            f"the local log ends below its archive {self._context.config.store_url}, which must take what is left "
            f"of it before the log goes on: {why}",
            EXIT_ARCHIVE,
        )

    def start_jobs(self) -> None:
        lifecycle = self.lifecycle
        assert lifecycle is not None
        assert self.safe_clock is not None
        if isinstance(lifecycle, ArchiveLifecycle):
            self.jobs.every("offload", self._context.config.archive_period / 1000, lifecycle.offload.run)
            self.jobs.every("upload-rate", _UPLOAD_RATE_SECONDS, lifecycle.upload_rate.adjust)
            assert self._state is not None
            hot = LoopHotStore(self._context, asyncio.get_running_loop())
            job = functools.partial(self._state.run, hot.state)
            self.jobs.every("state", self._context.config.state_period / 1000, job)
            self.jobs.every("checkpoint", _CHECKPOINT_SECONDS, lifecycle.checkpoint.run)
            self.jobs.every("sweep", _SWEEP_SECONDS, lifecycle.sweep.run)
        self.jobs.every("clock", _CLOCK_SECONDS, self.safe_clock.look)
        self.jobs.every("retention", _RETENTION_SECONDS, lifecycle.evict.run)
        self.jobs.every("ttl", _TTL_SECONDS, lifecycle.expire.run)
        self.jobs.start()

    async def write_last_state(self) -> None:
        """The broker has stopped giving out offsets: its bucket gets where it stands, unless the store is down."""
        if self._state is None or self.journal is None or not self.journal.online or self._hanging:
            return
        keeper, state = self._state, capture_state(self._context)
        try:
            await run_bounded(lambda: keeper.run_last(state), _STOP_SECONDS)
        except (ObjectStoreError, Fenced, StateTooLarge, NewerFormat, TimeoutError) as error:
            log.warning("the last state is not in the archive: %s", error)

    async def shutdown(self) -> None:
        """The name that is being made ends first; the loop stays free for what it asks of the store."""
        if self.lifecycle is not None:
            self.lifecycle.stop()
        self._hanging = await asyncio.to_thread(self.jobs.shutdown, _STOP_SECONDS)
        if self._hanging:
            log.error("jobs that hang are left behind, the next start goes on with them: %s", ", ".join(self._hanging))
        if self.reader is not None:
            self.reader.close()
        for worker in (self._uploader, self._reader_worker):
            if worker is not None:
                await asyncio.to_thread(worker.close)

    def has_named(self, topic: str) -> bool:
        """Whether the archive knows offsets of a topic. One that is switched off may: nobody can ask it."""
        if self.journal is not None:
            return self.journal.has_named(topic)
        return self._disk.exists(self._local)

    def begin_again(self, topic: str) -> bool:
        """Whether a topic that comes again may give its offsets again; the caller deletes it in the same step."""
        return self.journal.begin_again(topic) if self.journal is not None else not self.has_named(topic)

    async def bury(self, topic: str, minimums: Mapping[int, int]) -> None:
        """The archive hides what a deleted topic has below these offsets too: it must not come back."""
        if self.journal is None:
            return
        try:
            await asyncio.to_thread(self.journal.append, Topic(topic=topic, deleted=True, minimums=dict(minimums)))
        except (ObjectStoreError, Fenced) as error:
            raise BrokerError(
                ResponseCode.SYSTEM_BUSY, f"topic {topic} can't be deleted now: the archive can't record it: {error}"
            ) from error

    def status(self) -> dict[str, Any]:
        """Asks the store through the loop: call it in a thread."""
        return self.lifecycle.status() if self.lifecycle is not None else {"archive": "off"}
