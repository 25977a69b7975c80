"""Compact: small objects of a topic and day become few, at a pace, one after another.

`lifecycle.compaction` says which; `tiered.write.replacement` does it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from infra.clock import Clock
from infra.loop.threads import SYSTEM_THREADS, Threads
from lifecycle.compaction import DAY_MS, SIZES, Sizes, When, plan_topic
from lifecycle.retention import Policy
from lifecycle.safe_clock import SafeClock
from lifecycle.turns import Turns
from neve.archive.format.journal import COMPACT, AnyEntry, CommittedObject, Replace
from neve.archive.policy.ttl import HOUR_MS
from tiered.journal.writer import JournalWriter
from tiered.write.merge import Merge
from tiered.write.progress import Progress, tell
from tiered.write.replacement import Fate, Merger, Replacement
from tiered.write.set_aside import SetAside
from tiered.write.upload_rate import UploadRate

log = logging.getLogger(__name__)

#: What failed is not tried again for so long: each time costs its bytes.
RETRY_MS = 6 * HOUR_MS


class Compact:
    """The job, and what an operator asks for; one at a time."""

    def __init__(  # noqa: PLR0917
        self,
        journal: JournalWriter,
        worker: Merger,
        policy: Callable[[], Policy],
        clock: Clock,
        safe_clock: SafeClock,
        turns: Turns,
        threads: Threads = SYSTEM_THREADS,
        *,
        cluster: str = "DefaultCluster",
        sizes: Sizes = SIZES,
        wait: Callable[[threading.Condition, float], object] = threading.Condition.wait,
    ) -> None:
        """`wait`: as in UploadRate."""
        self._journal, self._policy, self._clock, self._safe_clock = journal, policy, clock, safe_clock
        self._worker, self._turns, self._sizes = worker, turns, sizes
        self._lock = threads.lock()
        self._pace = UploadRate(clock, wait)
        self._replacement = Replacement(journal, worker, COMPACT, turns, cluster=cluster)
        self._failed: dict[tuple[str, ...], int] = {}  # inputs -> when it failed, for RETRY_MS
        self._seen: dict[str, tuple[int | None, ...]] = {}  # topic -> as it was when all that was due of it was done
        self.set_aside = SetAside("compacted")
        self.made = self.replaced = self.replaced_bytes = self.failed = 0  # objects, since the start

    def run(self) -> int:
        """What is due, where the configuration says so; how many objects were made."""
        return self._run(None, at_once=False, progress=None) if self._policy().compaction else self._close_open()

    def now(self, topic: str | None = None, *, dry_run: bool = False, progress: Progress | None = None) -> int:
        """What can be compacted of a topic, or of all, whether its day has ended or not; how many objects."""
        planned = made = 0
        failed = self.failed
        if dry_run:
            with self._turns:
                self._journal.follow()
            for merge in self._merges(topic, at_once=True):
                planned += 1
                tell(progress, event="planned", **_described(merge))
        else:
            made = self._run(topic, at_once=True, progress=progress)
        tell(progress, event="done", planned=planned, made=made, failed=self.failed - failed)
        return planned + made

    def stop(self) -> None:
        """For good, behind the end of the turns: who waits for its pace begins nothing, what is under way fails."""
        self._pace.set(0)
        self._worker.give_up_compaction()

    def _close_open(self) -> int:
        """What was open when compaction was turned off, or by another process."""
        if self._journal.catalog.rounds.open_rewrites():
            with self._lock:
                self._begin()
        return 0

    def _begin(self) -> None:
        self._replacement.begin()
        with self._turns:
            self._journal.ensure_online()
            self._journal.follow()
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
        """Topic by topic, as they stand when their turn comes.

        Of itself the job looks at a topic once, and again when a round has, a day has ended, or its TTL is another: a
        million objects are not looked through every ten minutes.
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
            tell(progress, event="failed", reason=outcome.reason, **_described(merge))
            return 0
        self._failed.pop(_keys(merge), None)
        self.set_aside.clear(merge.topic)
        self.made += 1
        self.replaced += len(merge.inputs)
        self.replaced_bytes += merge.size
        log.info(
            "compacted: %d objects of %s, %s, %d bytes, are one of %d",
            len(merge.inputs),
            merge.topic,
            merge.day,
            merge.size,
            outcome.made.size,
        )
        tell(progress, event="compacted", key=outcome.made.key, to_bytes=outcome.made.size, **_described(merge))
        return 1

    def _swap(self, merge: Merge, made: list[CommittedObject]) -> AnyEntry:
        after = self._safe_clock.now_ms(self._journal.store) + self._policy().replaced_grace_ms
        return Replace(old=[one.key for one in merge.inputs], new=made, delete_after_ms=after)


def _keys(merge: Merge) -> tuple[str, ...]:
    return tuple(name.key for name in merge.inputs)


def _described(merge: Merge) -> dict[str, Any]:
    rows = sum(name.rows for name in merge.inputs)
    return {"topic": merge.topic, "day": merge.day, "objects": len(merge.inputs), "rows": rows, "bytes": merge.size}
