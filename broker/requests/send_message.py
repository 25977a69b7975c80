"""Sends (10, 310, 320): from the wire to the intake, and the receipt back to the wire.

Plain sends take the express lane (`ExpressSend`). All others are processed here, with the same answers
(`send_response`).
"""

import functools
from collections.abc import Awaitable

from access.permissions import PUB, of_topic
from broker.clients.rebalance_lock import RebalanceLock
from broker.intake.acknowledgement import Acknowledgement
from broker.intake.intake import Intake, TopicNotSaved, cached_tags_code
from broker.intake.log_writer import found_by
from broker.intake.message import NewMessage, Stored
from broker.intake.property_text import ended_bytes, join_properties, properties_of
from broker.intake.receipts import recall_handle, render_send_response, send_response
from broker.requests.route import MASTER, BrokerRoute, Waits
from broker.tables.retry_names import RetryNames
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfig
from broker.waiting.half_messages import TRANSACTION_BITS
from infra.clock import Clock
from infra.net.remoting_server import Connection
from neve.errors import BrokerError, ProtocolError
from neve.record.bodies import decode_batch
from neve.record.layout import MULTI_TAGS, PROPERTIES_LENGTH_MAX
from neve.record.properties import (
    PROPERTY_DELAY,
    PROPERTY_UNIQUE_KEY,
    PROPERTY_WAIT,
    bytes_to_properties,
    text_to_properties,
)
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import SERIALIZE_JSON, RemotingCommand, encode_command
from neve.remoting.headers import SendMessageHeader, parse_send_header
from neve.remoting.names import DLQ_PREFIX, RETRY_PREFIX

# Clients before 3.4.9 send a meaningless maxReconsumeTimes.
VERSION_MAX_RECONSUME = 121
DLQ_QUEUES = 1


class SendMessageProcessor:
    """Parses sends, passes their messages to the intake and answers with receipts (RocketMQ's SendMessageProcessor).

    All messages of a batch are checked before the first one is appended.
    """

    def __init__(
        self,
        intake: Intake,
        clock: Clock,
        *,
        answers: Acknowledgement,
        groups: SubscriptionGroupManager,
        locks: RebalanceLock,
        retry_names: RetryNames,
        broker_name: str,
    ) -> None:
        """Create the processor; groups, locks and retry names decide about sends to retry topics."""
        self._intake, self._clock, self._broker_name = intake, clock, broker_name
        self._acknowledge = answers.acknowledge
        self._groups, self._locks, self._retry_names = groups, locks, retry_names

    @BrokerRoute(Code.SEND_MESSAGE, of_topic(PUB), MASTER, Waits.IN_HANDLER, reads=False, hides_topics=False)
    @BrokerRoute(Code.SEND_MESSAGE_V2, of_topic(PUB, "b"), MASTER, Waits.IN_HANDLER, reads=False, hides_topics=False)
    @BrokerRoute(Code.SEND_BATCH_MESSAGE, of_topic(PUB, "b"), MASTER, Waits.IN_HANDLER, reads=False, hides_topics=False)
    def send(self, connection: Connection, request: RemotingCommand) -> Awaitable[None] | None:
        """Handle a send; it is answered with its batch or the next fdatasync, and never before its topic is saved."""
        try:
            self._send(connection, request)
        except TopicNotSaved:
            return self._send_when_saved(connection, request)
        return None

    async def _send_when_saved(self, connection: Connection, request: RemotingCommand) -> None:
        await self._intake.topics_saved()
        again = self.send(connection, request)
        if again is not None:  # a dead letter, whose topic is new as well
            await again

    def _send(self, connection: Connection, request: RemotingCommand) -> None:
        started = self._clock.monotonic()
        header = parse_send_header(request.code, request.ext)
        self._intake.check_open()
        config = self._intake.check_topic(header, len(request.body))
        put = self._put_batch if header.batch else self._put_single  # by the flag, because any code may carry it
        stored, waits = put(connection, request, header, config)
        if not request.is_oneway:
            render = functools.partial(self._frame, request, header.topic, stored)
            self._acknowledge(connection, stored.end_offset, render, started, waits=waits)

    def _frame(self, request: RemotingCommand, topic: str, stored: Stored, code: int) -> bytes:
        handle, unique = None, stored.unique
        if stored.deliver_ms is not None:
            handle = recall_handle(topic, self._broker_name, stored.deliver_ms, unique)
        if request.serialize_type == SERIALIZE_JSON:
            return render_send_response(request, code, stored, unique, handle)
        try:
            return b"".join(encode_command(send_response(request, code, stored, unique, handle)))
        except (ProtocolError, ValueError):
            # The message is stored, so the answer must succeed: omit texts of the client that can't be encoded.
            return b"".join(encode_command(send_response(request, code, stored, "", None)))

    # ---- single

    def _put_single(
        self, connection: Connection, request: RemotingCommand, header: SendMessageHeader, config: TopicConfig
    ) -> tuple[Stored, bool]:
        """Store a message; return the receipt, and whether the client waits for the fsync."""
        text = properties_of(header)
        properties = text_to_properties(text)
        topic, queue_id, reconsume_times = header.topic, header.queue_id, header.reconsume_times or 0
        half = self._intake.begins_transaction(properties, reconsume_times)
        if topic.startswith(RETRY_PREFIX) and (group := self._gives_up(request, header)) is not None:
            topic, queue_id = self._dead_letters(group), 0
            properties.pop(PROPERTY_DELAY, None)
            text = join_properties(properties)
        message = NewMessage(
            topic=topic,
            queue_id=queue_id,
            body=request.body,
            flag=header.flag,
            sys_flag=header.sys_flag | (MULTI_TAGS if config.topic_filter_type == "MULTI_TAG" else 0),
            born_timestamp=header.born_timestamp,
            born_host=connection.remote,
            reconsume_times=reconsume_times,
        )
        return self._intake.send(message, text, properties, half=half), properties.get(PROPERTY_WAIT) != "false"

    def _gives_up(self, request: RemotingCommand, header: SendMessageHeader) -> str | None:
        """Return the group whose dead letters get this message, None if it stays in the retry topic.

        Clients that could not send a message back send it to the retry topic themselves.
        """
        group = self._retry_names.group_of(header.topic)
        limit = self._groups.require(group).retry_max_times
        if request.version >= VERSION_MAX_RECONSUME and header.max_reconsume_times is not None:
            limit = header.max_reconsume_times
        return group if (header.reconsume_times or 0) > limit or self._locks.any_held(group) else None

    def _dead_letters(self, group: str) -> str:
        topic = DLQ_PREFIX + group
        self._intake.ensure_topic(topic, DLQ_QUEUES)
        self._intake.require_saved(topic)
        return topic

    # ---- batch

    def _put_batch(
        self, connection: Connection, request: RemotingCommand, header: SendMessageHeader, config: TopicConfig
    ) -> tuple[Stored, bool]:
        """Store a batch, all of which is checked before the first message is appended; return as `_put_single`."""
        if header.topic.startswith(RETRY_PREFIX):
            raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, "batch request does not support retry group")
        try:
            parts = decode_batch(request.body)
        except ValueError as error:
            raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, f"the batch is malformed: {error}") from error
        outer = text_to_properties(properties_of(header))
        if not parts or header.sys_flag & TRANSACTION_BITS or PROPERTY_DELAY in outer:
            raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, "a batch is not empty, delayed or part of a transaction")
        common = outer.get(PROPERTY_UNIQUE_KEY)
        stored = self._intake.put_batch([self._part_of_batch(connection, header, common, part) for part in parts])
        ids = ",".join(item.msg_id for item in stored)
        whole = Stored(ids, stored[0].queue_id, stored[0].queue_offset, stored[-1].end_offset, common or "")
        return whole, outer.get(PROPERTY_WAIT) != "false"

    def _part_of_batch(
        self, connection: Connection, header: SendMessageHeader, common: str | None, part: tuple[int, bytes, bytes]
    ) -> NewMessage:
        """Check a message of a batch; without a unique id it gets the batch's (RocketMQ appends that to all)."""
        flag, body, raw = part
        properties = bytes_to_properties(raw)
        if self._intake.asks_to_wait(properties):
            raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, "a batch can't hold delayed messages")
        adopted = ""
        if common and PROPERTY_UNIQUE_KEY not in properties:
            properties[PROPERTY_UNIQUE_KEY], adopted = common, f"UNIQ_KEY\x01{common}\x02"
        raw = ended_bytes(raw) + (adopted + self._intake.stamp.text).encode("utf-8", "surrogatepass")
        if len(raw) > PROPERTIES_LENGTH_MAX:
            raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, "the properties of a message in the batch are too long")
        return NewMessage(
            topic=header.topic,
            queue_id=header.queue_id,
            body=body,
            properties=raw,
            flag=flag,
            sys_flag=header.sys_flag,
            born_timestamp=header.born_timestamp,
            born_host=connection.remote,
            reconsume_times=header.reconsume_times or 0,
            tags_code=cached_tags_code(properties.get("TAGS")),
            keys=found_by(properties),
        )
