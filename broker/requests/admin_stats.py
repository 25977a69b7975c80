"""Administration: what is in the queues, who consumes, how the broker is doing."""

import os
from collections.abc import Iterator
from typing import Any

from broker.broker_context import BrokerContext
from broker.clients.client_manager import subscription_to_wire
from broker.intake.intake import Intake
from broker.requests.wide_answer import WideMap, in_slices
from infra.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import MessageQueue, dumps
from neve.remoting.codes import VERSION, ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import require_str

_DAY = 86_400_000
_ZEROS = (
    "sendThreadPoolQueueSize", "pullThreadPoolQueueSize", "sendThreadPoolQueueHeadWaitTimeMills",
    "pullThreadPoolQueueHeadWaitTimeMills", "pageCacheLockTimeMills", "timerReadBehind", "timerOffsetBehind",
    "timerCongestNum", "timerEnqueueTps", "timerDequeueTps", "dispatchBehindBytes", "dispatchMaxBuffer",
    "putMessageFailedTimes", "putMessageEntireTimeMax", "getMessageEntireTimeMax", "putLatency99", "putLatency999",
    "litePullThreadPoolQueueSize", "queryThreadPoolQueueSize", "ackThreadPoolQueueSize", "EndTransactionQueueSize",
    "remainTransientStoreBufferNumbs", "remainHowManyDataToCommit",
)  # fmt: skip


def queue_stats(context: BrokerContext, group: str, topic: str, queue: int) -> dict[str, int]:
    """Where a group stands in a queue, as RocketMQ's OffsetWrapper has it."""
    consumed = max(context.offsets.query(group, topic, queue), 0)
    last = context.tiered.store_time_at_hand(topic, queue, consumed - 1) if consumed else 0
    return {
        "brokerOffset": max(context.tiered.max_offset(topic, queue), 0),
        "consumerOffset": consumed,
        "lastTimestamp": max(last, 0),
        "pullOffset": max(consumed, context.offsets.query_pull(group, topic, queue)),
    }


class AdminStatsProcessor:
    """Counts, connections and the broker's state as mqadmin shows them (a part of RocketMQ's AdminBrokerProcessor)."""

    def __init__(self, context: BrokerContext, totals: "Totals") -> None:
        self._context = context
        self._totals = totals

    async def topic_stats(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        context = self._context
        topic = require_str(request.ext, "topic")
        config = context.topics.select(topic)
        if config is None:
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        table = WideMap()
        async for queue in in_slices(range(config.queue_nums)):
            high = max(context.tiered.max_offset(topic, queue), 0)
            low = max(context.tiered.min_offset(topic, queue), 0)
            described = {
                "lastUpdateTimestamp": max(context.tiered.store_time_at_hand(topic, queue, high - 1), 0) if high else 0,
                "maxOffset": high,
                "minOffset": low,
            }
            messages = context.tiered.count_messages(topic, queue, low, high)
            if messages != high - low:  # Java's clients pass over what they do not know
                described["messages"] = messages
            table.add(MessageQueue(topic, context.config.broker_name, queue), described)
        return table.answer(request, {"topicPutTps": context.stats.put_rate(topic)}, "offsetTable")

    async def consume_stats(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        context, ext = self._context, request.ext
        group = require_str(ext, "consumerGroup")
        listed = [name for name in dict.fromkeys((ext.get("topicList") or "").split(";")) if name]
        topics = listed or ([ext["topic"]] if ext.get("topic") else context.offsets.topics_of(group))
        live = context.clients.consumers.get(group)
        table = WideMap()
        rate = 0.0

        def queues() -> Iterator[tuple[str, int]]:
            nonlocal rate
            for topic in topics:
                config = context.topics.select(topic)
                rate += context.stats.get_rate(topic, group)
                if config is None or (not listed and live is not None and topic not in live.subscriptions):
                    continue
                for queue in range(config.read_queue_nums):
                    yield topic, queue

        async for topic, queue in in_slices(queues()):
            place = MessageQueue(topic, context.config.broker_name, queue)
            table.add(place, queue_stats(context, group, topic, queue))
        return table.answer(request, {"consumeTps": rate}, "offsetTable")

    def consumer_connections(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = require_str(request.ext, "consumerGroup")
        info = self._context.clients.consumers.get(group)
        if info is None:
            raise BrokerError(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{group}] not online")
        body = {
            "connectionSet": [channel.to_wire() for channel in info.channels.values()],
            "consumeFromWhere": info.consume_from_where,
            "consumeType": info.consume_type,
            "messageModel": info.message_model,
            "subscriptionTable": {topic: subscription_to_wire(sub) for topic, sub in info.subscriptions.items()},
        }
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(body))

    def producer_connections(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = require_str(request.ext, "producerGroup")
        producers = self._context.clients.producers.get(group)
        if not producers:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"the producer group[{group}] not exist")
        body = {"connectionSet": [channel.to_wire() for channel in producers.values()]}
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(body))

    def groups_of_topic(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic = require_str(request.ext, "topic")
        groups = {*self._context.clients.groups_subscribed_to(topic), *self._context.offsets.groups_of(topic)}
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps({"groupList": sorted(groups)}))

    def topics_of_group(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = require_str(request.ext, "group")
        live = self._context.clients.consumers.get(group)
        topics = {*self._context.offsets.topics_of(group), *(live.subscriptions if live is not None else ())}
        body = {"topicList": sorted(topics), "brokerAddr": "{}:{}".format(*self._context.address)}
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(body))

    def subscription(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group, topic = require_str(request.ext, "group"), require_str(request.ext, "topic")
        info = self._context.clients.consumers.get(group)
        body: dict[str, Any] = {"group": group, "topic": topic}
        if info is not None and topic in info.subscriptions:
            body["subscriptionData"] = subscription_to_wire(info.subscriptions[topic])
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(body))

    def runtime_info(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """28. mqadmin parses most of these without asking whether they are there."""
        context, store = self._context, self._context.store
        now = context.clock.now_ms()
        ratio = str(self._totals.disk_ratio())
        segments = store.segments()
        oldest = min((s.newest_store_time for s in segments if s.newest_store_time > 0), default=now)
        put, got = self._totals.put_rates(), self._totals.get_rates()
        table = {
            **dict.fromkeys(_ZEROS, "0"),
            "bootTimestamp": str(context.boot_ms),
            "brokerActive": "true",
            "brokerVersion": str(int(VERSION)),
            "brokerVersionDesc": "V5_3_3",
            "commitLogDiskRatio": ratio,
            "consumeQueueDiskRatio": ratio,
            "commitLogMaxOffset": str(store.max_physical_offset),
            "commitLogMinOffset": str(store.min_physical_offset),
            "earliestMessageTimeStamp": str(oldest),
            "getFoundTps": got,
            "getMissTps": "0.0 0.0 0.0",
            "getTotalTps": got,
            "getTransferredTps": got,
            **self._totals.mornings(),
            "pid": str(os.getpid()),
            "putMessageAverageSize": str(self._totals.average_size()),
            "putMessageSizeTotal": str(self._totals.size()),
            "putMessageTimesTotal": str(self._totals.put()),
            "putTps": put,
            "remainHowManyDataToFlush": f"{store.max_physical_offset - store.flushed_offset} B",
            "startAcceptSendRequestTimeStamp": str(context.boot_ms),
            "runtime": f"[ {(now - context.boot_ms) // 1000} seconds ]",
        }
        for level in range(1, context.schedule.max_level + 1):
            done, end = context.schedule.position(level)
            table[f"scheduleMessageOffset_{level}"] = f"{done},{end}"
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps({"table": table}))


class Totals:
    """Messages in and out, with rates over the last 10, 60 and 600 seconds from one sample each second."""

    _WINDOWS = (10, 60, 600)

    def __init__(self, context: BrokerContext, intake: Intake) -> None:
        self._context, self._intake = context, intake
        self._samples: list[tuple[float, int, int]] = []
        self._day = context.clock.now_ms() // _DAY
        # Messages in and out at the start (UTC) of yesterday and of today.
        self._yesterday = self._today = (0, 0)

    def sample(self) -> None:
        day = self._context.clock.now_ms() // _DAY
        if day != self._day:
            self._day, self._yesterday, self._today = day, self._today, (self.put(), self.got())
        self._samples.append((self._context.clock.monotonic(), self.put(), self.got()))
        del self._samples[: -(self._WINDOWS[-1] + 1)]

    def mornings(self) -> dict[str, str]:
        put, got = zip(self._yesterday, self._today, (self.put(), self.got()), strict=True)
        whens = ("YesterdayMorning", "TodayMorning", "TodayNow")
        rows = (("Put", put), ("Get", got))
        return {f"msg{what}Total{when}": str(n) for what, row in rows for when, n in zip(whens, row, strict=True)}

    def size(self) -> int:
        return self._intake.bytes

    def put(self) -> int:
        return self._intake.messages

    def got(self) -> int:
        return self._context.stats.messages_out

    def average_size(self) -> float:
        return self._intake.bytes / self._intake.messages if self._intake.messages else 0.0

    def put_rates(self) -> str:
        return self._rates(1)

    def get_rates(self) -> str:
        return self._rates(2)

    def _rates(self, column: int) -> str:
        rates = []
        for window in self._WINDOWS:
            part = self._samples[-(window + 1) :]
            seconds = part[-1][0] - part[0][0] if len(part) > 1 else 0
            rates.append((part[-1][column] - part[0][column]) / seconds if seconds > 0 else 0.0)
        return " ".join(f"{rate:.1f}" for rate in rates)

    def disk_ratio(self) -> float:
        return round(self._context.store.disk.room(self._context.root).used_ratio, 4)
