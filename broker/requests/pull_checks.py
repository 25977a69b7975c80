"""Checks of a pull: permissions of broker, group and topic, and its subscription."""

from __future__ import annotations

from access.guard import Guard
from broker.clients.client_manager import BROADCASTING, TAG, ClientManager
from broker.config import BrokerConfig
from broker.reading.message_filter import EVERY_MESSAGE, MessageFilter, parse_expression
from broker.requests.route import FENCED, SLAVE
from broker.role import BrokerRole, Role
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import PullMessageHeader
from neve.remoting.names import PERM_READ

SUBSCRIPTION, CLASS_FILTER = 4, 8


class PullChecks:
    """Checks pulls before they read, and again after each wait."""

    def __init__(
        self,
        config: BrokerConfig,
        role: BrokerRole,
        guard: Guard,
        *,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        clients: ClientManager,
    ) -> None:
        self._config, self._role, self._guard, self._clients = config, role, guard, clients
        self.topics, self.groups = topics, groups

    def check(self, header: PullMessageHeader) -> MessageFilter:
        """Return the filter of a pull. Raise BrokerError if it is refused."""
        if not self._role.is_master:
            self._check_slave()
        if not self._config.broker_permission & PERM_READ:
            name = self._config.broker_name
            raise BrokerError(ResponseCode.NO_PERMISSION, f"the broker[{name}] pulling message is forbidden")
        group = self.groups.require(header.consumer_group)
        if not group.consume_enable:
            raise BrokerError(ResponseCode.NO_PERMISSION, f"subscription group no permission, {header.consumer_group}")
        topic = self.topics.require(header.topic)
        if not topic.perm & PERM_READ:
            raise BrokerError(ResponseCode.NO_PERMISSION, f"the topic[{header.topic}] pulling message is forbidden")
        if not 0 <= header.queue_id < topic.read_queue_nums:
            raise BrokerError(
                ResponseCode.INVALID_PARAMETER,
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] "
                f"topicConfig.readQueueNums:[{topic.read_queue_nums}]",
            )
        if header.sys_flag & CLASS_FILTER:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, "class filters are not supported")
        if header.sys_flag & SUBSCRIPTION:
            return parse_expression(
                header.subscription, header.expression_type, sql=self._config.enable_property_filter
            )
        return self._stored_subscription(header, broadcast=group.consume_broadcast_enable)

    def check_again(self, connection: Connection, request: RemotingCommand, header: PullMessageHeader) -> None:
        """Check a pull that has waited, with its client's permissions."""
        self._guard.require(connection, request)
        self.check(header)

    def _check_slave(self) -> None:
        role = self._role.current
        if role is Role.FENCED or not self._config.slave_read_enable:
            raise BrokerError(*(FENCED if role is Role.FENCED else SLAVE))

    def _stored_subscription(self, header: PullMessageHeader, *, broadcast: bool) -> MessageFilter:
        """Return the filter of the group's subscription from its heartbeats."""
        info = self._clients.consumers.get(header.consumer_group)
        if info is None:
            raise BrokerError(ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's group info not exist")
        if info.message_model == BROADCASTING and not broadcast:
            raise BrokerError(
                ResponseCode.NO_PERMISSION,
                f"the consumer group[{header.consumer_group}] can not consume by broadcast way",
            )
        if self.groups.is_forbidden(header.consumer_group, header.topic):
            raise BrokerError(
                ResponseCode.NO_PERMISSION,
                f"the consumer group[{header.consumer_group}] is forbidden for topic[{header.topic}]",
            )
        subscription = info.subscriptions.get(header.topic)
        if subscription is None:
            raise BrokerError(ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's subscription not exist")
        if subscription.sub_version < header.sub_version:
            raise BrokerError(ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")
        if subscription.expression_type in (TAG, "", None):
            codes = subscription.code_set
            return MessageFilter(frozenset(codes)) if codes else EVERY_MESSAGE
        try:
            return parse_expression(
                subscription.sub_string,
                subscription.expression_type,
                sql=self._config.enable_property_filter,
            )
        except BrokerError as error:
            if error.code != ResponseCode.SUBSCRIPTION_PARSE_FAILED:
                raise
            raise BrokerError(
                ResponseCode.FILTER_DATA_NOT_EXIST,
                f"The broker's consumer filter data not exist! Your expression may be wrong: {error.remark}",
            ) from error
