"""Evict: the local disk is freed of segments that are too old or crowd it, under the eviction rule (`retention`).

One segment at a time, the oldest first, the disk asked again after each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from infra import failpoint
from infra.clock import Clock
from lifecycle.due import settled_through
from lifecycle.hot_store import HotStore, Segment
from lifecycle.retention import Moment, Policy, may_evict, moment_of
from lifecycle.safe_clock import ClocksDisagree, SafeClock
from lifecycle.turns import Turns
from tiered.journal.writer import JournalWriter
from tiered.write.progress import Progress

log = logging.getLogger(__name__)


class Settled(Protocol):
    """What is settled elsewhere, so that the local log may let go of it."""

    def begin(self) -> None:
        """Before a run of the job: raises where nothing may go now."""
        ...

    def through(self) -> Mapping[str, int]:
        """Topic -> the CommitLog offset below which it is in the archive."""
        ...

    def expired_by_ms(self) -> int:
        """The time by which a TTL lets go of what no archive has; 0: of nothing."""
        ...


class NothingArchived:
    """Without an archive: the TTL and fileReservedTime alone let go."""

    def __init__(self, safe_clock: SafeClock) -> None:
        self._safe_clock = safe_clock

    def begin(self) -> None:
        """The log is this broker's alone."""

    def through(self) -> Mapping[str, int]:
        return {}

    def expired_by_ms(self) -> int:
        return self._safe_clock.now_ms()


#: Of a log: no place in it lies above.
EVERYTHING = 1 << 62


class SettledInArchive:
    """By the journal, as long as it is this broker's, and of the log as it is."""

    def __init__(self, journal: JournalWriter, safe_clock: SafeClock, is_of: Callable[[], int]) -> None:
        """`is_of`: the CommitLog offset up to which the archive is of this log."""
        self._journal, self._safe_clock, self._is_of = journal, safe_clock, is_of

    def begin(self) -> None:
        if self._journal.leads:
            self._journal.ensure_online()
        self._journal.follow()  # of a slave: what its master has archived

    def through(self) -> Mapping[str, int]:
        most = self._is_of()
        return {topic: min(offset, most) for topic, offset in settled_through(self._journal.catalog).items()}

    def expired_by_ms(self) -> int:
        """As careful as where the TTL itself deletes."""
        try:
            return self._safe_clock.now_ms(self._journal.store)
        except ClocksDisagree as error:
            log.warning("nothing counts as expired: %s", error)
            return 0


class Evict:
    """The job, and a step of an offload that is to free the disk."""

    def __init__(
        self,
        hot: HotStore,
        settled: Settled,
        policy: Callable[[], Policy],
        clock: Clock,
        turns: Turns,
        *,
        is_member: bool = False,
        admits_members: bool = False,
    ) -> None:
        """`is_member`: others have the log, and it may be cut to where they go on. `admits_members`: new ones ask where
        their logs may begin."""
        self._is_member, self._admits_members = is_member, admits_members
        self._hot, self._settled, self._policy, self._clock, self._turns = hot, settled, policy, clock, turns
        self.evicted = 0  # segments, since the start
        self.frontier = 0  # below it the log may go, wherever there is no room for it; as of the last run

    def run(self) -> list[int]:
        """Bases of the segments that went."""
        with self._turns:
            self._settled.begin()
            evicted = self.in_turn()
            if self._admits_members:
                self.frontier = self._frontier()
            return evicted

    def _frontier(self) -> int:
        """A log that begins there lacks nothing that is needed, but what is read cold."""
        pinned, through, policy = self._hot.pinned_from(), self._settled.through(), self._policy()
        moment = Moment(self._clock.now_ms(), self._settled.expired_by_ms(), crowded=True)
        _, confirmed = self._hot.confirmed_range()
        frontier = 0
        for segment in sorted(self._hot.segments(), key=_base_of):
            frontier = segment.base
            if segment.end > confirmed or not may_evict(segment, through, policy, moment, pinned):
                break
        return frontier

    def in_turn(self, progress: Progress | None = None, *, everything: bool = False) -> list[int]:
        """For who has the turn: with `everything` segments of any age go that lose nothing."""
        evicted: list[int] = []
        expired_by: int | None = None
        moment: Moment | None = None
        while not self._turns.closed and (oldest := min(self._hot.segments(), key=_base_of, default=None)) is not None:
            if not oldest.sealed or not self._is_of_the_set(oldest):
                break
            expired_by = self._settled.expired_by_ms() if expired_by is None else expired_by
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
            log.info("the local segment at %d is evicted, the disk is %.0f %% full", oldest.base, ratio * 100)
            if progress is not None:
                progress({"event": "evicted", "segment": oldest.base})
        return evicted

    def _is_of_the_set(self, segment: Segment) -> bool:
        """Its end, too, though it holds nothing: the next master may go on within it, and this log is cut to there."""
        return not self._is_member or segment.end <= self._hot.confirmed_range()[1]

    def _may_go(self, oldest: Segment, policy: Policy, moment: Moment) -> bool:
        if not may_evict(oldest, self._settled.through(), policy, moment, None):
            return False
        pinned = self._hot.pinned_from()
        if pinned is not None and pinned < oldest.end:
            # A message may wait for days: it moves to the head of the log where it alone would keep a segment.
            self._hot.reappend_waiting(oldest.end)
            pinned = self._hot.pinned_from()
        # What a message no longer waits for, its delivery or its end, must be as durable as the segment that goes.
        self._hot.flush()
        return may_evict(oldest, self._settled.through(), policy, moment, pinned)


def _base_of(segment: Segment) -> int:
    return segment.base
