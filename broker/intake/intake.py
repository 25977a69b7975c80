"""What a put means. The one way in for what clients send; what the broker stores of its own accord takes `LogWriter`.

    may it come in?        check_open, check_topic: RocketMQ's checks, in its order; a topic is made, and is on the disk
                           before anything in it is acknowledged
    what is stored?        begins_transaction, stamped: its unique id, and what the broker writes into it
    where?                 send  a producer's: half messages and what asks to wait go to their waiting room
                           put   as send, but nothing begins a transaction: what another message became
                           put_now, put_batch   where they say, whatever their properties say
    when is it answered?   acknowledge, settled: as soon as it is as safe as this broker promises. In a broker set
                           that is not before the set has confirmed it (`broker.intake.replication`)

The express lane does the same for sends that are a check and an append.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from broker.broker_stats import BrokerStats
from broker.clients.registration import Registration
from broker.config import BrokerConfig
from broker.intake.flusher import Flusher, WaitingSend
from broker.intake.log_writer import LogWriter, found_by
from broker.intake.message import NewMessage, Stored
from broker.intake.property_text import ended, join_properties
from broker.intake.receipts import REGION, host_in_msg_id
from broker.intake.replication import STANDS_ALONE, AppendRefused, Replication
from broker.life import BrokerLife
from broker.role import BrokerRole
from broker.store.appender import AppendResult
from broker.store.errors import InternalTopic, MessageIllegal, StoreError, StoreFull, StoreNotWritable
from broker.store.message_store import PutResult
from broker.tables.topic_config_manager import TopicConfig, TopicConfigManager
from infra.clock import Clock
from infra.net.remoting_server import Connection
from infra.observe.metrics import LATENCIES, Histogram
from neve.errors import BrokerError
from neve.record.ids import UniqueIdGenerator
from neve.record.layout import PROPERTIES_LENGTH_MAX
from neve.record.properties import PROPERTY_DELAY, PROPERTY_TAGS, PROPERTY_TRANSACTION_PREPARED, tags_code
from neve.remoting import names
from neve.remoting.codes import ResponseCode
from neve.remoting.headers import SendMessageHeader
from neve.remoting.names import PERM_WRITE, RETRY_PREFIX

REFUSALS = (MessageIllegal, StoreFull, StoreNotWritable)
cached_tags_code = functools.lru_cache(maxsize=4096)(tags_code)
# What the broker writes itself; a message that comes from another broker has it already.
_FROM_ELSEWHERE = ("POP_CK", "MSG_REGION", "TRACE_ON", "CLUSTER")
# Whichever of these it has tells that it comes from there.
TELLS_ELSEWHERE = frozenset(("POP_CK", "MSG_REGION", "CLUSTER"))


class TopicNotSaved(Exception):
    """Nothing is stored yet: a restart would not know the topic, so the send waits for the table first."""


#: The kind of what was counted as a half message before.
COMMITTED = "committed"


class WaitingRoom(Protocol):
    """Where messages wait that are not for their topic yet."""

    # The properties by which a message asks for it.
    asked_by: frozenset[str]
    # What RocketMQ calls such a message.
    kind: str

    def take(self, message: NewMessage, properties: Mapping[str, str]) -> tuple[PutResult, int | None] | None:
        """Store it to wait here: the place, and when it is due if its sender is told. None: it doesn't ask for it."""


class Intake:
    """See the module."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        life: BrokerLife,
        role: BrokerRole,
        *,
        writer: LogWriter,
        flusher: Flusher,
        topics: TopicConfigManager,
        registration: Registration,
        stats: BrokerStats,
        half_messages: WaitingRoom,
        waiting_rooms: Sequence[WaitingRoom],
        unique_ids: UniqueIdGenerator,
        address: tuple[str, int],
        replication: Replication = STANDS_ALONE,
    ) -> None:
        """`waiting_rooms` are asked in this order."""
        self._config, self._clock, self._life, self._role = config, clock, life, role
        self._writer, self._flusher, self._stats = writer, flusher, stats
        self._topics, self._registration = topics, registration
        self._half_messages, self._waiting_rooms = half_messages, waiting_rooms
        self._unique_ids = unique_ids
        self._host = host_in_msg_id(address)
        cluster = config.broker_cluster_name
        self._suffix = f"MSG_REGION\x01{REGION}\x02TRACE_ON\x01true\x02CLUSTER\x01{cluster}\x02"
        #: Properties that make a send more than an append; one look tells that a message has none of them.
        self.special_properties = TELLS_ELSEWHERE.union(*(room.asked_by for room in (half_messages, *waiting_rooms)))
        self._sync_flush, self._replication = config.sync_flush, replication
        #: Whether a send is answered later than it is stored.
        self.answers_later = config.sync_flush or replication.waits
        self._wait = flusher.wait if config.sync_flush else replication.wait
        self._turn = itertools.count()
        #: From when a send is read to its answer, of those that are stored and as safe as was asked for.
        self.latency = Histogram(LATENCIES)
        self.messages = 0
        self.bytes = 0

    # ---- may it come in?

    @property
    def is_open(self) -> bool:
        """Whether sends are taken at all."""
        return self._life.takes_sends and self._role.is_master and self._config.broker_permission & PERM_WRITE != 0

    def check_open(self) -> None:
        """Raises BrokerError."""
        if not self._life.accepting:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, "broker unable to service, until it has started")
        if self._life.refusal is not None:
            raise BrokerError(ResponseCode.SERVICE_NOT_AVAILABLE, self._life.refusal)
        if not self._config.broker_permission & PERM_WRITE:
            name = self._config.broker_name
            raise BrokerError(ResponseCode.NO_PERMISSION, f"the broker[{name}] sending message is forbidden")

    def check_topic(self, header: SendMessageHeader, body_length: int) -> TopicConfig:
        """The topic, which may be made here; a header that leaves the queue to the broker has one afterwards.

        Raises BrokerError, and TopicNotSaved for who has to wait.
        """
        topic = header.topic
        config = self._topics.topics.get(topic)
        if not names.may_be_sent_to(topic):
            raise BrokerError(ResponseCode.NO_PERMISSION, f"Sending message to topic[{topic}] is forbidden.")
        if body_length > self._config.max_message_size:  # first: a send that is refused creates no topic
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
        """A queue for who doesn't care: each in its turn."""
        return next(self._turn) % max(queue_nums, 1)

    async def check_saved_topic(self, header: SendMessageHeader, body_length: int) -> TopicConfig:
        """The same, by one who can wait."""
        while True:
            try:
                return self.check_topic(header, body_length)
            except TopicNotSaved:
                await self.topics_saved()

    async def topics_saved(self) -> None:
        """All who wait share one write of the table."""
        await self._topics.file.save()

    def require_saved(self, topic: str) -> None:
        """Raises TopicNotSaved for one that a restart would not know."""
        if self._topics.unsaved and not self._topics.is_saved(topic):
            raise TopicNotSaved(topic)

    def ensure_topic(self, topic: str, queues: int) -> TopicConfig:
        """A topic that the broker itself puts into: the group's for retries, for dead letters.

        One that has fewer queues gets as many: its group's retryQueueNums was raised since it was made.
        """
        found, queues = self._topics.select(topic), min(queues, self._config.max_queues_per_topic)
        if found is None:
            fault = names.topic_fault(topic)
            if fault is not None:
                raise BrokerError(ResponseCode.INVALID_PARAMETER, fault)
            found = self._topics.create_plain(topic, queues)
            self._registration.soon()
        elif self._topics.grow(topic, queues):
            self._registration.soon()
            found = self._topics.require(topic)
        return found

    async def saved_topic(self, topic: str, queues: int) -> TopicConfig:
        """On disk before what is put into it is acknowledged."""
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
        self._registration.soon()
        return config

    # ---- what is stored?

    def begins_transaction(self, properties: Mapping[str, str], reconsume_times: int) -> bool:
        """The property decides, not the system flag; an old client's retry carries it without meaning it."""
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
        """Whether a message has a delay level, or a moment, that it names."""
        return any(not room.asked_by.isdisjoint(properties) for room in self._waiting_rooms)

    def next_unique_id(self, now: int) -> str:
        """For a client that gave its message none."""
        return self._unique_ids.next(now)

    def stamped(self, text: str) -> bytes:
        """The properties as they go into the record: the client's, then the broker's own."""
        if text and text[-1] != "\x02":  # `ended`, without the call: each plain send comes by here
            text += "\x02"
        return (text + self._suffix).encode("utf-8", "surrogatepass")

    @property
    def stamp(self) -> str:
        """The broker's own properties."""
        return self._suffix

    def _checked_properties(self, text: str, properties: Mapping[str, str]) -> bytes:
        if not TELLS_ELSEWHERE.isdisjoint(properties):
            text = join_properties({name: value for name, value in properties.items() if name not in _FROM_ELSEWHERE})
        raw = self.stamped(text)
        if len(raw) > PROPERTIES_LENGTH_MAX:
            raise BrokerError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the message is illegal, its properties have {len(raw)} bytes, the limit is {PROPERTIES_LENGTH_MAX}",
            )
        return raw

    # ---- where?

    def send(self, message: NewMessage, text: str, properties: dict[str, str], *, half: bool = False) -> Stored:
        """What a producer sends, with its property string and what that says; `half`: see `begins_transaction`.

        Gives it a unique id if it has none. Raises BrokerError; then nothing was stored.
        """
        unique = properties.get("UNIQ_KEY")
        if unique is None:
            unique = properties["UNIQ_KEY"] = self.next_unique_id(self._clock.now_ms())
            text = with_unique_id(text, unique)
        message.properties = self._checked_properties(text, properties)
        stored = self._put(message, properties, (self._half_messages,) if half else self._waiting_rooms)
        stored.unique = unique
        return stored

    def put(self, message: NewMessage, properties: Mapping[str, str]) -> Stored:
        """Append; or park where it waits until its delay level's time, or the moment that it names.

        `properties` are what the message's own say. Raises BrokerError; then nothing was stored.
        """
        return self._put(message, properties, self._waiting_rooms)

    def commit(self, message: NewMessage, properties: Mapping[str, str]) -> Stored:
        """The same, of what came as a half message."""
        return self._put(message, properties, self._waiting_rooms, COMMITTED)

    def put_now(self, message: NewMessage, properties: Mapping[str, str]) -> Stored:
        """Append to its queue, whatever delay it names. Raises BrokerError; then nothing was stored."""
        return self._put(message, properties, ())

    def put_batch(self, messages: Sequence[NewMessage]) -> list[Stored]:
        """Plain messages of one sender in their order, with one write where they fit.

        Raises BrokerError: then a first part may be stored, as when the disk is full on the way.
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
        self, message: NewMessage, properties: Mapping[str, str], waiting_rooms: Sequence[WaitingRoom], kind: str = ""
    ) -> Stored:
        message.tags_code = cached_tags_code(properties.get(PROPERTY_TAGS))
        message.keys = found_by(properties)
        taken: tuple[PutResult, int | None] | None = None
        try:
            self._writer.check_topic(message.topic)  # also where the message is parked for it first
            for room in waiting_rooms:
                taken = room.take(message, properties)
                if taken is not None:
                    break
            result, deliver_ms = taken or (self._writer.put(message), None)
        except REFUSALS as error:
            raise refusal(error) from error
        self._count(message.topic, result.size)
        if kind := kind or (room.kind if taken is not None else ""):
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
        """Messages that were appended, `size` bytes in all."""
        self.messages += number
        self.bytes += size
        self._stats.put_all(number, size)

    # ---- when is it answered?

    def acknowledge(
        self,
        connection: Connection,
        end_offset: int,
        render: Callable[[int], bytes],
        begun: float,
        number: int = 1,
        *,
        waits: bool,
    ) -> None:
        """Send `render(code)` once what lies below `end_offset` is safe; at once to a sender that doesn't wait.

        `begun`: when its sends were read, by the monotonic clock; so many as `number`.
        """
        render = functools.partial(self._render, render, begun, number)
        if waits and self.answers_later:
            deadline = self._clock.monotonic() + self._config.sync_flush_timeout / 1000
            self._wait(WaitingSend(end_offset, connection, deadline, render))
        else:
            connection.send_raw(render(ResponseCode.SUCCESS))

    def _render(self, render: Callable[[int], bytes], begun: float, number: int, code: int) -> bytes:
        if code == ResponseCode.SUCCESS:
            self.latency.observe(self._clock.monotonic() - begun, number)
        return render(code)

    async def settled(self) -> None:
        """Returns when everything put so far is as safe on this broker's disk as what `acknowledge` answers.

        For the set an answer waits when it is made: see `broker.requests.promises`.
        """
        if self._sync_flush:
            await self._flusher.flush_now()

    def stop_acknowledging(self) -> None:
        """This member is the master of its set no more: who waits is told that it is stored, and not that it is safe.

        First of all that a change of role does: what is confirmed later says nothing of what was appended before.
        """
        self._flusher.answer_all(ResponseCode.FLUSH_SLAVE_TIMEOUT)
        self._replication.answer_all()


def with_unique_id(text: str, unique: str) -> str:
    """The properties of a client that gave its message no id."""
    return f"{ended(text)}UNIQ_KEY\x01{unique}\x02"


def refusal(error: StoreError) -> BrokerError:
    """What a client is told of a store that takes nothing now."""
    if isinstance(error, AppendRefused):
        return BrokerError(error.code, str(error))
    if isinstance(error, InternalTopic):
        return BrokerError(ResponseCode.NO_PERMISSION, str(error))
    if isinstance(error, MessageIllegal):
        return BrokerError(ResponseCode.MESSAGE_ILLEGAL, f"the message is illegal: {error}")
    return BrokerError(ResponseCode.SERVICE_NOT_AVAILABLE, f"service not available now: {error}")
