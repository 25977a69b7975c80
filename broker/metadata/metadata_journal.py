"""The only writer of the metadata log: a change is appended here, then its table applies it.

Every broker writes these records, with and without slaves. After a crash between the append and the save of a table, a
start repairs the table with them. The code of slaves therefore runs at every start. A created, altered or deleted row
costs a record of some hundred bytes and no extra sync: an answer that needs one waits for the flush anyway.
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
    """`Journal` of the tables.

    Invariant: changes below `position` in the log are in the tables, and those above are in none. Owed changes are
    written before any later change. A topic's deletion must not precede the record that raised its queues: slaves would
    create the queues again, with lower ends.
    """

    def __init__(self, store: MessageStore, writer: LogWriter, clock: Clock) -> None:
        self._store, self._writer, self._clock = store, writer, clock
        self._position = 0
        self._deferred: deque[QueuesRaised] = deque()
        self.settled_in = 0  # epoch of the last `ArchiveSettled` that was recorded here

    @property
    def records(self) -> InternalRecords:
        """Return the reader of the internal records."""
        return self._writer.internal

    @property
    def position(self) -> int:
        """Return the offset below which all changes are in the tables."""
        return self._position

    def reached(self, position: int) -> None:
        """Record that the tables contain all changes below `position`."""
        self._position = position

    def defer(self, changes: Iterable[QueuesRaised]) -> None:
        """Set changes that are in force already, and have to be recorded before any other. Replaces earlier ones."""
        self._deferred = deque(changes)

    def record_deferred(self) -> None:
        """Record all owed changes. Raise as `record`; the changes that are left remain owed."""
        while self._deferred:
            self._put(self._deferred[0])
            self._deferred.popleft()

    def record(self, change: Change) -> None:
        """Append a change. Raise BrokerError if the log accepts no record now: then the change must not be made."""
        self.record_deferred()
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
            self._store.queue_changes.remember_raised(change.queues, stored.physical_offset + stored.size)
        if queue == CHANGES:
            assert stored.queue_offset == self._position, "a table changed before its log was followed to the end"
            self._position = stored.queue_offset + 1
        elif isinstance(change, ArchiveSettled):
            self.settled_in = change.epoch
