"""Administration: connected clients, and the topics that groups consume (203, 204, 300, 328, 343, 345)."""

from typing import Any

from access.permissions import GET, of_cluster, of_group, of_topic, of_topic_and_group
from broker.clients.client_manager import ClientManager, subscription_to_wire
from broker.requests.route import ANY_ROLE, MEMBERS, BrokerRoute, Waits
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import require_str


class AdminConnectionsProcessor:
    """Returns connected clients (a part of RocketMQ's AdminBrokerProcessor)."""

    def __init__(self, clients: ClientManager, offsets: ConsumerOffsetManager, address: tuple[str, int]) -> None:
        self._clients, self._offsets, self._address = clients, offsets, address

    @BrokerRoute(Code.GET_CONSUMER_CONNECTION_LIST, of_group(GET), ANY_ROLE, Waits.NO, reads=True, hides_topics=False)
    def consumer_connections(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = require_str(request.ext, "consumerGroup")
        info = self._clients.consumers.get(group)
        if info is None:
            raise BrokerError(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{group}] not online")
        body = {
            "connectionSet": [channel.to_wire() for channel in info.channels.values()],
            "consumeFromWhere": info.consume_from_where,
            "consumeType": info.consume_type,
            "messageModel": info.message_model,
            "subscriptionTable": {topic: subscription_to_wire(sub) for topic, sub in info.subscriptions.items()},
        }
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(body))

    @BrokerRoute(
        Code.GET_PRODUCER_CONNECTION_LIST,
        of_group(GET, "producerGroup"),
        ANY_ROLE,
        Waits.NO,
        reads=True,
        hides_topics=False,
    )
    def producer_connections(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = require_str(request.ext, "producerGroup")
        producers = self._clients.producers.get(group)
        if not producers:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"the producer group[{group}] not exist")
        body = {"connectionSet": [channel.to_wire() for channel in producers.values()]}
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(body))

    @BrokerRoute(Code.QUERY_TOPIC_CONSUME_BY_WHO, of_topic(GET), MEMBERS, Waits.NO, reads=True, hides_topics=False)
    def groups_of_topic(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic = require_str(request.ext, "topic")
        groups = {*self._clients.groups_subscribed_to(topic), *self._offsets.groups_of(topic)}
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps({"groupList": sorted(groups)}))

    @BrokerRoute(
        Code.QUERY_TOPICS_BY_CONSUMER, of_group(GET, "group"), MEMBERS, Waits.NO, reads=True, hides_topics=False
    )
    def topics_of_group(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = require_str(request.ext, "group")
        live = self._clients.consumers.get(group)
        topics = {*self._offsets.topics_of(group), *(live.subscriptions if live is not None else ())}
        body = {"topicList": sorted(topics), "brokerAddr": "{}:{}".format(*self._address)}
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(body))

    @BrokerRoute(
        Code.QUERY_SUBSCRIPTION_BY_CONSUMER,
        of_topic_and_group(GET, "group"),
        MEMBERS,
        Waits.NO,
        reads=True,
        hides_topics=False,
    )
    def subscription(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group, topic = require_str(request.ext, "group"), require_str(request.ext, "topic")
        info = self._clients.consumers.get(group)
        body: dict[str, Any] = {"group": group, "topic": topic}
        if info is not None and topic in info.subscriptions:
            body["subscriptionData"] = subscription_to_wire(info.subscriptions[topic])
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(body))

    @BrokerRoute(Code.GET_ALL_PRODUCER_INFO, of_cluster(GET), ANY_ROLE, Waits.NO, reads=True, hides_topics=False)
    def all_producers(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return all producers (328)."""
        data = {
            group: [
                {
                    "clientId": channel.client_id,
                    "language": channel.language,
                    "lastUpdateTimestamp": channel.last_update_ms,
                    "remoteIP": "/{}:{}".format(*channel.connection.remote),  # Java's text of a socket address
                    "version": channel.version,
                }
                for channel in channels.values()
            ]
            for group, channels in self._clients.producers.items()
        }
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps({"data": data}))
