"""Heartbeats (34), unregistration (35) and the check of a subscription (46)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

from access.permissions import of_client_check, of_heartbeat, of_unregistration
from broker.clients.client_manager import MAX_CLIENT_ID, ClientChannel, ClientManager, ConsumerGroup
from broker.clients.registration import Registration
from broker.config import BrokerConfig
from broker.reading.message_filter import parse_expression
from broker.requests.route import ANY_ROLE, BrokerRoute, Waits
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.clock import Clock
from infra.loop.in_steps import Steps, at_once, in_turns
from infra.net.remoting_server import Answer, Connection
from neve.errors import BrokerError
from neve.remoting.body import ConsumerData, HeartbeatData, SubscriptionData, convert, lenient_loads, loads_as
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import require_str
from neve.remoting.names import RETRY_PREFIX, group_fault
from neve.remoting.signature import ACCESS_KEY

log = logging.getLogger(__name__)

_UNIT_SUBSCRIPTION = 2
_MAX_PRODUCER_GROUP = 255
_BEAT = "heartbeat"
_ORDER = "order of heartbeats"
# Size of a body that is read and compared in one step, in less than a millisecond. A longer body blocks the event loop
# only while it is decoded.
_SHORT = 1 << 16


class _Beat(NamedTuple):
    """A connection's last heartbeat, as far as needed to renew it when it is repeated."""

    content_key: tuple[int, int]
    client_id: str
    changed: bool  # part of the answer
    producers: list[str]
    consumers: list[tuple[str, int]]  # groups and their revisions


class _Order:
    """Keeps requests of a connection in order while one of them is processed in steps."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        # Queued and running requests. A refused request drops its coroutine before it starts, which also removes it
        # here.
        self.waiting: WeakSet[Coroutine[Any, Any, Answer]] = WeakSet()


class ClientManageProcessor:
    """Processes heartbeats and unregistrations of clients (RocketMQ's ClientManageProcessor)."""

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

    @BrokerRoute(Code.HEART_BEAT, of_heartbeat, ANY_ROLE, Waits.NO, reads=False, hides_topics=False)
    def heartbeat(self, connection: Connection, request: RemotingCommand) -> Answer | Awaitable[Answer]:
        """Process a heartbeat.

        Clients repeat it every 30 s, with up to a megabyte, so an unchanged one is not parsed.
        """
        if self._must_wait(connection):
            return self._in_order(connection, partial(self._heartbeat, connection, request))
        beat = self._known(connection, request)
        if beat is None and len(request.body) > _SHORT:
            return self._in_order(connection, partial(self._heartbeat, connection, request))
        return _answer(request, beat or at_once(self._process_heartbeat(connection, request)))

    async def _heartbeat(self, connection: Connection, request: RemotingCommand) -> Answer:
        """Process a heartbeat in its turn; return None if the connection closes meanwhile."""
        beat = self._known(connection, request)
        if beat is None:
            beat = await in_turns(
                self._process_heartbeat(connection, request), is_cancelled=lambda: connection.is_closed
            )
        return None if beat is None else _answer(request, beat)

    @staticmethod
    def _must_wait(connection: Connection) -> bool:
        order: _Order | None = connection.state.get(_ORDER)
        return order is not None and len(order.waiting) > 0

    @staticmethod
    def _in_order(connection: Connection, work: Callable[[], Awaitable[Answer]]) -> Awaitable[Answer]:
        order: _Order = connection.state.setdefault(_ORDER, _Order())

        async def in_its_turn() -> Answer:
            async with order.turn:
                return await work()

        waiting = in_its_turn()
        order.waiting.add(waiting)
        return waiting

    def _known(self, connection: Connection, request: RemotingCommand) -> _Beat | None:
        """Return the last heartbeat if the request repeats it and it is still valid."""
        beat: _Beat | None = connection.state.get(_BEAT)
        if (
            beat is None
            or beat.content_key != _content_key(request)
            or not self._renew_heartbeat(connection, request, beat)
        ):
            return None
        return beat

    def _renew_heartbeat(self, connection: Connection, request: RemotingCommand, beat: _Beat) -> bool:
        """Renew the clients of a repeated heartbeat; return False if a group has changed, so that it must be parsed."""
        channel = self._channel(connection, request, beat.client_id)
        for group, revision in beat.consumers:
            if group not in self._groups.groups or self._topics.select(RETRY_PREFIX + group) is None:
                return False
            if not self._clients.is_same_heartbeat(group, channel, revision):
                return False
        for group in beat.producers:
            self._clients.register_producer(group, channel)
        return True

    def _process_heartbeat(self, connection: Connection, request: RemotingCommand) -> Steps[_Beat]:
        """Parse and apply a heartbeat in steps; each group changes in one step."""
        data = loads_as(request.body, HeartbeatData)
        if len(data.client_id) > MAX_CLIENT_ID:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"a client id of {len(data.client_id)} characters")
        if len(request.body) > _SHORT:
            yield
        connection.state.pop(_BEAT, None)
        channel, clients = self._channel(connection, request, data.client_id), self._clients
        clients.watch(connection)
        for producer in data.producer_data_set:
            if len(producer.group_name) > _MAX_PRODUCER_GROUP:
                raise BrokerError(ResponseCode.INVALID_PARAMETER, "a producer group's name is too long")
            clients.register_producer(producer.group_name, channel)
        revisions: dict[str, int] = {}
        for consumer in data.consumer_data_set:
            registered = yield from self._register_consumer(channel, data, consumer)
            if registered is not None:
                revisions[registered.name] = registered.revision
        is_new = self._is_new(connection, data, revisions)
        always_new = not data.consumer_data_set or data.heartbeat_fingerprint == 0
        producers = [producer.group_name for producer in data.producer_data_set]
        beat = _Beat(_content_key(request), data.client_id, always_new, producers, list(revisions.items()))
        if revisions.keys() >= {consumer.group_name for consumer in data.consumer_data_set}:
            connection.state[_BEAT] = beat
        return beat._replace(changed=is_new)

    def _channel(self, connection: Connection, request: RemotingCommand, client_id: str) -> ClientChannel:
        clock, user = self._clock, request.ext.get(ACCESS_KEY, "")
        return ClientChannel(
            connection, client_id, request.language, request.version, clock.monotonic(), clock.now_ms(), user
        )

    def _register_consumer(
        self, channel: ClientChannel, data: HeartbeatData, consumer: ConsumerData
    ) -> Steps[ConsumerGroup | None]:
        """Register a consumer; return None if its group does not exist and is not created."""
        group = consumer.group_name
        fault = group_fault(group)
        if fault is not None:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, fault)
        changes = yield from self._clients.compare(group, None if data.without_sub else consumer.subscription_data_set)
        config = self._groups.find(group)
        if config is None:
            return None
        retry = RETRY_PREFIX + group
        queue_nums = min(config.retry_queue_nums, self._config.max_queues_per_topic)
        known = self._topics.select(retry)
        if known is None or min(known.read_queue_nums, known.write_queue_nums) < queue_nums:
            try:
                if known is None:
                    self._topics.create_plain(retry, queue_nums, _UNIT_SUBSCRIPTION if consumer.unit_mode else 0)
                else:
                    self._topics.grow(retry, queue_nums)
            except BrokerError as error:  # a later heartbeat retries: clients may read while the log refuses records
                log.debug("%s is not created yet: %s", retry, error.remark)
            else:
                self._registration.soon()
        kinds = (consumer.consume_type, consumer.message_model, consumer.consume_from_where)
        return self._clients.register_consumer(group, channel, kinds, changes)

    @staticmethod
    def _is_new(connection: Connection, data: HeartbeatData, groups: Iterable[str]) -> bool:
        """Return whether the heartbeat's fingerprint is new for any of its groups."""
        fingerprint = data.heartbeat_fingerprint
        known: dict[str, int] = connection.state.setdefault("fingerprints", {})
        is_new = not data.consumer_data_set
        for group in groups:
            is_new |= fingerprint == 0 or known.get(group) != fingerprint
            known[group] = fingerprint
        return is_new

    @BrokerRoute(Code.UNREGISTER_CLIENT, of_unregistration, ANY_ROLE, Waits.NO, reads=False, hides_topics=False)
    def unregister(self, connection: Connection, request: RemotingCommand) -> Answer | Awaitable[Answer]:
        if self._must_wait(connection):
            return self._in_order(connection, partial(self._unregister_later, connection, request))
        return self._unregister(connection, request)

    async def _unregister_later(self, connection: Connection, request: RemotingCommand) -> Answer:
        return self._unregister(connection, request)

    def _unregister(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        ext = request.ext
        require_str(ext, "clientID")
        group = ext.get("consumerGroup")
        self._clients.unregister(connection, ext.get("producerGroup"), group)
        if group:
            connection.state.get("fingerprints", {}).pop(group, None)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    @BrokerRoute(Code.CHECK_CLIENT_CONFIG, of_client_check, ANY_ROLE, Waits.NO, reads=True, hides_topics=False)
    def check_client(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Check that a subscription's expression can be parsed (46)."""
        value = lenient_loads(request.body)
        if isinstance(value, dict) and value.get("subscriptionData"):
            data = convert(value["subscriptionData"], SubscriptionData)
            parse_expression(data.sub_string, data.expression_type, sql=self._config.enable_property_filter)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)


def _content_key(request: RemotingCommand) -> tuple[int, int]:
    return len(request.body), hash(request.body)  # SipHash with a random key of this process


def _answer(request: RemotingCommand, beat: _Beat) -> RemotingCommand:
    ext = {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true" if beat.changed else "false"}
    return RemotingCommand.response(request, ResponseCode.SUCCESS, ext=ext)
