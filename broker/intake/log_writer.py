"""The only caller of the store's append methods: every record that this broker creates passes through here.

Entry points: `append` takes sends of one client that `Intake` has checked. `put` takes one record. `put_copy` stores a
record again: in its target queue when it is due, or in a later place of its waiting queue. None of them checks
permissions: those were checked when the message arrived, also for delayed, timer, half, popped and dead messages.

Each entry point refuses internal topics (`neve.remoting.names.is_internal`), because names in stored messages may come
from a foreign log. An example is REAL_TOPIC of a delayed message that a client sent to an Apache broker. Only modules
that own an internal topic pass `internal=True`.

All methods raise StoreError, and then nothing was stored. In a broker set, `Replication` is asked before each append
and notified after it, also for records of the broker itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from broker.intake.internal_records import InternalRecords
from broker.intake.message import NewMessage
from broker.intake.replication import STANDS_ALONE, Replication
from broker.store.appender import AppendResult, Send
from broker.store.consume_queue import ConsumeQueue
from broker.store.errors import InternalTopic
from broker.store.message_store import MessageStore, PutResult
from neve.record.codec import MessageRecord, parse_host
from neve.record.properties import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQUE_KEY, tags_code
from neve.remoting.names import is_internal

# A waiting message is reappended before the log file that contains it is deleted. Messages due within this time are not
# reappended, and a copy stays in place at least this long, because a full disk triggers eviction every few seconds.
REAPPEND_AGAIN_MS = 30 * 60_000
_NONE: Mapping[str, str] = {}
_QueueOf = Callable[[str, int], ConsumeQueue]
_Append = Callable[[Sequence[Send], tuple[str, int], int], list[AppendResult]]


def found_by(properties: Mapping[str, str]) -> str:
    """Return the space-separated keys for the key index: the message's unique id and its KEYS."""
    return " ".join(filter(None, (properties.get(PROPERTY_UNIQUE_KEY), properties.get(PROPERTY_KEYS))))


class LogWriter:
    """Append interface of the store, with the checks of a broker set."""

    def __init__(self, store: MessageStore, replication: Replication = STANDS_ALONE) -> None:
        self._store, self._replication = store, replication
        #: Reads the records of internal topics.
        self.internal = InternalRecords(store)
        # Attributes of the store without a wrapper, because each batch of the express lane uses them.
        self.file_budget = store.queues.file_budget  # budget of queue files to create or map in one turn
        #: Returns the queue of a put and creates it if missing. Call `takes` or `check` first, in the same turn. Raises
        #: StoreError.
        self.queue_of: _QueueOf = store.queue_for
        #: Appends sends of one host in order. If it returns fewer places than sends, the next send cannot be stored.
        self.append: _Append = store.append
        #: Returns whether the broker set accepts appends in this turn; None if there is no set.
        self.takes: Callable[[], bool] | None = None
        self._in_set = replication.waits
        if replication.waits:
            self.takes, self.append = replication.takes, self._append_in_set

    def check(self) -> None:
        """Raise AppendRefused if the broker set accepts no appends."""
        if self._in_set:
            self._replication.check_append()

    def check_topic(self, topic: str) -> None:
        """Raise InternalTopic if only the broker's own modules may write to the topic."""
        if is_internal(topic):
            raise InternalTopic(f"topic {topic} is internal: only the broker's own records may be stored there")

    def put(self, message: NewMessage, *, internal: bool = False) -> PutResult:
        """Append one record, and the message `beside` it: both or neither.

        `internal`: the caller owns the internal topic that it writes to. `beside` is always a record of an internal
        topic.
        """
        beside = message.beside
        if internal:
            assert is_internal(message.topic), f"{message.topic} is not an internal topic"
        else:
            self.check_topic(message.topic)
        assert beside is None or is_internal(beside.topic), "only a record of an internal topic may be beside"
        self.check()
        stored = self._store.put(
            message.topic,
            message.queue_id,
            message.body,
            message.properties,
            flag=message.flag,
            sys_flag=message.sys_flag,
            born_timestamp=message.born_timestamp,
            born_host=message.born_host,
            reconsume_times=message.reconsume_times,
            tags_code=message.tags_code,
            keys=message.keys,
            prepared_transaction_offset=message.prepared_transaction_offset,
            beside=None if beside is None else self._send_of(beside),
        )
        if self._in_set:
            self._replication.appended()
        return stored

    def put_copy(
        self,
        record: MessageRecord,
        topic: str,
        queue_id: int,
        *,
        properties_raw: bytes | None = None,
        properties: Mapping[str, str] = _NONE,
        code: int | None = None,
        sys_flag: int | None = None,
        prepared_transaction_offset: int = 0,
        beside: NewMessage | None = None,
        internal: bool = False,
    ) -> PutResult:
        """Append a copy of the record to another queue, with a new store time.

        Arguments that are None keep the record's value. `properties` supply the tags, keys and unique id for the
        indexes; without them the copy is in no index. `code` replaces the code of the tags. `beside` and `internal` are
        as in `put`.
        """
        return self.put(
            NewMessage(
                topic=topic,
                queue_id=queue_id,
                body=record.body,
                properties=record.properties_raw if properties_raw is None else properties_raw,
                flag=record.flag,
                sys_flag=record.sys_flag if sys_flag is None else sys_flag,
                born_timestamp=record.born_timestamp,
                born_host=parse_host(record.born_host),
                reconsume_times=record.reconsume_times,
                tags_code=tags_code(properties.get(PROPERTY_TAGS)) if code is None else code,
                keys=found_by(properties),
                prepared_transaction_offset=prepared_transaction_offset,
                beside=beside,
            ),
            internal=internal,
        )

    def send_of(self, message: NewMessage) -> Send:
        """Return the message in the store's form; create its queue if missing.

        Call `check` first. Raises InternalTopic.
        """
        self.check_topic(message.topic)
        return self._send_of(message)

    def _send_of(self, message: NewMessage) -> Send:
        return (
            self.queue_of(message.topic, message.queue_id), message.body, message.properties, message.tags_code,
            message.keys, message.flag, message.sys_flag, message.born_timestamp, message.reconsume_times,
            message.prepared_transaction_offset,
        )  # fmt: skip

    # ---- in a broker set

    def _append_in_set(self, sends: Sequence[Send], host: tuple[str, int], now: int) -> list[AppendResult]:
        self._replication.check_append()
        places = self._store.append(sends, host, now)
        self._replication.appended()
        return places
