"""Administration: requests that only a connected consumer can answer (223, 307, 309)."""

import logging
from typing import Any

from access.permissions import GET, UPDATE, all_of, of_cluster, of_group, of_topic_and_group
from broker.clients.client_manager import ClientChannel, ClientManager
from broker.reading.tiered_store import TieredStore
from broker.requests.route import ANY_ROLE, MEMBERS, BrokerRoute, Waits
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.record.ids import parse_offset_msg_id
from neve.remoting.body import dumps_object_keys, lenient_loads
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import require_str

log = logging.getLogger(__name__)

_TIMEOUT = 10.0
# Older clients do not answer these requests.
_VERSION_MIN = 62


class AdminRelayProcessor:
    """Relays requests to connected consumers and returns their answers (RocketMQ's Broker2Client).

    The request fails if the consumer is not connected or does not answer in time.
    """

    def __init__(
        self,
        broker_name: str,
        clients: ClientManager,
        tiered: TieredStore,
        *,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
    ) -> None:
        self._broker_name, self._clients, self._tiered = broker_name, clients, tiered
        self._topics, self._groups = topics, groups

    @BrokerRoute(Code.GET_CONSUMER_RUNNING_INFO, of_group(GET), ANY_ROLE, Waits.NO, reads=True, hides_topics=False)
    async def running_info(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return a consumer's runtime information (307)."""
        return await self._relay(request, dict(request.ext), bytes(request.body))

    @BrokerRoute(
        Code.CONSUME_MESSAGE_DIRECTLY,
        all_of(of_group(UPDATE), of_cluster(GET)),
        MEMBERS,
        Waits.NO,
        reads=True,
        hides_topics=True,
    )
    async def consume_directly(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Let a consumer process one message (309), whose record is found by the physical offset in the message id."""
        ext = dict(request.ext)
        ext["brokerName"] = self._broker_name
        body = bytes(request.body)
        if ext.get("msgId"):
            body = await self._record(ext["msgId"])
        topic = self._topics.select(ext.get("topic", ""))
        if topic is not None:
            ext["topicSysFlag"] = str(topic.topic_sys_flag)
        group = self._groups.groups.get(ext.get("consumerGroup", ""))
        if group is not None:
            ext["groupSysFlag"] = str(group.group_sys_flag)
        return await self._relay(request, ext, body)

    async def _record(self, msg_id: str) -> bytes:
        try:
            offset = parse_offset_msg_id(msg_id)[2]
        except ValueError as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"{msg_id} is not an offset message id") from error
        record = await self._tiered.record_at(offset)
        if record is None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {offset}")
        return bytes(record)

    async def _relay(self, request: RemotingCommand, ext: dict[str, str], body: bytes) -> RemotingCommand:
        group, client = require_str(ext, "consumerGroup"), require_str(ext, "clientId")
        info = self._clients.consumers.get(group)
        channel = info.find_client(client) if info is not None else None
        if channel is None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"The Consumer <{group}> <{client}> not online")
        answer = await self._ask(channel, group, RemotingCommand(request.code, ext=ext, body=body))
        return RemotingCommand.response(request, answer.code, answer.remark, answer.ext or None, bytes(answer.body))

    @staticmethod
    async def _ask(channel: ClientChannel, group: str, command: RemotingCommand) -> RemotingCommand:
        who = f"The Consumer <{group}> <{channel.client_id}>"
        if channel.version < _VERSION_MIN:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"{who} Version <{channel.version}> too low to finish")
        try:
            return await channel.connection.invoke(command, _TIMEOUT)
        except TimeoutError as error:
            raise BrokerError(ResponseCode.CONSUME_MSG_TIMEOUT, f"{who} did not answer in {_TIMEOUT:.0f} s") from error
        except ConnectionError as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"{who} not online") from error

    @BrokerRoute(
        Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
        of_topic_and_group(GET, "group"),
        MEMBERS,
        Waits.NO,
        reads=True,
        hides_topics=False,
    )
    async def consumer_status(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return the offsets that members of a group, or one of them, have in a topic (223)."""
        ext = request.ext
        topic, group, wanted = require_str(ext, "topic"), require_str(ext, "group"), ext.get("clientAddr")
        info = self._clients.consumers.get(group)
        channels = [] if info is None else list(info.channels.values())
        if not channels:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"No Any Consumer online in the consumer group: [{group}]")
        table: dict[str, Any] = {}
        for channel in channels:
            host, port = channel.connection.remote
            if wanted and wanted not in (channel.client_id, f"{host}:{port}"):
                continue
            command = RemotingCommand(Code.GET_CONSUMER_STATUS_FROM_CLIENT, ext={"topic": topic, "group": group})
            answer = await self._ask(channel, group, command)
            if answer.code == ResponseCode.SUCCESS and len(answer.body):
                table[channel.client_id] = lenient_loads(answer.body).get("messageQueueTable") or {}
            else:
                log.info("%s of %s did not report its offsets: %s", channel.client_id, group, answer.remark)
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps_object_keys({"consumerTable": table}))
