"""Administration: statistics (315, 317), queue entries (321), producers (328), replication (907, 1007)."""

from typing import Any

from broker.broker_context import BrokerContext
from broker.clients.client_manager import subscription_to_wire
from broker.requests.admin_stats import queue_stats
from broker.requests.wide_answer import Turns
from infra.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import MessageQueue, dumps, dumps_object_keys
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_bool, require_int, require_str

_ENTRIES_MAX = 2000


class AdminInspectProcessor:
    """Looks into the broker that change nothing (a part of RocketMQ's AdminBrokerProcessor)."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def stats_data(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """315."""
        name, key = require_str(request.ext, "statsName"), require_str(request.ext, "statsKey")
        found = self._context.stats.view(name, key)
        if found is None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"The stats <{name}> <{key}> not exist")
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(found))

    async def all_consume_stats(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """317: every group in every topic where it stands, and how far it is behind in all."""
        context, only_ordered = self._context, optional_bool(request.ext, "isOrder")
        parts = [b'{"brokerAddr":%b,"consumeStatsList":[' % dumps("{}:{}".format(*context.address))]
        behind = in_flight = 0
        turns = Turns()
        for number, group in enumerate(list(context.groups.groups)):
            live = context.clients.consumers.get(group)
            parts.append(b"%b{%b:[" % (b"," if number else b"", dumps(group)))
            separator = b""
            for topic in context.offsets.topics_of(group):
                await turns.take()
                config = context.topics.select(topic)
                if config is None or (only_ordered and not config.order):
                    continue
                if live is not None and topic not in live.subscriptions:
                    continue
                table = {}
                for queue in range(config.write_queue_nums):
                    await turns.take()
                    table[MessageQueue(topic, context.config.broker_name, queue)] = stats = queue_stats(
                        context, group, topic, queue
                    )
                    behind += stats["brokerOffset"] - stats["consumerOffset"]
                    in_flight += stats["pullOffset"] - stats["consumerOffset"]
                rate = context.stats.get_rate(topic, group)
                parts += (separator, dumps_object_keys({"consumeTps": rate, "offsetTable": table}))
                separator = b","
            parts.append(b"]}")
        parts.append(b"]," + dumps_object_keys({"totalDiff": behind, "totalInflightDiff": in_flight})[1:])
        return RemotingCommand.response(request, ResponseCode.SUCCESS, parts=parts)

    def queue_entries(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """321: the local queue's entries as they are; what is only in the archive has none."""
        ext, context = request.ext, self._context
        topic, queue = require_str(ext, "topic"), require_int(ext, "queueId")
        index, count = require_int(ext, "index"), require_int(ext, "count")
        config = context.topics.select(topic)
        if config is None or not 0 <= queue < config.queue_nums:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"{queue}@{topic} is not exist!")
        low, high = context.store.min_offset(topic, queue), context.store.max_offset(topic, queue)
        entries = []
        for offset in range(max(index, low), min(index + min(count, _ENTRIES_MAX), high)):
            entry = context.store.entry(topic, queue, offset)
            if entry is None:
                continue
            physical_offset, size, tag_code = entry
            entries.append({"eval": False, "physicOffset": physical_offset, "physicSize": size, "tagsCode": tag_code})
        body: dict[str, Any] = {"maxQueueIndex": high, "minQueueIndex": low, "queueData": entries}
        info = context.clients.consumers.get(ext.get("consumerGroup") or "")
        if info is not None and topic in info.subscriptions:
            body["subscriptionData"] = subscription_to_wire(info.subscriptions[topic])
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(body))

    def all_producers(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """328."""
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
            for group, channels in self._context.clients.producers.items()
        }
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps({"data": data}))

    def ha_status(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """907: a master alone."""
        body = {
            "haClientRuntimeInfo": {},
            "haConnectionInfo": [],
            "inSyncSlaveNums": 0,
            "master": True,
            "masterCommitLogMaxOffset": self._context.store.max_physical_offset,
        }
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(body))

    @staticmethod
    def epoch_cache(connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """1007."""
        raise BrokerError(ResponseCode.SYSTEM_ERROR, "this request only for controllerMode")
