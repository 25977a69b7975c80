"""Groups' positions: all of them (43, 45), set (222), copied (314), compared (308, 303), reading taken away (353)."""

from typing import Any

from broker.broker_context import BrokerContext
from broker.requests.wide_answer import WideMap, in_slices, wide_answer
from broker.tables.consumer_offset_manager import SEPARATOR
from infra.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import MessageQueue, dumps, dumps_object_keys
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_bool, optional_int, require_int, require_str

_LONG_MAX = (1 << 63) - 1


class AdminOffsetsProcessor:
    """Groups' positions, as an administrator reads and sets them (a part of RocketMQ's AdminBrokerProcessor)."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    async def all_offsets(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """43: what every group has consumed, as a slave would copy it."""
        offsets = self._context.offsets
        table = WideMap()
        async for topic, group in in_slices(offsets.pairs()):
            table.add(f"{topic}{SEPARATOR}{group}", offsets.queues_of(group, topic))
        return table.answer(request, {}, "offsetTable")

    def delay_offsets(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """45: how far each delay level is delivered."""
        schedule = self._context.schedule
        table = {level: schedule.position(level)[0] for level in range(1, schedule.max_level + 1)}
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps_object_keys({"offsetTable": table}))

    async def reset_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """222. Kept here until each queue's next pull or pop, so consumers need not be running."""
        ext, context = request.ext, self._context
        group, topic = require_str(ext, "group"), require_str(ext, "topic")
        config = context.find_topic(topic)
        if group not in context.groups.groups:
            raise BrokerError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{group}] does not exist")
        queue, offset = optional_int(ext, "queueId", -1), optional_int(ext, "offset", -1)
        if queue >= config.read_queue_nums:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"queueId[{queue}] is illegal, {topic} has fewer queues")
        if queue >= 0 and offset != -1:
            targets = {queue: self._given(topic, queue, offset)}
        else:
            time = require_int(ext, "timestamp")
            queues = [queue] if queue >= 0 else range(config.read_queue_nums)
            targets = {number: await self._by_time(topic, number, time) async for number in in_slices(queues)}
        context.find_topic(topic)  # the queues were looked at one after the other
        for number, target in targets.items():
            context.offsets.reset(group, topic, number, target)
        await context.pops.settle()
        await context.offsets.file.save()
        context.arriving.release_group(group, topic)
        name = context.config.broker_name
        if request.language == "CPP":
            table: Any = [
                {"topic": topic, "brokerName": name, "queueId": number, "offset": target}
                for number, target in targets.items()
            ]
        else:
            table = {MessageQueue(topic, name, number): target for number, target in targets.items()}
        return await wide_answer(request, {"offsetTable": table})

    def _given(self, topic: str, queue: int, offset: int) -> int:
        tiered = self._context.tiered
        low, high = tiered.min_offset(topic, queue), tiered.max_offset(topic, queue)
        if not low <= offset <= high + 1:
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR, f"Target offset {offset} not in consume queue range [{low}-{high}]"
            )
        return offset

    async def _by_time(self, topic: str, queue: int, timestamp: int) -> int:
        tiered = self._context.tiered
        if timestamp == -1:
            return max(tiered.max_offset(topic, queue), 0)
        return max(await tiered.offset_by_time(topic, queue, timestamp, False), 0)

    async def clone_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """314."""
        ext, context = request.ext, self._context
        source, target = require_str(ext, "srcGroup"), require_str(ext, "destGroup")
        topics = [ext["topic"]] if ext.get("topic") else context.offsets.topics_of(source)
        live = context.clients.consumers
        for topic in topics:
            if context.topics.select(topic) is None:
                continue
            online = [live[group] for group in (source, target) if group in live]
            if optional_bool(ext, "offline") or all(topic in info.subscriptions for info in online):
                context.offsets.clone(source, target, topic)
        await context.offsets.file.save()
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    async def correction_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """308: where the slowest group of the topic is; no bound for queues where the compared group is behind it."""
        ext, context = request.ext, self._context
        topic, compared = require_str(ext, "topic"), require_str(ext, "compareGroup")
        filtered = {group.strip() for group in (ext.get("filterGroups") or "").split(",")}
        lowest: dict[int, int] = {}
        for group in context.offsets.groups_of(topic):
            if group in filtered:
                continue
            offsets = context.offsets.queues_of(group, topic)
            async for queue in in_slices(offsets):
                offset = offsets[queue]
                if offset >= context.tiered.min_offset(topic, queue):
                    lowest[queue] = min(offset, lowest.get(queue, _LONG_MAX))
        for queue, offset in context.offsets.queues_of(compared, topic).items():
            if lowest.get(queue, _LONG_MAX) > offset:
                lowest[queue] = _LONG_MAX
        return await wide_answer(request, {"correctionOffsets": lowest})

    async def time_span(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """303."""
        topic, group = require_str(request.ext, "topic"), require_str(request.ext, "group")
        config = self._context.find_topic(topic)
        spans = [await self._span(topic, group, queue) async for queue in in_slices(range(config.write_queue_nums))]
        return await wide_answer(request, {"consumeTimeSpanSet": spans})

    async def _span(self, topic: str, group: str, queue: int) -> dict[str, Any]:
        context, tiered = self._context, self._context.tiered
        low, high = tiered.min_offset(topic, queue), tiered.max_offset(topic, queue)
        earliest = await tiered.store_time(topic, queue, low)
        consumed = context.offsets.query(group, topic, queue)
        last = await tiered.store_time(topic, queue, consumed - 1) if consumed > low else earliest
        waiting = await tiered.store_time(topic, queue, max(consumed, low)) if consumed < high else -1
        return {
            "messageQueue": MessageQueue(topic, context.config.broker_name, queue),
            "minTimeStamp": earliest,
            "maxTimeStamp": await tiered.store_time(topic, queue, high - 1) if high > low else -1,
            "consumeTimeStamp": last if last >= 0 else earliest,
            "delayTime": max(context.clock.now_ms() - waiting, 0) if waiting >= 0 else 0,
        }

    async def group_forbidden(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """353: with `readable` set it changes what is told."""
        ext, groups = request.ext, self._context.groups
        group, topic = require_str(ext, "group"), require_str(ext, "topic")
        if ext.get("readable"):
            self._context.find_topic(topic)
            self._context.find_group(group)
            groups.set_forbidden(group, topic, forbidden=not optional_bool(ext, "readable"))
            await groups.file.save()
        body = {"group": group, "readable": not groups.is_forbidden(group, topic), "topic": topic}
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(body))
