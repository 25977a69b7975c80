"""Salvage: before a log goes on above its archive, what it still holds is archived and what it lacks is closed."""

from __future__ import annotations

from lifecycle.rounds import Rounds
from tiered.write.offload import RoundReport


class Salvage:
    """Once, at a start, before the first send."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def run(self) -> list[RoundReport]:
        with self._rounds.lock:
            return self._rounds.run(everything=True)
