"""Archivable limit of a broker set: confirmed, and fsynced on all members of its SyncStateSet.

    archived <= lowest fsynced end in the SyncStateSet <= confirmed offset

Every electable member then has all archived messages, even after a power failure of all members. Until the set has
all that a master had at its promotion, that master reports neither messages nor gaps. Readers and rounds can't see
those messages yet, and a GAP would be recorded over existing ones.

For the copy of an Apache master's log, the limit is how far that master's log is durable (`broker.ha.stock_reach`).
"""

from __future__ import annotations

from typing import Protocol

from broker.store.message_store import MessageStore


class Others(Protocol):
    """Other holders of the same log that may continue it. Called on the event loop."""

    def archivable(self, synced: int) -> int:
        """Return the offset below which all of them keep the log, given the local fsynced offset; -1 if unknown."""
        ...


class BrokerSet(Others, Protocol):
    """Interface of the broker set to the archive of a member. Called on the event loop.

    Archivable messages are on the disks of the whole SyncStateSet. Members without them can't join it afterwards.
    """

    def appended(self) -> None:
        """Note that the log has grown and has to be replicated."""
        ...

    def deposed(self) -> None:
        """Note that the archive has the EPOCH of a later master, which a controller can name."""
        ...


class Reach:
    """Archivable limit of a broker; without others, its own fsynced offset. Called on the event loop."""

    def __init__(self, store: MessageStore, others: Others | None = None) -> None:
        self._store, self._set = store, others
        self._promoted_at = 0

    def lead(self) -> None:
        """Note the end of the log at a promotion, before the first append."""
        self._promoted_at = self._store.max_physical_offset

    def within(self, synced: int) -> int:
        """Return the archivable limit, given the local fsynced offset; 0 before the set is settled."""
        if self._set is None:
            return synced
        reach = min(self._set.archivable(synced), self._store.confirmed_offset)
        return self._store.record_start(reach) if reach >= self._promoted_at else 0

    def is_settled(self, synced: int) -> bool:
        """Return whether the whole set has what this member had at its promotion."""
        return self._set is None or self.within(synced) >= self._promoted_at
