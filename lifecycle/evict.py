"""Job that evicts local segments that are too old or fill the disk, under the eviction rule of `retention`.

It evicts one segment at a time, the oldest first, and checks the disk again after each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from infra import failpoint
from infra.clock import Clock
from lifecycle.due import settled_through
from lifecycle.hot_store import HotStore, LogSegment
from lifecycle.retention import Moment, RetentionPolicy, may_evict, moment_of
from lifecycle.safe_clock import ClocksDisagree, SafeClock
from lifecycle.turns import Turns
from tiered.journal.writer import JournalWriter
from tiered.write.progress import Progress

log = logging.getLogger(__name__)


#: Above every offset of a log.
EVERYTHING = 1 << 62


def no_limit() -> int:
    """Return the limit of an archive that describes the whole local log."""
    return EVERYTHING


class ArchivedShare:
    """State of the archive that decides which records the local log may drop.

    Without an archive (`journal` is None) only the TTL and fileReservedTime release records. With one, the journal
    releases records as far as it describes this log.
    """

    def __init__(
        self, journal: JournalWriter | None, safe_clock: SafeClock, described_below: Callable[[], int] = no_limit
    ) -> None:
        """`described_below`: returns the CommitLog offset up to which the archive describes this broker's log."""
        self._journal, self._safe_clock, self._described_below = journal, safe_clock, described_below

    def begin(self) -> None:
        """Prepare a run of the job. Raises if nothing may be evicted now."""
        if self._journal is None:
            return
        if self._journal.ownership.leads:
            self._journal.ownership.ensure_online()
        self._journal.ownership.follow()  # on a slave: read what its master has archived

    def through(self) -> Mapping[str, int]:
        """Return topic -> the CommitLog offset below which it is in the archive."""
        if self._journal is None:
            return {}
        most = self._described_below()
        return {topic: min(offset, most) for topic, offset in settled_through(self._journal.catalog).items()}

    def expired_by_ms(self) -> int:
        """Return the time by which a TTL expires unarchived messages, as for deletions; 0 if the clocks disagree."""
        if self._journal is None:
            return self._safe_clock.now_ms()
        try:
            return self._safe_clock.now_ms(self._journal.store)
        except ClocksDisagree as error:
            log.warning("expiry paused: %s", error)
            return 0


class Evict:
    """The eviction job, and a step of an offload that frees the disk."""

    def __init__(
        self,
        hot: HotStore,
        archived: ArchivedShare,
        policy: Callable[[], RetentionPolicy],
        clock: Clock,
        turns: Turns,
        *,
        is_member: bool = False,
        admits_members: bool = False,
    ) -> None:
        """`is_member`: of a broker set, which may truncate this log to where its next master continues.

        `admits_members`: whether new members ask this broker where their logs may begin.
        """
        self._is_member, self._admits_members = is_member, admits_members
        self._hot, self._archived, self._policy, self._clock, self._turns = hot, archived, policy, clock, turns
        self.evicted = 0  # segments, since the start
        self.frontier = 0  # offset below which the log may be evicted if the disk is full, as of the last run

    def run(self) -> list[int]:
        """Evict what may be evicted. Returns the base offsets of the evicted segments."""
        with self._turns:
            self._archived.begin()
            evicted = self.in_turn()
            if self._admits_members:
                self.frontier = self._frontier()
            return evicted

    def _frontier(self) -> int:
        """Return the offset at which a new member's log may begin: all it lacks can be read from the archive."""
        pinned, through, policy = self._hot.pinned_from(), self._archived.through(), self._policy()
        moment = Moment(self._clock.now_ms(), self._archived.expired_by_ms(), crowded=True)
        _, confirmed = self._hot.confirmed_range()
        frontier = 0
        for segment in sorted(self._hot.segments(), key=_base_of):
            frontier = segment.base
            if segment.end > confirmed or not may_evict(segment, through, policy, moment, pinned):
                break
        return frontier

    def in_turn(self, progress: Progress | None = None, *, everything: bool = False) -> list[int]:
        """Evict, for a caller that has the turn. With `everything`, evict segments of any age if nothing is lost."""
        evicted: list[int] = []
        expired_by: int | None = None
        moment: Moment | None = None
        while not self._turns.closed and (oldest := min(self._hot.segments(), key=_base_of, default=None)) is not None:
            if not oldest.sealed or not self._is_of_the_set(oldest):
                break
            expired_by = self._archived.expired_by_ms() if expired_by is None else expired_by
            policy, ratio = self._policy(), self._hot.disk_ratio()
            moment = moment_of(policy, self._clock.now_ms(), expired_by, ratio, moment)
            if not self._may_go(oldest, policy, moment._replace(crowded=moment.crowded or everything)):
                break
            failpoint.hit("offload.before_evict")
            if not self._hot.evict(oldest.base):
                continue
            failpoint.hit("offload.after_evict")
            evicted.append(oldest.base)
            self.evicted += 1
            log.info("local segment evicted: base=%d disk_used=%.0f %%", oldest.base, ratio * 100)
            if progress is not None:
                progress({"event": "evicted", "segment": oldest.base})
        return evicted

    def _is_of_the_set(self, segment: LogSegment) -> bool:
        """Whether the segment's end is confirmed: the next master may truncate this log within an unconfirmed one."""
        return not self._is_member or segment.end <= self._hot.confirmed_range()[1]

    def _may_go(self, oldest: LogSegment, policy: RetentionPolicy, moment: Moment) -> bool:
        if not may_evict(oldest, self._archived.through(), policy, moment, None):
            return False
        pinned = self._hot.pinned_from()
        if pinned is not None and pinned < oldest.end:
            # A message may wait for days. If only waiting messages pin the segment, append them again at the log's end.
            self._hot.reappend_waiting(oldest.end)
            pinned = self._hot.pinned_from()
        # Records that a waiting message was delivered or has ended must be as durable as the removal of its segment.
        self._hot.flush()
        return may_evict(oldest, self._archived.through(), policy, moment, pinned)


def _base_of(segment: LogSegment) -> int:
    return segment.base
