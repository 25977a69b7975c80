"""Administration: consumer groups and the topics that they may not read (353)."""

from collections.abc import Callable

from access.permissions import (
    DELETE,
    GET,
    LIST,
    UPDATE,
    of_cluster,
    of_group,
    of_group_config,
    of_group_list,
    of_topic_and_group,
)
from broker.archiving.deletion import GroupDeletion
from broker.config import BrokerConfig
from broker.requests.admin_values import Settled, in_range, list_of
from broker.requests.route import MASTER_CHANGE, MEMBERS, BrokerRoute, Waits
from broker.tables.subscription_group_manager import SubscriptionGroupConfig, SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting import names
from neve.remoting.body import convert, dumps, lenient_loads
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_bool, require_str

# Limit of a group's settings, which may include fields that are only stored.
_MAX_GROUP_BYTES = 16 * 1024


class AdminGroupsProcessor:
    """Creates, changes, deletes and lists groups (a part of RocketMQ's AdminBrokerProcessor)."""

    def __init__(
        self,
        config: BrokerConfig,
        groups: SubscriptionGroupManager,
        topics: TopicConfigManager,
        deletion: GroupDeletion,
        settled: Settled,
        *,
        register_soon: Callable[[], None],
    ) -> None:
        self._config, self._groups, self._topics, self._deletion = config, groups, topics, deletion
        self._settled, self._register_soon = settled, register_soon

    @BrokerRoute(
        Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        of_group_config,
        MASTER_CHANGE,
        Waits.YES,
        reads=False,
        hides_topics=False,
    )
    async def update_group(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        config = convert(lenient_loads(request.body), SubscriptionGroupConfig)
        await self._apply_groups([config])
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    @BrokerRoute(
        Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        of_group_list,
        MASTER_CHANGE,
        Waits.YES,
        reads=False,
        hides_topics=False,
    )
    async def update_group_list(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        items = list_of(request, "groupConfigList")
        await self._apply_groups([convert(item, SubscriptionGroupConfig) for item in items])
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    async def _apply_groups(self, configs: list[SubscriptionGroupConfig]) -> None:
        groups = self._groups
        for config in configs:
            fault = names.group_fault(config.group_name)
            if fault is None and len(dumps(config)) > _MAX_GROUP_BYTES:
                fault = f"the settings of the group {config.group_name} are longer than {_MAX_GROUP_BYTES} bytes"
            if fault is not None:
                raise BrokerError(ResponseCode.INVALID_PARAMETER, fault)
            in_range("retryQueueNums", config.retry_queue_nums, 0, self._config.max_queues_per_topic)
        new = len({config.group_name for config in configs} - groups.groups.keys())
        if new > groups.room and new:
            limit = self._config.max_groups
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"there are maxGroups={limit} groups")
        for config in configs:
            groups.update(config)
            retry = names.RETRY_PREFIX + config.group_name
            if self._topics.select(retry) is not None and self._topics.grow(retry, config.retry_queue_nums):
                self._register_soon()
        await groups.file.save()
        await self._settled()

    @BrokerRoute(
        Code.DELETE_SUBSCRIPTIONGROUP,
        of_group(DELETE, "groupName"),
        MASTER_CHANGE,
        Waits.YES,
        reads=False,
        hides_topics=False,
    )
    async def delete_group(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = require_str(request.ext, "groupName")
        await self._deletion.delete(group, with_offsets=optional_bool(request.ext, "cleanOffset"))
        await self._settled()
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    @BrokerRoute(
        Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, of_cluster(LIST), MEMBERS, Waits.NO, reads=True, hides_topics=False
    )
    def all_groups(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(self._groups.to_wire()))

    @BrokerRoute(
        Code.GET_SUBSCRIPTIONGROUP_CONFIG, of_group(GET, "group"), MEMBERS, Waits.NO, reads=True, hides_topics=False
    )
    def group_config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        config = self._groups.require(require_str(request.ext, "group"))
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(config.to_wire()))

    @BrokerRoute(
        Code.UPDATE_AND_GET_GROUP_FORBIDDEN,
        of_topic_and_group(UPDATE, "group"),
        MASTER_CHANGE,
        Waits.YES,
        reads=False,
        hides_topics=False,
    )
    async def group_forbidden(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return whether a group may read a topic (353); with `readable`, change that first."""
        ext, groups = request.ext, self._groups
        group, topic = require_str(ext, "group"), require_str(ext, "topic")
        if ext.get("readable"):
            self._topics.require(topic)
            self._groups.require(group)
            groups.set_forbidden(group, topic, forbidden=not optional_bool(ext, "readable"))
            await groups.file.save()
            await self._settled()
        body = {"group": group, "readable": not groups.is_forbidden(group, topic), "topic": topic}
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(body))
