"""Job that writes a checkpoint of the catalog when the journal has grown, so that readers need not read it all."""

from __future__ import annotations

from lifecycle.turns import Turns
from tiered.journal.writer import JournalWriter


class WriteCheckpoint:
    """The checkpoint job."""

    def __init__(self, journal: JournalWriter, turns: Turns) -> None:
        self._journal, self._turns = journal, turns

    def run(self) -> bool:
        """Write a checkpoint if one is due. Returns whether one was written."""
        with self._turns:
            self._journal.ownership.confirm()
            return self._journal.checkpoint_if_due()
