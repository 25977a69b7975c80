"""The door through which a table's change goes before it holds: into the metadata log (`broker.metadata`)."""

from __future__ import annotations

from typing import Protocol

from broker.tables.changes import Change


class Journal(Protocol):
    """Each change is in the log before it is in its table."""

    @property
    def position(self) -> int:
        """The tables hold all changes below this offset of the log."""

    def record(self, change: Change) -> None:
        """Its next record. Raises BrokerError where the log takes nothing now: then nothing may change."""


class NoJournal:
    """Of a table without a log: its file says everything."""

    position = 0

    def record(self, change: Change) -> None:
        """Nobody follows."""


NO_JOURNAL = NoJournal()
