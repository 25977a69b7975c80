"""Administration: statistics (315) and queue entries (321)."""

from typing import Any

from access.permissions import GET, of_cluster, of_topic
from broker.broker_stats import BrokerStats
from broker.clients.client_manager import ClientManager, subscription_to_wire
from broker.requests.route import ANY_ROLE, MEMBERS, BrokerRoute, Waits
from broker.store.message_store import MessageStore
from broker.tables.topic_config_manager import TopicConfigManager
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import require_int, require_str

_ENTRIES_MAX = 2000


class AdminInspectProcessor:
    """Read-only views of the broker's state (a part of RocketMQ's AdminBrokerProcessor)."""

    def __init__(
        self, store: MessageStore, topics: TopicConfigManager, clients: ClientManager, stats: BrokerStats
    ) -> None:
        self._store, self._topics, self._clients, self._stats = store, topics, clients, stats

    @BrokerRoute(Code.VIEW_BROKER_STATS_DATA, of_cluster(GET), ANY_ROLE, Waits.NO, reads=True, hides_topics=False)
    def stats_data(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return one of the broker's statistics (315)."""
        name, key = require_str(request.ext, "statsName"), require_str(request.ext, "statsKey")
        found = self._stats.view(name, key)
        if found is None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"The stats <{name}> <{key}> not exist")
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(found))

    @BrokerRoute(Code.QUERY_CONSUME_QUEUE, of_topic(GET), MEMBERS, Waits.NO, reads=True, hides_topics=True)
    def queue_entries(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return entries of the local queue (321); messages that are in the archive only have none."""
        ext = request.ext
        topic, queue = require_str(ext, "topic"), require_int(ext, "queueId")
        index, count = require_int(ext, "index"), require_int(ext, "count")
        config = self._topics.select(topic)
        if config is None or not 0 <= queue < config.queue_nums:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"{queue}@{topic} is not exist!")
        low, high = self._store.queues.min_offset(topic, queue), self._store.queues.max_offset(topic, queue)
        entries = []
        for offset in range(max(index, low), min(index + min(count, _ENTRIES_MAX), high)):
            entry = self._store.reader.entry(topic, queue, offset)
            if entry is None:
                continue
            physical_offset, size, tag_code = entry
            entries.append({"eval": False, "physicOffset": physical_offset, "physicSize": size, "tagsCode": tag_code})
        body: dict[str, Any] = {"maxQueueIndex": high, "minQueueIndex": low, "queueData": entries}
        info = self._clients.consumers.get(ext.get("consumerGroup") or "")
        if info is not None and topic in info.subscriptions:
            body["subscriptionData"] = subscription_to_wire(info.subscriptions[topic])
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(body))
