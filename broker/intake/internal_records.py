"""Records of the broker's internal topics, and the proof that a neve broker wrote them.

A log can hold records that another broker stored: it was imported from an Apache broker, or it follows an Apache
master. A client of an Apache broker may send to any topic whose name begins with `rmq_sys_`, so neither the name nor
the body of a record proves its origin.

The field preparedTransactionOffset does. A client cannot set it. Apache's brokers store 0 there, or the physical offset
of a half message that they looked up (EndTransactionProcessor), which is never negative. neve stores `WRITTEN_BY_NEVE`
in every record that a start, a slave or a change of role executes: the metadata log, the revive log, the marks of timer
messages. Replication copies the field as it is. Records without it are counted and ignored. Damaged
records are ignored too if an older record may replace them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from broker.store.message_store import MessageStore
from infra.loop.in_steps import Steps, at_once
from neve.record.codec import MessageRecord, iter_records

log = logging.getLogger(__name__)

T = TypeVar("T")

#: preparedTransactionOffset of a record that a neve broker wrote into an internal topic: "neve" in ASCII, negated.
WRITTEN_BY_NEVE = -0x6E657665
_COUNT, _BYTES = 512, 4 << 20  # limits of one read


class _Seen(NamedTuple):
    """The decoded newest own record of a queue below the offset `end`, and `TruncationState.count` when it was read."""

    truncation_count: int
    end: int
    newest: Any


class InternalRecords:
    """Reads the records of internal topics and distinguishes own records from foreign ones."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        #: Topic → ignored records; a record that is read twice counts twice.
        self.ignored: Counter[str] = Counter()
        self._seen: dict[tuple[str, int], _Seen] = {}

    def scan(self, topic: str, queue_id: int, first: int, end: int) -> Iterator[MessageRecord]:
        """Yield all records from offset `first` up to `end`; end earlier if the queue returns nothing."""
        offset = first
        while offset < end:
            got = self._store.reader.get(topic, queue_id, offset, _COUNT, _BYTES)
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
        self.ignore(record, "not written by a neve broker")
        return False

    def ignore(self, record: MessageRecord, cause: str) -> None:
        """Count a record that is not executed; log the first of a topic, and again at each doubling."""
        topic = record.topic
        self.ignored[topic] += 1
        count = self.ignored[topic]
        if not count & (count - 1):
            log.warning(
                "record in an internal topic ignored: %s; topic=%s queue=%d offset=%d ignored=%d",
                cause, topic, record.queue_id, record.queue_offset, count,
            )  # fmt: skip

    def last(self, topic: str, queue_id: int, decode: Callable[[MessageRecord], T | None]) -> T | None:
        """Run `last_steps` without yielding.

        For a start, and for a slave, which has read all but the newest records before.
        """
        return at_once(self.last_steps(topic, queue_id, decode))

    def last_steps(self, topic: str, queue_id: int, decode: Callable[[MessageRecord], T | None]) -> Steps[T | None]:
        """Return `decode`'s result for the newest own record, or None if the queue has no such record.

        A record for which `decode` returns None is damaged: it is ignored, and the record before it is used. No record
        is read twice unless the log was truncated, so foreign records at the end of a queue are scanned only once.
        `decode` must be the same in all calls for a queue.
        """
        store, truncation_count = self._store, self._store.truncations.count
        end, seen = store.queues.max_offset(topic, queue_id), self._seen.get((topic, queue_id))
        if seen is not None and (seen.truncation_count != truncation_count or seen.end > end):
            seen = None
        lowest = max(0 if seen is None else seen.end, store.queues.min_offset(topic, queue_id))
        upper, count = end, 1  # the last record is nearly always an own one
        found: T | None = None
        while found is None and upper > lowest:
            first = max(upper - count, lowest)
            own = [record for record in self.scan(topic, queue_id, first, upper) if self.is_own(record)]
            found = self._newest(own, decode)
            upper, count = first, _COUNT
            yield
        if found is None and seen is not None:
            found = seen.newest
        self._seen[topic, queue_id] = _Seen(truncation_count, end, found)
        return found

    def _newest(self, own: list[MessageRecord], decode: Callable[[MessageRecord], T | None]) -> T | None:
        for record in reversed(own):
            decoded = decode(record)
            if decoded is not None:
                return decoded
            self.ignore(record, "it is damaged")
        return None
