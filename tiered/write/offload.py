"""One offload round: plan → INTENT → encode, verify, upload → COMMIT.

Several names are in progress at a time (`round_names` tracks them). Uploaded objects are collected for a COMMIT. The
log is read and the journal is written in a turn; other jobs have theirs during the uploads.

A crash at any point leaves an open intent or an orphan object. The next round completes the intent under the same
names, or closes it if the local log no longer has what it names. An object becomes visible only by its COMMIT.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from infra import failpoint
from infra.clock import Clock
from infra.objects.store import ObjectStoreError
from neve.archive.format.journal import Abort, AnyEntry, Commit, CommittedObject, Gap, Intent, PlannedObject
from tiered.journal.errors import NotMaster
from tiered.journal.named_topics import StalePlan
from tiered.journal.writer import JournalWriter
from tiered.write.entry_run import EntryRun, PartOfRun
from tiered.write.offload_plan import FoundEntries, HotLog, KeyParts, TopicRange, TopicUnreadable, plan_topic
from tiered.write.progress import Progress, report_event
from tiered.write.round_names import LIMITS, Limits, RoundNames
from tiered.write.set_aside import SetAside
from tiered.write.uploader import (
    SMALL_BYTES,
    ContentConflict,
    EncodeFailed,
    GivenUp,
    NamedEntries,
    Outcome,
    Uploader,
    Uploads,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RoundReport:
    """Outcome of a round's names: published, failed with a reason, or closed without an object."""

    round: int
    committed: list[CommittedObject] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # key -> reason
    aborted: list[str] = field(default_factory=list)
    gaps: int = 0


class OffloadRound:
    """Runs rounds. Each step takes a turn of its own, so that a long round does not block other jobs."""

    def __init__(  # noqa: PLR0917
        self,
        journal: JournalWriter,
        hot: HotLog,
        worker: Uploader,
        clock: Clock,
        turn: AbstractContextManager[None],
        stopping: Callable[[], bool] = lambda: False,
        *,
        cluster: str = "DefaultCluster",
        limits: Limits = LIMITS,
    ) -> None:
        self._limits = limits
        self._journal, self._hot, self._worker, self._clock = journal, hot, worker, clock
        self._turn, self._stopping = turn, stopping
        self._cluster = cluster
        self._master_epoch: int | None = None  # the term in which the log was read for the journal's entries
        self.set_aside = SetAside("archived")

    def begin(self) -> None:
        """Note the leadership term before the log is read. Raises NotMaster if this broker is not the master."""
        self._master_epoch = self._journal.ownership.master_epoch
        if self._master_epoch is None:
            raise NotMaster(f"archive of {self._journal.broker}: rounds are the master's")

    def _append(self, entry: AnyEntry, plan: int | None = None) -> None:
        """Append in the noted term only: a member that was a slave in between may have had another log before."""
        self._journal.append(entry, plan=plan, master_epoch=self._master_epoch)

    def resume(self, progress: Progress | None = None) -> list[RoundReport]:
        """Complete or close open rounds, of this process or an earlier one."""
        reports = []
        for number, names in self._journal.catalog.rounds.open_intents().items():
            reports.append(self._complete(number, names, progress))
        return reports

    def run(self, topics: Iterable[TopicRange], progress: Progress | None = None) -> RoundReport | None:
        """Run one round for the ranges; None if they have no entry."""
        with self._turn:
            planned = self._begin(list(topics), progress)
        if planned is None:
            return None
        number, names, gaps = planned
        report = self._complete(number, names, progress)
        report.gaps += gaps
        return report

    def _begin(
        self, topics: Sequence[TopicRange], progress: Progress | None
    ) -> tuple[int, list[PlannedObject], int] | None:
        """Write the INTENT. Returns the round's number, its names and the number of gaps."""
        plan = self._journal.named.mark()
        key_parts = KeyParts(self._journal.prefix, self._journal.broker, self._journal.ownership.epoch)
        names: list[PlannedObject] = []
        gaps: list[Gap] = []
        for wanted, found in zip(topics, self._hot.entries_of(topics, timed=True), strict=True):
            try:
                if isinstance(found, TopicUnreadable):
                    raise found
                more_names, more_gaps = plan_topic(self._hot, self._journal.catalog, wanted, found, key_parts)
            except TopicUnreadable as error:
                self.set_aside.note(wanted.topic, error)
                continue
            names += more_names
            gaps += more_gaps
        if not names:
            return None
        if any(name.key in self._journal.aborted for name in names):
            # A name is written at most once, so a closed one is not tried again; a new epoch yields new names.
            self._journal.ownership.renew_epoch()
            return self._begin(topics, progress)
        for gap in gaps:
            log.error("topic %s queue %d: offsets %d-%d are lost: %s", *_gap_fields(gap))
            self._append(gap)
        number = self._journal.catalog.rounds.last_round + 1
        failpoint.hit("offload.before_intent")
        try:
            self._append(Intent(round=number, names=names), plan)
        except StalePlan:
            return self._begin(topics, progress)
        failpoint.hit("offload.after_intent")
        report_event(progress, event="intent", round=number, objects=len(names))
        return number, names, len(gaps)

    def _complete(self, number: int, names: Sequence[PlannedObject], progress: Progress | None) -> RoundReport:
        report, of_round = RoundReport(number), RoundNames(names, self._limits)
        metadata = {"cluster": self._cluster, "broker": self._journal.broker, "round": str(number)}
        uploads = self._worker.uploads(self._journal.store.url, metadata)
        try:
            self._upload_all(of_round, uploads, report, progress)
        except Exception:
            uploads.give_up()
            while uploads.done():  # a name must not be in progress twice when the next round resumes it
                pass
            raise
        for name, reason in of_round.lost:
            with self._turn:
                try:
                    self._abort(number, name, reason, report)
                except TopicUnreadable as error:
                    of_round.failed(name)
                    self._fail(name, error, report)
                else:
                    of_round.closed(name)
        return report

    def _upload_all(self, names: RoundNames, uploads: Uploads, report: RoundReport, progress: Progress | None) -> None:
        given_up = False
        entries = self._hot.entries_of([TopicRange(name.topic, name.start, name.end) for name in names.all])
        while True:
            if self._stopping():
                if not given_up:
                    uploads.give_up()  # the rest stays open: the next round, or process, completes it
                    given_up = True
            else:
                with self._turn:
                    self._begin_uploads(names, entries, uploads, report)
            ended = uploads.done()
            with self._turn:
                for name, outcome in ended:
                    self._take(name, outcome, names, report, progress)
                ready = names.to_commit(self._clock.monotonic(), at_end=not names.is_under_way)
                self._commit(ready, names, report, progress)
            if not names.is_under_way and (self._stopping() or not names.is_left):
                return

    def _begin_uploads(
        self,
        names: RoundNames,
        entries: Iterator[FoundEntries | TopicUnreadable],
        uploads: Uploads,
        report: RoundReport,
    ) -> None:
        """Begin as many uploads as allowed: one request for a large name, a shared one for small names.

        `entries`: the entries of each name, in order.
        """
        small: list[NamedEntries] = []
        while (name := names.next()) is not None:
            read = self._read(name, next(entries), names, report)
            if read is None:
                continue
            names.started(name, read.wire_bytes)
            if read.wire_bytes > SMALL_BYTES:
                self._begin_request([read], uploads)
            else:
                small.append(read)
            if len(small) >= self._limits.group:
                self._begin_request(small, uploads)
                small = []
        if small:
            self._begin_request(small, uploads)

    def _begin_request(self, objects: Sequence[NamedEntries], uploads: Uploads) -> None:
        start, end = min(one.name.start for one in objects), max(one.name.end for one in objects)
        files = [
            (path, base, size)
            for path, base, size in self._hot.files(start, end)
            if any(one.name.start < base + size and base < one.name.end for one in objects)
        ]
        uploads.begin(objects, files)

    def _read(
        self, name: PlannedObject, found: FoundEntries | TopicUnreadable, names: RoundNames, report: RoundReport
    ) -> NamedEntries | None:
        """Return a name with its entries; None if it failed and stays open, or if the log lost its entries."""
        if isinstance(found, TopicUnreadable):
            names.failed(name)
            self._fail(name, found, report)
            return None
        entries = _cut(name, found.runs)
        if _bounds(entries) != name.queues:
            names.is_lost(name, "the local log does not hold what the intent named")
            return None
        return NamedEntries(name, entries)

    def _take(
        self, name: PlannedObject, outcome: Outcome, names: RoundNames, report: RoundReport, progress: Progress | None
    ) -> None:
        """Record the outcome of an upload. Raises if the store is unavailable."""
        if isinstance(outcome, CommittedObject):
            written = {queue: (first, last) for queue, (first, last, _) in outcome.queues.items()}
            if outcome.key == name.key and written == name.queues:
                failpoint.hit("offload.after_upload")
                names.uploaded(outcome, self._clock.monotonic())
                self.set_aside.clear(name.topic)
                report_event(progress, event="uploaded", key=name.key, rows=outcome.rows, bytes=outcome.size)
                return
            outcome = EncodeFailed(f"{name.key}: the object holds {written}, the intent named {name.queues}")
        if isinstance(outcome, GivenUp):
            names.given_up(name)
        elif isinstance(outcome, ContentConflict):
            names.is_lost(name, str(outcome))
        elif isinstance(outcome, ObjectStoreError):
            names.failed(name)
            log.error("round %d, %s: %s", report.round, name.key, outcome)
            report.failed[name.key] = str(outcome)
            self._journal.ownership.follow()  # raises if the store is unavailable: all further names would fail as well
        else:
            names.failed(name)
            self._fail(name, outcome, report)

    def _commit(
        self, ready: Sequence[CommittedObject], names: RoundNames, report: RoundReport, progress: Progress | None
    ) -> None:
        if not ready:
            return
        failpoint.hit("offload.before_commit")
        self._append(Commit(round=report.round, names=list(ready)))
        names.committed(ready)
        report.committed += ready
        failpoint.hit("offload.after_commit")
        rows, size = sum(one.rows for one in ready), sum(one.size for one in ready)
        log.info("round %d: %d objects, %d rows, %d bytes", report.round, len(ready), rows, size)
        report_event(progress, event="commit", round=report.round, objects=len(ready))

    def _fail(self, name: PlannedObject, error: Exception, report: RoundReport) -> None:
        """Report a failed name; it stays open, and the next round tries it again under the same name."""
        self.set_aside.note(name.topic, error)
        report.failed[name.key] = str(error)

    def _abort(self, number: int, name: PlannedObject, reason: str, report: RoundReport) -> None:
        """Close a name without an object. Entries still in the local log are planned again; others become a GAP.

        The gaps are written first: after a crash in between, nothing would look for the missing offsets of a closed
        name.
        """
        log.error("round %d: %s is closed without an object: %s", number, name.key, reason)
        held = _bounds(_cut(name, self._hot.entries(name.topic, name.start, name.end)))
        for queue, (first, last) in sorted(name.queues.items()):
            have = held.get(queue)
            if have is None:
                missing = [(first, last)]
            else:
                missing = [(first, min(have[0] - 1, last)), (max(have[1] + 1, first), last)]
            for low, high in missing:
                if self._journal.catalog.queue(name.topic, queue).count_existing(low, high + 1):  # not all recorded yet
                    gap = Gap(topic=name.topic, queue=queue, first=low, last=high, reason=reason)
                    log.error("topic %s queue %d: offsets %d-%d are lost: %s", *_gap_fields(gap))
                    self._append(gap)
                    report.gaps += 1
        self._append(Abort(round=number, keys=[name.key], reason=reason))
        report.aborted.append(name.key)


def _cut(name: PlannedObject, runs: Mapping[int, EntryRun]) -> dict[int, EntryRun]:
    """Return the entries within the name's CommitLog range."""
    found: dict[int, EntryRun] = {}
    for queue, run in runs.items():
        low, high = (int(index) for index in np.searchsorted(run.physical, [name.start, name.end]))
        if low < high:
            part = slice(low, high)
            found[queue] = PartOfRun(run.first_offset + low, run.physical[part], run.sizes[part])
    return found


def _bounds(entries: Mapping[int, EntryRun]) -> dict[int, tuple[int, int]]:
    return {queue: (run.first_offset, run.first_offset + len(run.physical) - 1) for queue, run in entries.items()}


def _gap_fields(gap: Gap) -> tuple[str, int, int, int, str]:
    return gap.topic, gap.queue, gap.first, gap.last, gap.reason
