"""Records of the broker's internal topics, and the proof that a neve broker wrote them.

A log can hold records that another broker stored: it was imported from an Apache broker, or it follows an Apache
master. A client of an Apache broker may send to any topic whose name begins with `rmq_sys_`, so neither the name nor
the body of a record proves its origin.

The field preparedTransactionOffset does. A client cannot set it. Apache's brokers store 0 there, or the physical offset
of a half message that they looked up (EndTransactionProcessor), which is never negative. neve stores `WRITTEN_BY_NEVE`
in every record that a start, a slave or a change of role executes: the metadata log, the revive log, the marks of timer
messages. Replication copies the field as it is. Records without it are counted and ignored.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

from broker.store.message_store import MessageStore
from neve.record.codec import MessageRecord, iter_records

log = logging.getLogger(__name__)

#: preparedTransactionOffset of a record that a neve broker wrote into an internal topic: "neve" in ASCII, negated.
WRITTEN_BY_NEVE = -0x6E657665
_COUNT, _BYTES = 512, 4 << 20  # of one read


class InternalRecords:
    """Reads the records of internal topics and distinguishes own records from foreign ones."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        #: Topic → ignored records; a record that is read twice counts twice.
        self.ignored: Counter[str] = Counter()

    def scan(self, topic: str, queue_id: int, first: int, end: int) -> Iterator[MessageRecord]:
        """Yield all records from offset `first` up to `end`; ends earlier where the queue returns nothing."""
        offset = first
        while offset < end:
            got = self._store.get(topic, queue_id, offset, _COUNT, _BYTES)
            for buffer in got.buffers:
                for record in iter_records(buffer):
                    if record.queue_offset < end:
                        yield record
            if got.next_offset <= offset:
                return
            offset = got.next_offset

    def is_own(self, record: MessageRecord) -> bool:
        """Return whether a neve broker wrote the record; count it as ignored if not."""
        if record.prepared_transaction_offset == WRITTEN_BY_NEVE:
            return True
        self._ignore(record)
        return False

    def last(self, topic: str, queue_id: int, lowest: int = 0) -> MessageRecord | None:
        """Return the newest own record from offset `lowest` on, or None."""
        end = self._store.max_offset(topic, queue_id)
        lowest = max(lowest, self._store.min_offset(topic, queue_id))
        count = 1  # the last record is nearly always an own one
        while end > lowest:
            first = max(end - count, lowest)
            own = [record for record in self.scan(topic, queue_id, first, end) if self.is_own(record)]
            if own:
                return own[-1]
            end, count = first, _COUNT
        return None

    def _ignore(self, record: MessageRecord) -> None:
        topic = record.topic
        self.ignored[topic] += 1
        count = self.ignored[topic]
        if not count & (count - 1):  # the first one, then at each doubling
            log.warning(
                "foreign record in an internal topic ignored: no neve broker wrote it; topic=%s queue=%d offset=%d "
                "ignored=%d",
                topic, record.queue_id, record.queue_offset, count,
            )  # fmt: skip
