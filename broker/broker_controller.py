"""The broker put together: parts made by hand, started and stopped in order.

start:  directory, log recovery, tables → archive → ports → tasks → name servers → accepting
stop:   accepting off → ports → held pulls answered → jobs → flush, tables → last state → log → name servers
"""

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Callable

from access.wiring import guarded, make_guard
from broker import rocketmqs_store
from broker.archiving.archive import AnyArchive, open_archive
from broker.archiving.deletion import TopicDeletion
from broker.archiving.local_side import LocalSide
from broker.archiving.pins import Pins, WaitingMessages
from broker.archiving.restore import Restore, refuse_unfinished
from broker.archiving.state import Tables
from broker.broker_context import BrokerContext
from broker.clients.broker_outer_api import BrokerOuterApi
from broker.clients.client_manager import ClientManager
from broker.clients.consumer_ids_change import ConsumerIdsChangeListener
from broker.clients.rebalance_lock import RebalanceLock
from broker.clients.registration import Registration
from broker.config import BrokerConfig
from broker.intake.disk_mark import DiskMark
from broker.intake.express_lane import ExpressSend
from broker.intake.flusher import Flusher
from broker.intake.intake import Intake
from broker.intake.log_writer import LogWriter
from broker.life import BrokerLife
from broker.long_polling.message_arriving import MessageArriving
from broker.long_polling.pop_long_polling import PopLongPolling
from broker.long_polling.pull_request_hold import PullRequestHold
from broker.machine import Machine
from broker.pop.assignment import RequestModes
from broker.pop.pop_book import PopBook, revive_log
from broker.pop.pop_consumer_service import PopConsumerService
from broker.pop.pop_retry_topics import PopRetryTopics
from broker.pop.revive import PopRevive
from broker.reading.tiered_store import TieredStore
from broker.requests.admin import AdminProcessor
from broker.requests.admin_inspect import AdminInspectProcessor
from broker.requests.admin_offsets import AdminOffsetsProcessor
from broker.requests.admin_relay import AdminRelayProcessor
from broker.requests.admin_stats import AdminStatsProcessor, Totals
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
from broker.requests.reply_message import ReplyMessageProcessor
from broker.requests.send_back import SendBackProcessor
from broker.requests.send_message import SendMessageProcessor
from broker.requests.table import Processors
from broker.stats.admin_pages import register_pages
from broker.stats.broker_stats import BrokerStats
from broker.store.config import StoreConfig
from broker.store.errors import StoreError, StoreFull, StoreLocked
from broker.store.message_store import MessageStore
from broker.tables import topic_config_manager
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.retry_names import RetryNames
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from broker.waiting.check_back import CheckBack
from broker.waiting.half_messages import HalfMessages
from broker.waiting.schedule_message import ScheduleMessage, parse_levels
from broker.waiting.timer_message import TimerMessages, code_of_entry
from infra.admin_http import AdminHttp
from infra.descriptors import budget, mappings_limit
from infra.metrics import Metrics
from infra.remoting_limits import RemotingLimits
from infra.remoting_server import RemotingServer
from infra.request_router import RequestRouter
from infra.startup import (
    EXIT_CONFIG,
    EXIT_DISK,
    EXIT_FAILED,
    EXIT_IN_USE,
    StartupError,
    free_port,
    local_address,
    open_files_limit,
)
from infra.supervisor import HANGING_S, Faults, Stop, Supervisor, Trouble
from infra.tls import server_tls
from lifecycle.scheduler import KNOWN_FAILURES
from neve.entropy import salt, system_entropy
from neve.record.ids import UniqueIdGenerator

log = logging.getLogger(__name__)

_TICK = 1.0
_REVIVE_PERIOD = 0.5
_SCHEDULE_PERIOD = 0.1
_CLIENT_SCAN = 10.0
_VIP_OFFSET = 2
# A checkpoint syncs each queue that was written to: tens of thousands of files on a slow disk.
_HANGING_UPKEEP_S = 600.0
# What each step of a stop may take; together, where one hangs, less than the 120 s that conf/neve-broker.service gives.
_STOP_S = {
    "name servers": 15.0, "archive": 45.0, "tables": 10.0, "flush": 10.0, "connections": 5.0, "tasks": 10.0,
    "last state": 15.0, "flusher": 10.0, "store": 30.0,
}  # fmt: skip
# A log file, its successor and the first queue files must fit.
_MIN_FREE_FILES = 2


class BrokerController:
    """The broker put together: makes every part, starts them in order, stops them in reverse (RocketMQ's
    BrokerController).

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
    ) -> None:
        """`store_config` makes the store's settings out of what the configuration says of them.

        `pins`: what keeps segments of the log in place of the messages in waiting.
        """
        clock, disk = machine.clock, machine.disk
        self.config, self._machine, self._clock, self._disk, self._restore = config, machine, clock, disk, restore
        self._threads, self._store_config = machine.outside.threads, store_config
        # Records and ids carry the port: it has to be known before the log is opened.
        config.listen_port = config.listen_port or free_port(config.bind_address)
        self.metrics = Metrics()
        # What did not end when the broker stopped; its threads would keep the process.
        self.left_behind: list[str] = []
        self._supervisor = Supervisor("broker")
        self.faults = Faults()
        self.life = BrokerLife(clock)
        self._descriptors = budget(open_files_limit(), mappings_limit())
        # The address that clients dial.
        self.address = (self._own_host(), config.listen_port)
        self.context = self._make_context()
        context = self.context
        self.pop_service = PopConsumerService(
            clock,
            config.broker_name,
            tiered=context.tiered,
            pops=context.pops,
            offsets=context.offsets,
            retry_names=context.retry_names,
            polling=context.polling,
            on_handed_out=context.stats.got,
        )
        self.revive = PopRevive(
            clock,
            self.life,
            self.faults,
            self._supervisor.spawn,
            tiered=context.tiered,
            pops=context.pops,
            polling=context.polling,
            topics=context.topics,
            groups=context.groups,
            retries=PopRetryTopics(
                context.writer, context.retry_names, context.topics, self.registration.soon, self.address
            ),
        )
        self._local_side = LocalSide(
            config,
            context.store,
            context.flusher,
            Tables(context.topics, context.groups, context.offsets),
            pins or WaitingMessages(context.schedule, context.timers, context.transactions, context.pops),
            clock,
            disk,
            machine.outside,
        )
        self.archive: AnyArchive  # from the start on, once the log is recovered
        self.topic_deletion = TopicDeletion(
            store=context.store,
            tombstones=lambda: self.archive.tombstones,
            topics=context.topics,
            groups=context.groups,
            offsets=context.offsets,
            retry_names=context.retry_names,
            pops=context.pops,
            arriving=context.arriving,
            registration=self.registration,
        )
        self.intake = Intake(
            config,
            clock,
            self.life,
            writer=context.writer,
            flusher=context.flusher,
            topics=context.topics,
            registration=self.registration,
            stats=context.stats,
            half_messages=context.transactions,
            waiting_rooms=(context.schedule, context.timers),
            unique_ids=self._ids(),
            address=self.address,
        )
        self.totals = Totals(context, self.intake)
        self._disk_mark = DiskMark(config, self.totals.disk_ratio, self.life)
        self.router = RequestRouter()
        self._make_processors().register_on(self.router)
        limits = RemotingLimits(
            max_connections=config.max_connections,
            max_unfinished=config.max_unfinished_bytes,
            backlog=self._descriptors.accepts,
        )
        self.server = RemotingServer(
            guarded(self.router, self.guard),
            reads=self.router.reads,
            express=self.router.express,
            host=config.bind_address,
            port=config.listen_port,
            limits=limits,
            room=self._connections_room,
            tls=server_tls(config.tls_server_mode, config.tls_cert_path, config.tls_key_path),
        )
        self._admin = AdminHttp(port=max(config.admin_port, 0), expected=KNOWN_FAILURES)
        self.admin_address: tuple[str, int] | None = None

    def _own_host(self) -> str:
        config = self.config
        peer = config.name_servers[0].rpartition(":")[0] if config.name_servers else None
        return config.broker_ip1 or local_address(peer)

    def _ids(self) -> UniqueIdGenerator:
        return UniqueIdGenerator(self.address[0], os.getpid(), salt(system_entropy), self._clock.now_ms())

    def _make_processors(self) -> Processors:
        config, clock, context, intake = self.config, self._clock, self.context, self.intake
        topics, groups, offsets, clients = context.topics, context.groups, context.offsets, context.clients
        pop_checks = PopChecks(
            config,
            clock,
            self.life,
            topics=topics,
            groups=groups,
            retry_names=context.retry_names,
            service=self.pop_service,
        )
        return Processors(
            sender=SendMessageProcessor(
                intake,
                groups=groups,
                locks=context.locks,
                retry_names=context.retry_names,
                broker_name=config.broker_name,
            ),
            send_back=SendBackProcessor(
                intake, context.tiered, groups=groups, guard=self.guard, stats=context.stats, address=self.address
            ),
            express=ExpressSend(
                intake,
                context.writer,
                config,
                clock,
                topics=topics,
                stats=context.stats,
                signed_sends=self.guard.signed_sends,
                address=self.address,
            ),
            puller=PullMessageProcessor(
                config,
                clock,
                tiered=context.tiered,
                hold=context.hold,
                topics=topics,
                groups=groups,
                clients=clients,
                offsets=offsets,
                stats=context.stats,
                guard=self.guard,
            ),
            clients=ClientManageProcessor(
                config, clock, clients=clients, topics=topics, groups=groups, registration=self.registration
            ),
            consumers=ConsumerManageProcessor(
                topics=topics, groups=groups, offsets=offsets, clients=clients, tiered=context.tiered
            ),
            ranges=QueueRangeProcessor(context.tiered),
            locks=LockBatchProcessor(config.broker_name, context.locks, topics=topics, groups=groups),
            popper=PopMessageProcessor(
                config,
                clock,
                self.life,
                checks=pop_checks,
                service=self.pop_service,
                polling=context.polling,
                guard=self.guard,
            ),
            peeker=PeekMessageProcessor(
                config,
                clock,
                self.life,
                topics=topics,
                checks=pop_checks,
                service=self.pop_service,
                polling=context.polling,
                guard=self.guard,
            ),
            pop_acks=PopAckProcessor(
                clock, topics=topics, tiered=context.tiered, pops=context.pops, polling=context.polling
            ),
            assignment=QueryAssignmentProcessor(
                config.broker_name,
                modes=context.modes,
                topics=topics,
                groups=groups,
                clients=clients,
                name_servers=self.name_servers,
            ),
            query=QueryMessageProcessor(clock, context.tiered, context.store),
            transactions=EndTransactionProcessor(
                intake,
                context.transactions,
                context.store,
                context.tiered,
                clock=clock,
                topics=topics,
                guard=self.guard,
            ),
            recall=RecallMessageProcessor(intake, config, clock, topics=topics),
            replies=ReplyMessageProcessor(intake, clients, config, clock, address=self.address),
            admin=AdminProcessor(context, self.topic_deletion),
            stats=AdminStatsProcessor(context, self.totals),
            offsets=AdminOffsetsProcessor(context),
            relay=AdminRelayProcessor(context),
            inspect=AdminInspectProcessor(context),
        )

    def _make_context(self) -> BrokerContext:
        config, clock, disk, threads = self.config, self._clock, self._disk, self._threads
        root = config.root
        store = self._make_store()
        writer = LogWriter(store)
        tables = root / "config"
        flusher = Flusher(
            store,
            clock,
            interval_ms=lambda: config.flush_interval_commit_log,
            on_failure=self.life.sync_failed,
            faults=self.faults,
            threads=threads,
        )
        sync_log, revives = flusher.flush_now, revive_log(config.broker_cluster_name)
        offsets = ConsumerOffsetManager(disk, tables / "consumerOffset.json", sync_log, threads)
        topics = TopicConfigManager(disk, tables / "topics.json", clock, lambda: config.max_topics, threads=threads)
        groups = SubscriptionGroupManager(
            disk,
            tables / "subscriptionGroup.json",
            clock,
            lambda: config.max_groups,
            auto_create=lambda: config.auto_create_subscription_group,
            threads=threads,
        )
        retry_names = RetryNames(topics.topics, groups.groups, offsets.stands, lambda: config.enable_retry_topic_v2)
        self.guard = make_guard(
            config,
            tables / "auth" / "auth.json",
            disk,
            cluster=config.broker_cluster_name,
            retry_owners=retry_names.owners,
        )
        self.name_servers = BrokerOuterApi(config, self.address)
        self.registration = Registration(self.name_servers, topics)
        members_changed = ConsumerIdsChangeListener(groups).changed
        hold, polling = PullRequestHold(clock, config.max_held_pulls, self.faults), PopLongPolling()
        context = BrokerContext(
            config=config,
            clock=clock,
            metrics=self.metrics,
            faults=self.faults,
            root=root,
            store=store,
            tiered=TieredStore(store, config),
            writer=writer,
            flusher=flusher,
            topics=topics,
            groups=groups,
            offsets=offsets,
            pops=PopBook(store, writer, offsets, clock, disk, tables / "popState.json", revives, sync_log, threads),
            polling=polling,
            retry_names=retry_names,
            modes=RequestModes(disk, tables / "messageRequestMode.json", threads),
            clients=ClientManager(clock, members_changed, lambda: config.max_client_bytes),
            locks=RebalanceLock(clock, lambda: config.max_queue_locks),
            hold=hold,
            arriving=MessageArriving(hold, polling, self.faults),
            schedule=ScheduleMessage(
                store,
                writer,
                clock,
                parse_levels(config.message_delay_level),
                disk,
                tables / "delayOffset.json",
                sync_log,
                self.faults,
                threads,
            ),
            stats=BrokerStats(clock),
            timers=TimerMessages(
                store, writer, clock, config, lambda topic: topics.select(topic) is not None, self.faults
            ),
            transactions=HalfMessages(store, writer, clock),
            address=self.address,
            boot_ms=clock.now_ms(),
            life=self.life,
            registration=self.registration,
            guard=self.guard,
        )
        offsets.on_set = self._offset_set
        return context

    def unfinished_bytes(self) -> int:
        return self.server.unfinished.bytes

    def in_work_bytes(self) -> int:
        return self.server.in_work.bytes

    def _make_store(self) -> MessageStore:
        config = self.config
        return MessageStore(
            self._store_config(
                config.root,
                commit_log_file_size=config.mapped_file_size_commit_log,
                flush_disk_type=config.flush_disk_type,
                store_host=self.address,
                mapped_queue_files=self._descriptors.queue_files,
                code_of=code_of_entry,
            ),
            self._disk,
            self._clock,
            self._threads.lock,
        )

    # ---- start -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises StartupError with a text for the operator; nothing is left running or locked then."""
        await self.recover()
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._threads.run, self.context.store.shutdown)
            await self.open_archive()
            undo.push_async_callback(self.archive.shutdown)
            undo.push_async_callback(self.server.shutdown)
            self.settle()
            await self._listen()
            undo.pop_all()
        self.context.store.tell(self.context.arriving.appended)
        self._start_tasks()
        self.life.started()
        await self.registration.now()
        self.archive.start_jobs()
        log.info("broker %s serves %s:%d", self.config.broker_name, *self.address)
        if not self.config.name_servers:
            log.warning("namesrvAddr is empty: clients find no route to this broker, they reach it by its address only")

    async def recover(self) -> None:
        """What this machine has: the directory, the log, the tables. Raises StartupError; nothing is locked then."""
        self._machine.check_port(self.config.bind_address, self.config.listen_port, "port")
        self._machine.check_port("127.0.0.1", max(self.config.admin_port, 0), "adminPort")
        if self._restore is not None:
            await self._threads.run(self._restore.begin)
        else:
            refuse_unfinished(self.config, self._disk)
        await self._threads.run(self._check_disk)
        await self._threads.run(self._load)

    async def open_archive(self) -> None:
        """What the archive has besides, or a restore brings back. Raises StartupError."""
        self.archive = await open_archive(self._local_side, self._restore, cold_groups=self._descriptors.cold_groups)
        self.context.trusted_ms = self.archive.safe_clock.now_ms
        if self.archive.reader is not None:
            self.context.tiered.attach(self.archive.reader)

    def settle(self) -> None:
        """What follows from log and archive together: no position is above its queue's end, and what is popped."""
        for line in self.context.offsets.clip(self.context.store.max_offset):
            log.warning("group offset above the end of its queue: %s", line)
        self._load_pops()

    def _check_disk(self) -> None:
        root = self.context.root
        try:
            self._disk.make_dirs(root / "config")
        except OSError as error:
            raise StartupError(f"storePathRootDir={root}: {error.strerror or error}", EXIT_DISK) from error
        if (foreign := rocketmqs_store.refusal(self._disk, root)) is not None:
            raise StartupError(foreign, EXIT_CONFIG)
        needed = _MIN_FREE_FILES * self.config.mapped_file_size_commit_log
        free = self._disk.room(root).available
        if free < needed and not self._disk.exists(root / "commitlog"):
            raise StartupError(
                f"{root}: {free >> 20} MiB free, {needed >> 20} MiB needed; set mappedFileSizeCommitLog smaller",
                EXIT_DISK,
            )

    def _load(self) -> None:
        context = self.context
        try:
            report = context.store.load()
        except StoreLocked as error:
            raise StartupError(f"data directory {context.root} is in use by another broker", EXIT_IN_USE) from error
        except StoreFull as error:
            raise StartupError(f"{context.root}: {error}", EXIT_DISK) from error
        except (StoreError, OSError) as error:
            raise StartupError(f"{context.root}: {error}", EXIT_FAILED) from error
        log.info("log recovered: %s", report)
        try:
            for part in (context.topics, context.groups, context.offsets, context.schedule, context.modes):
                part.load()
            context.timers.load()
            context.transactions.load()
        except ValueError as error:
            context.store.shutdown()
            raise StartupError(str(error), EXIT_FAILED) from error
        config = self.config
        context.topics.ensure_system(
            topic_config_manager.system_topics(
                config.broker_name,
                config.broker_cluster_name,
                auto_create=config.auto_create_topic_enable,
                queues=config.default_topic_queue_nums,
                trace=config.trace_topic_enable,
            )
        )
        context.topics.file.save_now()
        context.groups.file.save_now()

    def _load_pops(self) -> None:
        try:
            self.context.pops.load()
        except ValueError as error:
            raise StartupError(str(error), EXIT_FAILED) from error

    async def _listen(self) -> None:
        try:
            await self.server.start()
            assert self.server.port == self.address[1], "records and ids carry another port"
            await self._listen_vip(self.address[1] - _VIP_OFFSET)
            if self.config.admin_port >= 0:
                register_pages(self._admin, self)
                self.admin_address = await self._admin.start()
                self.config.admin_port = self.admin_address[1]  # who asks for the configuration finds the port by it
        except OSError as error:
            raise StartupError(f"can't listen: {error.strerror or error}", EXIT_IN_USE) from error

    async def _listen_vip(self, port: int) -> None:
        """Only old clients use it; another broker on this machine may have taken it for its own."""
        try:
            await self.server.listen(port)
        except OSError as error:
            log.warning("VIP port %d: %s", port, error.strerror or error)

    def _start_tasks(self) -> None:
        every, context = self._supervisor.every, self.context
        self._supervisor.vital("flush", context.flusher.run(), self._flusher_ended)
        self._supervisor.keep("register", self.registration.keep)
        every("schedule", _SCHEDULE_PERIOD, self._deliver_delayed)
        every("timers", _SCHEDULE_PERIOD, self._deliver_timers)
        every("held-pulls", _TICK, context.hold.check_deadlines)
        every("flush-deadlines", _TICK, context.flusher.check_deadlines)
        every("disk-mark", _TICK, self._disk_mark.look)
        every("totals", _TICK, self.totals.sample)
        every("stats", _TICK, context.stats.sample)
        every("pop-revive", _REVIVE_PERIOD, self.revive.run_due)
        every("check-back", self.config.transaction_check_interval / 1000, CheckBack(context, context.writer).run)
        every("prepare-log", _TICK, functools.partial(self._threads.run, self._prepare_log))
        every("clients", _CLIENT_SCAN, context.clients.expire)
        every("queue-locks", _CLIENT_SCAN, context.locks.expire)
        every("register-period", self.config.register_name_server_period / 1000, self.registration.now)
        every("persist", self.config.flush_consumer_offset_interval / 1000, self._persist)

    # ---- running -----------------------------------------------------------------------------------------------

    def _deliver_delayed(self) -> None:
        if self.life.accepting:
            self.context.schedule.deliver_due()

    def _deliver_timers(self) -> None:
        if self.life.accepting:
            self.context.timers.deliver_due()

    def _prepare_log(self) -> None:
        try:
            self.context.store.prepare_next()
        except StoreFull as error:
            log.warning("no room for the next log file: %s", error)

    async def _persist(self) -> None:
        """All tables that changed, together: one sync of the log serves them; one that fails keeps back no other."""
        context = self.context
        files = (context.topics.file, context.groups.file, context.schedule.file, context.offsets.file)
        saves = [file.save() for file in files if file.dirty]
        if context.pops.dirty:
            saves.append(context.pops.save())
        results = await asyncio.gather(*saves, return_exceptions=True)
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            raise ExceptionGroup("tables that could not be saved", failures)

    def _offset_set(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        if self.context.pops.set_elsewhere(group, topic, queue_id, offset):
            self.context.polling.wake(group, topic, queue_id)

    def troubles(self) -> list[Trouble]:
        """What is wrong with the broker's own tasks."""
        found, flusher, now = self._supervisor.troubles(), self.context.flusher, self._clock.monotonic()
        for name, since, most in (
            ("flush", flusher.syncing_since, HANGING_S),
            ("upkeep", flusher.upkeep_since, _HANGING_UPKEEP_S),
        ):
            if since is not None and now - since > most:
                found.append(Trouble(name, "hanging", f"for {now - since:.0f} s"))
        return found

    def task_failures(self) -> int:
        return self._supervisor.failures.total()

    def _flusher_ended(self, error: BaseException | None) -> None:
        self.context.flusher.fail(error or RuntimeError("the flusher ended"))

    def _connections_room(self) -> int:
        """How many connections the process has descriptors for, beside its log."""
        return self._descriptors.connections(self.context.store.descriptors)

    # ---- stop --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask for a clean stop; `shutdown` does it."""
        self.life.ask_to_end()

    async def shutdown(self) -> None:
        """Ends in bounded time, whatever fails or hangs: what is left undone the next start does, as after a crash."""
        context, stop = self.context, Stop("broker", _STOP_S)
        self.life.stop()
        self.server.stop_accepting()
        context.arriving.release_all()
        await stop.step("name servers", self.registration.take_back())
        await stop.step("archive", self.archive.shutdown())
        if not context.flusher.failed:
            await stop.step("tables", self._persist())
            await stop.step("flush", context.flusher.flush_now())
        await stop.step("connections", self.server.shutdown())
        await stop.step("tasks", self._supervisor.stop())
        if not context.flusher.failed and not stop.left_behind:
            await stop.step("last state", self.archive.write_last_state())
        await self._admin.shutdown()
        context.tiered.close()
        if not stop.left_behind:
            await stop.step("flusher", self._threads.run(context.flusher.close))
        if not stop.left_behind:  # else something may still use it
            await stop.step("store", self._threads.run(context.store.shutdown))
        self.left_behind = stop.left_behind
        if self.left_behind:
            self.life.exit_code = self.life.exit_code or EXIT_FAILED
        log.info("broker %s stopped", self.config.broker_name)
