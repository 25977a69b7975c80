"""Repeated offload rounds until nothing is due, for offload and salvage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from infra.clock import Clock
from infra.loop.threads import Threads
from lifecycle.due import Due
from lifecycle.throttle import UploadThrottle
from lifecycle.turns import Turns
from tiered.write.offload import OffloadRound, RoundReport
from tiered.write.offload_plan import TopicRange
from tiered.write.progress import Progress


class OffloadRounds:
    """Runs of rounds. The caller of `run` holds `lock`, for as long as the backlog takes."""

    def __init__(  # noqa: PLR0917
        self,
        rounds: OffloadRound,
        due: Due,
        throttle: UploadThrottle,
        turns: Turns,
        clock: Clock,
        threads: Threads,
        settled: Callable[[], bool] | None = None,
    ) -> None:
        """`settled`: whether the broker set has all that its master had at its promotion; None: no broker set."""
        self._rounds, self._due, self._throttle, self._turns, self._clock = rounds, due, throttle, turns, clock
        self._settled = settled
        self.lock = threads.lock()
        self.last: dict[str, Any] = {}  # the last run: its last round, and the totals of all

    def run(self, *, everything: bool, progress: Progress | None = None) -> list[RoundReport]:
        """Complete open rounds, then archive what is due. With `everything`, archive all records that exist now.

        A caller waits for a run with `everything`, so such a run is not slowed down.
        """
        assert self.lock.locked(), "one at a time"
        with self._throttle.awaited() if everything else nullcontext():
            return self._run(everything, progress)

    def _run(self, everything: bool, progress: Progress | None) -> list[RoundReport]:
        self._rounds.begin()
        if self._settled is not None and not self._settled():
            return []
        reports = self._rounds.resume(progress)
        goal = self._due.reach() if everything else None
        while not self._turns.closed and (ranges := self._ranges(goal)):
            report = self._rounds.run(ranges, progress)
            if report is None:
                break
            reports.append(report)
            if not report.committed:
                break  # each name failed; the next run tries again
        self._note(reports)
        return reports

    def _ranges(self, goal: int | None) -> list[TopicRange]:
        """Return the next ranges. With a goal, only ranges that begin below it: a busy broker would never finish."""
        ranges = self._due.ranges(everything=goal is not None)
        if goal is not None:
            ranges = [one for one in ranges if one.start < goal]
        self._throttle.adjust()
        return ranges

    def _note(self, reports: Sequence[RoundReport]) -> None:
        if reports:
            self.last = {
                "round": reports[-1].round,
                "time_ms": self._clock.now_ms(),
                "objects": sum(len(report.committed) for report in reports),
                "failed": sum(len(report.failed) for report in reports),
                "aborted": sum(len(report.aborted) for report in reports),
            }
