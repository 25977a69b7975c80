"""Job that archives due records, round after round."""

from __future__ import annotations

from lifecycle.evict import Evict
from lifecycle.hot_store import HotStore
from lifecycle.rounds import OffloadRounds
from lifecycle.turns import Turns
from tiered.journal.writer import JournalWriter
from tiered.write.offload import RoundReport
from tiered.write.progress import Progress, report_event


class Offload:
    """The offload job. A long backlog takes a turn for each of its steps."""

    def __init__(
        self, hot: HotStore, journal: JournalWriter, rounds: OffloadRounds, evict: Evict, turns: Turns
    ) -> None:
        self._hot, self._journal, self._rounds, self._evict, self._turns = hot, journal, rounds, evict, turns

    def run(self, roll: bool = False, evict: bool = False, progress: Progress | None = None) -> list[RoundReport]:
        """Complete open rounds, then archive what is due; with `roll` everything, with `evict` free the local disk."""
        with self._rounds.lock:
            with self._turns:
                self._journal.ownership.confirm()
                if evict:
                    self._evict.in_turn(progress, everything=True)  # before a roll, which needs room
                if roll and not self._hot.roll():
                    report_event(progress, event="not_rolled", reason="the log can't start a new segment now")
            reports = self._rounds.run(everything=roll, progress=progress)
            if evict:
                with self._turns:
                    self._evict.in_turn(progress, everything=True)
        return reports
