"""Committed offsets (14, 15) and members of groups (38)."""

from access.permissions import GET, SUB, UPDATE, of_group, of_topic_and_group
from broker.clients.client_manager import ClientManager
from broker.reading.tiered_store import TieredStore
from broker.requests.route import IN_SYNC, MASTER, MEMBERS, NOT_IN_SYNC, BrokerRoute, Waits
from broker.role import BrokerRole
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_bool, require_int, require_str


class ConsumerManageProcessor:
    """Returns and commits offsets of groups, and lists their members (RocketMQ's ConsumerManageProcessor)."""

    def __init__(
        self,
        role: BrokerRole,
        *,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        clients: ClientManager,
        tiered: TieredStore,
    ) -> None:
        self._topics, self._groups, self._offsets, self._clients = topics, groups, offsets, clients
        self._role, self._tiered = role, tiered

    @BrokerRoute(
        Code.QUERY_CONSUMER_OFFSET, of_topic_and_group(SUB | GET), IN_SYNC, Waits.NO, reads=True, hides_topics=False
    )
    def query_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return a committed offset (14).

        Without one, a young queue has 0. Otherwise the request fails, so that the client decides where to start.
        """
        ext = request.ext
        group, topic = require_str(ext, "consumerGroup"), require_str(ext, "topic")
        queue = require_int(ext, "queueId")
        offset = self._offsets.query(group, topic, queue)
        if (
            offset < 0 and not self._role.is_master
        ):  # a slave receives offsets late, so only its master knows that there is none
            raise BrokerError(*NOT_IN_SYNC)
        if offset < 0 and optional_bool(ext, "setZeroIfNotFound", True) and self._tiered.is_young(topic, queue):
            offset = 0
        if offset < 0:
            raise BrokerError(ResponseCode.QUERY_NOT_FOUND, "Not found, maybe this group consumer boot first")
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={"offset": str(offset)})

    @BrokerRoute(
        Code.UPDATE_CONSUMER_OFFSET, of_topic_and_group(SUB | UPDATE), MASTER, Waits.NO, reads=False, hides_topics=False
    )
    def update_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Commit an offset (15)."""
        ext = request.ext
        group, topic = require_str(ext, "consumerGroup"), require_str(ext, "topic")
        config = self._topics.require(topic)
        if group not in self._groups.groups:
            raise BrokerError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{group}] does not exist")
        queue, offset = require_int(ext, "queueId"), require_int(ext, "commitOffset")
        if not 0 <= queue < config.queue_nums or offset < 0:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"queueId {queue}, commitOffset {offset}")
        self._offsets.commit(group, topic, queue, offset)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    @BrokerRoute(
        Code.GET_CONSUMER_LIST_BY_GROUP, of_group(SUB | GET), MEMBERS, Waits.NO, reads=True, hides_topics=False
    )
    def consumer_list(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return the client ids of a group's members (38)."""
        group = require_str(request.ext, "consumerGroup")
        info = self._clients.consumers.get(group)
        if info is None or not info.channels:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {group}")
        return RemotingCommand.response(
            request, ResponseCode.SUCCESS, body=dumps({"consumerIdList": info.client_ids()})
        )
