"""Frees the local disk: one segment at a time, the oldest first, the disk asked again after each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from infra import failpoint
from infra.clock import Clock
from lifecycle.hot_store import HotStore, Segment
from lifecycle.retention import Moment, Policy, may_evict, moment_of
from tiered.write.offload import Progress

_log = logging.getLogger(__name__)


class Evictor:
    """`through` says of each topic below which CommitLog offset it is settled in the archive."""

    def __init__(
        self,
        hot: HotStore,
        policy: Callable[[], Policy],
        clock: Clock,
        *,
        through: Callable[[], Mapping[str, int]],
        expired_by: Callable[[], int],
        stopping: Callable[[], bool],
    ) -> None:
        self._hot, self._policy, self._clock = hot, policy, clock
        self._through, self._expired_by, self._stopping = through, expired_by, stopping
        self.evicted = 0

    def run(self, progress: Progress | None = None, *, everything: bool = False) -> list[int]:
        """Bases of the segments that went; with `everything` those of any age that lose nothing."""
        evicted: list[int] = []
        expired_by: int | None = None
        moment: Moment | None = None
        while not self._stopping() and (oldest := min(self._hot.segments(), key=_base_of, default=None)) is not None:
            if not oldest.sealed:
                break
            expired_by = self._expired_by() if expired_by is None else expired_by
            policy, ratio = self._policy(), self._hot.disk_ratio()
            moment = moment_of(policy, self._clock.now_ms(), expired_by, ratio, moment)
            if not self._may_go(oldest, policy, moment._replace(crowded=moment.crowded or everything)):
                break
            failpoint.hit("offload.before_evict")
            self._hot.evict(oldest.base)
            failpoint.hit("offload.after_evict")
            evicted.append(oldest.base)
            self.evicted += 1
            _log.info("the local segment at %d is evicted, the disk is %.0f %% full", oldest.base, ratio * 100)
            if progress is not None:
                progress({"event": "evicted", "segment": oldest.base})
        return evicted

    def _may_go(self, oldest: Segment, policy: Policy, moment: Moment) -> bool:
        if not may_evict(oldest, self._through(), policy, moment, None):
            return False
        pinned = self._hot.pinned_from()
        if pinned is not None and pinned < oldest.end:
            # A message may wait for days: it moves to the head of the log where it alone would keep a segment.
            self._hot.carry_waiting(oldest.end)
            pinned = self._hot.pinned_from()
        # What a message no longer waits for, its delivery or its end, must be as durable as the segment that goes.
        self._hot.flush()
        return may_evict(oldest, self._through(), policy, moment, pinned)


def _base_of(segment: Segment) -> int:
    return segment.base
