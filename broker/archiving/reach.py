"""How far the archive of a broker set may reach: to what is on the disks of its whole SyncStateSet, and confirmed.

    archived <= least synced end of the SSS <= confirm

Whoever can be elected has it then, and after a rack's power cut too: no master may lack what the archive holds. And
before the set has all that a master had at its promotion, that master says nothing of what is there and what is not:
readers, and so rounds, do not see it yet, and a GAP would be recorded over what exists.

Of the copy of an Apache master's log it reaches as far as that master keeps what it has (`broker.ha.stock_reach`).
"""

from __future__ import annotations

from typing import Protocol

from broker.store.message_store import MessageStore


class Others(Protocol):
    """Whoever has the same log, and may go on with it. On the loop."""

    def archivable(self, synced: int) -> int:
        """Below this the log is safe with all of them, the own disk having `synced`; -1: not known."""
        ...


class BrokerSet(Others, Protocol):
    """What an archive asks of the set that its broker is a member of. On the loop.

    What is archivable is on the disks of the whole SyncStateSet, and from then on nobody joins it who lacks it.
    """

    def appended(self) -> None:
        """The log has grown: its members have to have that."""
        ...

    def deposed(self) -> None:
        """The archive has the EPOCH of a later master: a controller knows who that is."""
        ...


class Reach:
    """Of a broker; one that stands alone reaches as far as its own disk. On the loop."""

    def __init__(self, store: MessageStore, others: Others | None = None) -> None:
        self._store, self._set = store, others
        self._promoted_at = 0

    def lead(self) -> None:
        """This member is the master from here on, and has appended nothing yet."""
        self._promoted_at = self._store.max_physical_offset

    def within(self, synced: int) -> int:
        """The log offset up to which a round may go, with so much on the own disk; 0 before all is settled."""
        if self._set is None:
            return synced
        reach = min(self._set.archivable(synced), self._store.confirmed_offset)
        return self._store.record_start(reach) if reach >= self._promoted_at else 0

    def is_settled(self, synced: int) -> bool:
        """Whether what this member had at its promotion is the set's."""
        return self._set is None or self.within(synced) >= self._promoted_at
