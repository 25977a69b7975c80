"""SEND_REPLY_MESSAGE (324, 325): push a reply to the waiting client, and store it as an ordinary message."""

import logging

from access.permissions import PUB, of_topic
from broker.clients.client_manager import ClientManager
from broker.config import BrokerConfig
from broker.intake.intake import Intake
from broker.intake.message import NewMessage
from broker.intake.property_text import properties_of
from broker.requests.route import MASTER, BrokerRoute, Waits
from infra.clock import Clock
from infra.net.remoting_server import Connection
from neve.errors import BrokerError, UnknownOutcome
from neve.record.properties import properties_to_bytes, text_to_properties
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import SendMessageHeader, parse_send_header

log = logging.getLogger(__name__)

_PUSH_SECONDS = 10.0


class ReplyMessageProcessor:
    """Pushes replies to waiting clients (RocketMQ's ReplyMessageProcessor)."""

    def __init__(
        self, intake: Intake, clients: ClientManager, config: BrokerConfig, clock: Clock, *, address: tuple[str, int]
    ) -> None:
        self._intake, self._clients, self._config, self._clock = intake, clients, config, clock
        self._address = address

    @BrokerRoute(Code.SEND_REPLY_MESSAGE, of_topic(PUB), MASTER, Waits.YES, reads=False, hides_topics=False)
    @BrokerRoute(Code.SEND_REPLY_MESSAGE_V2, of_topic(PUB, "b"), MASTER, Waits.YES, reads=False, hides_topics=False)
    async def reply(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Push a reply to the client in REPLY_TO_CLIENT; then store it, if the configuration enables that."""
        header = parse_send_header(request.code, request.ext)
        self._intake.check_open()
        await self._intake.check_saved_topic(header, len(request.body))
        properties = text_to_properties(properties_of(header))
        fault = await self._push(connection, request, header, properties)
        ext = {"msgId": "0", "queueId": str(header.queue_id), "queueOffset": "0"}
        if self._config.store_reply_message_enable:
            ext |= self._store(connection, request, header, properties)
        code = ResponseCode.SUCCESS if fault is None else ResponseCode.SYSTEM_ERROR
        return RemotingCommand.response(request, code, fault, ext=ext)

    async def _push(
        self, connection: Connection, request: RemotingCommand, header: SendMessageHeader, properties: dict[str, str]
    ) -> str | None:
        """Push a reply; return None if the client has it, otherwise the error."""
        client = properties.get("REPLY_TO_CLIENT")
        if not client:
            return "REPLY_TO_CLIENT is null, can not reply message"
        channel = self._clients.find_producer(client)
        if channel is None:
            return f"push reply message fail, channel of <{client}> not found."
        now = self._clock.now_ms()
        text = properties_to_bytes({**properties, "PUSH_REPLY_TIME": str(now)}).decode("utf-8", "surrogatepass")
        host, port = connection.remote
        ext = {
            "producerGroup": header.producer_group,
            "topic": header.topic,
            "defaultTopic": header.default_topic,
            "defaultTopicQueueNums": str(header.default_topic_queue_nums),
            "queueId": str(header.queue_id),
            "sysFlag": str(header.sys_flag),
            "bornTimestamp": str(header.born_timestamp),
            "flag": str(header.flag),
            "properties": text,
            "reconsumeTimes": str(header.reconsume_times or 0),
            "unitMode": str(bool(header.unit_mode)).lower(),
            "bornHost": f"{host}:{port}",
            "storeHost": "{}:{}".format(*self._address),
            "storeTimestamp": str(now),
        }
        push = RemotingCommand(Code.PUSH_REPLY_MESSAGE_TO_CLIENT, ext=ext, body=request.body)
        try:
            answer = await channel.connection.invoke(push, _PUSH_SECONDS)
        except (TimeoutError, ConnectionError, UnknownOutcome, BrokerError) as error:
            return f"push reply message to {client} fail: {str(error) or 'no answer in time'}"
        return None if answer.code == ResponseCode.SUCCESS else f"push reply message to {client} fail: {answer.remark}"

    def _store(
        self, connection: Connection, request: RemotingCommand, header: SendMessageHeader, properties: dict[str, str]
    ) -> dict[str, str]:
        message = NewMessage(
            topic=header.topic,
            queue_id=header.queue_id,
            body=request.body,
            properties=properties_to_bytes(properties),
            flag=header.flag,
            sys_flag=header.sys_flag,
            born_timestamp=header.born_timestamp,
            born_host=connection.remote,
            reconsume_times=header.reconsume_times or 0,
        )
        try:
            stored = self._intake.put_now(message, properties)
        except BrokerError as error:
            # The answer reports the outcome of the push only.
            log.warning("a reply to %s can't be stored: %s", properties.get("REPLY_TO_CLIENT"), error)
            return {}
        return {"msgId": stored.msg_id, "queueId": str(stored.queue_id), "queueOffset": str(stored.queue_offset)}
