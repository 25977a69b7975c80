"""Salvage before a log continues above its archive: archive what the log still has, and close what it lacks."""

from __future__ import annotations

from lifecycle.rounds import OffloadRounds
from tiered.write.offload import RoundReport


class Salvage:
    """Runs once at a start, before the first send."""

    def __init__(self, rounds: OffloadRounds) -> None:
        self._rounds = rounds

    def run(self) -> list[RoundReport]:
        with self._rounds.lock:
            return self._rounds.run(everything=True)
