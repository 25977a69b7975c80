"""Sends (10, 310, 320): checked as RocketMQ checks them, appended, answered.

Plain sends take the express lane (`express_send`); what it leaves comes here, and both answer alike (`send_response`).
"""

import functools
from collections.abc import Awaitable
from dataclasses import dataclass

from broker.broker_context import BrokerContext
from broker.intake.flusher import WaitingSend
from broker.intake.message import NewMessage
from broker.intake.property_text import (
    ended,
    ended_bytes,
    join_properties,
    properties_of,
    target_pairs,
)
from broker.intake.receipts import (
    REGION,
    Stored,
    host_in_msg_id,
    recall_handle,
    render_send_response,
    send_response,
)
from broker.store.appender import Place, Send
from broker.store.errors import MessageIllegal, StoreError, StoreFull, StoreNotWritable
from broker.store.message_store import PutResult
from broker.tables.topic_config_manager import TopicConfig
from broker.waiting.half_messages import TRANSACTION_BITS
from broker.waiting.timer_message import OUT_MS, RECALL_KEY, TIMER_PROPERTIES, recall_key
from infra.remoting_server import Connection
from neve.errors import BrokerError, ProtocolError
from neve.record.bodies import decode_batch
from neve.record.ids import UniqueIdGenerator
from neve.record.layout import MULTI_TAGS, PROPERTIES_LENGTH_MAX
from neve.record.properties import bytes_to_properties, tags_code, text_to_properties
from neve.remoting import names
from neve.remoting.codes import ResponseCode
from neve.remoting.command import SERIALIZE_JSON, RemotingCommand, encode_command
from neve.remoting.headers import SendMessageHeader, parse_send_header
from neve.remoting.names import DLQ_PREFIX, HALF_TOPIC, PERM_WRITE, RETRY_PREFIX, SCHEDULE_TOPIC, WHEEL_TIMER_TOPIC

# A client before 3.4.9 sends a maxReconsumeTimes that isn't meant.
VERSION_MAX_RECONSUME = 121
DLQ_QUEUES = 1

cached_tags_code = functools.lru_cache(maxsize=4096)(tags_code)
REFUSALS = (MessageIllegal, StoreFull, StoreNotWritable)
# Python refuses to read numbers of thousands of digits; nobody has so many levels.
_LEVEL_DIGITS = 9
# Properties that make a send more than an append; one look tells that a message has none of them.
SPECIAL_PROPERTIES = frozenset(("TRAN_MSG", "DELAY", *TIMER_PROPERTIES, "POP_CK", "MSG_REGION", "CLUSTER"))


class TopicNotSaved(Exception):
    """Nothing is stored yet: a restart would not know the topic, so the send waits for the table first."""


@dataclass(slots=True)
class Outgoing:
    """One message on its way into the log."""

    topic: str
    queue_id: int
    body: bytes | memoryview
    properties: bytes
    flag: int
    sys_flag: int
    born_timestamp: int
    born_host: tuple[str, int]
    reconsume_times: int
    tags: str | None
    keys: str | None
    unique_key: str | None
    prepared_transaction_offset: int = 0
    # What is stored with it, or neither.
    beside: NewMessage | None = None


class SendMessageProcessor:
    def __init__(self, context: BrokerContext, unique_ids: UniqueIdGenerator) -> None:
        self._context = context
        self.unique_ids = unique_ids
        cluster = context.config.broker_cluster_name
        self._suffix = f"MSG_REGION\x01{REGION}\x02TRACE_ON\x01true\x02CLUSTER\x01{cluster}\x02"
        self.messages = 0
        self.bytes = 0

    def send(self, connection: Connection, request: RemotingCommand) -> Awaitable[None] | None:
        """Answered with the batch that it came in, or with the next fdatasync; never before its topic is saved."""
        try:
            self._send(connection, request)
        except TopicNotSaved:
            return self._send_when_saved(connection, request)
        return None

    async def _send_when_saved(self, connection: Connection, request: RemotingCommand) -> None:
        """All who wait share one write of the table."""
        await self._context.topics.file.save()
        again = self.send(connection, request)
        if again is not None:  # it is a dead letter, whose topic is new as well
            await again

    def _send(self, connection: Connection, request: RemotingCommand) -> None:
        header = parse_send_header(request.code, request.ext)
        self.check_writable()
        config = self.check_topic(header, request)
        if header.batch:  # the flag decides, whatever the code
            stored, unique, wait = self._put_batch(connection, request, header, config)
        else:
            stored, unique, wait = self._put_single(connection, request, header, config)
        if request.is_oneway:
            return
        if wait and self._context.config.sync_flush:
            deadline = self._context.clock.monotonic() + self._context.config.sync_flush_timeout / 1000
            render = functools.partial(self._frame, request, stored, unique)
            self._context.flusher.wait(WaitingSend(stored.end_offset, connection, deadline, render))
        else:
            connection.send_raw(self._frame(request, stored, unique, ResponseCode.SUCCESS))

    def _frame(self, request: RemotingCommand, stored: Stored, unique: str, code: int) -> bytes:
        handle = None
        if stored.deliver_ms is not None:
            topic = parse_send_header(request.code, request.ext).topic
            handle = recall_handle(topic, self._context.config.broker_name, stored.deliver_ms, unique)
        if request.serialize_type == SERIALIZE_JSON:
            return render_send_response(request, code, stored, unique, handle)
        try:
            return b"".join(encode_command(send_response(request, code, stored, unique, handle)))
        except (ProtocolError, ValueError):
            # what is stored is stored: what the client named itself is left out where it makes no header
            return b"".join(encode_command(send_response(request, code, stored, "", None)))

    # ---- checks, in RocketMQ's order ----------------------------------------------------------------------

    def check_writable(self) -> None:
        context = self._context
        if not context.accepting:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, "broker unable to service, until it has started")
        if context.refuse_writes is not None:
            raise BrokerError(ResponseCode.SERVICE_NOT_AVAILABLE, context.refuse_writes)
        if not context.config.broker_permission & PERM_WRITE:
            name = context.config.broker_name
            raise BrokerError(ResponseCode.NO_PERMISSION, f"the broker[{name}] sending message is forbidden")

    def check_topic(self, header: SendMessageHeader, request: RemotingCommand) -> TopicConfig:
        topics, topic = self._context.topics, header.topic
        config = topics.topics.get(topic)
        if not names.may_be_sent_to(topic):
            raise BrokerError(ResponseCode.NO_PERMISSION, f"Sending message to topic[{topic}] is forbidden.")
        if config is None:
            config = self._create_topic(header)
        self._require_saved(topic)
        if header.queue_id >= config.queue_nums:
            raise BrokerError(
                ResponseCode.INVALID_PARAMETER,
                f"request queueId[{header.queue_id}] is illegal, {topic} has {config.queue_nums} queues",
            )
        if header.queue_id < 0:
            header.queue_id = self._context.any_queue(config.write_queue_nums)
        if len(request.body) > self._context.config.max_message_size:
            raise BrokerError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the message is illegal, its body has {len(request.body)} bytes, "
                f"maxMessageSize is {self._context.config.max_message_size}",
            )
        return config

    async def check_saved_topic(self, header: SendMessageHeader, request: RemotingCommand) -> TopicConfig:
        """The same, by one who can wait."""
        while True:
            try:
                return self.check_topic(header, request)
            except TopicNotSaved:
                await self._context.topics.file.save()

    def _require_saved(self, topic: str) -> None:
        topics = self._context.topics
        if topics.unsaved and not topics.is_saved(topic):
            raise TopicNotSaved(topic)

    def _create_topic(self, header: SendMessageHeader) -> TopicConfig:
        context, topic = self._context, header.topic
        fault = names.topic_fault(topic)
        if fault is not None:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, fault)
        config = context.topics.create_in_send(
            topic,
            header.default_topic,
            header.default_topic_queue_nums,
            enabled=context.config.auto_create_topic_enable and context.topics.room > 0,
        )
        if config is None and topic.startswith(RETRY_PREFIX) and context.topics.room > 0:
            config = context.topics.create_plain(topic, 1)
        if config is None:
            full = "" if context.topics.room > 0 else f" There are maxTopics={context.config.max_topics} topics."
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!{full}")
        context.register_soon()
        return config

    # ---- single ------------------------------------------------------------------------------------------------

    def _put_single(
        self, connection: Connection, request: RemotingCommand, header: SendMessageHeader, config: TopicConfig
    ) -> tuple[Stored, str, bool]:
        text = properties_of(header)
        properties = text_to_properties(text)
        topic, queue_id = header.topic, header.queue_id
        special = not SPECIAL_PROPERTIES.isdisjoint(properties)
        is_half = special and self._is_half(properties, header)
        if topic.startswith(RETRY_PREFIX):
            topic, queue_id = self._retry_or_dead_letter(request, header, properties)
            text = join_properties(properties)
        unique = properties.get("UNIQ_KEY")
        if unique is None:
            unique = self.unique_ids.next(self._context.clock.now_ms())
            text = self.with_unique_id(text, unique)
        raw = self._checked_properties(text, properties if special else None)
        message = Outgoing(
            topic,
            queue_id,
            request.body,
            raw,
            header.flag,
            header.sys_flag | (MULTI_TAGS if config.topic_filter_type == "MULTI_TAG" else 0),
            header.born_timestamp,
            connection.remote,
            header.reconsume_times or 0,
            properties.get("TAGS"),
            properties.get("KEYS"),
            unique,
        )
        if is_half:
            stored = self._put_half(message, properties)
        else:
            stored = self.put(message, properties.get("DELAY"), properties if special else None)
        return stored, unique, properties.get("WAIT") != "false"

    def _is_half(self, properties: dict[str, str], header: SendMessageHeader) -> bool:
        """The property decides, not the system flag; an old client's retry carries it without meaning it."""
        if properties.get("TRAN_MSG") != "true" or ((header.reconsume_times or 0) > 0 and "DELAY" in properties):
            return False
        if self._context.config.reject_transaction_message:
            name = self._context.config.broker_name
            raise BrokerError(
                ResponseCode.NO_PERMISSION, f"the broker[{name}] sending transaction message is forbidden"
            )
        return True

    @staticmethod
    def with_unique_id(text: str, unique: str) -> str:
        """The properties of a client that gave its message no id."""
        return f"{ended(text)}UNIQ_KEY\x01{unique}\x02"

    def stored_properties(self, text: str) -> bytes:
        """The properties as they go into the record: the client's, then the broker's own."""
        return (ended(text) + self._suffix).encode("utf-8", "surrogatepass")

    def _checked_properties(self, text: str, special: dict[str, str] | None) -> bytes:
        if special and ("POP_CK" in special or "MSG_REGION" in special or "CLUSTER" in special):
            drop = ("POP_CK", "MSG_REGION", "TRACE_ON", "CLUSTER")
            kept = text_to_properties(text)
            text = join_properties({name: value for name, value in kept.items() if name not in drop})
        raw = self.stored_properties(text)
        if len(raw) > PROPERTIES_LENGTH_MAX:
            raise BrokerError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the message is illegal, its properties have {len(raw)} bytes, the limit is {PROPERTIES_LENGTH_MAX}",
            )
        return raw

    def _retry_or_dead_letter(
        self, request: RemotingCommand, header: SendMessageHeader, properties: dict[str, str]
    ) -> tuple[str, int]:
        """A client that couldn't send back sends to its retry topic; after too many times it is a dead letter."""
        group = self._context.retry_names.group_of(header.topic)
        config = self._context.find_group(group)
        limit = config.retry_max_times
        if request.version >= VERSION_MAX_RECONSUME and header.max_reconsume_times is not None:
            limit = header.max_reconsume_times
        if (header.reconsume_times or 0) <= limit and not self._context.locks.any_held(group):
            return header.topic, header.queue_id
        properties.pop("DELAY", None)
        self.ensure_topic(DLQ_PREFIX + group, DLQ_QUEUES)
        self._require_saved(DLQ_PREFIX + group)
        return DLQ_PREFIX + group, 0

    # ---- batch -------------------------------------------------------------------------------------------------

    def _put_batch(
        self, connection: Connection, request: RemotingCommand, header: SendMessageHeader, config: TopicConfig
    ) -> tuple[Stored, str, bool]:
        """All of the batch is checked before its first message is appended."""
        if header.topic.startswith(RETRY_PREFIX):
            raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, "batch request does not support retry group")
        try:
            parts = decode_batch(request.body)
        except ValueError as error:
            raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, f"the batch is malformed: {error}") from error
        outer = text_to_properties(properties_of(header))
        if not parts or header.sys_flag & TRANSACTION_BITS or "DELAY" in outer:
            raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, "a batch is not empty, delayed or part of a transaction")
        common = outer.get("UNIQ_KEY")
        messages = [self._batch_message(connection, header, common, part) for part in parts]
        stored = self._put_together(messages)
        ids = ",".join(item.msg_id for item in stored)
        whole = Stored(ids, stored[0].queue_id, stored[0].queue_offset, stored[-1].end_offset)
        return whole, common or "", outer.get("WAIT") != "false"

    def _batch_message(
        self, connection: Connection, header: SendMessageHeader, common: str | None, part: tuple[int, bytes, bytes]
    ) -> Outgoing:
        """A message keeps its own unique id; one without gets the batch's (MessageExtEncoder appends that to all)."""
        flag, body, raw = part
        properties = bytes_to_properties(raw)
        if not properties.keys().isdisjoint(("DELAY", *TIMER_PROPERTIES)):
            raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, "a batch can't hold delayed messages")
        unique = properties.get("UNIQ_KEY")
        adopted = f"UNIQ_KEY\x01{common}\x02" if common and unique is None else ""
        raw = ended_bytes(raw) + (adopted + self._suffix).encode("utf-8", "surrogatepass")
        if len(raw) > PROPERTIES_LENGTH_MAX:
            raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, "the properties of a message in the batch are too long")
        return Outgoing(
            header.topic,
            header.queue_id,
            body,
            raw,
            flag,
            header.sys_flag,
            header.born_timestamp,
            connection.remote,
            header.reconsume_times or 0,
            properties.get("TAGS"),
            properties.get("KEYS"),
            unique or common,
        )

    # ---- append ------------------------------------------------------------------------------------------------

    def put(self, message: Outgoing, delay: str | None, timers: dict[str, str] | None = None) -> Stored:
        """Append; or park in the schedule topic when a delay level is given, or until the time that `timers` names."""
        context = self._context
        topic, queue_id, properties = message.topic, message.queue_id, message.properties
        code = cached_tags_code(message.tags) if message.tags else 0
        level = _level(delay, context.schedule.max_level)
        if level:
            properties = ended_bytes(properties) + target_pairs(topic, queue_id)
            topic, queue_id = SCHEDULE_TOPIC, level - 1
            code = context.schedule.deliver_time(level, context.clock.now_ms())
        elif timers is not None and (when := context.timers.time_of(timers)) is not None:
            if not timers.get(RECALL_KEY, recall_key(topic, "")).startswith(recall_key(topic, "")):
                raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, f"timer message illegal: {RECALL_KEY} of another topic")
            return self._put_timer(message, when, timers.get(RECALL_KEY))
        result = self._append(message, topic, queue_id, properties, code)
        return self._stored(result, message.queue_id)

    def _put_timer(self, message: Outgoing, when: int, recall: str | None) -> Stored:
        out = f"{OUT_MS}\x01{when}\x02".encode()
        properties = ended_bytes(message.properties) + out + target_pairs(message.topic, message.queue_id)
        result = self._append(message, WHEEL_TIMER_TOPIC, 0, properties, -when if recall else when)
        self._context.timers.added(when, result, recall)
        stored = self._stored(result, message.queue_id)
        stored.deliver_ms = when
        return stored

    def _put_half(self, message: Outgoing, properties: dict[str, str]) -> Stored:
        """Out of sight until its transaction is committed; what the target would do with it is done then."""
        raw = ended_bytes(message.properties) + target_pairs(message.topic, message.queue_id)
        raw += f"__transactionId__\x01{message.unique_key}\x02".encode("utf-8", "surrogatepass")
        message.sys_flag &= ~TRANSACTION_BITS
        message.keys = message.unique_key = None
        result = self._append(message, HALF_TOPIC, 0, raw, 0)
        self._context.transactions.added(result, properties)
        return self._stored(result, message.queue_id)

    def _append(self, message: Outgoing, topic: str, queue_id: int, properties: bytes, code: int) -> PutResult:
        try:
            new = NewMessage(
                topic=topic,
                queue_id=queue_id,
                body=message.body,
                properties=properties,
                flag=message.flag,
                sys_flag=message.sys_flag,
                born_timestamp=message.born_timestamp,
                born_host=message.born_host,
                reconsume_times=message.reconsume_times,
                tags_code=code,
                keys=" ".join(filter(None, (message.unique_key, message.keys))),
                prepared_transaction_offset=message.prepared_transaction_offset,
            )
            result = self._context.writer.put(new, message.beside)
        except REFUSALS as error:
            raise refusal(error) from error
        self._count(message.topic, result.size)
        return result

    def _put_together(self, messages: list[Outgoing]) -> list[Stored]:
        """Plain messages of one sender, with one write where they fit."""
        places = list[Place]()
        try:
            sends = [self._send_of(message) for message in messages]
            while len(places) < len(sends):
                places += self._context.writer.append(
                    sends[len(places) :], messages[0].born_host, self._context.clock.now_ms()
                )
        except REFUSALS as error:
            raise refusal(error) from error
        finally:
            for message, (_, size, _) in zip(messages, places, strict=False):
                self._count(message.topic, size)
        host = host_in_msg_id(self._context.address)
        return [
            Stored(f"{host}{physical_offset:016X}", message.queue_id, queue_offset, physical_offset + size)
            for message, (physical_offset, size, queue_offset) in zip(messages, places, strict=True)
        ]

    def _send_of(self, message: Outgoing) -> Send:
        return self._context.writer.send_of(
            NewMessage(
                topic=message.topic,
                queue_id=message.queue_id,
                body=message.body,
                properties=message.properties,
                flag=message.flag,
                sys_flag=message.sys_flag,
                born_timestamp=message.born_timestamp,
                born_host=message.born_host,
                reconsume_times=message.reconsume_times,
                tags_code=cached_tags_code(message.tags) if message.tags else 0,
                keys=" ".join(filter(None, (message.unique_key, message.keys))),
            )
        )

    def _count(self, topic: str, size: int) -> None:
        self._context.stats.of_topic(topic).add(1, size)
        self.count(1, size)

    def count(self, number: int, size: int) -> None:
        """Messages that were appended, `size` bytes in all."""
        self.messages += number
        self.bytes += size
        self._context.stats.put_all(number, size)

    def _stored(self, result: PutResult, queue_id: int) -> Stored:
        msg_id = f"{host_in_msg_id(self._context.address)}{result.physical_offset:016X}"
        return Stored(msg_id, queue_id, result.queue_offset, result.physical_offset + result.size)

    async def saved_topic(self, topic: str, queues: int) -> TopicConfig:
        """On disk before what is put into it is acknowledged."""
        config = self.ensure_topic(topic, queues)
        if not self._context.topics.is_saved(topic):
            await self._context.topics.file.save()
        return config

    def ensure_topic(self, topic: str, queues: int) -> TopicConfig:
        found = self._context.topics.select(topic)
        if found is None:
            fault = names.topic_fault(topic)
            if fault is not None:
                raise BrokerError(ResponseCode.INVALID_PARAMETER, fault)
            found = self._context.topics.create_plain(topic, queues)
            self._context.register_soon()
        return found


def refusal(error: StoreError) -> BrokerError:
    if isinstance(error, MessageIllegal):
        return BrokerError(ResponseCode.MESSAGE_ILLEGAL, f"the message is illegal: {error}")
    return BrokerError(ResponseCode.SERVICE_NOT_AVAILABLE, f"service not available now: {error}")


def _level(delay: str | None, maximum: int) -> int:
    """A level above the highest is the highest; what is no number is no delay."""
    if delay is None or not delay.isascii() or not delay.isdigit():
        return 0
    digits = delay.lstrip("0")
    return min(int(digits[:_LEVEL_DIGITS] or "0"), maximum)
