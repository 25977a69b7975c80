"""Queue assignment by the broker (400 to 402)."""

from typing import Any

from access.permissions import GET, SUB, UPDATE, of_cluster, of_topic_and_group_in_body
from broker.clients.broker_outer_api import BrokerOuterApi
from broker.clients.client_manager import BROADCASTING, ClientManager
from broker.pop import assignment
from broker.pop.assignment import RequestModes
from broker.requests.admin_values import Settled
from broker.requests.route import MASTER_CHANGE, MEMBERS, BrokerRoute, Waits
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import MessageQueue, QueueData, dumps, lenient_loads
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.names import PERM_READ, RETRY_PREFIX

_MAX_QUEUES = 100_000


class QueryAssignmentProcessor:
    """Assigns queues and request modes to clients (RocketMQ's QueryAssignmentProcessor)."""

    def __init__(
        self,
        broker_name: str,
        *,
        modes: RequestModes,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        clients: ClientManager,
        name_servers: BrokerOuterApi,
        settled: Settled,
    ) -> None:
        self._broker_name, self._modes, self._topics, self._groups = broker_name, modes, topics, groups
        self._clients, self._name_servers, self._settled = clients, name_servers, settled

    @BrokerRoute(
        Code.QUERY_ASSIGNMENT, of_topic_and_group_in_body(SUB), MEMBERS, Waits.NO, reads=True, hides_topics=False
    )
    async def query(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return a client's queues.

        Without any, the field is omitted, because an empty one would make the client drop its queues.
        """
        value = _body(request)
        topic, group, client = (str(value.get(name, "")) for name in ("topic", "consumerGroup", "clientId"))
        strategy = str(value.get("strategyName") or assignment.AVERAGE)
        mode, neighbours = self._modes.find(topic, group)
        if topic.startswith(RETRY_PREFIX) or value.get("messageModel") == BROADCASTING:
            mode = assignment.PULL
        queues = await self._queues(topic)
        info = self._clients.consumers.get(group)
        if not queues or (info is None and value.get("messageModel") != BROADCASTING):
            return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps({}))
        clients = info.client_ids() if info is not None else []
        try:
            if value.get("messageModel") == BROADCASTING:
                shared = queues
            elif mode == assignment.POP:
                shared = assignment.share_for_pop(strategy, client, queues, clients, neighbours)
            else:
                shared = assignment.share(strategy, client, queues, clients)
        except ValueError as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        found = [
            {"messageQueue": {"topic": q.topic, "brokerName": q.broker_name, "queueId": q.queue_id}, "mode": mode}
            for q in dict.fromkeys(shared)
        ]
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps({"messageQueueAssignments": found}))

    @BrokerRoute(
        Code.SET_MESSAGE_REQUEST_MODE,
        of_topic_and_group_in_body(UPDATE),
        MASTER_CHANGE,
        Waits.YES,
        reads=False,
        hides_topics=False,
    )
    async def set_mode(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Set the request mode of a group in a topic (401)."""
        value = _body(request)
        topic, group = str(value.get("topic", "")), str(value.get("consumerGroup", ""))
        mode = str(value.get("mode", assignment.PULL))
        if topic.startswith(RETRY_PREFIX):
            raise BrokerError(ResponseCode.NO_PERMISSION, "retry topic is not allowed to set mode")
        if mode not in (assignment.PULL, assignment.POP):
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"mode {mode} is neither PULL nor POP")
        self._topics.require(topic)
        self._groups.require(group)
        try:
            neighbours = int(value.get("popShareQueueNum") or 0)
        except (TypeError, ValueError, OverflowError) as error:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, "popShareQueueNum is no number") from error
        if not -(2**31) <= neighbours < 2**31:  # a larger number could not be encoded in the table's file
            raise BrokerError(ResponseCode.INVALID_PARAMETER, "popShareQueueNum has more than 32 bits")
        self._modes.set(topic, group, mode, neighbours)
        await self._modes.file.save()
        await self._settled()
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    @BrokerRoute(Code.GET_ALL_MESSAGE_REQUEST_MODE, of_cluster(GET), MEMBERS, Waits.NO, reads=True, hides_topics=False)
    def all_modes(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(self._modes.to_wire()))

    async def _queues(self, topic: str) -> list[MessageQueue]:
        datas = await self._name_servers.route(topic)
        if datas is None:
            own = self._topics.select(topic)
            if own is None:
                return []
            datas = [QueueData(self._broker_name, own.read_queue_nums, own.write_queue_nums, own.perm)]
        readable = [data for data in datas if data.perm & PERM_READ]
        if sum(max(data.read_queue_nums, 0) for data in readable) > _MAX_QUEUES:  # any broker may register any number
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"the route of {topic} has more than {_MAX_QUEUES} queues")
        return sorted(
            MessageQueue(topic, data.broker_name, queue) for data in readable for queue in range(data.read_queue_nums)
        )


def _body(request: RemotingCommand) -> dict[str, Any]:
    value = lenient_loads(request.body)
    if not isinstance(value, dict):
        raise BrokerError(ResponseCode.SYSTEM_ERROR, "the body is no object")
    return value
