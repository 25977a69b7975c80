"""A consumer failed on a message (36): again later through its group's retry topic, or a dead letter."""

from broker.broker_context import BrokerContext
from broker.requests.send_message import DLQ_QUEUES, VERSION_MAX_RECONSUME, Outgoing, SendMessageProcessor
from infra.remoting_server import Connection
from neve.errors import BrokerError
from neve.record.codec import MessageRecord, decode_record, parse_host
from neve.record.ids import offset_msg_id
from neve.record.layout import PROPERTIES_LENGTH_MAX
from neve.record.properties import properties_to_bytes
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_int, require_int, require_str
from neve.remoting.names import DLQ_PREFIX, PERM_WRITE, RETRY_PREFIX

_FIRST_DELAY_LEVEL = 3


class SendBackProcessor:
    def __init__(self, context: BrokerContext, sender: SendMessageProcessor) -> None:
        self._context, self._sender = context, sender

    async def send_back(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """A consumer failed on a message: again later through its retry topic, or a dead letter."""
        ext, context = request.ext, self._context
        group = require_str(ext, "group")
        self._sender.check_writable()
        config = context.find_group(group)
        if config.retry_queue_nums <= 0:
            return RemotingCommand.response(request, ResponseCode.SUCCESS)
        retry = await self._sender.saved_topic(RETRY_PREFIX + group, config.retry_queue_nums)
        if not retry.perm & PERM_WRITE:
            raise BrokerError(ResponseCode.NO_PERMISSION, f"the topic[{RETRY_PREFIX}{group}] is forbidden to write")
        physical_offset = require_int(ext, "offset")
        raw = await context.tiered.record_at(physical_offset)
        if raw is None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {physical_offset}")
        record = decode_record(raw)
        context.require_topic(connection, request, record.topic, "Sub")
        limit = config.retry_max_times
        if request.version >= VERSION_MAX_RECONSUME:
            limit = optional_int(ext, "maxReconsumeTimes", limit)
        level = require_int(ext, "delayLevel")
        properties = record.properties
        properties.setdefault("RETRY_TOPIC", record.topic)
        properties["WAIT"] = "false"
        properties.setdefault("ORIGIN_MESSAGE_ID", offset_msg_id(context.address, physical_offset))
        for name in ("DELAY", "REAL_TOPIC", "REAL_QID", "POP_CK"):
            properties.pop(name, None)
        if record.reconsume_times >= limit or level < 0:
            await self._sender.saved_topic(DLQ_PREFIX + group, DLQ_QUEUES)
            self._put_again(record, DLQ_PREFIX + group, 0, properties, None)
        else:
            level = level or _FIRST_DELAY_LEVEL + record.reconsume_times
            properties["DELAY"] = str(level)
            queue = context.any_queue(config.retry_queue_nums)
            self._put_again(record, RETRY_PREFIX + group, queue, properties, str(level))
        context.stats.sent_back(record.topic, group)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    def _put_again(
        self, record: MessageRecord, topic: str, queue: int, properties: dict[str, str], delay: str | None
    ) -> None:
        raw = properties_to_bytes(properties)
        if len(raw) > PROPERTIES_LENGTH_MAX:
            raise BrokerError(
                ResponseCode.MESSAGE_ILLEGAL, "the properties of the message are too long to send it back"
            )
        message = Outgoing(
            topic,
            queue,
            record.body,
            raw,
            record.flag,
            record.sys_flag,
            record.born_timestamp,
            parse_host(record.born_host),
            record.next_reconsume_times,
            properties.get("TAGS"),
            properties.get("KEYS"),
            properties.get("UNIQ_KEY"),
        )
        self._sender.put(message, delay)
