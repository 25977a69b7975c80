"""One offload round: plan → INTENT → encode, verify, upload → COMMIT.

A crash anywhere leaves an open intent or an orphan object. The next round completes the intent under the same names,
or closes it where the local log no longer has what it named. COMMIT is the one moment at which an object counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infra import failpoint
from infra.clock import Clock
from infra.object_store.protocol import ObjectStoreError
from neve.archive.journal import Abort, AnyEntry, Commit, CommittedName, Gap, Intent, IntentName
from tiered.journal.errors import NotMaster
from tiered.journal.named_topics import StalePlan
from tiered.journal.writer import JournalWriter
from tiered.write.entry_run import EntryRun, PartOfRun
from tiered.write.offload_plan import HotLog, KeyParts, TopicRange, TopicUnreadable, plan_topic
from tiered.write.set_aside import SetAside
from tiered.write.uploader import ContentConflict, EncodeFailed, Uploader

log = logging.getLogger(__name__)

Progress = Callable[[dict[str, Any]], None]
# A round of many names publishes what it has so often: what is published can be evicted.
_COMMIT_S = 30.0


@dataclass(slots=True)
class RoundReport:
    """What became of a round's names: published, failed (by topic, why), closed without an object, lost for good."""

    round: int
    committed: list[CommittedName] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # key -> why
    aborted: list[str] = field(default_factory=list)
    lost: list[tuple[IntentName, str]] = field(default_factory=list)  # names to be closed without an object, and why
    gaps: int = 0


class OffloadRound:
    """Each step takes a turn of its own, so that other jobs have theirs between two names of a long round."""

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
    ) -> None:
        self._journal, self._hot, self._worker, self._clock = journal, hot, worker, clock
        self._turn, self._stopping = turn, stopping
        self._cluster = cluster
        self._master_epoch: int | None = None  # in which all is seen that goes into the journal
        self.set_aside = SetAside("archived")

    def begin(self) -> None:
        """Before anything is seen of the log. Raises NotMaster where this broker has to follow."""
        self._master_epoch = self._journal.master_epoch
        if self._master_epoch is None:
            raise NotMaster(f"archive of {self._journal.broker}: rounds are the master's")

    def _append(self, entry: AnyEntry, plan: int | None = None) -> None:
        """A member that was a slave in between sees another log: what it saw before must not be recorded."""
        self._journal.append(entry, plan=plan, master_epoch=self._master_epoch)

    def resume(self, progress: Progress | None = None) -> list[RoundReport]:
        """Complete or close what earlier rounds, of this process or a former one, left open."""
        reports = []
        for number, names in self._journal.catalog.open_intents().items():
            reports.append(self._complete(number, names, progress))
        return reports

    def run(self, topics: Iterable[TopicRange], progress: Progress | None = None) -> RoundReport | None:
        """One round for the given ranges; None where they hold no entry."""
        with self._turn:
            begun = self._begin(list(topics), progress)
        if begun is None:
            return None
        number, names, gaps = begun
        report = self._complete(number, names, progress)
        report.gaps += gaps
        return report

    def _begin(
        self, topics: Sequence[TopicRange], progress: Progress | None
    ) -> tuple[int, list[IntentName], int] | None:
        """The round's number, its names and how many gaps it found."""
        plan = self._journal.plan_mark()
        key_parts = KeyParts(self._journal.prefix, self._journal.broker, self._journal.epoch)
        names: list[IntentName] = []
        gaps: list[Gap] = []
        for wanted in topics:
            try:
                more_names, more_gaps = plan_topic(self._hot, self._journal.catalog, wanted, key_parts)
            except TopicUnreadable as error:
                self.set_aside.note(wanted.topic, error)
                continue
            names += more_names
            gaps += more_gaps
        if not names:
            return None
        if any(name.key in self._journal.aborted for name in names):
            # A name is written at most once, so a closed one is not tried again: a new epoch gives new names.
            self._journal.renew_epoch()
            return self._begin(topics, progress)
        for gap in gaps:
            log.error("topic %s queue %d: offsets %d-%d are lost: %s", *_gap_fields(gap))
            self._append(gap)
        number = self._journal.catalog.last_round + 1
        failpoint.hit("offload.before_intent")
        try:
            self._append(Intent(round=number, names=names), plan)
        except StalePlan:
            return self._begin(topics, progress)
        failpoint.hit("offload.after_intent")
        _tell(progress, event="intent", round=number, objects=len(names))
        return number, names, len(gaps)

    def _complete(self, number: int, names: Sequence[IntentName], progress: Progress | None) -> RoundReport:
        report = RoundReport(number)
        ready: list[CommittedName] = []
        since = self._clock.monotonic()
        for name in names:
            if self._stopping():
                break  # what is left stays open: the next round, or the next process, goes on with it
            with self._turn:
                committed = self._finish(number, name, report)
                if committed is not None:
                    ready.append(committed)
                    _tell(progress, event="uploaded", key=name.key, rows=committed.rows, bytes=committed.size)
                if self._clock.monotonic() - since >= _COMMIT_S:
                    self._commit(number, ready, report, progress)
                    ready, since = [], self._clock.monotonic()
        with self._turn:
            self._commit(number, ready, report, progress)
        for name, reason in report.lost:
            with self._turn:
                try:
                    self._abort(number, name, reason, report)
                except TopicUnreadable as error:
                    self._fail(name, error, report)
        return report

    def _finish(self, number: int, name: IntentName, report: RoundReport) -> CommittedName | None:
        """The name's object, in the store; None: it stays open, or is lost. Raises where the store is away."""
        try:
            entries = self._entries(name)
            if _bounds(entries) != name.queues:
                report.lost.append((name, "the local log does not hold what the intent named"))
                return None
            committed = self._upload(number, name, entries)
        except ContentConflict as error:
            report.lost.append((name, str(error)))
        except (TopicUnreadable, EncodeFailed) as error:
            self._fail(name, error, report)
        except ObjectStoreError as error:
            log.error("round %d, %s: %s", number, name.key, error)
            report.failed[name.key] = str(error)
            self._journal.follow()  # raises where it is the store: the names behind this one would fail as well
        else:
            self.set_aside.clear(name.topic)
            return committed
        return None

    def _commit(
        self, number: int, names: Sequence[CommittedName], report: RoundReport, progress: Progress | None
    ) -> None:
        if not names:
            return
        failpoint.hit("offload.before_commit")
        self._append(Commit(round=number, names=list(names)))
        report.committed += names
        failpoint.hit("offload.after_commit")
        rows, size = sum(one.rows for one in names), sum(one.size for one in names)
        log.info("round %d: %d objects, %d rows, %d bytes", number, len(names), rows, size)
        _tell(progress, event="commit", round=number, objects=len(names))

    def _fail(self, name: IntentName, error: Exception, report: RoundReport) -> None:
        """It stays open: the next round tries it again, under the same name."""
        self.set_aside.note(name.topic, error)
        report.failed[name.key] = str(error)

    def _entries(self, name: IntentName) -> dict[int, EntryRun]:
        """The entries that the name holds, cut to its offsets."""
        found: dict[int, EntryRun] = {}
        for queue, run in self._hot.entries(name.topic, name.start, name.end).items():
            low, high = (int(index) for index in np.searchsorted(run.physical, [name.start, name.end]))
            if low < high:
                part = slice(low, high)
                found[queue] = PartOfRun(run.first_offset + low, run.physical[part], run.sizes[part])
        return found

    def _upload(self, number: int, name: IntentName, entries: Mapping[int, EntryRun]) -> CommittedName:
        metadata = {"cluster": self._cluster, "broker": self._journal.broker, "round": str(number)}
        files = self._hot.files(name.start, name.end)
        committed = self._worker.encode_upload(self._journal.store.url, name, entries, files, metadata)
        written = {queue: (first, last) for queue, (first, last, _) in committed.queues.items()}
        if committed.key != name.key or written != name.queues:
            raise EncodeFailed(f"{name.key}: the object holds {written}, the intent named {name.queues}")
        failpoint.hit("offload.after_upload")
        return committed

    def _abort(self, number: int, name: IntentName, reason: str, report: RoundReport) -> None:
        """Close a name without an object. What is still in the local log is planned again; the rest is a GAP.

        The gaps come first: once the name is closed nobody looks for what it lacks, should this end in between.
        """
        log.error("round %d: %s is closed without an object: %s", number, name.key, reason)
        held = _bounds(self._entries(name))
        for queue, (first, last) in sorted(name.queues.items()):
            have = held.get(queue)
            if have is None:
                missing = [(first, last)]
            else:
                missing = [(first, min(have[0] - 1, last)), (max(have[1] + 1, first), last)]
            for low, high in missing:
                if self._journal.catalog.count_existing(name.topic, queue, low, high + 1):  # not all told by now
                    gap = Gap(topic=name.topic, queue=queue, first=low, last=high, reason=reason)
                    log.error("topic %s queue %d: offsets %d-%d are lost: %s", *_gap_fields(gap))
                    self._append(gap)
                    report.gaps += 1
        self._append(Abort(round=number, keys=[name.key], reason=reason))
        report.aborted.append(name.key)


def _bounds(entries: Mapping[int, EntryRun]) -> dict[int, tuple[int, int]]:
    return {queue: (run.first_offset, run.first_offset + len(run.physical) - 1) for queue, run in entries.items()}


def _gap_fields(gap: Gap) -> tuple[str, int, int, int, str]:
    return gap.topic, gap.queue, gap.first, gap.last, gap.reason


def _tell(progress: Progress | None, **event: Any) -> None:
    if progress is not None:
        progress(event)
