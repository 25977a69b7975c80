"""Administration: committed offsets of groups: return them all (43, 45), copy (314) and compare them (308, 303)."""

from typing import Any

from access.permissions import GET, UPDATE, all_of, of_cluster, of_group, of_topic_and_group
from broker.clients.client_manager import ClientManager
from broker.reading.tiered_store import TieredStore
from broker.requests.admin_values import Settled
from broker.requests.route import IN_SYNC, MASTER_CHANGE, MEMBERS, BrokerRoute, Waits
from broker.requests.wide_answer import WideMap, wide_answer
from broker.tables.consumer_offset_manager import SEPARATOR, ConsumerOffsetManager
from broker.tables.topic_config_manager import TopicConfigManager
from broker.waiting.schedule_message import ScheduleMessage
from infra.clock import Clock
from infra.loop.in_steps import LoopSlices, in_slices, in_turns
from infra.net.remoting_server import Connection
from neve.remoting.body import MessageQueue, dumps_object_keys
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_bool, require_str

# Offsets that are encoded in the same time as one queue is processed.
_NUMBERS_PER_LOOK = 32
_LONG_MAX = (1 << 63) - 1


class AdminOffsetsProcessor:
    """Returns and copies committed offsets (a part of RocketMQ's AdminBrokerProcessor)."""

    def __init__(
        self,
        broker_name: str,
        clock: Clock,
        *,
        topics: TopicConfigManager,
        offsets: ConsumerOffsetManager,
        clients: ClientManager,
        tiered: TieredStore,
        schedule: ScheduleMessage,
        settled: Settled,
    ) -> None:
        self._broker_name, self._clock = broker_name, clock
        self._topics, self._offsets, self._clients = topics, offsets, clients
        self._tiered, self._schedule, self._settled = tiered, schedule, settled

    async def all_offsets(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return all committed offsets (43); RocketMQ's slaves save them only with a version."""
        offsets = self._offsets
        table = WideMap()
        slices = LoopSlices()
        for topic, group in offsets.pairs():
            queues = offsets.queues_of(group, topic)
            table.add_numbers(f"{topic}{SEPARATOR}{group}", queues)
            await slices.step(1 + len(queues) // _NUMBERS_PER_LOOK)
        version = {"counter": offsets.file.changes, "stateVersion": 0, "timestamp": self._clock.now_ms()}
        return table.answer(request, {"dataVersion": version}, "offsetTable")

    @BrokerRoute(Code.GET_ALL_DELAY_OFFSET, of_cluster(GET), MEMBERS, Waits.NO, reads=True, hides_topics=False)
    def delay_offsets(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return the next offset to deliver of each delay level (45)."""
        schedule = self._schedule
        table = {level: schedule.position(level)[0] for level in range(1, schedule.max_level + 1)}
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps_object_keys({"offsetTable": table}))

    @BrokerRoute(
        Code.CLONE_GROUP_OFFSET,
        all_of(of_group(GET, "srcGroup"), of_group(UPDATE, "destGroup")),
        MASTER_CHANGE,
        Waits.YES,
        reads=False,
        hides_topics=False,
    )
    async def clone_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Copy a group's committed offsets to another group (314)."""
        ext = request.ext
        source, target = require_str(ext, "srcGroup"), require_str(ext, "destGroup")
        topics = [ext["topic"]] if ext.get("topic") else self._offsets.topics_of(source)
        live = self._clients.consumers
        for topic in topics:
            if self._topics.select(topic) is None:
                continue
            online = [live[group] for group in (source, target) if group in live]
            if optional_bool(ext, "offline") or all(topic in info.subscriptions for info in online):
                await in_turns(self._offsets.clone(source, target, topic))
        await self._offsets.file.save()
        await self._settled()
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    @BrokerRoute(
        Code.QUERY_CORRECTION_OFFSET,
        of_topic_and_group(GET, "compareGroup"),
        IN_SYNC,
        Waits.NO,
        reads=True,
        hides_topics=False,
    )
    async def correction_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return the lowest committed offsets of a topic's groups (308), by queue.

        Queues in which the compared group is behind them get the maximum of a long, which RocketMQ treats as no limit.
        """
        ext = request.ext
        topic, compared = require_str(ext, "topic"), require_str(ext, "compareGroup")
        filtered = {group.strip() for group in (ext.get("filterGroups") or "").split(",")}
        lowest: dict[int, int] = {}
        slices = LoopSlices()
        for group in self._offsets.groups_of(topic):
            await slices.step()
            if group in filtered:
                continue
            for queue, offset in self._offsets.queues_of(group, topic).items():
                await slices.step()
                if offset >= self._tiered.min_offset(topic, queue):
                    lowest[queue] = min(offset, lowest.get(queue, _LONG_MAX))
        for queue, offset in self._offsets.queues_of(compared, topic).items():
            if lowest.get(queue, _LONG_MAX) > offset:
                lowest[queue] = _LONG_MAX
        return await wide_answer(request, {"correctionOffsets": lowest})

    @BrokerRoute(
        Code.QUERY_CONSUME_TIME_SPAN, of_topic_and_group(GET, "group"), IN_SYNC, Waits.NO, reads=True, hides_topics=True
    )
    async def time_span(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return the store times of first, last and consumed messages of each queue (303)."""
        topic, group = require_str(request.ext, "topic"), require_str(request.ext, "group")
        config = self._topics.require(topic)
        parts = [b'{"consumeTimeSpanSet":[']
        async for queue in in_slices(range(config.write_queue_nums)):
            parts += (b"," if queue else b"", dumps_object_keys(await self._span(topic, group, queue)))
        return RemotingCommand.response(request, ResponseCode.SUCCESS, parts=[*parts, b"]}"])

    async def _span(self, topic: str, group: str, queue: int) -> dict[str, Any]:
        tiered = self._tiered
        low, high = tiered.min_offset(topic, queue), tiered.max_offset(topic, queue)
        earliest = await tiered.store_time(topic, queue, low)
        consumed = self._offsets.query(group, topic, queue)
        last = await tiered.store_time(topic, queue, consumed - 1) if consumed > low else earliest
        waiting = await tiered.store_time(topic, queue, max(consumed, low)) if consumed < high else -1
        return {
            "messageQueue": MessageQueue(topic, self._broker_name, queue),
            "minTimeStamp": earliest,
            "maxTimeStamp": await tiered.store_time(topic, queue, high - 1) if high > low else -1,
            "consumeTimeStamp": last if last >= 0 else earliest,
            "delayTime": max(self._clock.now_ms() - waiting, 0) if waiting >= 0 else 0,
        }
