"""Heartbeats, farewells and the check of a subscription: 34, 35, 46."""

from broker.broker_context import BrokerContext
from broker.clients.client_manager import MAX_CLIENT_ID, ClientChannel, ConsumerGroup, Subscription
from broker.requests.pull_message import parse_expression
from broker.validators import RETRY_PREFIX, group_fault
from infra.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import ConsumerData, HeartbeatData, SubscriptionData, convert, lenient_loads, loads_as
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import require_str
from neve.remoting.signature import ACCESS_KEY

_UNIT_SUBSCRIPTION = 2
_MAX_PRODUCER_GROUP = 255


class ClientManageProcessor:
    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def heartbeat(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        data = loads_as(request.body, HeartbeatData)
        if len(data.client_id) > MAX_CLIENT_ID:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"a client id of {len(data.client_id)} characters")
        clock = self._context.clock
        channel = ClientChannel(
            connection,
            data.client_id,
            request.language,
            request.version,
            clock.monotonic(),
            clock.now_ms(),
            request.ext.get(ACCESS_KEY, ""),
        )
        self._context.watch(connection)
        for producer in data.producer_data_set:
            if len(producer.group_name) > _MAX_PRODUCER_GROUP:
                raise BrokerError(ResponseCode.INVALID_PARAMETER, "a producer group's name is too long")
            self._context.clients.register_producer(producer.group_name, channel)
        changed = not data.consumer_data_set
        for consumer in data.consumer_data_set:
            changed |= self._register_consumer(channel, data, consumer)
        ext = {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true" if changed else "false"}
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext=ext)

    def _register_consumer(self, channel: ClientChannel, data: HeartbeatData, consumer: ConsumerData) -> bool:
        context, group = self._context, consumer.group_name
        fault = group_fault(group)
        if fault is not None:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, fault)
        config = context.groups.find(group, create=context.config.auto_create_subscription_group)
        if config is None:
            return False
        retry = RETRY_PREFIX + group
        if context.topics.select(retry) is None:
            flag = _UNIT_SUBSCRIPTION if consumer.unit_mode else 0
            context.topics.create_plain(retry, min(config.retry_queue_nums, context.config.max_queues_per_topic), flag)
            context.register_soon()
        subs = None if data.without_sub else [_subscription(sub) for sub in consumer.subscription_data_set]
        kinds = (consumer.consume_type, consumer.message_model, consumer.consume_from_where)
        context.clients.register_consumer(group, channel, kinds, subs)
        fingerprints: dict[str, int] = channel.connection.state.setdefault("fingerprints", {})
        known = fingerprints.get(group)
        fingerprints[group] = data.heartbeat_fingerprint
        return data.heartbeat_fingerprint == 0 or known != data.heartbeat_fingerprint

    def unregister(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        ext = request.ext
        require_str(ext, "clientID")
        group = ext.get("consumerGroup")
        self._context.clients.unregister(connection, ext.get("producerGroup"), group)
        if group:
            connection.state.get("fingerprints", {}).pop(group, None)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    def check_client(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        value = lenient_loads(request.body)
        if isinstance(value, dict) and value.get("subscriptionData"):
            data = convert(value["subscriptionData"], SubscriptionData)
            parse_expression(data.sub_string, data.expression_type, sql=self._context.config.enable_property_filter)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    def notify_consumers(self, info: ConsumerGroup) -> None:
        """Tell a group's members to share out their queues anew."""
        config = self._context.groups.groups.get(info.name)
        if config is not None and not config.notify_consumer_ids_changed_enable:
            return
        for connection in info.channels:
            connection.send_oneway(
                RemotingCommand(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, ext={"consumerGroup": info.name})
            )


def _subscription(data: SubscriptionData) -> Subscription:
    return Subscription(
        data.topic,
        data.sub_string,
        tuple(data.tags_set),
        frozenset(data.code_set),
        data.sub_version,
        data.expression_type or "TAG",
    )
