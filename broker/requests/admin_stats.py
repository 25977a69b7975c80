"""Administration: figures of a topic's queues and of groups in them (202, 208, 317)."""

from collections.abc import Iterator

from access.permissions import GET, of_cluster, of_group, of_topic
from broker.broker_stats import BrokerStats
from broker.clients.client_manager import ClientManager
from broker.requests.route import IN_SYNC, BrokerRoute, Waits
from broker.requests.wide_answer import WideMap
from broker.stats.queue_stats import QueueFigures
from broker.stats.topic_tiers import TopicTiers
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.loop.in_steps import LoopSlices, in_slices
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import MessageQueue, dumps, dumps_object_keys
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_bool, require_str


class AdminStatsProcessor:
    """Returns figures of queues and groups (a part of RocketMQ's AdminBrokerProcessor)."""

    def __init__(
        self,
        broker_name: str,
        address: tuple[str, int],
        *,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        clients: ClientManager,
        stats: BrokerStats,
        queue_stats: QueueFigures,
        tiers: TopicTiers,
    ) -> None:
        self._broker_name, self._address = broker_name, address
        self._topics, self._groups, self._offsets, self._clients = topics, groups, offsets, clients
        self._stats, self._queue_stats, self._tiers = stats, queue_stats, tiers

    @BrokerRoute(Code.GET_TOPIC_STATS_INFO, of_topic(GET), IN_SYNC, Waits.NO, reads=True, hides_topics=True)
    async def topic_stats(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return figures of a topic's queues (202); with `tiers`, also the archived part."""
        topic = require_str(request.ext, "topic")
        config = self._topics.select(topic)
        if config is None:
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        about: dict[str, object] = {"topicPutTps": self._stats.put_rate(topic)}
        with_tiers = optional_bool(request.ext, "tiers")
        if with_tiers and (archived := await self._tiers.archived(topic)) is not None:
            about["archived"] = archived._asdict()
        table = WideMap()
        async for queue in in_slices(range(config.queue_nums)):
            described = self._queue_stats.of_topic(topic, queue)
            if with_tiers and (offset := self._tiers.archived_offset(topic, queue)) is not None:
                high = described["maxOffset"]
                archived_to = described["archivedOffset"] = max(min(offset, high), described["minOffset"])
                waiting = self._queue_stats.count_messages(topic, queue, archived_to, high)
                if waiting != high - archived_to:
                    described["notArchived"] = waiting
                oldest = self._queue_stats.stored_ms(topic, queue, archived_to)
                if oldest > 0:
                    described["notArchivedSince"] = oldest
            table.add(MessageQueue(topic, self._broker_name, queue), described)
        return table.answer(request, about, "offsetTable")

    @BrokerRoute(Code.GET_CONSUME_STATS, of_group(GET), IN_SYNC, Waits.NO, reads=True, hides_topics=False)
    async def consume_stats(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return a group's progress in the queues of its topics, or of the listed ones (208)."""
        ext = request.ext
        group = require_str(ext, "consumerGroup")
        listed = [name for name in dict.fromkeys((ext.get("topicList") or "").split(";")) if name]
        topics = listed or ([ext["topic"]] if ext.get("topic") else self._offsets.topics_of(group))
        live = self._clients.consumers.get(group)
        table = WideMap()
        rate = 0.0

        def queues() -> Iterator[tuple[str, int]]:
            nonlocal rate
            for topic in topics:
                config = self._topics.select(topic)
                rate += self._stats.get_rate(topic, group)
                if config is None or (not listed and live is not None and topic not in live.subscriptions):
                    continue
                for queue in range(config.read_queue_nums):
                    yield topic, queue

        async for topic, queue in in_slices(queues()):
            place = MessageQueue(topic, self._broker_name, queue)
            table.add(place, self._queue_stats.of_group(group, topic, queue))
        return table.answer(request, {"consumeTps": rate}, "offsetTable")

    @BrokerRoute(Code.GET_BROKER_CONSUME_STATS, of_cluster(GET), IN_SYNC, Waits.NO, reads=True, hides_topics=False)
    async def all_consume_stats(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return the progress of all groups in all their topics (317), and the total lag."""
        only_ordered = optional_bool(request.ext, "isOrder")
        parts = [b'{"brokerAddr":%b,"consumeStatsList":[' % dumps("{}:{}".format(*self._address))]
        behind = in_flight = 0
        slices = LoopSlices()
        for number, group in enumerate(list(self._groups.groups)):
            await slices.step()
            live = self._clients.consumers.get(group)
            parts.append(b"%b{%b:[" % (b"," if number else b"", dumps(group)))
            separator = b""
            for topic in self._offsets.topics_of(group):
                await slices.step()
                config = self._topics.select(topic)
                if config is None or (only_ordered and not config.order):
                    continue
                if live is not None and topic not in live.subscriptions:
                    continue
                table = WideMap()
                for queue in range(config.write_queue_nums):
                    await slices.step()
                    stats = self._queue_stats.of_group(group, topic, queue)
                    table.add(MessageQueue(topic, self._broker_name, queue), stats)
                    behind += stats["brokerOffset"] - stats["consumerOffset"]
                    in_flight += stats["pullOffset"] - stats["consumerOffset"]
                rate = self._stats.get_rate(topic, group)
                parts += (separator, *table.parts({"consumeTps": rate}, "offsetTable"))
                separator = b","
            parts.append(b"]}")
        parts.append(b"]," + dumps_object_keys({"totalDiff": behind, "totalInflightDiff": in_flight})[1:])
        return RemotingCommand.response(request, ResponseCode.SUCCESS, parts=parts)
