"""CONSUMER_SEND_MSG_BACK (36): redeliver a message by its group's retry topic, or move it to the dead letters."""

from access.guard import Guard
from access.permissions import SUB, of_group
from broker.broker_stats import BrokerStats
from broker.intake.intake import Intake
from broker.intake.message import NewMessage
from broker.intake.property_text import drop_stated_origin
from broker.reading.tiered_store import TieredStore
from broker.requests.route import MASTER, BrokerRoute, Waits
from broker.requests.send_message import DLQ_QUEUES, VERSION_MAX_RECONSUME
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.record.codec import MessageRecord, decode_record, parse_host
from neve.record.ids import offset_msg_id
from neve.record.layout import PROPERTIES_LENGTH_MAX
from neve.record.properties import PROPERTY_RETRY_TOPIC, properties_to_bytes
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_int, require_int, require_str
from neve.remoting.names import DLQ_PREFIX, PERM_WRITE, RETRY_PREFIX

_FIRST_DELAY_LEVEL = 3


class SendBackProcessor:
    """Copies messages that consumers send back to retry topics or dead letters.

    In RocketMQ, this is a part of SendMessageProcessor.
    """

    def __init__(
        self,
        intake: Intake,
        tiered: TieredStore,
        *,
        groups: SubscriptionGroupManager,
        guard: Guard,
        stats: BrokerStats,
        address: tuple[str, int],
    ) -> None:
        self._intake, self._tiered, self._stats, self._address = intake, tiered, stats, address
        self._groups, self._guard = groups, guard

    @BrokerRoute(
        Code.CONSUMER_SEND_MSG_BACK, of_group(SUB, "group"), MASTER, Waits.YES, reads=False, hides_topics=False
    )
    async def send_back(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Append a copy of the message to the group's retry topic, or to its dead letters after too many attempts."""
        ext, intake = request.ext, self._intake
        group = require_str(ext, "group")
        intake.check_open()
        config = self._groups.require(group)
        if config.retry_queue_nums <= 0:
            return RemotingCommand.response(request, ResponseCode.SUCCESS)
        retry = await intake.saved_topic(RETRY_PREFIX + group, config.retry_queue_nums)
        if not retry.perm & PERM_WRITE:
            raise BrokerError(ResponseCode.NO_PERMISSION, f"the topic[{RETRY_PREFIX}{group}] is forbidden to write")
        physical_offset = require_int(ext, "offset")
        raw = await self._tiered.record_at(physical_offset)
        if raw is None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {physical_offset}")
        record = decode_record(raw)
        self._guard.require_topic(connection, request, record.topic, "Sub")
        limit = config.retry_max_times
        if request.version >= VERSION_MAX_RECONSUME:
            limit = optional_int(ext, "maxReconsumeTimes", limit)
        level = require_int(ext, "delayLevel")
        properties = record.properties
        drop_stated_origin(record.topic, properties)
        properties.setdefault(PROPERTY_RETRY_TOPIC, record.topic)
        properties["WAIT"] = "false"
        properties.setdefault("ORIGIN_MESSAGE_ID", offset_msg_id(self._address, physical_offset))
        for name in ("DELAY", "REAL_TOPIC", "REAL_QID", "POP_CK"):
            properties.pop(name, None)
        if record.reconsume_times >= limit or level < 0:
            await intake.saved_topic(DLQ_PREFIX + group, DLQ_QUEUES)
            intake.put_now(_again(record, DLQ_PREFIX + group, 0, properties), properties)
        else:
            level = level or _FIRST_DELAY_LEVEL + record.reconsume_times
            properties["DELAY"] = str(level)
            queue = intake.any_queue(retry.read_queue_nums)
            intake.put(_again(record, RETRY_PREFIX + group, queue, properties), properties)
        self._stats.sent_back(record.topic, group)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)


def _again(record: MessageRecord, topic: str, queue: int, properties: dict[str, str]) -> NewMessage:
    raw = properties_to_bytes(properties)
    if len(raw) > PROPERTIES_LENGTH_MAX:
        raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, "the properties of the message are too long to send it back")
    return NewMessage(
        topic=topic,
        queue_id=queue,
        body=record.body,
        properties=raw,
        flag=record.flag,
        sys_flag=record.sys_flag,
        born_timestamp=record.born_timestamp,
        born_host=parse_host(record.born_host),
        reconsume_times=record.next_reconsume_times,
    )
