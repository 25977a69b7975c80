"""Intake of messages from clients. Records that the broker itself creates go through `LogWriter` instead.

A send passes four steps:

    admission    check_open, check_topic: RocketMQ's checks, in RocketMQ's order. A missing topic is created, and its
                 entry is durable before a message in it is acknowledged.
    properties   begins_transaction, `stamp`: the unique id and the broker's own properties.
    storage      send: a producer's message. Half, delayed and timer messages go to their `HeldMessages`.
                 put: as send, but never begins a transaction; for a message that results from another one.
                 put_now, put_batch: always to the named queue, whatever the properties request.
    answer       not here but by `Acknowledgement`, as soon as the record is as durable as this broker promises. In a
                 broker set the in-sync replicas have to confirm it first (`broker.intake.replication`).

The express lane does the same for plain sends, which need only a check and an append.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from broker.broker_stats import BrokerStats
from broker.config import BrokerConfig
from broker.intake.log_writer import LogWriter, found_by
from broker.intake.message import NewMessage, Stored
from broker.intake.message_stamp import MessageStamp
from broker.intake.property_text import ended, join_properties
from broker.intake.replication import AppendRefused
from broker.life import BrokerLife
from broker.role import BrokerRole
from broker.store.appender import AppendResult
from broker.store.errors import InternalTopic, MessageIllegal, StoreError, StoreFull, StoreNotWritable
from broker.store.message_store import PutResult
from broker.tables.topic_config_manager import TopicConfig, TopicConfigManager
from infra.clock import Clock
from neve.errors import BrokerError
from neve.record.layout import PROPERTIES_LENGTH_MAX
from neve.record.properties import PROPERTY_DELAY, PROPERTY_TAGS, PROPERTY_TRANSACTION_PREPARED, tags_code
from neve.remoting import names
from neve.remoting.codes import ResponseCode
from neve.remoting.headers import SendMessageHeader
from neve.remoting.names import PERM_WRITE, RETRY_PREFIX

REFUSALS = (MessageIllegal, StoreFull, StoreNotWritable)
cached_tags_code = functools.lru_cache(maxsize=4096)(tags_code)
# Properties that the broker writes itself. A message copied from another broker already has that broker's values.
_FROM_ELSEWHERE = ("POP_CK", "MSG_REGION", "TRACE_ON", "CLUSTER")
# The presence of any of these properties shows that another broker stored the message before.
TELLS_ELSEWHERE = frozenset(("POP_CK", "MSG_REGION", "CLUSTER"))


class TopicNotSaved(Exception):
    """The topic's entry is not durable yet, so a restart would lose it; the message was not stored.

    The caller waits for the topic table and repeats the send.
    """


#: Statistics kind of a committed transaction message, which was counted as a half message before.
COMMITTED = "committed"


class HeldMessages(Protocol):
    """Storage for messages that may not be delivered yet: half, delayed and timer messages."""

    # Names of the properties that request this storage.
    requested_by: frozenset[str]
    # RocketMQ's name of the message type, for statistics.
    kind: str

    def take(self, message: NewMessage, properties: Mapping[str, str]) -> tuple[PutResult, int | None] | None:
        """Store the message, if it requests this storage; otherwise return None.

        Returns the put result and the delivery time in milliseconds, which is None unless the sender receives it.
        """


class Intake:
    """Admission and storage of messages from clients."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        life: BrokerLife,
        role: BrokerRole,
        *,
        writer: LogWriter,
        topics: TopicConfigManager,
        register_soon: Callable[[], None],
        stats: BrokerStats,
        half_messages: HeldMessages,
        held_messages: Sequence[HeldMessages],
        stamp: MessageStamp,
    ) -> None:
        """`held_messages` are tried in this order."""
        self._config, self._clock, self._life, self._role = config, clock, life, role
        self._writer, self._stats = writer, stats
        self._topics, self._register_soon = topics, register_soon
        self._half_messages, self._held_messages = half_messages, held_messages
        self.stamp, self._host, self._stamped = stamp, stamp.host, stamp.stamped
        #: A message with one of these properties is not plain. One set lets the express lane test all of them at once.
        self.special_properties = TELLS_ELSEWHERE.union(
            *(holder.requested_by for holder in (half_messages, *held_messages))
        )
        self._turn = itertools.count()
        self.messages = 0
        self.bytes = 0

    # ---- admission

    @property
    def is_open(self) -> bool:
        """Return whether the broker accepts sends at all."""
        return self._life.takes_sends and self._role.is_master and self._config.broker_permission & PERM_WRITE != 0

    def check_open(self) -> None:
        """Raise BrokerError if the broker accepts no sends."""
        if not self._life.accepting:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, "broker unable to service, until it has started")
        if self._life.refusal is not None:
            raise BrokerError(ResponseCode.SERVICE_NOT_AVAILABLE, self._life.refusal)
        if not self._config.broker_permission & PERM_WRITE:
            name = self._config.broker_name
            raise BrokerError(ResponseCode.NO_PERMISSION, f"the broker[{name}] sending message is forbidden")

    def check_topic(self, header: SendMessageHeader, body_length: int) -> TopicConfig:
        """Return the topic's configuration; create the topic if that is allowed.

        Sets `header.queue_id` if the client left the choice to the broker. Raises BrokerError if the send is refused,
        and TopicNotSaved if the topic's entry is not durable yet.
        """
        topic = header.topic
        config = self._topics.topics.get(topic)
        if not names.may_be_sent_to(topic):
            raise BrokerError(ResponseCode.NO_PERMISSION, f"Sending message to topic[{topic}] is forbidden.")
        if body_length > self._config.max_message_size:  # before the topic is created: a refused send creates no topic
            raise BrokerError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the message is illegal, its body has {body_length} bytes, "
                f"maxMessageSize is {self._config.max_message_size}",
            )
        if config is None:
            config = self._create_topic(header)
        self.require_saved(topic)
        if header.queue_id >= config.queue_nums:
            raise BrokerError(
                ResponseCode.INVALID_PARAMETER,
                f"request queueId[{header.queue_id}] is illegal, {topic} has {config.queue_nums} queues",
            )
        if header.queue_id < 0:
            header.queue_id = self.any_queue(config.write_queue_nums)
        return config

    def any_queue(self, queue_nums: int) -> int:
        """Return a queue id for a send that names no queue, round-robin."""
        return next(self._turn) % max(queue_nums, 1)

    async def check_saved_topic(self, header: SendMessageHeader, body_length: int) -> TopicConfig:
        """Return `check_topic`'s result, after the topic's entry is durable."""
        while True:
            try:
                return self.check_topic(header, body_length)
            except TopicNotSaved:
                await self.topics_saved()

    async def topics_saved(self) -> None:
        """Return when the topic table is durable; concurrent callers share one write."""
        await self._topics.file.save()

    def require_saved(self, topic: str) -> None:
        """Raise TopicNotSaved if a restart would lose the topic."""
        if self._topics.unsaved and not self._topics.is_saved(topic):
            raise TopicNotSaved(topic)

    def ensure_topic(self, topic: str, queues: int) -> TopicConfig:
        """Return a topic that the broker itself writes to, such as a retry or dead-letter topic; create it if missing.

        If it has fewer queues than `queues`, it grows: the group's `retryQueueNums` was raised after its creation.
        """
        found, queues = self._topics.select(topic), min(queues, self._config.max_queues_per_topic)
        if found is None:
            fault = names.topic_fault(topic)
            if fault is not None:
                raise BrokerError(ResponseCode.INVALID_PARAMETER, fault)
            found = self._topics.create_plain(topic, queues)
            self._register_soon()
        elif self._topics.grow(topic, queues):
            self._register_soon()
            found = self._topics.require(topic)
        return found

    async def saved_topic(self, topic: str, queues: int) -> TopicConfig:
        """Return `ensure_topic`'s result after the topic's entry is durable."""
        config = self.ensure_topic(topic, queues)
        if not self._topics.is_saved(topic):
            await self.topics_saved()
        return config

    def _create_topic(self, header: SendMessageHeader) -> TopicConfig:
        topics, topic = self._topics, header.topic
        fault = names.topic_fault(topic)
        if fault is not None:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, fault)
        config = topics.create_in_send(
            topic,
            header.default_topic,
            header.default_topic_queue_nums,
            enabled=self._config.auto_create_topic_enable and topics.room > 0,
        )
        if config is None and topic.startswith(RETRY_PREFIX) and topics.room > 0:
            config = topics.create_plain(topic, 1)
        if config is None:
            full = "" if topics.room > 0 else f" There are maxTopics={self._config.max_topics} topics."
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!{full}")
        self._register_soon()
        return config

    # ---- properties

    def begins_transaction(self, properties: Mapping[str, str], reconsume_times: int) -> bool:
        """Return whether the message is a half message.

        The property decides, not the system flag, because retries of old clients carry the flag by accident. Raises
        BrokerError if the broker rejects transactions.
        """
        if properties.get(PROPERTY_TRANSACTION_PREPARED) != "true" or (
            reconsume_times > 0 and PROPERTY_DELAY in properties
        ):
            return False
        if self._config.reject_transaction_message:
            name = self._config.broker_name
            raise BrokerError(
                ResponseCode.NO_PERMISSION, f"the broker[{name}] sending transaction message is forbidden"
            )
        return True

    def asks_to_wait(self, properties: Mapping[str, str]) -> bool:
        """Return whether the message requests a delay level or a delivery time."""
        return any(not holder.requested_by.isdisjoint(properties) for holder in self._held_messages)

    def _checked_properties(self, text: str, properties: Mapping[str, str]) -> bytes:
        if not TELLS_ELSEWHERE.isdisjoint(properties):
            text = join_properties({name: value for name, value in properties.items() if name not in _FROM_ELSEWHERE})
        raw = self._stamped(text)
        if len(raw) > PROPERTIES_LENGTH_MAX:
            raise BrokerError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the message is illegal, its properties have {len(raw)} bytes, the limit is {PROPERTIES_LENGTH_MAX}",
            )
        return raw

    # ---- storage

    def send(self, message: NewMessage, text: str, properties: dict[str, str], *, half: bool = False) -> Stored:
        """Store a producer's message. `text` is its property string, `properties` the parsed form of it.

        Sets a unique id if the message has none. `half` is the result of `begins_transaction`. Raises BrokerError; then
        nothing was stored.
        """
        unique = properties.get("UNIQ_KEY")
        if unique is None:
            unique = properties["UNIQ_KEY"] = self.stamp.next_unique_id(self._clock.now_ms())
            text = with_unique_id(text, unique)
        message.properties = self._checked_properties(text, properties)
        stored = self._put(message, properties, (self._half_messages,) if half else self._held_messages)
        stored.unique = unique
        return stored

    def put(self, message: NewMessage, properties: Mapping[str, str]) -> Stored:
        """Append the message, or store it until its delay level or delivery time is due.

        `properties` are the parsed form of the message's own. Raises BrokerError; then nothing was stored.
        """
        return self._put(message, properties, self._held_messages)

    def commit(self, message: NewMessage, properties: Mapping[str, str]) -> Stored:
        """Store a committed transaction message as `put` does; statistics count it as committed."""
        return self._put(message, properties, self._held_messages, COMMITTED)

    def put_now(self, message: NewMessage, properties: Mapping[str, str]) -> Stored:
        """Append the message to its queue, whatever delay its properties request.

        Raises BrokerError; then nothing was stored.
        """
        return self._put(message, properties, ())

    def put_batch(self, messages: Sequence[NewMessage]) -> list[Stored]:
        """Append plain messages of one sender in order, with one write if they fit into it.

        Raises BrokerError. Then a prefix of the messages may be stored, for example if the disk becomes full.
        """
        writer, places = self._writer, list[AppendResult]()
        try:
            writer.check()
            sends = [writer.send_of(message) for message in messages]
            while len(places) < len(sends):
                places += writer.append(sends[len(places) :], messages[0].born_host, self._clock.now_ms())
        except REFUSALS as error:
            raise refusal(error) from error
        finally:
            for message, (_, size, _) in zip(messages, places, strict=False):
                self._count(message.topic, size)
        return [
            Stored(f"{self._host}{physical_offset:016X}", message.queue_id, queue_offset, physical_offset + size)
            for message, (physical_offset, size, queue_offset) in zip(messages, places, strict=True)
        ]

    def _put(
        self, message: NewMessage, properties: Mapping[str, str], held_messages: Sequence[HeldMessages], kind: str = ""
    ) -> Stored:
        message.tags_code = cached_tags_code(properties.get(PROPERTY_TAGS))
        message.keys = found_by(properties)
        taken: tuple[PutResult, int | None] | None = None
        try:
            self._writer.check_topic(message.topic)  # also if the message is delayed first
            for holder in held_messages:
                taken = holder.take(message, properties)
                if taken is not None:
                    break
            result, deliver_ms = taken or (self._writer.put(message), None)
        except REFUSALS as error:
            raise refusal(error) from error
        self._count(message.topic, result.size)
        if kind := kind or (holder.kind if taken is not None else ""):
            self._stats.of_a_kind(message.topic, kind, result.size)
        return Stored(
            f"{self._host}{result.physical_offset:016X}",
            message.queue_id,
            result.queue_offset,
            result.physical_offset + result.size,
            deliver_ms=deliver_ms,
        )

    def _count(self, topic: str, size: int) -> None:
        self._stats.of_topic(topic).add(1, size)
        self.count(1, size)

    def count(self, number: int, size: int) -> None:
        """Count appended messages of `size` bytes in total."""
        self.messages += number
        self.bytes += size
        self._stats.put_all(number, size)


def with_unique_id(text: str, unique: str) -> str:
    """Return a property string with the unique id added."""
    return f"{ended(text)}UNIQ_KEY\x01{unique}\x02"


def refusal(error: StoreError) -> BrokerError:
    """Return the error that a client receives for a failed append."""
    if isinstance(error, AppendRefused):
        return BrokerError(error.code, str(error))
    if isinstance(error, InternalTopic):
        return BrokerError(ResponseCode.NO_PERMISSION, str(error))
    if isinstance(error, MessageIllegal):
        return BrokerError(ResponseCode.MESSAGE_ILLEGAL, f"the message is illegal: {error}")
    return BrokerError(ResponseCode.SERVICE_NOT_AVAILABLE, f"service not available now: {error}")
