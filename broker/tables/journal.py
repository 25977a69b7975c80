"""Interface to the metadata log (`broker.metadata`), which records each change before it applies to a table."""

from __future__ import annotations

from typing import Protocol

from broker.tables.changes import Change


class Journal(Protocol):
    """Metadata log of the tables. Invariant: each change is in the log before it is in its table."""

    @property
    def position(self) -> int:
        """Offset of the log below which the tables include all changes."""

    def record(self, change: Change) -> None:
        """Append a change. Raises BrokerError if the log refuses it; the table must not change then."""


class NoJournal:
    """Journal of a table without a log: its file has all changes."""

    position = 0

    def record(self, change: Change) -> None:
        """Do nothing."""


NO_JOURNAL = NoJournal()
