"""The only caller of the store's append: every record of this broker's own making passes here.

Doors: `append` what one client sent together and `Intake` has checked · `put` one record · `put_copy` a stored record
once more, to where it was bound when its time has come, or to where it waits on. None of them asks whether a client
may: who puts what the broker keeps for itself (delayed, for a moment, half, popped, dead) was asked when it came.

Internal topics (`neve.remoting.names.is_internal`) are refused at each door, because names in stored messages may come
from a foreign log: REAL_TOPIC of a delayed message that a client sent to an Apache broker, for example. Only modules
that own an internal topic pass `internal=True`.

All raise StoreError, and then nothing was stored. In a broker set it is asked before each of them, and hears of it
after: also of what this broker stores for itself.
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

# What waits is reappended out of a log file that is to go. What leaves its place by itself so soon is not, and what was
# reappended stays at least that long: a crowded disk evicts every few seconds.
REAPPEND_AGAIN_MS = 30 * 60_000
_NONE: Mapping[str, str] = {}
_QueueOf = Callable[[str, int], ConsumeQueue]
_Append = Callable[[Sequence[Send], tuple[str, int], int], list[AppendResult]]


def found_by(properties: Mapping[str, str]) -> str:
    """The names under which the index finds a message."""
    return " ".join(filter(None, (properties.get(PROPERTY_UNIQUE_KEY), properties.get(PROPERTY_KEYS))))


class LogWriter:
    """See the module."""

    def __init__(self, store: MessageStore, replication: Replication = STANDS_ALONE) -> None:
        self._store, self._replication = store, replication
        #: Reads the internal topics back.
        self.internal = InternalRecords(store)
        # The store's own, with no layer between: each batch of the express lane comes by here.
        self.rooms = store.rooms  # how many queues' files are made ready for them in one turn
        #: The queue of a put, made for its first; after `takes`, or `check`, in the same turn. Raises StoreError.
        self.queue_of: _QueueOf = store.queue_for
        #: Sends of one host, in their order; fewer places than sends: the next one can't be stored.
        self.append: _Append = store.append
        #: Whether the set lets anything come in, in this turn; None where there is no set to ask.
        self.takes: Callable[[], bool] | None = None
        self._in_set = replication.waits
        if replication.waits:
            self.takes, self.append = replication.takes, self._append_in_set

    def check(self) -> None:
        """Raises AppendRefused where the set lets nothing come in."""
        if self._in_set:
            self._replication.check_append()

    def check_topic(self, topic: str) -> None:
        """Raise InternalTopic if only the broker's own modules may write to the topic."""
        if is_internal(topic):
            raise InternalTopic(f"topic {topic} is internal: only the broker's own records may be stored there")

    def put(self, message: NewMessage, *, internal: bool = False) -> PutResult:
        """One record, and what is to be stored beside it: both or neither.

        `internal`: the caller owns the internal topic that it writes to. `beside` is always a record of such a topic.
        """
        beside = message.beside
        if internal:
            assert is_internal(message.topic), f"{message.topic} is not an internal topic"
        else:
            self.check_topic(message.topic)
        assert beside is None or is_internal(beside.topic), "a client's message has a put of its own"
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
        """The record with another place and store time.

        `properties` have the tags, keys and id under which the copy is found; without them, it is in no index. `code`
        stands for the tags. What is None is as in the record. `beside` is stored with it, or neither. `internal`: see
        `put`.
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
        """As the store takes it; makes the queue of a first message: after `check`. Raises InternalTopic."""
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
