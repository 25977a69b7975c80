"""Sixth phase: the parts that serve clients: reads, long polling, pops, transactions and the intake of messages."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

from broker.broker_stats import BrokerStats
from broker.clients.broker_outer_api import BrokerOuterApi
from broker.clients.client_manager import ClientManager
from broker.clients.consumer_ids_change import ConsumerIdsChangeListener
from broker.clients.rebalance_lock import RebalanceLock
from broker.intake.disk_mark import DiskMark
from broker.intake.intake import Intake
from broker.intake.message_stamp import MessageStamp
from broker.long_polling.message_arriving import MessageArriving
from broker.long_polling.pull_request_hold import PullRequestHold
from broker.pop.pop_consumer_service import PopConsumerService
from broker.pop.pop_retry_topics import PopRetryTopics
from broker.pop.revive import PopRevive
from broker.reading.backlog_turns import BacklogTurns
from broker.reading.tiered_store import TieredStore
from broker.stats.totals import Totals
from broker.waiting.check_back import CheckBack, ProducerQuestions
from broker.wiring.archive import ArchiveParts
from broker.wiring.messages import MessageParts
from broker.wiring.runtime import Runtime
from broker.wiring.storage import Storage
from broker.wiring.tables import BrokerTables
from infra.observe.metrics import LATENCIES, Histogram
from neve.entropy import salt, system_entropy
from neve.record.ids import UniqueIdGenerator


@dataclass(frozen=True, kw_only=True)
class Service:
    """Parts behind the requests of clients."""

    name_servers: BrokerOuterApi
    #: Set to request a registration at the name servers.
    registration_requested: asyncio.Event
    clients: ClientManager
    locks: RebalanceLock
    stats: BrokerStats
    tiered: TieredStore
    hold: PullRequestHold
    backlog_turns: BacklogTurns
    #: Latency of pulls that found messages, from the start of the read to the answer.
    pull_latency: Histogram
    arriving: MessageArriving
    pop_service: PopConsumerService
    revive: PopRevive
    check_back: CheckBack
    intake: Intake
    totals: Totals
    disk_mark: DiskMark


def make_service(
    runtime: Runtime, storage: Storage, tables: BrokerTables, messages: MessageParts, archive: ArchiveParts
) -> Service:
    """Create the parts."""
    config, clock, faults = runtime.config, runtime.clock, runtime.faults
    registration_requested = asyncio.Event()
    register_soon = registration_requested.set
    clients = ClientManager(clock, ConsumerIdsChangeListener(tables.groups).changed, lambda: config.max_client_bytes)
    stats = BrokerStats(clock, sized=runtime.exports)
    tiered = TieredStore(storage.store, config)
    hold = PullRequestHold(clock, config.max_held_pulls, faults)
    intake = _make_intake(runtime, storage, tables, messages=messages, stats=stats, register_soon=register_soon)
    return Service(
        name_servers=_make_name_servers(runtime, storage, archive),
        registration_requested=registration_requested,
        clients=clients,
        locks=RebalanceLock(clock, lambda: config.max_queue_locks),
        stats=stats,
        tiered=tiered,
        hold=hold,
        backlog_turns=BacklogTurns(),
        pull_latency=Histogram(LATENCIES),
        arriving=MessageArriving(hold, messages.polling, faults),
        pop_service=PopConsumerService(
            clock,
            config.broker_name,
            tiered=tiered,
            pops=messages.pops,
            offsets=tables.offsets,
            retry_names=tables.retry_names,
            polling=messages.polling,
            on_handed_out=stats.got,
        ),
        revive=_make_revive(runtime, storage, tables, messages=messages, tiered=tiered, register_soon=register_soon),
        check_back=CheckBack(
            config,
            clock,
            runtime.life,
            faults,
            archive.opened.trusted_ms,
            transactions=messages.transactions,
            store=storage.store,
            writer=storage.writer,
            producers=ProducerQuestions(clients, tables.guard, broker_name=config.broker_name, address=runtime.address),
            topics=tables.topics,
            register_soon=register_soon,
        ),
        intake=intake,
        totals=Totals(clock, intake, stats),
        disk_mark=DiskMark(config, runtime.used_ratio, runtime.life),
    )


def _make_name_servers(runtime: Runtime, storage: Storage, archive: ArchiveParts) -> BrokerOuterApi:
    membership, slave = storage.membership, archive.plain_slave
    return BrokerOuterApi(
        runtime.config,
        runtime.address,
        ha_service=None if membership is None else membership.ha_service,
        on_master=None if slave is None else slave.master_is,
    )


def _make_revive(
    runtime: Runtime,
    storage: Storage,
    tables: BrokerTables,
    *,
    messages: MessageParts,
    tiered: TieredStore,
    register_soon: Callable[[], None],
) -> PopRevive:
    return PopRevive(
        runtime.clock,
        runtime.life,
        runtime.faults,
        runtime.supervisor.spawn,
        tiered=tiered,
        pops=messages.pops,
        polling=messages.polling,
        topics=tables.topics,
        groups=tables.groups,
        retries=PopRetryTopics(
            storage.writer,
            tables.retry_names,
            tables.topics,
            register_soon=register_soon,
            sync_soon=storage.flusher.sync_soon,
            store_host=runtime.address,
        ),
    )


def _make_intake(
    runtime: Runtime,
    storage: Storage,
    tables: BrokerTables,
    *,
    messages: MessageParts,
    stats: BrokerStats,
    register_soon: Callable[[], None],
) -> Intake:
    config, clock, address = runtime.config, runtime.clock, runtime.address
    unique_ids = UniqueIdGenerator(address[0], os.getpid(), salt(system_entropy), clock.now_ms())
    return Intake(
        config,
        clock,
        runtime.life,
        runtime.role,
        writer=storage.writer,
        topics=tables.topics,
        register_soon=register_soon,
        stats=stats,
        half_messages=messages.transactions,
        held_messages=(messages.schedule, messages.timers),
        stamp=MessageStamp(config.broker_cluster_name, address, unique_ids),
    )
