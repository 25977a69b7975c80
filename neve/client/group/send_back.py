"""Returns failed messages to the broker, which redelivers them later and at last moves them to %DLQ%group."""

from __future__ import annotations

import logging

from neve.client.model import Message, MessageQueue
from neve.client.net.route import DEFAULT_TOPIC_QUEUES
from neve.client.net.session import Session
from neve.errors import BrokerError, ClientError, ConnectionFailed, NeveError
from neve.record.layout import COMPRESSED, COMPRESSION_MASK
from neve.record.properties import (
    PROPERTY_DELAY,
    PROPERTY_MAX_RECONSUME_TIMES,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RECONSUME_TIME,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TRANSACTION_PREPARED,
    properties_to_bytes,
)
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.headers import send_v2_fields
from neve.remoting.names import RETRY_PREFIX

log = logging.getLogger(__name__)

_STORED = (
    ResponseCode.SUCCESS,
    ResponseCode.FLUSH_DISK_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE,
    ResponseCode.FLUSH_SLAVE_TIMEOUT,
)


class SendBack:
    """Returns the messages of one group."""

    def __init__(self, session: Session, group: str, max_redeliveries: int) -> None:
        self._session = session
        self._group = group
        self._max_redeliveries = max_redeliveries

    async def retry(self, message: Message, delay_level: int) -> None:
        """Have the broker of the message redeliver it; if that fails, send a copy to %RETRY%group.

        Raises:
            NeveError: both failed, so only this client has the message.
        """
        try:
            await self.ask_broker(message, delay_level)
        except NeveError as error:
            log.warning("send back failed, sending a copy: msg_id=%s cause=%s", message.msg_id, error)
            times = message.reconsume_times if delay_level >= 0 else self._max_redeliveries
            await self.send_copy(message, times + 1)

    async def ask_broker(self, message: Message, delay_level: int) -> None:
        """Send CONSUMER_SEND_MSG_BACK to the broker of the message.

        Args:
            message: a received message.
            delay_level: 0 for a level by the count of redeliveries, -1 for the dead letter queue.
        """
        assert message.queue is not None
        ext = {
            "offset": str(message.physical_offset),
            "group": self._group,
            "delayLevel": str(delay_level),
            "originMsgId": message.offset_msg_id,
            "originTopic": message.properties.get(PROPERTY_RETRY_TOPIC, message.topic),
            "maxReconsumeTimes": str(self._max_redeliveries),
            "bname": message.queue.broker_name,
        }
        try:
            address = await self._session.routes.master(message.queue)
        except ConnectionFailed:
            address = message.store_host
        await self._session.requests.ask(address, RequestCode.CONSUMER_SEND_MSG_BACK, ext)

    async def send_copy(self, message: Message, reconsume_times: int, *, delayed: bool = True) -> None:
        """Send a copy to %RETRY%group on any broker that accepts it; unless `delayed`, the group receives it at once.

        The broker moves the copy to %DLQ%group if it was redelivered too often, or if the group holds locks because it
        consumes in order.

        Brokers create the retry topic at the first heartbeat of the group or at the first send, and name servers may
        not have its route yet. Then a delayed copy, which only members of the group send, is sent to the broker of the
        message.
        """
        topic = f"{RETRY_PREFIX}{self._group}"
        problem: NeveError = ClientError(f"no broker accepts messages to {topic}")
        for queue, beside in await self._retry_queues(topic, message, may_create=delayed):
            try:
                header = self._header(message, reconsume_times, topic, queue, delayed=delayed)
                answer = await self._session.pool.invoke(
                    await self._session.routes.master(beside),
                    RequestCode.SEND_MESSAGE_V2,
                    header,
                    body=message.body,
                    timeout=self._session.options.attempt_timeout,
                )
            except NeveError as error:
                problem = error
                continue
            if answer.code in _STORED:
                return
            problem = BrokerError(answer.code, answer.remark or "")
        raise problem

    async def _retry_queues(
        self, topic: str, message: Message, *, may_create: bool
    ) -> list[tuple[MessageQueue, MessageQueue]]:
        """Return a queue of the retry topic on each broker, each with a queue whose route names that broker's master.

        Raises:
            BrokerError: TOPIC_NOT_EXIST, unless `may_create` and the broker of the message is known.
        """
        try:
            route = await self._session.routes.get(topic)
        except BrokerError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST or not may_create or message.queue is None:
                raise
            return [(MessageQueue(topic, message.queue.broker_name, 0), message.queue)]
        return [(queue, queue) for queue in {queue.broker_name: queue for queue in route.write_queues}.values()]

    def _header(
        self, message: Message, reconsume_times: int, topic: str, queue: MessageQueue, *, delayed: bool
    ) -> dict[str, str]:
        properties = dict(message.properties)
        for name in (PROPERTY_TRANSACTION_PREPARED, PROPERTY_RECONSUME_TIME, PROPERTY_MAX_RECONSUME_TIMES):
            properties.pop(name, None)
        properties.setdefault(PROPERTY_ORIGIN_MESSAGE_ID, message.msg_id)
        properties[PROPERTY_RETRY_TOPIC] = message.topic
        properties.pop(PROPERTY_DELAY, None)
        if delayed:
            properties[PROPERTY_DELAY] = str(3 + message.reconsume_times)
        return send_v2_fields(
            group="CLIENT_INNER_PRODUCER",
            topic=topic,
            default_topic_queues=DEFAULT_TOPIC_QUEUES,
            broker_name=queue.broker_name,
            queue_id=queue.queue_id,
            sys_flag=message.sys_flag & (COMPRESSED | COMPRESSION_MASK),
            born_timestamp=self._session.options.now_ms(),
            flag=message.flag,
            properties=properties_to_bytes(properties).decode(),
            reconsume_times=reconsume_times,
            max_reconsume_times=self._max_redeliveries,
        )
