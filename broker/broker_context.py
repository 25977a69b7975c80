"""What the processors share: the broker's parts, made by the controller, and the few questions all of them ask."""

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from broker.clients.client_manager import ClientManager
from broker.clients.rebalance_lock import RebalanceLock
from broker.config import BrokerConfig
from broker.intake.flusher import Flusher
from broker.intake.log_writer import LogWriter
from broker.pop.assignment import RequestModes
from broker.pop.polling import PopPolling
from broker.pop.pop_book import PopBook
from broker.reading.pull_request_hold import PullRequestHold
from broker.reading.tiered_store import TieredStore
from broker.stats.broker_stats import BrokerStats
from broker.store.message_store import MessageStore
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.retry_names import RetryNames
from broker.tables.subscription_group_manager import SubscriptionGroupConfig, SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfig, TopicConfigManager
from broker.waiting.half_messages import HalfMessages
from broker.waiting.schedule_message import ScheduleMessage
from broker.waiting.timer_message import TimerMessages
from infra.clock import Clock
from infra.metrics import Metrics
from infra.remoting_server import Connection
from infra.supervisor import Faults
from neve.errors import BrokerError
from neve.remoting.body import QueueData
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand


@dataclass(kw_only=True)
class BrokerContext:
    config: BrokerConfig
    clock: Clock
    metrics: Metrics
    # Single items that were set aside so that nothing else stops.
    faults: Faults
    root: Path
    store: MessageStore
    tiered: TieredStore
    writer: LogWriter
    flusher: Flusher
    topics: TopicConfigManager
    groups: SubscriptionGroupManager
    offsets: ConsumerOffsetManager
    clients: ClientManager
    locks: RebalanceLock
    hold: PullRequestHold
    schedule: ScheduleMessage
    pops: PopBook
    polling: PopPolling
    retry_names: RetryNames
    modes: RequestModes
    timers: TimerMessages
    transactions: HalfMessages
    stats: BrokerStats
    # The address that clients dial; port 0 in the configuration is known only after the bind.
    address: tuple[str, int] = ("127.0.0.1", 0)
    boot_ms: int = 0
    # The time by which what waits may be given up: late rather than early.
    trusted_ms: Callable[[], int] = lambda: 0
    accepting: bool = False
    # Why sends are refused now (disk above its mark), or None.
    refuse_writes: str | None = None
    refused_from: float = 0.0  # by the monotonic clock
    # Publishes the topics to the name servers at once; set by the controller.
    register_now: Callable[[], Awaitable[None]] | None = None
    register_soon: Callable[[], None] = lambda: None
    # A topic's queues in the whole cluster, as a name server says; None when none says anything.
    route_of: Callable[[str], Awaitable[list[QueueData] | None]] | None = None
    # Raises BrokerError if the signer of a request that was held back may no longer do that.
    require: Callable[[Connection, RemotingCommand], None] = lambda *_: None
    # Raises BrokerError if a request's signer may not do that (Pub, Sub) with the topic that a record has.
    require_topic: Callable[[Connection, RemotingCommand, str, str], None] = lambda *_: None
    # May that user, from that connection, do that (Pub, Sub) with that topic?
    may_use_topic: Callable[[Connection, str, str, str], bool] = lambda *_: True
    turn: "itertools.count[int]" = field(default_factory=itertools.count)

    def find_topic(self, topic: str) -> TopicConfig:
        config = self.topics.select(topic)
        if config is None:
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!")
        return config

    def find_group(self, group: str) -> SubscriptionGroupConfig:
        config = self.groups.find(group, create=self.config.auto_create_subscription_group)
        if config is None:
            raise BrokerError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{group}] does not exist")
        return config

    def pinned_from(self) -> int | None:
        """The lowest log position that a message in waiting needs; nothing from it on may be evicted."""
        parts = (
            self.schedule.oldest_pending_physical(),
            self.timers.pinned_from(),
            self.transactions.pinned_from(),
            self.pops.oldest_needed_physical(),
        )
        return min((position for position in parts if position is not None), default=None)

    def any_queue(self, queue_nums: int) -> int:
        """A queue for who doesn't care: each in its turn."""
        return next(self.turn) % max(queue_nums, 1)

    def watch(self, connection: Connection) -> None:
        """Forget the connection's clients and waiting pulls when it is gone."""
        if "watched" not in connection.state:
            connection.state["watched"] = True
            connection.on_close(self.clients.connection_closed)
            connection.on_close(self.hold.connection_closed)
