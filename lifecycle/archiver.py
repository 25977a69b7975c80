"""The lifecycle's jobs: offload, retention, TTL, sweep. One at a time, but for offload, which takes a turn for each
step of a backlog. Each starts by making sure it may.

A job that finds the archive taken over or out of reach raises: the scheduler counts and logs it, and runs it again at
its next time. Nothing is evicted or deleted on the way.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from infra.clock import Clock
from infra.object_store.protocol import AccessDenied
from lifecycle.backlog import Backlog
from lifecycle.evictor import Evictor
from lifecycle.expirer import Expirer
from lifecycle.hot_store import HotStore, Segment
from lifecycle.retention import (
    HOUR_MS,
    Pending,
    Policy,
    due_topics,
    upload_rate,
    wanted_segments,
)
from lifecycle.safe_clock import ClocksDisagree, SafeClock
from lifecycle.turns import Turns
from neve.archive import keys
from tiered.journal.verify import VerifyReport, verify
from tiered.journal.writer import JournalWriter
from tiered.write.offload import OffloadRound, Progress, RoundReport, RowCounts, Uploader
from tiered.write.offload_plan import TopicRange, TopicUnreadable

_log = logging.getLogger(__name__)

ORPHAN_AGE_MS = 48 * HOUR_MS
DELETE_BATCH = 500


class Lifecycle:
    """`journal` and `worker` are None where no archive is configured: then only local retention runs."""

    def __init__(
        self,
        hot: HotStore,
        journal: JournalWriter | None,
        worker: Uploader | None,
        policy: Callable[[], Policy],
        clock: Clock,
        *,
        cluster: str = "DefaultCluster",
        safe_clock: SafeClock | None = None,
    ) -> None:
        self._policy = policy
        self._hot, self._journal, self._clock = hot, journal, clock
        self.safe_clock = safe_clock or SafeClock(clock)
        self._worker = worker
        # A step of a job: each of them finds the journal, the log and the bucket as the one before left them.
        self._busy = Turns()
        self._rounds = (
            OffloadRound(journal, hot, worker, clock, self._busy, lambda: self._stopping, cluster=cluster)
            if journal is not None and worker is not None
            else None
        )
        self._expirer = Expirer(hot, journal, policy, clock, self.safe_clock)
        self._evictor = Evictor(
            hot,
            policy,
            clock,
            through=self._through,
            expired_by=self._expired_by,
            stopping=lambda: self._stopping,
        )
        self._offloading = threading.Lock()  # one at a time, for as long as its backlog takes
        self._backlog = Backlog(hot, journal.catalog) if journal is not None else None
        self._reported: dict[str, int] = {}  # orphan -> size, as the last sweep found them
        self._last_round: dict[str, Any] = {}
        self._stopping = False
        self._oldest_ms = -1  # of the backlog, as the last round saw it
        self._upload_rate = 0

    @property
    def policy(self) -> Policy:
        """As the configuration is now: some of its keys change on a running broker."""
        return self._policy()

    def stop(self) -> None:
        """Begin no further round: a backlog of many segments must not hold up the end of the process."""
        self._stopping = True
        self.adjust_upload_rate()

    # --- offload -------------------------------------------------------------------------------------------

    def run_offload(
        self, roll: bool = False, evict: bool = False, progress: Progress | None = None
    ) -> list[RoundReport]:
        """Finish what is open, then write what is due; with `roll` everything, with `evict` free the local disk."""
        if self._journal is None or self._rounds is None:
            return []
        with self._offloading:
            with self._busy:
                self._journal.ensure_online()
                self._journal.follow()
                if evict:
                    self._evictor.run(progress, everything=True)  # before a roll, which needs room
                if roll and not self._hot.roll():
                    _tell(progress, event="not_rolled", reason="no room for a next segment")
            reports = self._rounds.resume(progress)
            while not self._stopping and (ranges := self._ranges(everything=roll)):
                report = self._rounds.run(ranges, progress)
                if report is None:
                    break
                reports.append(report)
                if not report.committed:
                    break  # each name failed: the next run tries again
            self._note(reports)
            if evict:
                with self._busy:
                    self._evictor.run(progress, everything=True)
        return reports

    def adjust_upload_rate(self) -> None:
        """Also while a round is running: the disk does not wait for its end."""
        if self._worker is None:
            return
        now = self._clock.now_ms()
        rate = 0 if self._stopping else upload_rate(self.policy, self._oldest_ms, now, self._hot.disk_ratio())
        self._upload_rate = rate
        self._worker.set_upload_rate(rate)

    def run_salvage(self) -> list[RoundReport]:
        """Before a log goes on above its archive: close what it can't fulfil, archive the rest that it still holds."""
        if self._journal is None or self._rounds is None:
            return []
        with self._offloading:
            reports = self._rounds.resume()
            while ranges := self._ranges(everything=True):
                report = self._rounds.run(ranges)
                if report is None:
                    break
                reports.append(report)
                if not report.committed:
                    break
            self._note(reports)
        return reports

    def _ranges(self, *, everything: bool) -> list[TopicRange]:
        """The topics of the next round with their ranges, each within the segment of its first unarchived record."""
        assert self._journal is not None
        assert self._rounds is not None
        assert self._backlog is not None
        end = self._hot.flush()
        segments = sorted(self._hot.segments(), key=lambda segment: segment.base)
        ranges: dict[str, TopicRange] = {}
        pending: dict[str, Pending] = {}
        topics = self._hot.topics()
        existing = set(topics)
        self._rounds.set_aside.keep(existing)
        self._backlog.keep(existing, segments)
        for topic in self._archived(topics):
            try:
                found = self._pending(topic, segments, end)
            except TopicUnreadable as error:
                self._rounds.set_aside.note(topic, error)
                continue
            if found is not None:
                ranges[topic], pending[topic] = found
            else:
                self._rounds.set_aside.clear(topic)
        self._oldest_ms = min((what.oldest_ms for what in pending.values() if what.oldest_ms >= 0), default=-1)
        self.adjust_upload_rate()
        if not everything:
            now = self._clock.now_ms()
            wanted = wanted_segments(segments, self.policy, now, self._hot.disk_ratio())
            due = due_topics(pending, wanted, self._through(), self.policy, now)
            return [ranges[topic] for topic in due]
        return [ranges[topic] for topic in sorted(ranges)]

    def _archived(self, topics: Iterable[str]) -> list[str]:
        assert self._journal is not None
        open_topics = {name.topic for names in self._journal.catalog.open_intents().values() for name in names}
        archived = self.policy.archived
        return [topic for topic in topics if topic not in open_topics and archived(topic)]

    def _pending(self, topic: str, segments: Sequence[Segment], end: int) -> tuple[TopicRange, Pending] | None:
        assert self._backlog is not None
        return self._backlog.of(topic, segments, end, self.policy.gone_below(topic))

    def _through(self) -> dict[str, int]:
        if self._journal is None:
            return {}
        catalog = self._journal.catalog
        return {topic: catalog.through(topic) or 0 for topic in catalog.topics()}

    def _note(self, reports: Sequence[RoundReport]) -> None:
        if reports:
            self._last_round = {
                "round": reports[-1].round,
                "time_ms": self._clock.now_ms(),
                "objects": sum(len(report.committed) for report in reports),
                "failed": sum(len(report.failed) for report in reports),
                "aborted": sum(len(report.aborted) for report in reports),
            }

    # --- local disk ----------------------------------------------------------------------------------------

    def run_retention(self) -> list[int]:
        """Free the local disk of segments that are too old or crowd it, under the eviction rule."""
        with self._busy:
            if self._journal is not None:
                self._journal.ensure_online()
                self._journal.follow()
            return self._evictor.run()

    def _expired_by(self) -> int:
        """The time by which a TTL lets go of what no archive has: as careful as where the TTL itself deletes."""
        if self._journal is None:
            return self.safe_clock.now_ms()
        try:
            return self.safe_clock.now_ms(self._journal.store)
        except ClocksDisagree as error:
            _log.warning("nothing counts as expired: %s", error)
            return 0

    # --- expiry --------------------------------------------------------------------------------------------

    def run_ttl(self) -> dict[str, int]:
        """Take what has expired out of view, and delete what has been out of view for the grace."""
        with self._busy:
            return self._expirer.run()

    def run_unexpire(self) -> dict[str, int]:
        """Take back what has expired and has not by the TTL and the time as they are now."""
        with self._busy:
            return self._expirer.undo()

    def run_checkpoint(self) -> bool:
        """Write the catalog down when the journal has grown, so that the next reader need not read all of it."""
        if self._journal is None:
            return False
        with self._busy:
            self._journal.ensure_online()
            self._journal.follow()
            return self._journal.checkpoint_if_due()

    # --- sweep ---------------------------------------------------------------------------------------------

    def run_sweep(self, repair: bool = False) -> list[str]:
        """Objects of this broker that nothing vouches for, older than 48 h. `repair` deletes those reported before."""
        if self._journal is None:
            return []
        with self._busy:
            self._journal.ensure_online()
            self._journal.follow()
            now = self.safe_clock.now_ms(self._journal.store)
            self._remove_stale_uploads()
            found = self._orphans(now)
            for key, size in found.items():
                if repair and key in self._reported:
                    self._journal.store.delete(key)
                    _log.warning("deleted the orphan %s of %d bytes", key, size)
                else:
                    _log.warning("orphan: %s of %d bytes is in no catalog and no open intent", key, size)
            self._reported = found
            return sorted(found)

    def _remove_stale_uploads(self) -> None:
        """Costs room only, so a bucket that does not let us look stops nothing."""
        assert self._journal is not None
        if self._worker is None:
            return
        try:
            removed = self._worker.remove_stale_uploads(self._journal.store.url, self._journal.broker)
        except AccessDenied as error:
            _log.warning(
                "unfinished uploads stay: grant s3:ListBucketMultipartUploads, s3:AbortMultipartUpload: %s", error
            )
        else:
            if removed:
                _log.warning("removed %d uploads that nobody finished for a day", removed)

    def _orphans(self, now: int) -> dict[str, int]:
        assert self._journal is not None
        journal = self._journal
        top = f"{journal.prefix.strip('/')}/" if journal.prefix.strip("/") else ""
        found: dict[str, int] = {}
        for folder in journal.store.list_prefixes(top):
            if not folder.removeprefix(top).startswith("topic="):
                continue
            for info in journal.store.list(folder):
                parts = keys.parse_data_key(info.key)
                if parts is None or parts.broker != journal.broker or journal.catalog.knows(info.key):
                    continue  # not ours to judge
                if info.modified_ms + ORPHAN_AGE_MS <= now:
                    found[info.key] = info.size
        return found

    def verify(self, deep: bool = False) -> VerifyReport:
        """Journal against objects: one HEAD per object; `deep` reads each of them as well."""
        if self._journal is None:
            return VerifyReport()
        return verify(self._journal.catalog, self._journal.store, deep=deep)

    # --- status --------------------------------------------------------------------------------------------

    def status(self, backlog: Mapping[str, Pending] | None = None) -> dict[str, Any]:
        """Figures for metrics and the admin page, of a backlog that was seen just now; reads the local log only."""
        aside = self.set_aside()
        common: dict[str, Any] = {
            "evicted_segments": self._evictor.evicted,
            "deleted_objects": self._expirer.deleted,
            "clock": msgspec.to_builtins(self.safe_clock.state()),
        }
        common |= {"topics_set_aside": len(aside), "set_aside": aside}
        if self._journal is None:
            return {"archive": "off", **common}
        backlog = self.backlog() if backlog is None else backlog
        written = self._worker.written if self._worker is not None else RowCounts()
        return {
            "archive": "fenced" if self._journal.fenced else "online" if self._journal.online else "unreachable",
            "epoch": self._journal.epoch,
            "journal_entries": self._journal.catalog.next_seq,
            "objects": self._journal.catalog.object_count,
            "gaps": self._journal.catalog.gap_count,
            "open_names": sum(map(len, self._journal.catalog.open_intents().values())),
            "orphans": len(self._reported),
            "backlog_bytes": sum(what.bytes for what in backlog.values()),
            "backlog_age_ms": max(self.ages_ms(backlog).values(), default=0),
            "last_round": self._last_round,
            "upload_bytes_per_second": self._upload_rate,
            "upload_waited_ms": int(self._worker.upload_waited * 1000) if self._worker is not None else 0,
            "rows": written.rows,
            "rows_with_wire": written.wire,
            "rows_damaged": written.damaged,
            "store_requests": dict(self._journal.store.requests),
            **common,
        }

    def backlog(self) -> dict[str, Pending]:
        """What each topic has still to archive; topics without are not there."""
        if self._journal is None:
            return {}
        segments = sorted(self._hot.segments(), key=lambda segment: segment.base)
        end = max((segment.end for segment in segments), default=0)
        archived = self.policy.archived
        topics = [topic for topic in self._hot.topics() if archived(topic)]
        found: dict[str, Pending] = {}
        for topic in topics:
            with contextlib.suppress(TopicUnreadable):  # the next round sets it aside and says why
                pending = self._pending(topic, segments, end)
                if pending is not None:
                    found[topic] = pending[1]
        return found

    def set_aside(self) -> dict[str, str]:
        """Topics that no job can read, and why."""
        unread = self._rounds.set_aside.reasons() if self._rounds is not None else {}
        return {**self._expirer.set_aside.reasons(), **unread}

    def ages_ms(self, backlog: Mapping[str, Pending]) -> dict[str, int]:
        """Topic -> how old its oldest message is that is not archived."""
        now = self._clock.now_ms()
        oldest = {topic: what.oldest_ms for topic, what in backlog.items()}
        return {topic: max(0, now - time) if time >= 0 else 0 for topic, time in oldest.items()}


def _tell(progress: Progress | None, **event: Any) -> None:
    if progress is not None:
        progress(event)
