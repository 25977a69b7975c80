"""Job that merges small objects of a topic and day into few large ones, at a limited rate.

`lifecycle.compaction` selects the objects; `tiered.write.replacement` replaces them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from infra.clock import Clock
from infra.loop.threads import SYSTEM_THREADS, Threads
from lifecycle.compaction import DAY_MS, SIZES, Sizes, When, plan_topic
from lifecycle.retention import RetentionPolicy
from lifecycle.safe_clock import SafeClock
from lifecycle.turns import Turns
from neve.archive.format.journal import COMPACT, AnyEntry, CommittedObject, Replace
from neve.archive.policy.ttl import HOUR_MS
from tiered.journal.writer import JournalWriter
from tiered.write.merge import Merge
from tiered.write.progress import Progress, report_event
from tiered.write.replacement import Fate, Merger, Replacement
from tiered.write.set_aside import SetAside
from tiered.write.upload_rate import UploadRate

log = logging.getLogger(__name__)

#: Time until failed inputs are tried again, because each attempt reads their bytes.
RETRY_MS = 6 * HOUR_MS


class CompactObjects:
    """The compaction job, and compaction on an operator's request; one run at a time."""

    def __init__(  # noqa: PLR0917
        self,
        journal: JournalWriter,
        worker: Merger,
        policy: Callable[[], RetentionPolicy],
        clock: Clock,
        safe_clock: SafeClock,
        turns: Turns,
        threads: Threads = SYSTEM_THREADS,
        *,
        cluster: str = "DefaultCluster",
        sizes: Sizes = SIZES,
        wait: Callable[[threading.Condition, float], object] = threading.Condition.wait,
    ) -> None:
        """`wait`: as for UploadRate."""
        self._journal, self._policy, self._clock, self._safe_clock = journal, policy, clock, safe_clock
        self._worker, self._turns, self._sizes = worker, turns, sizes
        self._lock = threads.lock()
        self._pace = UploadRate(clock, wait)
        self._replacement = Replacement(journal, worker, COMPACT, turns, cluster=cluster)
        self._failed: dict[tuple[str, ...], int] = {}  # keys of inputs -> time of the failure, kept for RETRY_MS
        self._seen: dict[str, tuple[int | None, ...]] = {}  # topic -> its state when its last due merge was done
        self.set_aside = SetAside("compacted")
        self.made = self.replaced = self.replaced_bytes = self.failed = 0  # objects, since the start

    def run(self) -> int:
        """Compact what is due if the configuration enables it; returns the number of new objects."""
        return self._run(None, at_once=False, progress=None) if self._policy().compaction else self._close_open()

    def now(self, topic: str | None = None, *, dry_run: bool = False, progress: Progress | None = None) -> int:
        """Compact a topic, or all topics, including days that have not ended; returns the number of objects."""
        planned = made = 0
        failed = self.failed
        if dry_run:
            with self._turns:
                self._journal.ownership.follow()
            for merge in self._merges(topic, at_once=True):
                planned += 1
                report_event(progress, event="planned", **_described(merge))
        else:
            made = self._run(topic, at_once=True, progress=progress)
        report_event(progress, event="done", planned=planned, made=made, failed=self.failed - failed)
        return planned + made

    def stop(self) -> None:
        """Stop for good, after `turns` is closed: a merge that waits for its rate ends, one in progress fails."""
        self._pace.set(0)
        self._worker.give_up_compaction()

    def _close_open(self) -> int:
        """Close replacements that were open when compaction was turned off, or that another process left open."""
        if self._journal.catalog.rounds.open_rewrites():
            with self._lock:
                self._begin()
        return 0

    def _begin(self) -> None:
        self._replacement.begin()
        with self._turns:
            self._journal.ownership.confirm()
            self._replacement.close_open()

    def _run(self, topic: str | None, *, at_once: bool, progress: Progress | None) -> int:
        made = 0
        with self._lock:
            self._begin()
            retried = self._clock.now_ms() - RETRY_MS
            self._failed = {keys: at for keys, at in self._failed.items() if at > retried}
            for merge in self._merges(topic, at_once=at_once):
                if not at_once and _keys(merge) in self._failed:
                    continue
                self._pace.set(0 if self._turns.closed else self._policy().compaction_bytes_per_second)
                self._pace.take(merge.size)
                if self._turns.closed:
                    break
                made += self._compact(merge, progress)
        return made

    def _merges(self, topic: str | None, *, at_once: bool) -> Iterator[Merge]:
        """Yield the merges topic by topic, each planned when its turn comes.

        The job plans a topic again only after a round, after the end of a day, or when its TTL has changed. So it does
        not check a million objects every ten minutes.
        """
        catalog, policy = self._journal.catalog, self._policy()
        now = self._safe_clock.now_ms(self._journal.store)
        topics = catalog.topics_with_objects()
        self._seen = {one: self._seen[one] for one in topics if one in self._seen}
        for one in topics:
            if topic not in {None, one}:
                continue
            when = When(now, policy.grace_ms, policy.ttl_ms(one), at_once)
            seen = (catalog.through(one), (now - policy.grace_ms) // DAY_MS, policy.grace_ms, when.ttl_ms)
            if not at_once and self._seen.get(one) == seen:
                continue
            failed = self.failed
            yield from plan_topic(catalog, one, when, self._sizes)
            if not at_once and self.failed == failed and one not in self.set_aside.reasons():
                self._seen[one] = seen

    def _compact(self, merge: Merge, progress: Progress | None) -> int:
        outcome = self._replacement.run(merge, self._swap)
        if outcome.made is None:
            if outcome.fate is Fate.FAILED:
                self.failed += 1
                self._failed[_keys(merge)] = self._clock.now_ms()
                self.set_aside.note(merge.topic, RuntimeError(outcome.reason))
            report_event(progress, event="failed", reason=outcome.reason, **_described(merge))
            return 0
        self._failed.pop(_keys(merge), None)
        self.set_aside.clear(merge.topic)
        self.made += 1
        self.replaced += len(merge.inputs)
        self.replaced_bytes += merge.size
        log.info(
            "compacted: %d objects of %s, %s, %d bytes, into one of %d",
            len(merge.inputs),
            merge.topic,
            merge.day,
            merge.size,
            outcome.made.size,
        )
        report_event(progress, event="compacted", key=outcome.made.key, to_bytes=outcome.made.size, **_described(merge))
        return 1

    def _swap(self, merge: Merge, made: list[CommittedObject]) -> AnyEntry:
        after = self._safe_clock.now_ms(self._journal.store) + self._policy().replaced_grace_ms
        return Replace(old=[one.key for one in merge.inputs], new=made, delete_after_ms=after)


def _keys(merge: Merge) -> tuple[str, ...]:
    return tuple(name.key for name in merge.inputs)


def _described(merge: Merge) -> dict[str, Any]:
    rows = sum(name.rows for name in merge.inputs)
    return {"topic": merge.topic, "day": merge.day, "objects": len(merge.inputs), "rows": rows, "bytes": merge.size}
