"""The only writer of the metadata log: a change is appended here, then its table applies it.

Every broker writes these records, with and without slaves: a start heals by them what a crash left between the append
and the save of a table, so that one path is walked every day. They cost a record of some hundred bytes where something
is created, altered or deleted, and no sync: who is answered by the flush rule waits for one anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from broker.intake.intake import refusal
from broker.intake.internal_records import WRITTEN_BY_NEVE, InternalRecords
from broker.intake.log_writer import LogWriter
from broker.intake.message import NewMessage
from broker.store.errors import MessageIllegal, StoreFull, StoreNotWritable
from broker.store.message_store import MessageStore
from broker.tables.changes import CHANGES, ArchiveSettled, Change, QueuesRaised, encode_change, queue_of
from infra.clock import Clock
from neve.remoting.names import METADATA_LOG


class MetadataJournal:
    """A table's `Journal`.

    Invariant: what the log holds below `position` is in the tables, and what is above it is in none. What is owed lies
    below all that is recorded after it: a topic's deletion behind what raised its queues, or who follows would have it
    end lower, and have its queues again.
    """

    def __init__(self, store: MessageStore, writer: LogWriter, clock: Clock) -> None:
        self._store, self._writer, self._clock = store, writer, clock
        self._position = 0
        self._owed: deque[QueuesRaised] = deque()
        self.settled_in = 0  # the epoch of the last `ArchiveSettled` that was recorded here

    @property
    def records(self) -> InternalRecords:
        """The log as it is read back."""
        return self._writer.internal

    @property
    def position(self) -> int:
        """The tables hold all changes below this offset of the log."""
        return self._position

    def reached(self, position: int) -> None:
        """The tables have followed the log so far."""
        self._position = position

    def owe(self, changes: Iterable[QueuesRaised]) -> None:
        """They hold already: nothing else is recorded before them. In place of what was owed."""
        self._owed = deque(changes)

    def record_owed(self) -> None:
        """As much of it as the log takes. Raises as `record`; the rest is owed still."""
        while self._owed:
            self._put(self._owed[0])
            self._owed.popleft()

    def record(self, change: Change) -> None:
        """Its next record. Raises BrokerError where the log takes nothing now: then nothing may change."""
        self.record_owed()
        self._put(change)

    def _put(self, change: Change) -> None:
        queue = queue_of(change)
        message = NewMessage(
            topic=METADATA_LOG,
            queue_id=queue,
            body=encode_change(change),
            born_timestamp=self._clock.now_ms(),
            born_host=self._store.config.store_host,
            prepared_transaction_offset=WRITTEN_BY_NEVE,
        )
        try:
            stored = self._writer.put(message, internal=True)
        except (StoreFull, StoreNotWritable, MessageIllegal) as error:
            raise refusal(error) from error
        if isinstance(change, QueuesRaised):
            self._store.remember_raised(change.queues, stored.physical_offset + stored.size)
        if queue == CHANGES:
            assert stored.queue_offset == self._position, "a table changed before its log was followed to the end"
            self._position = stored.queue_offset + 1
        elif isinstance(change, ArchiveSettled):
            self.settled_in = change.epoch
