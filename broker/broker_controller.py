"""Composition of the broker: parts are created explicitly, in the order of dependence; two tables start and stop them.

Each part gets what it uses by name, and nothing replaces that later. A simulation passes another `Machine`; the parts
and the steps are the same.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from access import server_pages
from access.guard import SignatureGuard
from access.wiring import make_guard, make_server
from broker import kept_config
from broker.archiving.archive import AnyArchive, open_archive
from broker.archiving.deletion import DoomedQueues, GroupDeletion, TopicDeletion
from broker.archiving.local_side import LocalSide
from broker.archiving.pins import Pins, SetPins, WaitingMessages
from broker.archiving.restore import Restore, refuse_unfinished
from broker.archiving.state import Tables
from broker.broker_stats import BrokerStats
from broker.change_of_role import ChangeOfRole
from broker.clients.broker_outer_api import BrokerOuterApi
from broker.clients.client_manager import ClientManager
from broker.clients.consumer_ids_change import ConsumerIdsChangeListener
from broker.clients.master_api import MasterApi
from broker.clients.rebalance_lock import RebalanceLock
from broker.clients.registration import Registration
from broker.config import BrokerConfig
from broker.ha.ha_client import HaClient
from broker.ha.plain_slave import PlainSlave, refuse_slaves
from broker.ha.replicas_manager import TICK_S, ReplicasManager, SwitchoverRefused
from broker.ha.settings import is_slave, settings_of
from broker.importing.store_import import Report, StoreImport, refuse_unfinished_import
from broker.intake.disk_mark import DiskMark, used_ratio
from broker.intake.express_lane import ExpressSend
from broker.intake.flusher import Flusher
from broker.intake.intake import Intake
from broker.intake.log_writer import LogWriter
from broker.intake.replication import STANDS_ALONE, BrokerSet, GroupTransfer, Replication
from broker.kept_config import KeptConfig
from broker.life import BrokerLife
from broker.loading import add_system_tables, check_directory, load_all, recover_log, refuse_members
from broker.long_polling.message_arriving import MessageArriving
from broker.long_polling.pop_long_polling import PopLongPolling
from broker.long_polling.pull_request_hold import PullRequestHold
from broker.machine import Machine
from broker.membership import MasterPins, Membership, NoPins, plain_slave
from broker.metadata.last_poll import LastPollFile
from broker.metadata.metadata_journal import MetadataJournal
from broker.metadata.metadata_log import MetadataLog
from broker.metadata.slave_synchronize import SlaveSynchronize
from broker.metadata.user_changes import FollowedUsers, UserJournal
from broker.pop.assignment import RequestModes
from broker.pop.pop_book import PopBook, revive_log
from broker.pop.pop_consumer_service import PopConsumerService
from broker.pop.pop_retry_topics import PopRetryTopics
from broker.pop.revive import PopRevive
from broker.pop.set_elsewhere import SetElsewhere
from broker.promotion.promotion import Api, Promotion, refuse_present, refused
from broker.reading.backlog_turns import BacklogTurns
from broker.reading.tiered_store import TieredStore
from broker.requests.admin_config import AdminConfigProcessor
from broker.requests.admin_connections import AdminConnectionsProcessor
from broker.requests.admin_groups import AdminGroupsProcessor
from broker.requests.admin_inspect import AdminInspectProcessor
from broker.requests.admin_offsets import AdminOffsetsProcessor
from broker.requests.admin_relay import AdminRelayProcessor
from broker.requests.admin_stats import AdminStatsProcessor
from broker.requests.admin_topics import AdminTopicsProcessor
from broker.requests.broker_set import BrokerSetProcessor
from broker.requests.client_manage import ClientManageProcessor
from broker.requests.consumer_manage import ConsumerManageProcessor
from broker.requests.end_transaction import EndTransactionProcessor
from broker.requests.lock_batch import LockBatchProcessor
from broker.requests.peek_message import PeekMessageProcessor
from broker.requests.pop_ack import PopAckProcessor
from broker.requests.pop_message import PopMessageProcessor
from broker.requests.pop_request import PopChecks
from broker.requests.pull_message import PullMessageProcessor
from broker.requests.query_assignment import QueryAssignmentProcessor
from broker.requests.query_message import QueryMessageProcessor
from broker.requests.queue_range import QueueRangeProcessor
from broker.requests.recall_message import RecallMessageProcessor
from broker.requests.replicated_answers import wait_for_replication
from broker.requests.reply_message import ReplyMessageProcessor
from broker.requests.reset_offset import ResetOffsetProcessor
from broker.requests.role_gate import RoleGate
from broker.requests.runtime_info import RuntimeInfoProcessor
from broker.requests.send_back import SendBackProcessor
from broker.requests.send_message import SendMessageProcessor
from broker.requests.slave_polls import SlavePollsProcessor
from broker.requests.table import ROUTES, register_all
from broker.role import BrokerRole
from broker.stats import broker_metrics
from broker.stats.admin_pages import AdminPages, register_pages
from broker.stats.conditions import Conditions
from broker.stats.health import Health
from broker.stats.queue_stats import QueueStats
from broker.stats.rocketmq_metrics import RocketmqMetrics, Transactions, Waiting
from broker.stats.topic_metrics import TopicMetrics
from broker.stats.topic_tiers import TopicTiers
from broker.stats.totals import Totals
from broker.store.config import StoreConfig
from broker.store.errors import StoreFull
from broker.store.message_store import MessageStore
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.persistence import Persistence
from broker.tables.retry_names import RetryNames
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from broker.waiting.check_back import CheckBack
from broker.waiting.half_messages import HalfMessages
from broker.waiting.schedule_message import ScheduleMessage, parse_levels
from broker.waiting.timer_message import CODED_TOPICS, TimerMessages, code_of_entry
from infra.loop.pace import SCRAPE_SHARE, Pace
from infra.loop.supervisor import Faults, Stop, Supervisor
from infra.net.admin_http import AdminHttp
from infra.net.admin_token import AdminToken
from infra.net.request_router import RequestRouter
from infra.observe.metrics import LATENCIES, Histogram, Metrics
from infra.observe.metrics_page import MetricsPage
from infra.process.descriptors import budget, mappings_limit
from infra.process.startup import (
    EXIT_FAILED,
    EXIT_IN_USE,
    StartupError,
    free_port,
    local_address,
    open_files_limit,
)
from lifecycle.scheduler import KNOWN_FAILURES
from neve.entropy import salt, system_entropy
from neve.record.ids import UniqueIdGenerator

log = logging.getLogger(__name__)

_TICK = 1.0
_REVIVE_PERIOD = 0.5
_SCHEDULE_PERIOD = 0.1
_IDLE_POPS = 300.0
_CLIENT_SCAN = 10.0
_SLAVE_DEADLINES = 0.25
_LOOK_AT_MASTER = 2.0
_VIP_OFFSET = 2
# Directories of the data directory whose files contain users' secrets.
_PRIVATE = ("commitlog", "config", "diverged", "ha", "quarantine")


# Time limits in seconds for the steps of a stop. Even if one hangs, all together take less than the 120 s of
# conf/neve-broker.service.
_STOP_S = {
    "hand over": 3.0, "name servers": 15.0, "archive": 45.0, "broker set": 5.0, "tables": 10.0, "flush": 10.0,
    "connections": 5.0, "tasks": 10.0, "last state": 15.0, "pages": 5.0, "reads": 5.0, "flusher": 10.0, "store": 30.0,
}  # fmt: skip


class Step(NamedTuple):
    """A step of a start, and its undo if a later one fails."""

    name: str
    do: Callable[[], Awaitable[object]]
    undo: Callable[[], Awaitable[object]] | None = None


class StopStep(NamedTuple):
    """A step of a stop, and the conditions under which it is skipped. `_STOP_S` has its time limit."""

    name: str
    do: Callable[[], Coroutine[Any, Any, object]]
    unless: frozenset[str] = frozenset()


# Conditions to skip a step of a stop: no sync succeeds any longer; an earlier step still runs and may use the part.
_SYNC_FAILED, _LEFT_BEHIND = "sync failed", "left behind"


class BrokerController:
    """Composition of the broker (RocketMQ's BrokerController): creates, starts and stops all parts.

    It decides nothing about messages. A start that fails raises StartupError and leaves nothing running or locked.
    """

    def __init__(
        self,
        config: BrokerConfig,
        machine: Machine,
        restore: Restore | None = None,
        *,
        store_config: Callable[..., StoreConfig] = StoreConfig,
        pins: Pins | None = None,
        broker_set: BrokerSet | None = None,
    ) -> None:
        """Create all parts.

        `store_config` creates the store's settings from the configuration's. `pins` replaces the pins of waiting
        messages, which keep segments of the log. `broker_set` is the admission by the set that this broker is a member
        of; None: it is a single broker.
        """
        self.config, self.clock, self._disk, self._machine = config, machine.clock, machine.disk, machine
        self._threads, self._restore = machine.outside.threads, restore
        self.kept = KeptConfig(config, machine.disk, config.root / "config" / kept_config.FILE_NAME, self._threads)
        # Records and ids contain the port: it has to be known before the log is opened.
        self._ha_port = config.ha_port
        config.listen_port = config.listen_port or free_port(config.bind_address)
        #: Address for clients.
        self.address = (self._own_host(), config.listen_port)
        self._descriptors = budget(open_files_limit(), mappings_limit())
        #: Steps that did not end when the broker stopped. Their threads would keep the process alive.
        self.left_behind: list[str] = []
        self.metrics, self.faults, self.life = Metrics(), Faults(), BrokerLife(self.clock)
        self.role = BrokerRole()
        self._supervisor = Supervisor("broker")
        self._used_ratio = functools.partial(used_ratio, self._disk, config.root)
        self._settings = settings_of(config)
        self._make_store(store_config)
        self._make_membership(self._ha_port, broker_set)
        self._make_log()
        self._make_tables(config.root / "config")
        self._make_clients(config.root / "config" / "auth" / "auth.json")
        self._make_readers()
        self._make_waiting(config.root / "config")
        self._make_intake()
        self._make_archive(pins)
        self._make_replicas()
        self._make_server()

    conditions: Conditions  # created by the start
    archive: AnyArchive  # set by the start, once the log is recovered; users of it read it then

    # -- parts, in the order of dependence

    def _own_host(self) -> str:
        config = self.config
        peer = config.name_servers[0].rpartition(":")[0] if config.name_servers else None
        return config.broker_ip1 or local_address(peer)

    def _make_store(self, store_config: Callable[..., StoreConfig]) -> None:
        config = self.config
        self.store = MessageStore(
            store_config(
                config.root,
                commit_log_file_size=config.mapped_file_size_commit_log,
                flush_disk_type=config.flush_disk_type,
                store_host=self.address,
                mapped_queue_files=self._descriptors.queue_files,
                code_of=code_of_entry,
                coded_topics=CODED_TOPICS,
                queues_may_begin_again=is_slave(config),
            ),
            self._disk,
            self.clock,
            self._threads.lock,
        )

    def _make_membership(self, ha_port: int, broker_set: BrokerSet | None) -> None:
        #: Membership in a set; None: a single broker.
        self.membership: Membership | None = None
        if self._settings is not None:
            self.membership = Membership(
                self._settings,
                self.config,
                self.address,
                ha_port=ha_port,
                store=self.store,
                disk=self._disk,
                clock=self.clock,
                threads=self._threads,
            )
            broker_set = self.membership.admission
        #: Queue of answers that wait for the set; None: a single broker.
        self.group_transfer: GroupTransfer | None = None
        if broker_set is not None:
            timeout = self.config.slave_timeout / 1000
            self.group_transfer = GroupTransfer(broker_set, self.clock, self.faults, slave_timeout=timeout)
        self._replication: Replication = STANDS_ALONE if self.group_transfer is None else self.group_transfer

    def _make_log(self) -> None:
        config = self.config
        self.writer = LogWriter(self.store, self._replication)
        self.journal = MetadataJournal(self.store, self.writer, self.clock)
        self.flusher = Flusher(
            self.store,
            self.clock,
            interval_ms=lambda: config.flush_interval_commit_log,
            on_failure=self.life.sync_failed,
            faults=self.faults,
            threads=self._threads,
            then=None if self.group_transfer is None else self.group_transfer.wait,
        )

    def _make_tables(self, directory: Path) -> None:
        config, clock, disk, threads = self.config, self.clock, self._disk, self._threads
        sync_log = self._sync_positions
        sync_tables = self._save_deletions if self.membership is None else sync_log
        self.topics = TopicConfigManager(
            disk,
            directory / "topics.json",
            clock,
            lambda: config.max_topics,
            threads=threads,
            journal=self.journal,
            sync_log=sync_tables,
            sync_changes=sync_log,
        )
        self.groups = SubscriptionGroupManager(
            disk,
            directory / "subscriptionGroup.json",
            clock,
            lambda: config.max_groups,
            auto_create=lambda: config.auto_create_subscription_group,
            threads=threads,
            journal=self.journal,
            sync_log=sync_tables,
        )
        self.offsets = ConsumerOffsetManager(
            disk,
            directory / "consumerOffset.json",
            sync_log,
            threads,
            self.journal,
            limit=lambda: config.max_consumer_offsets,
        )
        self.modes = RequestModes(disk, directory / "messageRequestMode.json", threads, self.journal, sync_tables)
        self.retry_names = RetryNames(
            self.topics.topics, self.groups.groups, self.offsets.stands, lambda: config.enable_retry_topic_v2
        )

    def _make_clients(self, users: Path) -> None:
        config, clock = self.config, self.clock
        self.guard = make_guard(
            config,
            users,
            self._disk,
            ROUTES,
            cluster=config.broker_cluster_name,
            retry_owners=self.retry_names.owners,
            changes=UserJournal(self.journal, lambda: self.store.log_uuid, lambda: self.intake.settled()),  # noqa: PLW0108
        )
        membership = self.membership
        if membership is None:
            self.name_servers = BrokerOuterApi(config, self.address)
            self.registration = Registration(self.name_servers, self.topics)
        else:
            self.name_servers = BrokerOuterApi(config, self.address, ha_port=lambda: membership.ha_service.port)
            self.registration = Registration(self.name_servers, self.topics, self._registered_as)
        members_changed = ConsumerIdsChangeListener(self.groups).changed
        self.clients = ClientManager(clock, members_changed, lambda: config.max_client_bytes)
        self.locks = RebalanceLock(clock, lambda: config.max_queue_locks)
        self.stats = BrokerStats(clock, sized=self._exports)

    async def _sync_positions(self) -> None:
        """Sync the log before positions are saved, in a set on all in-sync replicas.

        Saved positions assume that the log has the records below them. A member whose log was truncated would
        otherwise, as master again, have positions of lost records.
        """
        term, end = self._replication.term, self.store.max_physical_offset
        leads = self.replicas is not None and self.replicas.role.leads
        await self.flusher.flush_now()
        if leads:
            await self._replication.replicated(end, term)
        await self._save_deletions()

    async def _save_deletions(self) -> None:
        """Save deletions of topics before a table that contains one: later starts do not read its record."""
        if self.store.has_unsaved_deletions:
            await self._threads.run(self.store.save_deletions)

    def _registered_as(self) -> int | None:
        assert self.replicas is not None
        return self.replicas.role.registered_as

    def _make_readers(self) -> None:
        config = self.config
        self.tiered = TieredStore(self.store, config)
        self.hold = PullRequestHold(self.clock, config.max_held_pulls, self.faults)
        self.backlog_turns = BacklogTurns()
        #: Latency of pulls that found messages, from the start of the read to the answer.
        self.pull_latency = Histogram(LATENCIES)
        self.polling = PopLongPolling()
        self.arriving = MessageArriving(self.hold, self.polling, self.faults)

    def _make_waiting(self, directory: Path) -> None:
        config, clock, disk, threads = self.config, self.clock, self._disk, self._threads
        sync_log = self._sync_positions
        self.schedule = ScheduleMessage(
            self.store,
            self.writer,
            clock,
            parse_levels(config.message_delay_level),
            disk,
            directory / "delayOffset.json",
            sync_log,
            self.faults,
            threads,
            self.journal,
            read_queues=self.topics.read_queues,
        )
        self.timers = TimerMessages(self.store, self.writer, clock, config, self.topics.read_queues, self.faults)
        self.transactions = HalfMessages(self.store, self.writer, clock)
        revives = revive_log(config.broker_cluster_name)
        self.pops = PopBook(
            self.store,
            self.writer,
            self.offsets,
            clock,
            disk,
            directory / "popState.json",
            revives,
            sync_log,
            threads,
        )
        self.metadata = MetadataLog(
            self.journal,
            self.store,
            disk,
            directory / "metadataImage.json",
            topics=self.topics,
            groups=self.groups,
            offsets=self.offsets,
            modes=self.modes,
            users=self._followed_users(),
            delays=self.schedule,
            pops=self.pops,
            on_settled=self._master_settled,
            on_lost=self._tables_lost,
        )
        self.pop_service = PopConsumerService(
            clock,
            config.broker_name,
            tiered=self.tiered,
            pops=self.pops,
            offsets=self.offsets,
            retry_names=self.retry_names,
            polling=self.polling,
            on_handed_out=self.stats.got,
        )
        self.revive = PopRevive(
            clock,
            self.life,
            self.faults,
            self._supervisor.spawn,
            tiered=self.tiered,
            pops=self.pops,
            polling=self.polling,
            topics=self.topics,
            groups=self.groups,
            retries=PopRetryTopics(
                self.writer,
                self.retry_names,
                self.topics,
                register_soon=self.registration.soon,
                sync_soon=self.flusher.sync_soon,
                store_host=self.address,
            ),
        )
        self.check_back = CheckBack(
            self.config,
            self.clock,
            self.life,
            self.faults,
            lambda: self.archive.safe_clock.now_ms(),  # noqa: PLW0108 - the archive is set by the start
            transactions=self.transactions,
            store=self.store,
            writer=self.writer,
            clients=self.clients,
            guard=self.guard,
            topics=self.topics,
            registration=self.registration,
            address=self.address,
        )
        self.offsets.on_set = SetElsewhere(self.pops, self.polling).set
        self.last_poll = LastPollFile(disk, directory / "lastPoll.json", sync_log, threads)
        self.promotion = Promotion(
            disk,
            config.root,
            self.last_poll,
            store=self.store,
            schedule=self.schedule,
            timer_messages=self.timers,
            transactions=self.transactions,
            book=self.pops,
            offsets=self.offsets,
            topics=self.topics,
            revive_log=revives,
        )
        self._promotes = False
        self._tables = (self.topics, self.groups, self.offsets, self.schedule, self.modes)
        self.persistence = Persistence(
            (
                self.topics.file,
                self.groups.file,
                self.schedule.file,
                self.offsets.file,
                self.modes.file,
                self.pops,
                self.last_poll,
            )
        )

    def _followed_users(self) -> FollowedUsers | None:
        guard = self.guard
        if not isinstance(guard, SignatureGuard):
            return None
        return FollowedUsers(guard.store, self.journal, lambda: self.store.log_uuid)

    def _make_intake(self) -> None:
        config, clock = self.config, self.clock
        unique_ids = UniqueIdGenerator(self.address[0], os.getpid(), salt(system_entropy), clock.now_ms())
        self.intake = Intake(
            config,
            clock,
            self.life,
            self.role,
            writer=self.writer,
            flusher=self.flusher,
            topics=self.topics,
            registration=self.registration,
            stats=self.stats,
            half_messages=self.transactions,
            waiting_rooms=(self.schedule, self.timers),
            unique_ids=unique_ids,
            address=self.address,
            replication=self._replication,
        )
        self.totals = Totals(clock, self.intake, self.stats)
        self._disk_mark = DiskMark(config, self._used_ratio, self.life)

    def _make_archive(self, pins: Pins | None) -> None:
        """Create the parts around the archive. The start opens the archive itself, once the log is recovered."""
        config, clock = self.config, self.clock
        pins = pins or WaitingMessages(self.schedule, self.timers, self.transactions, self.pops, self.metadata)
        self._set_pins: SetPins | None = None
        self._doomed: DoomedQueues | None = None
        if self.membership is not None:
            pins = self._set_pins = SetPins(self.store, pins)
            self._doomed = DoomedQueues(self.store, self._replication)
        elif is_slave(config):
            pins = MasterPins(self._master_begins_at, is_crowded=self._is_crowded) if config.store_url else NoPins()
        self._local_side = LocalSide(
            config,
            self.store,
            self.flusher,
            Tables(self.topics, self.groups, self.offsets),
            pins,
            clock,
            self._disk,
            self._machine.outside,
            broker_set=None if self.membership is None else self.membership.admission,
            follows=is_slave(config),
            journal=self.journal,
        )
        self.topic_deletion = TopicDeletion(
            store=self.store,
            journal=self.journal,
            sync_log=self.flusher.flush_now,
            tombstones=lambda: self.archive.tombstones,
            topics=self.topics,
            groups=self.groups,
            offsets=self.offsets,
            retry_names=self.retry_names,
            pops=self.pops,
            arriving=self.arriving,
            registration=self.registration,
            doomed=self._doomed,
            threads=self._threads,
        )

    def _make_replicas(self) -> None:
        #: Driver of the membership; None: a single broker.
        self.replicas: ReplicasManager | None = None
        #: Slave of an Apache master without a controller; None: this broker is not one.
        self.plain_slave: PlainSlave | None = None
        #: Synchronization of tables with a master; None: this broker never has one.
        self.synchronize: SlaveSynchronize | None = None
        membership, transfer, doomed = self.membership, self.group_transfer, self._doomed
        if is_slave(self.config) or membership is not None:
            self.synchronize = SlaveSynchronize(
                self.metadata,
                MasterApi(self.config),
                confirmed=lambda: self.store.confirmed_offset,
                on_frontier=self._frontier_told,
                on_unreadable=self._can_not_follow,
                on_stock=self.last_poll.take,
            )
        if self.synchronize is None:
            return
        if is_slave(self.config):
            self.plain_slave = plain_slave(
                self.config,
                self.role,
                self.synchronize,
                store=self.store,
                disk=self._disk,
                clock=self.clock,
                threads=self._threads,
                archive=lambda: self.archive,
                forget_poll=self.last_poll.forget,
                sync_log=self.flusher.flush_now,
            )
            self.name_servers.on_master = self.plain_slave.master_is
        if membership is None or transfer is None or doomed is None:
            return
        books = ChangeOfRole(
            self.store,
            membership.admission,
            journal=self.journal,
            metadata=self.metadata,
            synchronize=self.synchronize,
            topics=self.topics,
            pops=self.pops,
            timers=self.timers,
            transactions=self.transactions,
            doomed=doomed,
            registration=self.registration,
            files=[
                table.file for table in (self.topics, self.groups, self.offsets, self.modes, self.schedule, self.pops)
            ],
            go_on=lambda: self.archive.go_on(),  # noqa: PLW0108 - set by the start
            threads=self._threads,
        )
        self.change_of_role = books
        self.replicas = membership.manager(
            self.role,
            books,
            lambda: self.archive,
            on_confirmed=transfer.confirmed,
            stop_acknowledging=self.intake.stop_acknowledging,
            spawn=self._supervisor.spawn,
            keep=self._supervisor.keep,
            sync_log=self.flusher.flush_now,
        )

    def _master_begins_at(self) -> int:
        assert self.plain_slave is not None
        return self.plain_slave.master_begins_at

    def _is_crowded(self) -> bool:
        return self._used_ratio() > self.config.disk_max_used_space_ratio / 100

    def _following(self) -> HaClient | None:
        """Return the connection to the master, of a slave."""
        if self.plain_slave is not None:
            return self.plain_slave.client
        return None if self.replicas is None else self.replicas.role.client

    def _can_not_follow(self, why: str) -> None:
        if self.replicas is not None:
            self.replicas.can_not_follow(why)

    def _master_settled(self, epoch: int) -> None:
        if self.replicas is not None:
            self.replicas.master_settled(epoch)

    def _tables_lost(self) -> None:
        if self.replicas is not None:
            self.replicas.follower.tables_lost()

    def _make_server(self) -> None:
        config = self.config
        self.topic_metrics = TopicMetrics(
            self.stats,
            self.store,
            self.tiered,
            topics=self.topics,
            offsets=self.offsets,
            clients=self.clients,
            retry_names=self.retry_names,
            clock=self.clock,
            limit=lambda: config.metrics_max_series,
        )
        self.health = Health(self.clock, self._supervisor, self.flusher)
        self.router = RequestRouter()
        self.router.express = ExpressSend(
            self.intake,
            self.writer,
            config,
            self.clock,
            topics=self.topics,
            stats=self.stats,
            signed_sends=self.guard.signed_sends,
            address=self.address,
        ).serve
        transactions = EndTransactionProcessor(
            self.intake,
            self.transactions,
            self.store,
            self.tiered,
            clock=self.clock,
            topics=self.topics,
            guard=self.guard,
        )
        register_all(self.router, self._make_processors(transactions))
        self._ended = Transactions(transactions.committed, transactions.rolled_back, lambda: len(self.transactions))
        self.server = make_server(
            config,
            self.router,
            self.guard,
            self._descriptors,
            port=config.listen_port,
            in_use=lambda: self.store.descriptors,
        )
        if self._replication.waits:
            wait_for_replication(self.router, self._replication, self._log_end)
        RoleGate(self.role, self.router, self.arriving)
        self._admin_token = AdminToken(self._disk, config.root, system_entropy)
        self._admin = AdminHttp(port=max(config.admin_port, 0), expected=KNOWN_FAILURES, token=self._admin_token)
        self.admin_address: tuple[str, int] | None = None
        #: Address of RocketMQ's metrics, with `metricsExporterType=PROM`.
        self.metrics_address: tuple[str, int] | None = None
        self._exporter = AdminHttp(
            config.metrics_prom_exporter_host or self.address[0], config.metrics_prom_exporter_port, is_public=True
        )

    def _log_end(self) -> int:
        return self.store.max_physical_offset

    def _make_processors(self, transactions: EndTransactionProcessor) -> Collection[object]:
        config, clock = self.config, self.clock
        pop_checks = PopChecks(
            config,
            clock,
            self.life,
            self.role,
            topics=self.topics,
            groups=self.groups,
            retry_names=self.retry_names,
            service=self.pop_service,
        )
        topics = AdminTopicsProcessor(config, self.topics, self.topic_deletion, self.registration, self.intake.settled)
        offsets = AdminOffsetsProcessor(
            config.broker_name,
            clock,
            topics=self.topics,
            offsets=self.offsets,
            clients=self.clients,
            tiered=self.tiered,
            schedule=self.schedule,
            settled=self.intake.settled,
        )
        return (
            SendMessageProcessor(
                self.intake,
                clock,
                groups=self.groups,
                locks=self.locks,
                retry_names=self.retry_names,
                broker_name=config.broker_name,
            ),
            SendBackProcessor(
                self.intake, self.tiered, groups=self.groups, guard=self.guard, stats=self.stats, address=self.address
            ),
            PullMessageProcessor(
                config,
                clock,
                self.role,
                tiered=self.tiered,
                hold=self.hold,
                turns=self.backlog_turns,
                topics=self.topics,
                groups=self.groups,
                clients=self.clients,
                offsets=self.offsets,
                stats=self.stats,
                guard=self.guard,
                latency=self.pull_latency,
                master_may_lack=None if self.plain_slave is None else self.plain_slave.master_may_lack,
            ),
            ClientManageProcessor(
                config,
                clock,
                clients=self.clients,
                topics=self.topics,
                groups=self.groups,
                registration=self.registration,
            ),
            ConsumerManageProcessor(
                self.role,
                topics=self.topics,
                groups=self.groups,
                offsets=self.offsets,
                clients=self.clients,
                tiered=self.tiered,
            ),
            QueueRangeProcessor(self.tiered),
            LockBatchProcessor(config.broker_name, self.locks, topics=self.topics, groups=self.groups),
            PopMessageProcessor(
                config,
                clock,
                self.life,
                checks=pop_checks,
                service=self.pop_service,
                polling=self.polling,
                guard=self.guard,
                replication=self._replication,
                log_end=self._log_end,
            ),
            PeekMessageProcessor(
                config,
                clock,
                self.life,
                topics=self.topics,
                checks=pop_checks,
                service=self.pop_service,
                polling=self.polling,
                guard=self.guard,
            ),
            PopAckProcessor(clock, topics=self.topics, tiered=self.tiered, pops=self.pops, polling=self.polling),
            QueryAssignmentProcessor(
                config.broker_name,
                modes=self.modes,
                topics=self.topics,
                groups=self.groups,
                clients=self.clients,
                name_servers=self.name_servers,
                settled=self.intake.settled,
            ),
            QueryMessageProcessor(clock, self.tiered, self.store),
            transactions,
            RecallMessageProcessor(self.intake, config, clock, topics=self.topics),
            ReplyMessageProcessor(self.intake, self.clients, config, clock, address=self.address),
            topics,
            AdminGroupsProcessor(
                config,
                self.groups,
                self.topics,
                GroupDeletion(journal=self.journal, groups=self.groups, offsets=self.offsets, pops=self.pops),
                self.intake.settled,
                register_soon=self.registration.soon,
            ),
            AdminConfigProcessor(config, self.kept, self.topics),
            AdminStatsProcessor(
                config.broker_name,
                self.address,
                topics=self.topics,
                groups=self.groups,
                offsets=self.offsets,
                clients=self.clients,
                stats=self.stats,
                queue_stats=QueueStats(self.tiered, self.offsets),
                tiers=TopicTiers(lambda: None if self.archive.journal is None else self.archive.journal.catalog),
            ),
            AdminConnectionsProcessor(self.clients, self.offsets, self.address),
            RuntimeInfoProcessor(
                clock,
                self.store,
                self.schedule,
                self.totals,
                used_ratio=self._used_ratio,
                conditions=lambda: self.conditions.now(),  # noqa: PLW0108 - created by the start
                waiting=lambda: {"timersWaiting": len(self.timers), "transactionsWaiting": len(self.transactions)},
            ),
            offsets,
            ResetOffsetProcessor(
                config.broker_name,
                topics=self.topics,
                groups=self.groups,
                offsets=self.offsets,
                tiered=self.tiered,
                pops=self.pops,
                arriving=self.arriving,
                settled=self.intake.settled,
            ),
            AdminRelayProcessor(config.broker_name, self.clients, self.tiered, topics=self.topics, groups=self.groups),
            AdminInspectProcessor(self.store, self.topics, self.clients, self.stats),
            SlavePollsProcessor(
                self.metadata, topics, offsets, self.guard, leads_in=self._leads_in, frontier=self._frontier
            ),
            BrokerSetProcessor(
                self.store,
                self.replicas,
                self.plain_slave,
                cluster=config.broker_cluster_name,
                name=config.broker_name,
                address=self.address,
            ),
        )

    def _leads_in(self) -> int | None:
        return None if self.replicas is None else self.replicas.term.leads_in

    def _frontier_told(self, frontier: int) -> None:
        if self._set_pins is not None:
            self._set_pins.told(frontier)

    def _frontier(self) -> int:
        return 0 if self._set_pins is None else self._set_pins.frontier()

    # -- start

    @property
    def starting(self) -> Sequence[Step]:
        """Return the steps of a start. A step that fails leaves nothing of its own behind."""
        run = self._threads.run
        return (
            Step("free ports", self._check_ports),
            Step("directory", self._check_directory),
            Step("promotion", self._check_promotion),
            Step("log", lambda: run(self._open_log), lambda: run(self.store.shutdown)),
            Step("tables", lambda: run(self._load_tables)),
            Step("archive", self._open_archive, lambda: self.archive.shutdown()),  # noqa: PLW0108 - created by the step
            Step("positions", self._settle_positions),
            Step("ports", self._listen, self._close_ports),
            *([] if self.replicas is None else [Step("HA port", self.replicas.start, self._leave_set)]),
            Step("tasks", self._start_tasks, self._supervisor.stop),
            Step("name servers", self.registration.now),
            Step("jobs", self._start_jobs),
        )

    async def take_in(self, importing: StoreImport, api: Api) -> Report:
        """Import an Apache broker's directory, in place of a start. The configuration is a slave's.

        The next start as master is its promotion. Raise StartupError; an import that has begun can be resumed. `api`
        checks that the Apache broker has stopped before anything is written. Messages that it accepted later would be
        in no copy.
        """
        run, store = self._threads.run, self.store
        await run(importing.look)
        own = self.config.broker_name, "{}:{}".format(*self.address)
        await refuse_present(api, importing.master(), own, self.config.name_servers)
        await run(importing.begin)
        await run(check_directory, self.config, self._disk)
        try:
            await run(recover_log, self.config, store, following=True)
            await run(load_all, (*self._tables, self.metadata, self.last_poll))
            await importing.copy(store, self.flusher)
            await importing.take_tables(store, self.metadata, self.last_poll, self.persistence)
            return await run(importing.finish, store)
        finally:
            await run(store.shutdown)

    async def start(self) -> None:
        """Start all parts. Raise StartupError with a text for the operator; then nothing is left running or locked."""
        async with contextlib.AsyncExitStack() as undo:
            for step in self.starting:
                await step.do()
                if step.undo is not None:
                    undo.push_async_callback(step.undo)
            undo.pop_all()
        log.info("broker %s of neve %s serves %s:%d", self.config.broker_name, version("neve"), *self.address)
        if not self.config.name_servers:
            log.warning("namesrvAddr is empty: clients find no route to this broker, they reach it by its address only")

    async def _check_ports(self) -> None:
        self._machine.check_port(self.config.bind_address, self.config.listen_port, "port")
        self._machine.check_port("127.0.0.1", max(self.config.admin_port, 0), "adminPort")
        if self.replicas is not None:
            self._machine.check_port(self.config.bind_address, self._ha_port, "haListenPort")
        if self._exports:
            self.config.metrics_labels  # noqa: B018 - raises now if they are invalid
            host = self.config.metrics_prom_exporter_host or self.address[0]
            self._machine.check_port(host, self.config.metrics_prom_exporter_port, "metricsPromExporterPort")

    @property
    def _exports(self) -> bool:
        return self.config.metrics_exporter_type == "PROM"

    async def _check_directory(self) -> None:
        if self._restore is not None:
            await self._threads.run(self._restore.begin)
        else:
            refuse_unfinished(self.config, self._disk)
            refuse_unfinished_import(self.config, self._disk)
        await self._threads.run(check_directory, self.config, self._disk)
        for name in _PRIVATE:  # new directories are private already; this one may be older or copied
            if self._disk.exists(self.config.root / name):
                self._disk.make_private(self.config.root / name)

    async def _check_promotion(self) -> None:
        """Check whether a slave's directory is started as a single broker: then it is promoted."""
        config = self.config
        if self.plain_slave is None and self.replicas is None and self.promotion.is_due:
            own = config.broker_cluster_name, config.broker_name, "{}:{}".format(*self.address)
            await self.promotion.check(MasterApi(config), own, config.name_servers)
            self._promotes = True

    def _open_log(self) -> None:
        """Recover the log. If that fails, nothing stays locked."""
        try:
            self._recover_log()
        except BaseException:
            self.store.shutdown()
            raise

    def _recover_log(self) -> None:
        replicas, slave = self.replicas, self.plain_slave
        if slave is not None:
            refuse_members(self.config, self._disk)
            slave.load()
            recover_log(self.config, self.store, following=True)
            self.promotion.take_back()
            slave.begin()
        elif replicas is None:
            refuse_members(self.config, self._disk)
            recover_log(self.config, self.store, following=self._promotes)
            if self._promotes:
                self.promotion.begin()
        else:
            refuse_slaves(self._disk, self.config.root)
            recover_log(self.config, self.store, confirmed=replicas.life.load())
            replicas.life.begin()

    def _load_tables(self) -> None:
        # Messages that wait in an Apache master's log are in RocketMQ's form, and the master delivers them, as in a
        # set.
        load_all((*self._tables, self.metadata, *((self.last_poll,) if self.plain_slave is not None else ())))
        if self._promotes:
            self.promotion.run()
        if self.plain_slave is None and self.replicas is None:
            load_all((self.timers, self.transactions))
        add_system_tables(self.config, self.topics, self.groups)

    async def _open_archive(self) -> None:
        """Open the archive, which may restore its contents."""
        promotion = self.promotion if self._promotes else None
        try:
            self.archive = await open_archive(
                self._local_side,
                self._restore,
                cold_groups=self._descriptors.cold_groups,
                promote=None if promotion is None else promotion.finish,
            )
        except StartupError as error:
            if promotion is not None and promotion.is_due:  # the promotion is not final, and the slave may continue
                raise refused(str(error), error.exit_code) from error
            raise
        if self.archive.reader is not None:
            self.tiered.attach(self.archive.reader)
        self.conditions = Conditions(
            self.clock,
            self.life,
            self.archive,
            name_servers=self.name_servers,
            replicas=self.replicas,
            plain_slave=self.plain_slave,
            certificate=self.server.certificate,
        )

    async def _settle_positions(self) -> None:
        """Settle positions that depend on log and archive: clip committed offsets, then load popped messages."""
        if self.replicas is not None:  # before it is master, its log may be confirmed further: no offset is clipped
            load_all((self.pops,))
            return
        if self.plain_slave is not None:
            return
        for line in self.offsets.clip(self.store.max_offset):
            log.warning("group offset above the end of its queue: %s", line)
        load_all((self.pops,))
        self.metadata.settle()

    async def _listen(self) -> None:
        try:
            await self.server.start()
            assert self.server.port == self.address[1], "records and ids carry another port"
            await self._listen_vip(self.address[1] - _VIP_OFFSET)
            if self.config.admin_port >= 0:
                self._register_pages()
                await self._threads.run(self._admin_token.renew)
                self.admin_address = await self._admin.start()
                self.config.admin_port = self.admin_address[1]  # clients of the configuration find the port here
            if self._exports:
                self._register_export()
                self.metrics_address = await self._exporter.start()
            elif self.config.metrics_exporter_type != "DISABLE":
                log.warning(
                    "metricsExporterType=%s: nothing is pushed here, PROM is", self.config.metrics_exporter_type
                )
        except BaseException as error:
            await self._close_ports()
            if isinstance(error, OSError):
                raise StartupError(f"can't listen: {error.strerror or error}", EXIT_IN_USE) from error
            raise

    async def _close_ports(self) -> None:
        """Close all ports, after a failed start."""
        await self.server.shutdown()
        await self._close_pages()

    async def _close_pages(self) -> None:
        await self._admin.shutdown()
        await self._exporter.shutdown()

    async def _hand_over(self) -> None:
        """Switch over to another member before the stop, so that no client waits for a timeout."""
        assert self.replicas is not None
        if not self.replicas.role.leads:
            return
        try:
            await self.replicas.switch_over()
        except SwitchoverRefused as error:
            log.info("the set elects another master when this one is gone: %s", error)

    async def _leave_set(self) -> None:
        if self.replicas is not None:
            await self.replicas.shutdown()

    async def _listen_vip(self, port: int) -> None:
        """Listen on the port of old clients. Only log a failure: another broker of this machine may use the port."""
        try:
            await self.server.listen(port)
        except OSError as error:
            log.warning("VIP port %d: %s", port, error.strerror or error)

    def _register_export(self) -> None:
        exported = RocketmqMetrics(
            self.config,
            self.clock,
            stats=self.stats,
            store=self.store,
            tiered=self.tiered,
            topics=self.topics,
            groups=self.groups,
            offsets=self.offsets,
            clients=self.clients,
            pops=self.pops,
            retry_names=self.retry_names,
            topic_metrics=self.topic_metrics,
            sends=self.intake.latency,
            pulls=self.pull_latency,
            transactions=self._ended,
            waiting=Waiting(
                timers=lambda: len(self.timers),
                pulls=lambda: self.backlog_turns.waiting,
                revived=lambda: self.revive.revived,
            ),
            used_bytes=lambda: self._disk.room(self.config.root).used,
        )
        page = MetricsPage(exported.take, functools.partial(Pace, self.clock, self._threads, SCRAPE_SHARE))
        self._exporter.on_shutdown(page.close)
        self._exporter.route("GET", "/metrics", page.show, at_once=2)

    def _register_pages(self) -> None:
        metrics, archive = self.metrics, self.archive
        pages = AdminPages(
            self.config,
            self.life,
            archive,
            metrics=metrics,
            topic_metrics=self.topic_metrics,
            health=self.health,
            conditions=self.conditions,
            pace=functools.partial(Pace, self.clock, self._threads),
            clock=self.clock,
            replicas=self.replicas,
        )
        register_pages(self._admin, pages)
        broker_metrics.register_traffic(metrics, self.totals, self.intake, self.stats)
        broker_metrics.register_latencies(metrics, self.intake.latency, self.pull_latency)
        server_pages.register_guard(metrics, self.guard)
        broker_metrics.register_conditions(metrics, self.conditions)
        broker_metrics.register_groups(metrics, self.offsets, self.pops, self.revive)
        server_pages.register_server(metrics, self.server)
        broker_metrics.register_clients(
            metrics, self.clients, self.locks, self.hold, self.backlog_turns, self.name_servers
        )
        broker_metrics.register_store(metrics, self.store, self.flusher, self.topics, self._used_ratio)
        broker_metrics.register_replication(metrics, self.group_transfer)
        broker_metrics.register_set(metrics, self.role, self.replicas)
        broker_metrics.register_following(metrics, self._following, self.synchronize)
        broker_metrics.register_followed(metrics, archive)
        self.tiered.register_metrics(metrics)
        broker_metrics.register_tasks(metrics, self.health, self.faults, archive, self.writer.internal.ignored.total)
        broker_metrics.register_archive(metrics, archive, self.conditions)

    async def _start_tasks(self) -> None:
        every, config = self._supervisor.every, self.config
        self.store.tell(self.arriving.appended)
        self._supervisor.vital("flush", self.flusher.run, self._flusher_ended)
        self._supervisor.keep("register", self.registration.keep)
        every("schedule", _SCHEDULE_PERIOD, self._deliver_delayed)
        every("timers", _SCHEDULE_PERIOD, self._deliver_timers)
        every("held-pulls", _TICK, self.hold.check_deadlines)
        every("flush-deadlines", _TICK, self.flusher.check_deadlines)
        if self.group_transfer is not None:
            every("slave-deadlines", _SLAVE_DEADLINES, self.group_transfer.check_deadlines)
        if self.synchronize is not None:
            self._supervisor.keep("synchronize", self.synchronize.run)
        if self.replicas is not None:
            self._supervisor.keep("broker-set", self.replicas.run)
            every("broker-set-tick", TICK_S, self.replicas.tick, first_s=0.0)
            every("follow-pops", _TICK, self.change_of_role.follow_pops)
        if self.plain_slave is not None:
            self._supervisor.keep("follow-master", self.plain_slave.run)
            every("slave", _TICK, self.plain_slave.tick)
            if config.store_url:
                every("look-at-master", _LOOK_AT_MASTER, self.plain_slave.look)
        every("disk-mark", _TICK, self._disk_mark.look)
        every("conditions", _TICK, self.conditions.look)
        every("totals", _TICK, self.totals.sample)
        every("stats", _TICK, self.stats.sample)
        every("pop-revive", _REVIVE_PERIOD, self.revive.run_due)
        every("idle-pop-queues", _IDLE_POPS, self.pops.drop_idle)
        every("check-back", config.transaction_check_interval / 1000, self.check_back.run)
        every("prepare-log", _TICK, functools.partial(self._threads.run, self._prepare_log))
        every("clients", _CLIENT_SCAN, self.clients.expire)
        every("queue-locks", _CLIENT_SCAN, self.locks.expire)
        every("register-period", config.register_name_server_period / 1000, self.registration.now)
        every("persist", config.flush_consumer_offset_interval / 1000, self.persistence.run)
        self.life.started()

    async def _start_jobs(self) -> None:
        self.archive.start_jobs()

    def _deliver_delayed(self) -> None:
        if self.life.accepting and self.schedule.deliver_due():
            self.flusher.sync_soon()

    def _deliver_timers(self) -> None:
        if self.life.accepting and self.timers.deliver_due():
            self.flusher.sync_soon()

    def _prepare_log(self) -> None:
        try:
            self.store.prepare_next()
        except StoreFull as error:
            log.warning("no room for the next log file: %s", error)

    def _flusher_ended(self, error: BaseException | None) -> None:
        self.flusher.fail(error or RuntimeError("the flusher ended"))

    # -- stop

    def stop(self) -> None:
        """Request a clean stop, which `shutdown` does."""
        self.life.ask_to_end()

    @property
    def _stopping(self) -> Sequence[StopStep]:
        """Return the steps of a stop. A step that fails or hangs does not prevent the others."""
        run, synced, alone = self._threads.run, frozenset({_SYNC_FAILED}), frozenset({_LEFT_BEHIND})
        return (
            *([] if self.replicas is None else [StopStep("hand over", self._hand_over)]),
            StopStep("name servers", self.registration.take_back),
            StopStep("archive", self.archive.shutdown),
            StopStep("tables", self.persistence.run, synced),
            StopStep("flush", self.flusher.flush_now, synced),
            *([] if self.replicas is None else [StopStep("broker set", self._leave_set)]),
            StopStep("connections", self.server.shutdown),
            StopStep("tasks", self._supervisor.stop),
            StopStep("last state", self.archive.write_last_state, synced | alone),
            StopStep("pages", self._close_pages),
            StopStep("reads", self._close_reads),
            StopStep("flusher", lambda: run(self.flusher.close), alone),
            StopStep("store", lambda: run(self._close_store), alone),
        )

    def _close_store(self) -> None:
        store, replicas = self.store, self.replicas
        if replicas is not None and store.failed is None:
            store.after_flush(store.flush())
            if store.flushed_offset == store.max_physical_offset:
                replicas.life.end()
        store.shutdown()

    async def _close_reads(self) -> None:
        self.tiered.close()

    async def shutdown(self) -> None:
        """Stop within a bounded time, even if steps fail or hang. The next start recovers the rest as after a crash."""
        steps = self._stopping
        stop = Stop("broker", _STOP_S)
        self.life.stop()
        self.server.stop_accepting()
        self.arriving.release_all()
        for step in steps:
            now = {
                *({_SYNC_FAILED} if self.flusher.failed else ()),
                *({_LEFT_BEHIND} if stop.left_behind else ()),
            }
            if not now & step.unless:
                await stop.step(step.name, step.do())
        self.left_behind = stop.left_behind
        if self.left_behind:
            self.life.exit_code = self.life.exit_code or EXIT_FAILED
        log.info("broker %s stopped", self.config.broker_name)
