"""What the processors share: the broker's parts, made by the controller, and the few questions all of them ask."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from access.guard import Guard
from broker.clients.client_manager import ClientManager
from broker.clients.rebalance_lock import RebalanceLock
from broker.clients.registration import Registration
from broker.config import BrokerConfig
from broker.intake.flusher import Flusher
from broker.intake.log_writer import LogWriter
from broker.life import BrokerLife
from broker.long_polling.message_arriving import MessageArriving
from broker.long_polling.pop_long_polling import PopLongPolling
from broker.long_polling.pull_request_hold import PullRequestHold
from broker.pop.assignment import RequestModes
from broker.pop.pop_book import PopBook
from broker.reading.tiered_store import TieredStore
from broker.stats.broker_stats import BrokerStats
from broker.store.message_store import MessageStore
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.retry_names import RetryNames
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from broker.waiting.half_messages import HalfMessages
from broker.waiting.schedule_message import ScheduleMessage
from broker.waiting.timer_message import TimerMessages
from infra.clock import Clock
from infra.metrics import Metrics
from infra.remoting_server import Connection
from infra.supervisor import Faults
from neve.remoting.command import RemotingCommand


@dataclass(kw_only=True)
class BrokerContext:
    """The broker's parts by name, for those processors that still ask for more than a few of them."""

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
    arriving: MessageArriving
    schedule: ScheduleMessage
    pops: PopBook
    polling: PopLongPolling
    retry_names: RetryNames
    modes: RequestModes
    timers: TimerMessages
    transactions: HalfMessages
    stats: BrokerStats
    # The address that clients dial; port 0 in the configuration is known only after the bind.
    address: tuple[str, int] = ("127.0.0.1", 0)
    boot_ms: int = 0
    life: BrokerLife
    registration: Registration
    guard: Guard
    # The time by which what waits may be given up: late rather than early.
    trusted_ms: Callable[[], int] = lambda: 0

    def __post_init__(self) -> None:
        """What is asked by its old name until its asker has it as a part of its own."""
        self.register_soon = self.registration.soon
        self.require_topic, self.may_use_topic = self.guard.require_topic, self.guard.may_use_topic
        self.find_topic, self.find_group = self.topics.require, self.groups.require

    @property
    def accepting(self) -> bool:
        return self.life.accepting

    @property
    def refuse_writes(self) -> str | None:
        return self.life.refusal

    def require(self, connection: Connection, command: RemotingCommand) -> None:
        self.guard.require(connection, command)
