"""Half messages that wait for the end of their transaction. All state is in the log.

RMQ_SYS_TRANS_HALF_TOPIC, queue 0      half messages, with the target in REAL_TOPIC and REAL_QID
RMQ_SYS_TRANS_OP_HALF_TOPIC, queue 0   marks; body: queue offsets of half messages, each followed by ","
    TAGS=d  ended (committed, rolled back or abandoned)     TAGS=c  checked once more
    TAGS=r  the number of checks restarts at 0
    HALF_FROM, OP_FROM: a start needs no half message and no mark below these offsets

A half message whose log file has to be evicted is appended again, with its first physical offset + 1 as the prepared
offset. Its producer knows it by that offset, and by its offset at each check. A crash before the mark of the old copy
leaves both, and the newer one counts.

A committed message and its mark are appended together, the mark last. If a crash separates them, the message is the
log's last record and contains the half message's physical offset. The next start detects that and writes the mark, so
consumers see a commit only once. It stores nothing before the mark, because the message must be the last record until
then.
"""

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from broker.intake.log_writer import REAPPEND_AGAIN_MS, LogWriter
from broker.intake.message import NewMessage
from broker.intake.property_text import ended_bytes, target_pairs
from broker.store.errors import StoreFull, StoreNotWritable
from broker.store.message_store import MessageStore, PutResult
from broker.waiting.queue_records import of_queue
from infra.clock import Clock
from infra.loop.in_steps import Steps, at_once
from infra.loop.parts import Parts, emptied, run_here
from neve.record.codec import MessageRecord, decode_record
from neve.record.layout import TRANSACTION_COMMIT
from neve.record.properties import PROPERTY_TRANSACTION_PREPARED, PROPERTY_UNIQUE_KEY, tags_code
from neve.remoting.names import HALF_TOPIC, OP_HALF_TOPIC

log = logging.getLogger(__name__)

COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
TRANSACTION_BITS = 0xC

_SECONDS = re.compile(r"[0-9]{1,15}")
_OFFSET, _OFFSETS = re.compile(r"[0-9]{1,19}"), re.compile(rb"(?:[0-9]{1,19},)*(?:[0-9]{1,19})?")
_IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"
_ENDED, _ASKED, _ANEW = "d", "c", "r"
_OFFSETS_IN_MARK = 1000
_OUTCOMES_KEPT = 10_000
_REAPPENDED_AT_ONCE = 64
_A_STEP = 100  # records read in one turn of the event loop
_BYTES_A_RECORD = 256  # bytes of a mark's offsets that count as one record, because they take as long to read


@dataclass(slots=True)
class Half:
    """One waiting half message: its queue offset and physical offset, its store time (ms), its number of checks."""

    queue_offset: int
    physical_offset: int
    store_ms: int
    # Time without checks by the producer's property; None: the broker's transactionTimeOut.
    immunity_ms: int | None
    # Offset of the op queue below which this half message has no mark.
    op_from: int
    checks: int = 0
    # Physical offsets before it was appended again, the first one first.
    earlier: list[int] = field(default_factory=list)
    reappended_ms: int = -1


class HalfMessages:
    """Open transactions (RocketMQ's TransactionalMessageServiceImpl), loaded from the log at a start.

    Invariant: waiting half messages have no end mark in the op queue, except while the log refuses records.
    """

    requested_by = frozenset((PROPERTY_TRANSACTION_PREPARED,))
    kind = "transaction"

    def __init__(self, store: MessageStore, writer: LogWriter, clock: Clock) -> None:
        self._store, self._writer, self._clock = store, writer, clock
        self._queues = store.queues
        self._pending: OrderedDict[int, Half] = OrderedDict()
        # Half messages that were appended again, by their earlier physical offsets.
        self._reappended: dict[int, Half] = {}
        self._outcomes: OrderedDict[int, int] = OrderedDict()
        self._unmarked: list[int] = []

    def __len__(self) -> int:
        return len(self._pending)

    def find(self, queue_offset: int) -> Half | None:
        return self._pending.get(queue_offset)

    def reappended_from(self, physical_offset: int) -> Half | None:
        """Return the waiting half message that had this physical offset before it was appended again."""
        return self._reappended.get(physical_offset)

    def outcome(self, queue_offset: int) -> int | None:
        """Return the outcome of a transaction that ended recently."""
        return self._outcomes.get(queue_offset)

    def waiting(self) -> list[Half]:
        """Return the waiting half messages, in the order of the log."""
        return list(self._pending.values())

    def pinned_from(self) -> int | None:
        """Return the lowest physical offset that a waiting half message needs."""
        first = next(iter(self._pending.values()), None)
        return None if first is None else first.physical_offset

    # ---- changes

    def take(self, message: NewMessage, properties: Mapping[str, str]) -> tuple[PutResult, None]:
        """Store a half message, invisible until commit; processing by its target topic is deferred until then."""
        raw = ended_bytes(message.properties) + target_pairs(message.topic, message.queue_id)
        raw += f"__transactionId__\x01{properties[PROPERTY_UNIQUE_KEY]}\x02".encode("utf-8", "surrogatepass")
        half = msgspec.structs.replace(
            message,
            topic=HALF_TOPIC,
            queue_id=0,
            properties=raw,
            sys_flag=message.sys_flag & ~TRANSACTION_BITS,
            tags_code=0,
            keys="",
        )
        stored = self._writer.put(half, internal=True)
        self.added(stored, properties)
        return stored, None

    def added(self, stored: PutResult, properties: Mapping[str, str]) -> None:
        """Track a half message that has been stored."""
        op_from = self._queues.max_offset(OP_HALF_TOPIC, 0)
        self._pending[stored.queue_offset] = Half(
            stored.queue_offset, stored.physical_offset, stored.store_timestamp, immunity(properties), op_from
        )

    def end_mark(self, half: Half) -> NewMessage:
        """Return the end mark, to be stored together with the outcome and before `ended`. Raises StoreError."""
        return self._mark_of(_ENDED, [half.queue_offset], half)

    def roll_back(self, half: Half) -> None:
        """Roll a transaction back. Raises StoreError; the half message is unchanged then."""
        self._writer.put(self.end_mark(half), internal=True)
        self.ended(half, ROLLBACK)

    def end(self, half: Half, outcome: int) -> None:
        """End a transaction, even if the log refuses the mark now; it is written later."""
        self.ended(half, outcome)
        self._unmarked.append(half.queue_offset)
        self.write_marks()

    def ended(self, half: Half, outcome: int) -> None:
        """Remove a half message whose end mark is in the log; it is not checked again and can't end another way."""
        del self._pending[half.queue_offset]
        for position in half.earlier:
            self._reappended.pop(position, None)
        self._outcomes[half.queue_offset] = outcome
        if len(self._outcomes) > _OUTCOMES_KEPT:
            self._outcomes.popitem(last=False)

    def asked(self, halves: list[Half]) -> None:
        """Count one more check of each half message, and log that."""
        for half in halves:
            half.checks += 1
        for start in range(0, len(halves), _OFFSETS_IN_MARK):
            self._mark(_ASKED, [half.queue_offset for half in halves[start : start + _OFFSETS_IN_MARK]])

    def start_over(self, half: Half) -> None:
        """Reset the number of checks to 0. Raises StoreError; nothing has changed then."""
        self._writer.put(self._mark_of(_ANEW, [half.queue_offset]), internal=True)
        half.checks = 0

    def put_again(self, record: MessageRecord) -> None:
        """Append a copy of an abandoned half message, which waits again. Raises StoreError if the log refuses it."""
        self.added(self._writer.put_copy(record, HALF_TOPIC, 0, internal=True), record.properties)

    def reappend(self, below: int) -> bool:
        """Append a batch of the half messages below a physical offset again; return False if none can be moved now.

        Young ones are skipped, because they end soon. Raises StoreFull or StoreNotWritable; the copies appended before
        that are valid.
        """
        left: list[int] = []
        try:
            while len(left) < _REAPPENDED_AT_ONCE and (half := self._first_to_reappend(below)) is not None:
                offset = half.queue_offset
                self._reappend(half)
                left.append(offset)
        finally:
            self._unmarked += left
            self.write_marks()
        return bool(left)

    def _first_to_reappend(self, below: int) -> Half | None:
        half = next(iter(self._pending.values()), None)
        if half is None or half.physical_offset >= below:
            return None
        stays = 0 <= self._clock.now_ms() - max(half.store_ms, half.reappended_ms) < REAPPEND_AGAIN_MS
        return None if stays else half

    def _reappend(self, half: Half) -> None:
        store = self._store
        raw = store.reader.record_at(half.physical_offset)
        assert raw is not None, "its segment is pinned"
        first = half.earlier[0] if half.earlier else half.physical_offset
        op_from = store.queues.max_offset(OP_HALF_TOPIC, 0)
        stored = self._writer.put_copy(
            decode_record(raw), HALF_TOPIC, 0, prepared_transaction_offset=first + 1, internal=True
        )
        del self._pending[half.queue_offset]
        half.earlier.append(half.physical_offset)
        self._reappended[half.physical_offset] = half
        half.queue_offset, half.physical_offset = stored.queue_offset, stored.physical_offset
        half.op_from, half.reappended_ms = op_from, stored.store_timestamp
        self._pending[half.queue_offset] = half
        if half.checks:
            self._mark(_ASKED, [half.queue_offset] * half.checks)

    def begin_with(self, waiting: Sequence[tuple[MessageRecord, int]], ended: list[int]) -> None:
        """Take over the half messages of another broker, each with its number of checks.

        No start reads marks of that broker. `ended` are the offsets in between that no longer wait. Raises StoreError.
        """
        run_here(self.forget_parts())
        op_from = self._queues.max_offset(OP_HALF_TOPIC, 0)
        for record, checks in waiting:
            offset, wish = record.queue_offset, immunity(record.properties)
            half = Half(offset, record.physical_offset, record.store_timestamp, wish, op_from, checks)
            self._pending[offset] = half
        for start in range(0, max(len(ended), 1), _OFFSETS_IN_MARK):  # at least one mark, for HALF_FROM and OP_FROM
            self._writer.put(self._mark_of(_ENDED, ended[start : start + _OFFSETS_IN_MARK]), internal=True)
        asked = [offset for offset, half in self._pending.items() for _ in range(half.checks)]
        for start in range(0, len(asked), _OFFSETS_IN_MARK):
            self._writer.put(self._mark_of(_ASKED, asked[start : start + _OFFSETS_IN_MARK]), internal=True)

    def write_marks(self) -> None:
        """Write the outstanding end marks, including those that the log refused earlier."""
        while self._unmarked and self._mark(_ENDED, self._unmarked[:_OFFSETS_IN_MARK]):
            del self._unmarked[:_OFFSETS_IN_MARK]

    def _mark(self, tag: str, offsets: list[int]) -> bool:
        try:
            self._writer.put(self._mark_of(tag, offsets), internal=True)
        except (StoreFull, StoreNotWritable) as error:
            log.warning("a transaction's mark can't be written now: %s", error)
            return False
        return True

    def _append_end(self, offset: int) -> None:
        self._writer.put(self._mark_of(_ENDED, [offset]), internal=True)

    def _mark_of(self, tag: str, offsets: list[int], ends: Half | None = None) -> NewMessage:
        """Return a mark; `ends` no longer waits once the mark is in the log."""
        store, first = self._store, next((half for half in self._pending.values() if half is not ends), None)
        half_from = first.queue_offset if first is not None else store.queues.max_offset(HALF_TOPIC, 0)
        op_from = first.op_from if first is not None else store.queues.max_offset(OP_HALF_TOPIC, 0)
        properties = f"TAGS\x01{tag}\x02HALF_FROM\x01{half_from}\x02OP_FROM\x01{op_from}\x02".encode()
        return NewMessage(
            topic=OP_HALF_TOPIC,
            queue_id=0,
            body="".join(f"{offset}," for offset in offsets).encode(),
            properties=properties,
            born_timestamp=self._clock.now_ms(),
            tags_code=tags_code(tag),
        )

    # ---- start

    def load(self) -> None:
        """Load the waiting half messages from the log at a start."""
        at_once(self.load_steps())
        self.lead()

    def load_steps(self) -> Steps[None]:
        """Load the waiting half messages in steps from a log that does not grow meanwhile; `lead` must follow."""
        for _ in self.forget_parts():
            yield
        half_from, op_from = yield from self._floors()
        ended: set[int] = set()
        checks: dict[int, int] = {}
        weight = 0
        for mark in of_queue(self._store, OP_HALF_TOPIC, 0, op_from):
            read = _read_mark(mark)
            if read is None:
                self._writer.internal.ignore(mark, "it is damaged")
            else:
                if read.tag == _ENDED:
                    ended.update(read.offsets)
                for offset in read.offsets:
                    checks[offset] = checks.get(offset, 0) + 1 if read.tag == _ASKED else 0
            weight += 1 + len(mark.body) // _BYTES_A_RECORD
            if weight >= _A_STEP:
                weight = 0
                yield
        places: dict[int, Half] = {}
        for number, record in enumerate(of_queue(self._store, HALF_TOPIC, 0, half_from), 1):
            if number % _A_STEP == 0:
                yield
            self._load_half(record, ended, checks, places, op_from)

    def _load_half(
        self, record: MessageRecord, ended: set[int], checks: Mapping[int, int], places: dict[int, Half], op_from: int
    ) -> None:
        """Load one record of the half queue; `places` maps physical offsets to half messages loaded so far."""
        offset, first = record.queue_offset, record.prepared_transaction_offset - 1
        earlier = [first] if first >= 0 else []
        if earlier:
            self._leave(first, places)
        if offset not in ended:
            half = Half(
                offset,
                record.physical_offset,
                record.store_timestamp,
                immunity(record.properties),
                op_from,
                checks.get(offset, 0),
                earlier,
            )
            self._pending[offset] = places[record.physical_offset] = half
            self._reappended.update(dict.fromkeys(earlier, half))

    def lead(self) -> None:
        """Begin as the log's writer: complete the transaction whose end mark a crash has separated."""
        raw = self._store.reader.newest_record()
        if raw is not None:
            self._end_if_committed(decode_record(raw))

    def forget_parts(self) -> Parts[None]:
        """Forget all half messages on a slave, because its master completes them."""
        tables = (self._pending, self._reappended, self._outcomes, self._unmarked)
        self._pending, self._reappended, self._outcomes, self._unmarked = OrderedDict(), {}, OrderedDict(), []
        yield from emptied(*tables)

    def _leave(self, first: int, places: dict[int, Half]) -> None:
        """Remove the older copy of a half message that was appended again, even if a crash prevented its mark."""
        before = self._reappended.pop(first, None) or places.pop(first, None)
        if before is not None:
            del self._pending[before.queue_offset]

    def _end_if_committed(self, record: MessageRecord) -> None:
        if record.sys_flag & TRANSACTION_BITS != TRANSACTION_COMMIT:
            return
        raw = self._store.reader.record_at(record.prepared_transaction_offset)
        half = None if raw is None else self._pending.get(decode_record(raw).queue_offset)
        if half is None or half.physical_offset != record.prepared_transaction_offset:
            return
        self.ended(half, COMMIT)
        if not self._store.end.is_following:  # otherwise the master writes the mark
            self._store.end.put_first(partial(self._append_end, half.queue_offset))

    def _floors(self) -> Steps[tuple[int, int]]:
        """Return the offsets of the half queue and of the op queue from which a start reads.

        They are in the newest undamaged mark. Those of an older mark are lower, which only means reading more.
        """
        lowest, end = self._queues.min_offset(OP_HALF_TOPIC, 0), self._queues.max_offset(OP_HALF_TOPIC, 0)
        for number, offset in enumerate(range(end - 1, lowest - 1, -1), 1):
            record = next(of_queue(self._store, OP_HALF_TOPIC, 0, offset), None)
            mark = None if record is None else _read_mark(record)
            if mark is not None:
                return mark.half_from, mark.op_from
            if number % _A_STEP == 0:
                yield
        return 0, 0


class _Mark(NamedTuple):
    tag: str
    offsets: list[int]
    half_from: int
    op_from: int


def _read_mark(record: MessageRecord) -> _Mark | None:
    """Parse a mark; None if it is damaged. Marks of Apache brokers have no HALF_FROM and no OP_FROM."""
    properties = record.properties
    floors = [properties.get(name, "0") for name in ("HALF_FROM", "OP_FROM")]
    if _OFFSETS.fullmatch(record.body) is None or not all(map(_OFFSET.fullmatch, floors)):
        return None
    offsets = [int(part) for part in record.body.split(b",") if part]
    return _Mark(properties.get("TAGS", ""), offsets, *map(int, floors))


def immunity(properties: Mapping[str, str]) -> int | None:
    """Return the producer's immunity time in ms, None without a valid number of seconds."""
    text = properties.get(_IMMUNITY, "")
    return int(text) * 1000 if _SECONDS.fullmatch(text) else None
