"""Assembly of the jobs of a broker with an archive; `retention_jobs` has those of every broker.

Only one step of one job runs at a time (`turns`), so that each step finds the journal, the log and the bucket as the
step before left them. Each job first checks that this broker owns the archive. A job that finds the archive fenced or
unreachable raises, and evicts or deletes nothing. The scheduler counts and logs the failure and runs the job again at
its next time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from infra.clock import Clock
from infra.loop.threads import SYSTEM_THREADS, Threads
from lifecycle.checkpoint import WriteCheckpoint
from lifecycle.compact import CompactObjects
from lifecycle.delta_tables import DeltaTables
from lifecycle.due import Due, ages_ms
from lifecycle.erase import WITH_ITS_OBJECT, EraseKey, Eraser
from lifecycle.evict import no_limit
from lifecycle.forget import ForgetNames
from lifecycle.hot_erasure import HotErasure
from lifecycle.hot_store import HotStore
from lifecycle.offload import Offload
from lifecycle.retention import Pending, RetentionPolicy
from lifecycle.retention_jobs import RetentionJobs, common_status
from lifecycle.rounds import OffloadRounds
from lifecycle.safe_clock import SafeClock
from lifecycle.salvage import Salvage
from lifecycle.shorten import ShortenJournal
from lifecycle.sweep import Sweep
from lifecycle.throttle import UploadThrottle
from neve.archive.format.journal import CommittedObject
from neve.archive.read.verify import VerifyReport, verify
from tiered.journal.writer import JournalWriter
from tiered.write.offload import OffloadRound
from tiered.write.round_names import LIMITS, Limits
from tiered.write.uploader import Uploader


class SharedLog(NamedTuple):
    """A log that other brokers hold as well.

    `is_settled` returns whether a round may archive records and close ranges without records: in a broker set, whether
    the set has all that its master had at its promotion. `described_below` is of the copy of an Apache master's log: it
    returns the CommitLog offset up to which the archive describes the log.
    """

    is_settled: Callable[[], bool]
    described_below: Callable[[], int] | None = None


class Encoder(Uploader, Eraser, Protocol):
    """The worker that writes objects, as the jobs use it."""


class ArchiveLifecycle:
    """The jobs of a broker with an archive: those of every broker, and those of the archive."""

    def __init__(  # noqa: PLR0917
        self,
        hot: HotStore,
        journal: JournalWriter,
        worker: Encoder,
        policy: Callable[[], RetentionPolicy],
        clock: Clock,
        safe_clock: SafeClock,
        *,
        cluster: str = "DefaultCluster",
        threads: Threads = SYSTEM_THREADS,
        shared: SharedLog | None = None,
        forget: Callable[[Sequence[CommittedObject]], None] | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        """`shared`: the log as other brokers hold it; None: this broker alone has it. `forget`: see `RetentionJobs`."""
        self._journal, self._worker, self._clock, self.safe_clock = journal, worker, clock, safe_clock
        self._counted_gaps = (-1, 0)  # the journal's next entry at the count, and the count
        settled = None if shared is None else shared.is_settled
        described_below = None if shared is None else shared.described_below
        is_member, is_copy = shared is not None, described_below is not None
        #: Whether a round may archive records and close ranges without records.
        self.is_settled = settled or _always
        retention = self._retention = RetentionJobs(
            hot,
            policy,
            clock,
            safe_clock,
            threads,
            is_member=is_member,
            journal=journal,
            described_below=described_below,
            forget=forget,
        )
        self.evict, self.expire = retention.evict, retention.expire
        self.unexpire, self.trim = retention.unexpire, retention.trim
        turns = self.turns = retention.turns
        self._round = OffloadRound(
            journal, hot, worker, clock, turns, lambda: turns.closed, cluster=cluster, limits=limits
        )
        self._due = Due(hot, journal.catalog, policy, clock, self._round.set_aside, is_copy=is_copy)
        self.throttle = UploadThrottle(worker, hot, policy, clock, turns, lambda: self._due.oldest_ms)
        self._rounds = OffloadRounds(self._round, self._due, self.throttle, turns, clock, threads, settled)
        self.offload = Offload(hot, journal, self._rounds, self.evict, turns)
        self.salvage = Salvage(self._rounds)
        self.compact = CompactObjects(journal, worker, policy, clock, safe_clock, turns, threads, cluster=cluster)
        self.delta = DeltaTables(
            journal, policy, clock, lambda: safe_clock.now_ms(journal.store), is_closed=lambda: turns.closed
        )
        self.hot_erasure = HotErasure(
            hot, journal, policy, turns, described_below=described_below or no_limit, is_copy=is_copy
        )
        self.erase = EraseKey(
            hot, journal, worker, policy, clock, retention, self.offload, self.hot_erasure, threads, cluster=cluster,
            is_member=is_member,
        )  # fmt: skip
        self.checkpoint = WriteCheckpoint(journal, turns)
        self.forget = ForgetNames(hot, journal, policy, safe_clock, turns, is_alone=not is_member and not is_copy)
        self.shorten = ShortenJournal(journal, policy, safe_clock, turns)
        self.sweep = Sweep(journal, worker, safe_clock, turns)

    def stop(self) -> None:
        """Start no further step. An upload in progress continues without a rate limit."""
        self.turns.close()
        self.throttle.adjust()
        self.compact.stop()

    def set_aside(self) -> dict[str, str]:
        """Return the topics that no job can read, each with the reason."""
        return {**self._retention.set_aside(), **self._round.set_aside.reasons()}

    def backlog(self, pause: Callable[[], None] = lambda: None) -> dict[str, Pending]:
        """Return the unarchived records of each topic that has any. `pause`: called between two topics."""
        return self._due.pending(pause)

    def ages_ms(self, backlog: Mapping[str, Pending]) -> dict[str, int]:
        """Return the age of each topic's oldest unarchived message in milliseconds."""
        return ages_ms(backlog, self._clock.now_ms())

    def verify(self, deep: bool = False) -> VerifyReport:
        """Compare the journal with the objects: one HEAD each, with `deep` a full read. Does not wait for a turn."""
        return verify(self._journal.catalog, self._journal.store, deep=deep)

    def _lost_ranges(self) -> int:
        """Return the number of gaps that no erasure made; the count is renewed when the journal has grown."""
        catalog = self._journal.catalog
        counted, lost = self._counted_gaps
        if counted != (seq := catalog.next_seq):
            lost = sum(not (gap.is_erased or gap.reason == WITH_ITS_OBJECT) for gap in catalog.gaps())
            self._counted_gaps = seq, lost
        return lost

    def status(self, backlog: Mapping[str, Pending] | None = None) -> dict[str, Any]:
        """Return the figures for metrics and the admin page, for a recent backlog. Reads only the local log."""
        journal, worker = self._journal, self._worker
        backlog = self.backlog() if backlog is None else backlog
        return {
            "archive": _state_of(journal),
            "epoch": journal.ownership.epoch,
            "journal_entries": journal.catalog.next_seq,
            "objects": journal.catalog.object_count,
            "gaps": self._lost_ranges(),
            "open_names": sum(map(len, journal.catalog.rounds.open_intents().values())),
            "orphans": self.sweep.orphan_count,
            "compacted_objects": self.compact.replaced,
            "compacted_bytes": self.compact.replaced_bytes,
            "compactions": self.compact.made,
            "compactions_failed": self.compact.failed,
            "not_compacted": self.compact.set_aside.reasons(),
            "delta_commits": self.delta.commits,
            "delta_entries_behind": self.delta.behind(journal.catalog.next_seq),
            "no_delta_table": self.delta.set_aside.reasons(),
            "backlog_bytes": sum(what.bytes for what in backlog.values()),
            "backlog_age_ms": max(self.ages_ms(backlog).values(), default=0),
            "last_round": self._rounds.last,
            "upload_bytes_per_second": self.throttle.bytes_per_second,
            "upload_waited_ms": int(worker.upload_waited * 1000),
            "worker_starved_ms": int(worker.starved * 1000),
            "rows": worker.written.rows,
            "rows_with_wire": worker.written.wire,
            "rows_damaged": worker.written.damaged,
            "store_requests": dict(journal.store.requests),
            **common_status(self.evict, self.expire.deleted, self.safe_clock, self.set_aside()),
        }


def _always() -> bool:
    return True


def _state_of(journal: JournalWriter) -> str:
    if journal.ownership.fenced:
        return "fenced"
    if not journal.ownership.leads:
        return "following"
    return "online" if journal.ownership.online else "unreachable"
