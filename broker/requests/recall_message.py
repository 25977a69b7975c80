"""RECALL_MESSAGE (370): cancel a timer message that is not delivered yet.

handle:  base64url of "v1 <topic> <broker> <time of delivery + 1> <unique key>"
"""

import base64
import binascii
from collections.abc import Awaitable, Callable

from access.permissions import PUB, of_topic
from broker.config import BrokerConfig
from broker.intake.intake import Intake
from broker.intake.message import NewMessage
from broker.intake.receipts import REGION
from broker.requests.route import BrokerRoute, Waits, master_else
from broker.tables.topic_config_manager import TopicConfigManager
from broker.waiting.timer_message import DELIVER_MS, RECALL_KEY, recall_key
from infra.clock import Clock
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.record.properties import properties_to_bytes
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import require_str

_VERSION = "v1"
_BODY = b"0"


_ROLES = master_else(ResponseCode.SLAVE_NOT_AVAILABLE, "recall failed, broker service not available")


class RecallMessageProcessor:
    """Cancels timer messages by their handle (RocketMQ's RecallMessageProcessor)."""

    def __init__(
        self,
        intake: Intake,
        config: BrokerConfig,
        clock: Clock,
        *,
        topics: TopicConfigManager,
        settled: Callable[[], Awaitable[None]],
    ) -> None:
        """`settled` returns when everything stored so far is durable."""
        self._intake, self._config, self._clock, self._topics = intake, config, clock, topics
        self._settled = settled

    @BrokerRoute(Code.RECALL_MESSAGE, of_topic(PUB), _ROLES, Waits.YES, reads=False, hides_topics=False)
    async def recall(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Cancel a timer message; even errors contain the region, so that RocketMQ clients trace the recall."""
        try:
            code, remark, ext = ResponseCode.SUCCESS, None, {"msgId": await self._recall(connection, request)}
        except BrokerError as error:
            code, remark, ext = ResponseCode(error.code or ResponseCode.SYSTEM_ERROR), error.remark, {}
        return RemotingCommand.response(request, code, remark, {"MSG_REGION": REGION, "TRACE_ON": "true", **ext})

    async def _recall(self, connection: Connection, request: RemotingCommand) -> str:
        """Append the recall and return the id of the cancelled message."""
        topic = require_str(request.ext, "topic")
        if not self._config.recall_message_enable:
            raise BrokerError(ResponseCode.NO_PERMISSION, "recall failed, operation is forbidden")
        self._intake.check_open()
        self._topics.require(topic)
        when, unique = self._read(topic, request.ext.get("recallHandle", ""))
        properties = {DELIVER_MS: str(when), RECALL_KEY: recall_key(topic, unique)}
        message = NewMessage(
            topic=topic,
            queue_id=0,
            body=_BODY,
            properties=properties_to_bytes(properties),
            born_timestamp=self._clock.now_ms(),
            born_host=connection.remote,
        )
        self._intake.put(message, properties)
        await self._settled()
        return unique

    def _read(self, topic: str, handle: str) -> tuple[int, str]:
        """Parse a handle to delivery time and unique key. Raises BrokerError unless it is for a future message here."""
        try:
            text = base64.urlsafe_b64decode(handle + "=" * (-len(handle) % 4)).decode("ascii")
            version, its_topic, broker, time, unique = text.split(" ")
            when = int(time) - 1
        except (binascii.Error, ValueError) as error:
            raise _illegal("recall handle is invalid") from error
        if version != _VERSION or not unique:
            raise _illegal("recall handle is invalid")
        if its_topic != topic or broker != self._config.broker_name:
            raise _illegal("recall failed, topic or broker does not match the handle")
        left = when - self._clock.now_ms()
        if not 0 < left <= self._config.timer_max_delay_sec * 1000:
            raise _illegal("recall failed, timestamp invalid")
        return when, unique


def _illegal(remark: str) -> BrokerError:
    return BrokerError(ResponseCode.ILLEGAL_OPERATION, remark)
