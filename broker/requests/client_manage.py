"""Heartbeats, farewells and the check of a subscription: 34, 35, 46."""

from typing import NamedTuple

from broker.clients.client_manager import MAX_CLIENT_ID, ClientChannel, ClientManager
from broker.clients.registration import Registration
from broker.config import BrokerConfig
from broker.reading.message_filter import parse_expression
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.clock import Clock
from infra.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import ConsumerData, HeartbeatData, SubscriptionData, convert, lenient_loads, loads_as
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import require_str
from neve.remoting.names import RETRY_PREFIX, group_fault
from neve.remoting.signature import ACCESS_KEY

_UNIT_SUBSCRIPTION = 2
_MAX_PRODUCER_GROUP = 255
_BEAT = "heartbeat"


class _Beat(NamedTuple):
    """A connection's last heartbeat, as far as saying it again has to be understood."""

    said: tuple[int, int]
    client_id: str
    changed: bool  # what is answered
    producers: list[str]
    consumers: list[tuple[str, int]]  # groups, and the revision that each was at


class ClientManageProcessor:
    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        *,
        clients: ClientManager,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        registration: Registration,
    ) -> None:
        self._config, self._clock, self._clients = config, clock, clients
        self._topics, self._groups, self._registration = topics, groups, registration

    def heartbeat(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """A client says the same every 30 s, and it may be a megabyte: what changes nothing is not read again."""
        said = (len(request.body), hash(request.body))  # siphash, with this process' own key
        beat: _Beat | None = connection.state.get(_BEAT)
        if beat is None or beat.said != said or not self._hear_again(connection, request, beat):
            beat = self._hear(connection, request, said)
        ext = {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true" if beat.changed else "false"}
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext=ext)

    def _hear_again(self, connection: Connection, request: RemotingCommand, beat: _Beat) -> bool:
        """False: it has to be read, something that it speaks of has changed."""
        channel = self._channel(connection, request, beat.client_id)
        for group, revision in beat.consumers:
            if group not in self._groups.groups or self._topics.select(RETRY_PREFIX + group) is None:
                return False
            if not self._clients.says_the_same(group, channel, revision):
                return False
        for group in beat.producers:
            self._clients.register_producer(group, channel)
        return True

    def _hear(self, connection: Connection, request: RemotingCommand, said: tuple[int, int]) -> _Beat:
        data = loads_as(request.body, HeartbeatData)
        if len(data.client_id) > MAX_CLIENT_ID:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"a client id of {len(data.client_id)} characters")
        connection.state.pop(_BEAT, None)
        channel, clients = self._channel(connection, request, data.client_id), self._clients
        clients.watch(connection)
        for producer in data.producer_data_set:
            if len(producer.group_name) > _MAX_PRODUCER_GROUP:
                raise BrokerError(ResponseCode.INVALID_PARAMETER, "a producer group's name is too long")
            clients.register_producer(producer.group_name, channel)
        changed = not data.consumer_data_set
        for consumer in data.consumer_data_set:
            changed |= self._register_consumer(channel, data, consumer)
        always_new = not data.consumer_data_set or data.heartbeat_fingerprint == 0
        groups = [consumer.group_name for consumer in data.consumer_data_set]
        revisions = [(group, clients.consumers[group].revision) for group in groups if group in clients.consumers]
        producers = [producer.group_name for producer in data.producer_data_set]
        if len(revisions) == len(groups):
            connection.state[_BEAT] = _Beat(said, data.client_id, always_new, producers, revisions)
        return _Beat(said, data.client_id, changed, producers, revisions)

    def _channel(self, connection: Connection, request: RemotingCommand, client_id: str) -> ClientChannel:
        clock, user = self._clock, request.ext.get(ACCESS_KEY, "")
        return ClientChannel(
            connection, client_id, request.language, request.version, clock.monotonic(), clock.now_ms(), user
        )

    def _register_consumer(self, channel: ClientChannel, data: HeartbeatData, consumer: ConsumerData) -> bool:
        group = consumer.group_name
        fault = group_fault(group)
        if fault is not None:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, fault)
        config = self._groups.find(group)
        if config is None:
            return False
        retry = RETRY_PREFIX + group
        if self._topics.select(retry) is None:
            flag = _UNIT_SUBSCRIPTION if consumer.unit_mode else 0
            queue_nums = min(config.retry_queue_nums, self._config.max_queues_per_topic)
            self._topics.create_plain(retry, queue_nums, flag)
            self._registration.soon()
        subs = None if data.without_sub else consumer.subscription_data_set
        kinds = (consumer.consume_type, consumer.message_model, consumer.consume_from_where)
        self._clients.register_consumer(group, channel, kinds, subs)
        fingerprints: dict[str, int] = channel.connection.state.setdefault("fingerprints", {})
        known = fingerprints.get(group)
        fingerprints[group] = data.heartbeat_fingerprint
        return data.heartbeat_fingerprint == 0 or known != data.heartbeat_fingerprint

    def unregister(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        ext = request.ext
        require_str(ext, "clientID")
        group = ext.get("consumerGroup")
        self._clients.unregister(connection, ext.get("producerGroup"), group)
        if group:
            connection.state.get("fingerprints", {}).pop(group, None)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    def check_client(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        value = lenient_loads(request.body)
        if isinstance(value, dict) and value.get("subscriptionData"):
            data = convert(value["subscriptionData"], SubscriptionData)
            parse_expression(data.sub_string, data.expression_type, sql=self._config.enable_property_filter)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)
