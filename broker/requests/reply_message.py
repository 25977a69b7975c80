"""SEND_REPLY_MESSAGE (324, 325): hand a reply to the client that waits for it, and keep it as an ordinary message."""

import logging

from broker.broker_context import BrokerContext
from broker.intake.property_text import properties_of
from broker.requests.send_message import Outgoing, SendMessageProcessor
from infra.remoting_server import Connection
from neve.errors import BrokerError, UnknownOutcome
from neve.record.properties import properties_to_bytes, text_to_properties
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import SendMessageHeader, parse_send_header

log = logging.getLogger(__name__)

_PUSH_SECONDS = 10.0


class ReplyMessageProcessor:
    def __init__(self, context: BrokerContext, sender: SendMessageProcessor) -> None:
        self._context, self._sender = context, sender

    async def reply(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        header = parse_send_header(request.code, request.ext)
        self._sender.check_writable()
        await self._sender.check_saved_topic(header, request)
        properties = text_to_properties(properties_of(header))
        fault = await self._push(connection, request, header, properties)
        ext = {"msgId": "0", "queueId": str(header.queue_id), "queueOffset": "0"}
        if self._context.config.store_reply_message_enable:
            ext |= self._store(connection, request, header, properties)
        code = ResponseCode.SUCCESS if fault is None else ResponseCode.SYSTEM_ERROR
        return RemotingCommand.response(request, code, fault, ext=ext)

    async def _push(
        self, connection: Connection, request: RemotingCommand, header: SendMessageHeader, properties: dict[str, str]
    ) -> str | None:
        """None: the client has it; else why not."""
        context = self._context
        client = properties.get("REPLY_TO_CLIENT")
        if not client:
            return "REPLY_TO_CLIENT is null, can not reply message"
        channel = context.clients.find_producer(client)
        if channel is None:
            return f"push reply message fail, channel of <{client}> not found."
        now = context.clock.now_ms()
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
            "storeHost": "{}:{}".format(*context.address),
            "storeTimestamp": str(now),
        }
        push = RemotingCommand(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, ext=ext, body=request.body)
        try:
            answer = await channel.connection.invoke(push, _PUSH_SECONDS)
        except (TimeoutError, ConnectionError, UnknownOutcome, BrokerError) as error:
            return f"push reply message to {client} fail: {str(error) or 'no answer in time'}"
        return None if answer.code == ResponseCode.SUCCESS else f"push reply message to {client} fail: {answer.remark}"

    def _store(
        self, connection: Connection, request: RemotingCommand, header: SendMessageHeader, properties: dict[str, str]
    ) -> dict[str, str]:
        message = Outgoing(
            header.topic,
            header.queue_id,
            request.body,
            properties_to_bytes(properties),
            header.flag,
            header.sys_flag,
            header.born_timestamp,
            connection.remote,
            header.reconsume_times or 0,
            properties.get("TAGS"),
            properties.get("KEYS"),
            properties.get("UNIQ_KEY"),
        )
        try:
            stored = self._sender.put(message, None)
        except BrokerError as error:
            # The answer tells of the push alone.
            log.warning("a reply to %s can't be kept: %s", properties.get("REPLY_TO_CLIENT"), error)
            return {}
        return {"msgId": stored.msg_id, "queueId": str(stored.queue_id), "queueOffset": str(stored.queue_offset)}
