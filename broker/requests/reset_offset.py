"""Reset of a group's offsets (222), including the pop book and held requests."""

from access.permissions import UPDATE, of_topic_and_group
from broker.long_polling.message_arriving import MessageArriving
from broker.pop.pop_book import PopBook
from broker.reading.tiered_store import TieredStore
from broker.requests.admin_values import Settled
from broker.requests.route import BrokerRoute, Waits, master_else
from broker.requests.wide_answer import WideMap, wide_answer
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.loop.in_steps import in_slices, in_turns
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import MessageQueue
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_int, require_int, require_str

_ROLES = master_else(ResponseCode.SYSTEM_ERROR, "Can not reset offset in slave broker")


class ResetOffsetProcessor:
    """Resets offsets of groups (a part of RocketMQ's AdminBrokerProcessor)."""

    def __init__(
        self,
        broker_name: str,
        *,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        tiered: TieredStore,
        pops: PopBook,
        arriving: MessageArriving,
        settled: Settled,
    ) -> None:
        self._broker_name, self._tiered = broker_name, tiered
        self._topics, self._groups, self._offsets = topics, groups, offsets
        self._pops, self._arriving, self._settled = pops, arriving, settled

    @BrokerRoute(
        Code.INVOKE_BROKER_TO_RESET_OFFSET,
        of_topic_and_group(UPDATE, "group"),
        _ROLES,
        Waits.YES,
        reads=False,
        hides_topics=False,
    )
    async def reset_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Reset offsets (222); consumers need not be connected, as each queue's next pull or pop receives it."""
        ext = request.ext
        group, topic = require_str(ext, "group"), require_str(ext, "topic")
        config = self._topics.require(topic)
        if group not in self._groups.groups:
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
        self._topics.require(topic)  # it may have been deleted while the queues were read
        await in_turns(self._offsets.reset_all(group, topic, targets))
        await self._pops.settle()
        await self._offsets.file.save()
        await self._settled()
        self._arriving.release_group(group, topic)
        name = self._broker_name
        if request.language == "CPP":
            table = [
                {"topic": topic, "brokerName": name, "queueId": number, "offset": target}
                for number, target in targets.items()
            ]
            return await wide_answer(request, {"offsetTable": table})
        found = WideMap()
        async for number in in_slices(targets):
            found.add(MessageQueue(topic, name, number), targets[number])
        return found.answer(request, {}, "offsetTable")

    def _given(self, topic: str, queue: int, offset: int) -> int:
        tiered = self._tiered
        low, high = tiered.min_offset(topic, queue), tiered.max_offset(topic, queue)
        if not low <= offset <= high + 1:
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR, f"Target offset {offset} not in consume queue range [{low}-{high}]"
            )
        return offset

    async def _by_time(self, topic: str, queue: int, timestamp: int) -> int:
        tiered = self._tiered
        if timestamp == -1:
            return max(tiered.max_offset(topic, queue), 0)
        return max(await tiered.offset_by_time(topic, queue, timestamp, False), 0)
