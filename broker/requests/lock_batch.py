"""Queue locks of ordered consumers (41, 42)."""

import msgspec

from access.permissions import of_queue_locks
from broker.clients.client_manager import MAX_CLIENT_ID
from broker.clients.rebalance_lock import RebalanceLock
from broker.requests.route import MASTER, BrokerRoute, Waits
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import MessageQueue, convert, dumps_object_keys, lenient_loads
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import Int32


class LockBatchProcessor:
    """Locks and unlocks existing queues of this broker only."""

    def __init__(
        self, broker_name: str, locks: RebalanceLock, *, topics: TopicConfigManager, groups: SubscriptionGroupManager
    ) -> None:
        self._broker_name, self._locks, self._topics, self._groups = broker_name, locks, topics, groups

    @BrokerRoute(Code.LOCK_BATCH_MQ, of_queue_locks, MASTER, Waits.NO, reads=False, hides_topics=False)
    def lock_batch(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group, client, queues = _lock_body(request)
        broker = self._broker_name
        if group not in self._groups.groups or len(client) > MAX_CLIENT_ID:
            queues = []  # this client can't hold any lock
        known = self._topics.topics
        real = [
            (topic, name, queue) for topic, name, queue in queues
            if name == broker and topic in known and 0 <= queue < known[topic].queue_nums
        ]  # fmt: skip
        held = self._locks.lock(group, client, real)
        wire = [{"brokerName": broker, "queueId": queue, "topic": topic} for topic, broker, queue in held]
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps_object_keys({"lockOKMQSet": wire}))

    @BrokerRoute(Code.UNLOCK_BATCH_MQ, of_queue_locks, MASTER, Waits.NO, reads=False, hides_topics=False)
    def unlock_batch(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group, client, queues = _lock_body(request)
        self._locks.unlock(group, client, queues)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)


class _LockQueue(msgspec.Struct, rename="camel"):
    topic: str
    broker_name: str
    queue_id: Int32


def _lock_body(request: RemotingCommand) -> tuple[str, str, list[tuple[str, str, int]]]:
    value = lenient_loads(request.body)
    items = value.get("mqSet") or () if isinstance(value, dict) else None
    if not isinstance(items, list | tuple):
        raise BrokerError(ResponseCode.SYSTEM_ERROR, "the body is not a lock request")
    queues = [item if isinstance(item, MessageQueue) else convert(item, _LockQueue) for item in items]
    places = [(queue.topic, queue.broker_name, queue.queue_id) for queue in queues]
    return str(value.get("consumerGroup", "")), str(value.get("clientId", "")), places
