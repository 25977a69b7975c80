"""Header and checks of pops, peeks and notifications."""

import msgspec

from broker.config import BrokerConfig
from broker.life import BrokerLife
from broker.long_polling.pop_long_polling import ANY_QUEUE
from broker.long_polling.pull_request_hold import MAX_HELD_SIZE
from broker.pop.pop_consumer_service import PopConsumerService, PopRequest
from broker.pop.pop_queue import MAX_INVISIBLE_MS
from broker.reading.message_filter import parse_expression
from broker.requests.route import FENCED, SLAVE
from broker.role import BrokerRole, Role
from broker.tables.retry_names import RetryNames
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.clock import Clock
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import Int32, Int64
from neve.remoting.names import PERM_READ, topic_fault

_MAX_COUNT = 32
_MAX_POLL_MS = 60_000
_ATTEMPT_ID_MAX = 255


class PopHeader(msgspec.Struct, rename="camel"):
    """Fields of POP_MESSAGE; PEEK_MESSAGE and NOTIFICATION have some of them."""

    consumer_group: str
    topic: str
    queue_id: Int32
    max_msg_nums: Int32 = 1
    invisible_time: Int64 = 60_000
    poll_time: Int64 = 0
    born_time: Int64 = 0
    init_mode: Int32 = 0
    exp_type: str | None = None
    exp: str | None = None
    order: bool = False
    attempt_id: str = ""


class PopChecks:
    """Checks of pops, repeated after each wait because settings and permissions may have changed."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        life: BrokerLife,
        role: BrokerRole,
        *,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        retry_names: RetryNames,
        service: PopConsumerService,
    ) -> None:
        self._config, self._clock, self._life, self._role = config, clock, life, role
        self._topics, self._groups, self._retry_names = topics, groups, retry_names
        self._service = service

    def checked(self, header: PopHeader, count: int) -> PopRequest:
        """Check a request and convert its header. Raises BrokerError if it is refused."""
        config = self._config
        if not self._life.accepting:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, "broker unable to service, until it has started")
        if not self._role.is_master:
            raise BrokerError(*(FENCED if self._role.current is Role.FENCED else SLAVE))
        if not config.broker_permission & PERM_READ:
            raise BrokerError(ResponseCode.NO_PERMISSION, f"the broker[{config.broker_name}] pop message is forbidden")
        if not 0 < count <= _MAX_COUNT:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"maxMsgNums {count} is not from 1 to {_MAX_COUNT}")
        if len(header.attempt_id) > _ATTEMPT_ID_MAX:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"attemptId has more than {_ATTEMPT_ID_MAX} characters")
        if not 0 < header.invisible_time <= MAX_INVISIBLE_MS:
            raise BrokerError(
                ResponseCode.INVALID_PARAMETER,
                f"invisibleTime must be from 1 to {MAX_INVISIBLE_MS} ms (3 days), got {header.invisible_time}",
            )
        topic = self._topics.require(header.topic)
        if not topic.perm & PERM_READ:
            raise BrokerError(ResponseCode.NO_PERMISSION, f"the topic[{header.topic}] pop message is forbidden")
        if not ANY_QUEUE <= header.queue_id < topic.read_queue_nums:
            raise BrokerError(
                ResponseCode.INVALID_PARAMETER,
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] "
                f"topicConfig.readQueueNums:[{topic.read_queue_nums}]",
            )
        group = self._groups.require(header.consumer_group)
        if not group.consume_enable or self._groups.is_forbidden(header.consumer_group, header.topic):
            raise BrokerError(ResponseCode.NO_PERMISSION, f"subscription group no permission, {header.consumer_group}")
        fault = topic_fault(self._retry_names.of_pair(header.consumer_group, header.topic))
        if fault is not None:  # redeliveries would have no topic
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"the group's retry topic of {header.topic}: {fault}")
        message_filter = parse_expression(header.exp, header.exp_type, sql=config.enable_property_filter)
        any_queue = header.queue_id == ANY_QUEUE
        return PopRequest(
            group=header.consumer_group,
            topic=header.topic,
            queue_id=header.queue_id,
            queues=self._service.in_turn(topic.read_queue_nums) if any_queue else (header.queue_id,),
            max_count=count,
            invisible_time=header.invisible_time,
            message_filter=message_filter,
            in_order=header.order,
            attempt=header.attempt_id,
            from_newest=header.init_mode != 0,
        )

    def deadline(self, header: PopHeader, request: RemotingCommand) -> float:
        """Return the monotonic time of the answer; `bornTime` is ignored, because the client's clock may be wrong."""
        may_wait = self._config.long_polling_enable and request.size <= MAX_HELD_SIZE
        poll = min(header.poll_time, _MAX_POLL_MS) if may_wait else 0
        return self._clock.monotonic() + max(poll, 0) / 1000
