"""Processors of all requests."""

from __future__ import annotations

from collections.abc import Collection

from broker.archiving.deletion import GroupDeletion, TopicDeletion
from broker.kept_config import KeptConfig
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
from broker.requests.pull_checks import PullChecks
from broker.requests.pull_message import PullMessageProcessor
from broker.requests.query_assignment import QueryAssignmentProcessor
from broker.requests.query_message import QueryMessageProcessor
from broker.requests.queue_range import QueueRangeProcessor
from broker.requests.recall_message import RecallMessageProcessor
from broker.requests.reply_message import ReplyMessageProcessor
from broker.requests.reset_offset import ResetOffsetProcessor
from broker.requests.runtime_info import RuntimeInfoProcessor
from broker.requests.send_back import SendBackProcessor
from broker.requests.send_message import SendMessageProcessor
from broker.requests.slave_polls import SlavePollsProcessor
from broker.stats.conditions import Conditions
from broker.stats.queue_stats import QueueFigures
from broker.stats.topic_tiers import TopicTiers
from broker.wiring.parts import BrokerParts


def make_processors(
    parts: BrokerParts,
    transactions: EndTransactionProcessor,
    *,
    conditions: Conditions,
    kept: KeptConfig,
    deletion: TopicDeletion,
) -> Collection[object]:
    """Create all processors but `transactions`. `kept` is the configuration that administrators change."""
    runtime, storage, tables, messages = parts.runtime, parts.storage, parts.tables, parts.messages
    archive, service, replicas = parts.archive, parts.service, parts.replicas
    config, clock, settled = runtime.config, runtime.clock, storage.answers.settled
    pop_checks = PopChecks(
        config,
        clock,
        runtime.life,
        runtime.role,
        topics=tables.topics,
        groups=tables.groups,
        retry_names=tables.retry_names,
        service=service.pop_service,
    )
    topics = AdminTopicsProcessor(config, tables.topics, deletion, replicas.registration, settled)
    offsets = AdminOffsetsProcessor(
        config.broker_name,
        clock,
        topics=tables.topics,
        offsets=tables.offsets,
        clients=service.clients,
        tiered=service.tiered,
        schedule=messages.schedule,
        settled=settled,
    )
    return (
        SendMessageProcessor(
            service.intake,
            clock,
            answers=storage.answers,
            groups=tables.groups,
            locks=service.locks,
            retry_names=tables.retry_names,
            broker_name=config.broker_name,
        ),
        SendBackProcessor(
            service.intake,
            service.tiered,
            groups=tables.groups,
            guard=tables.guard,
            stats=service.stats,
            address=runtime.address,
        ),
        PullMessageProcessor(
            config,
            clock,
            runtime.role,
            checks=PullChecks(
                config, runtime.role, tables.guard, topics=tables.topics, groups=tables.groups, clients=service.clients
            ),
            tiered=service.tiered,
            hold=service.hold,
            turns=service.backlog_turns,
            offsets=tables.offsets,
            stats=service.stats,
            latency=service.pull_latency,
            master_may_lack=None if archive.plain_slave is None else archive.plain_slave.master_may_lack,
        ),
        ClientManageProcessor(
            config,
            clock,
            clients=service.clients,
            topics=tables.topics,
            groups=tables.groups,
            registration=replicas.registration,
        ),
        ConsumerManageProcessor(
            runtime.role,
            topics=tables.topics,
            groups=tables.groups,
            offsets=tables.offsets,
            clients=service.clients,
            tiered=service.tiered,
        ),
        QueueRangeProcessor(service.tiered),
        LockBatchProcessor(config.broker_name, service.locks, topics=tables.topics, groups=tables.groups),
        PopMessageProcessor(
            config,
            clock,
            runtime.life,
            checks=pop_checks,
            service=service.pop_service,
            polling=messages.polling,
            guard=tables.guard,
            replication=storage.replication,
            log_end=storage.log_end,
        ),
        PeekMessageProcessor(
            config,
            clock,
            runtime.life,
            topics=tables.topics,
            checks=pop_checks,
            service=service.pop_service,
            polling=messages.polling,
            guard=tables.guard,
        ),
        PopAckProcessor(
            clock, topics=tables.topics, tiered=service.tiered, pops=messages.pops, polling=messages.polling
        ),
        QueryAssignmentProcessor(
            config.broker_name,
            modes=tables.modes,
            topics=tables.topics,
            groups=tables.groups,
            clients=service.clients,
            name_servers=service.name_servers,
            settled=settled,
        ),
        QueryMessageProcessor(clock, service.tiered, storage.store),
        transactions,
        RecallMessageProcessor(service.intake, config, clock, topics=tables.topics, settled=settled),
        ReplyMessageProcessor(service.intake, service.clients, config, clock, address=runtime.address),
        topics,
        AdminGroupsProcessor(
            config,
            tables.groups,
            tables.topics,
            GroupDeletion(journal=storage.journal, groups=tables.groups, offsets=tables.offsets, pops=messages.pops),
            settled,
            register_soon=replicas.registration.soon,
        ),
        AdminConfigProcessor(config, kept, tables.topics),
        AdminStatsProcessor(
            config.broker_name,
            runtime.address,
            topics=tables.topics,
            groups=tables.groups,
            offsets=tables.offsets,
            clients=service.clients,
            stats=service.stats,
            queue_stats=QueueFigures(service.tiered, tables.offsets),
            tiers=TopicTiers(archive.opened.catalog),
        ),
        AdminConnectionsProcessor(service.clients, tables.offsets, runtime.address),
        RuntimeInfoProcessor(
            clock,
            storage.store,
            messages.schedule,
            service.totals,
            used_ratio=runtime.used_ratio,
            conditions=conditions.now,
            waiting=messages.counts,
        ),
        offsets,
        ResetOffsetProcessor(
            config.broker_name,
            topics=tables.topics,
            groups=tables.groups,
            offsets=tables.offsets,
            tiered=service.tiered,
            pops=messages.pops,
            arriving=service.arriving,
            settled=settled,
        ),
        AdminRelayProcessor(
            config.broker_name, service.clients, service.tiered, topics=tables.topics, groups=tables.groups
        ),
        AdminInspectProcessor(storage.store, tables.topics, service.clients, service.stats),
        SlavePollsProcessor(
            messages.metadata, topics, offsets, tables.guard, leads_in=replicas.leads_in, frontier=archive.frontier
        ),
        BrokerSetProcessor(
            storage.store,
            replicas.manager,
            archive.plain_slave,
            cluster=config.broker_cluster_name,
            name=config.broker_name,
            address=runtime.address,
        ),
    )
