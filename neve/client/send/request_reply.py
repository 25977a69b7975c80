"""Request and reply: a message with the address of its requester, and a reply that a broker pushes to it.

    request    SEND_MESSAGE_V2 with CORRELATION_ID, REPLY_TO_CLIENT (the requester's client id) and TTL (ms)
    reply      SEND_REPLY_MESSAGE_V2 to the cluster's reply topic, with the same three properties and MSG_TYPE=reply
    push       PUSH_REPLY_MESSAGE_TO_CLIENT from the broker to the requester, which is one of its producers

A request therefore first makes the client known to the brokers of the topic.
"""

from __future__ import annotations

import asyncio
import logging
from uuid import UUID

from neve.client.model import Message, MessageQueue, SendResult
from neve.client.net.connection import Connection
from neve.client.net.session import Session
from neve.client.send.draft import SendRequest
from neve.client.send.producer import Producer
from neve.client.validators import check_timeout
from neve.errors import ClientError, NeveError, RequestTimeout, seconds_text
from neve.record.bodies import inflate
from neve.record.properties import (
    PROPERTY_CLUSTER,
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_UNIQUE_KEY,
    bytes_to_properties,
)
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

log = logging.getLogger(__name__)

PROPERTY_CORRELATION_ID = "CORRELATION_ID"
PROPERTY_REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
PROPERTY_TTL = "TTL"
PROPERTY_MESSAGE_TYPE = "MSG_TYPE"
REPLY = "reply"
REPLY_TOPIC_POSTFIX = "REPLY_TOPIC"
_REQUEST_PROPERTIES = (PROPERTY_CORRELATION_ID, PROPERTY_REPLY_TO_CLIENT)


class ReplyRequests:
    """Sends the requests of one client, which wait for their replies, and its own replies."""

    def __init__(self, session: Session, producer: Producer) -> None:
        self._session, self._producer = session, producer
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        session.membership.code_handlers[RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT] = self._serve

    async def request(self, what: SendRequest, timeout: float) -> Message:
        """Send a message and return the reply: `AsyncClient.request`."""
        check_timeout(timeout)
        correlation = str(UUID(bytes=self._session.options.entropy(16), version=4))
        own = {
            PROPERTY_CORRELATION_ID: correlation,
            PROPERTY_REPLY_TO_CLIENT: self._session.client_id,
            PROPERTY_TTL: str(round(timeout * 1000)),
        }
        draft = self._producer.drafts.single(what.message, own)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        reply: asyncio.Future[Message] = loop.create_future()
        self._waiting[correlation] = reply
        try:
            async with asyncio.timeout_at(deadline):
                await self._introduce(draft.topic)
                await self._producer.deliver(draft, what.queue, deadline - loop.time())
                return await reply
        except NeveError:  # may be a TimeoutError, of the send
            raise
        except TimeoutError:
            raise RequestTimeout(
                f"no reply to {draft.msg_id} of {draft.topic} within {seconds_text(timeout)}"
            ) from None
        finally:
            self._waiting.pop(correlation, None)

    async def _introduce(self, topic: str) -> None:
        route = await self._session.routes.to_publish(topic)
        await self._session.membership.introduce(self._session.options.producer_group, route.brokers.values())

    async def reply(self, request: Message, what: SendRequest) -> SendResult:
        """Send a reply, which must have the topic `reply_topic(request)`: `AsyncClient.reply`."""
        asked = request.properties
        own = {PROPERTY_MESSAGE_TYPE: REPLY}
        own |= {name: asked[name] for name in (*_REQUEST_PROPERTIES, PROPERTY_TTL) if name in asked}
        return await self._producer.deliver(self._producer.drafts.single(what.message, own), None, what.timeout)

    def _serve(self, connection: Connection, request: RemotingCommand) -> bool:
        try:
            message = _pushed(request)
        except (KeyError, ValueError, ModuleNotFoundError) as error:
            log.warning("invalid reply received: address=%s cause=%r", connection.address, error)
            connection.answer(request, ResponseCode.SYSTEM_ERROR, "process reply message fail")
            return True
        waiting = self._waiting.get(message.properties.get(PROPERTY_CORRELATION_ID, ""))
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
        else:
            log.info("late reply ignored: msg_id=%s from=%s", message.msg_id, message.born_host)
        connection.answer(request, ResponseCode.SUCCESS)
        return True


def reply_topic(request: Message) -> str:
    """Return the topic for the reply to a consumed message.

    Raises:
        ClientError: the message was not sent by `request`.
    """
    missing = {PROPERTY_CLUSTER, *_REQUEST_PROPERTIES} - request.properties.keys()
    if missing:
        raise ClientError(f"{request.msg_id} is no request: it has no {', '.join(sorted(missing))}")
    return f"{request.properties[PROPERTY_CLUSTER]}_{REPLY_TOPIC_POSTFIX}"


def _pushed(request: RemotingCommand) -> Message:
    """Return the reply of a PUSH_REPLY_MESSAGE_TO_CLIENT, whose header has the long field names of a send.

    Raises:
        KeyError, ValueError, ModuleNotFoundError: the request is invalid, or its compression is not supported.
    """
    ext = request.ext or {}
    properties = bytes_to_properties(ext.get("properties", "").encode())
    return Message(
        topic=ext["topic"],
        body=inflate(bytes(request.body), int(ext.get("sysFlag", "0"))),
        tags=properties.get(PROPERTY_TAGS),
        keys=tuple(properties.get(PROPERTY_KEYS, "").split()),
        properties=properties,
        flag=int(ext.get("flag", "0")),
        queue=MessageQueue(ext["topic"], ext.get("bname", ""), int(ext["queueId"])),
        msg_id=properties.get(PROPERTY_UNIQUE_KEY, ""),
        born_timestamp=int(ext.get("bornTimestamp", "0")),
        born_host=ext.get("bornHost", ""),
        store_timestamp=int(ext.get("storeTimestamp", "0")),
        store_host=ext.get("storeHost", ""),
        reconsume_times=int(ext.get("reconsumeTimes", "0")),
    )
