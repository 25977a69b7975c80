"""Third phase: the tables of topics, groups, committed offsets, request modes and users."""

from __future__ import annotations

from dataclasses import dataclass

from access.guard import SignatureGuard, Unguarded
from access.wiring import make_guard
from broker.metadata.user_changes import UserJournal
from broker.pop.assignment import RequestModes
from broker.requests.table import ROUTES
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.retry_names import RetryNames
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from broker.wiring.runtime import Runtime
from broker.wiring.storage import Storage


@dataclass(frozen=True, kw_only=True)
class BrokerTables:
    """Tables whose changes are in the metadata log, and the guard, which reads the table of users."""

    topics: TopicConfigManager
    groups: SubscriptionGroupManager
    offsets: ConsumerOffsetManager
    modes: RequestModes
    retry_names: RetryNames
    guard: SignatureGuard | Unguarded


def make_tables(runtime: Runtime, storage: Storage) -> BrokerTables:
    """Create the tables. The start loads them."""
    config, disk, threads, journal = runtime.config, runtime.disk, runtime.threads, storage.journal
    directory, sync_log = config.root / "config", storage.sync.positions
    sync_tables = storage.sync.deletions if storage.membership is None else sync_log
    topics = TopicConfigManager(
        disk,
        directory / "topics.json",
        runtime.clock,
        lambda: config.max_topics,
        threads=threads,
        journal=journal,
        sync_log=sync_tables,
        sync_changes=sync_log,
    )
    groups = SubscriptionGroupManager(
        disk,
        directory / "subscriptionGroup.json",
        runtime.clock,
        lambda: config.max_groups,
        auto_create=lambda: config.auto_create_subscription_group,
        threads=threads,
        journal=journal,
        sync_log=sync_tables,
    )
    offsets = ConsumerOffsetManager(
        disk,
        directory / "consumerOffset.json",
        sync_log,
        threads,
        journal,
        limit=lambda: config.max_consumer_offsets,
    )
    retry_names = RetryNames(topics.topics, groups.groups, offsets.has_offsets, lambda: config.enable_retry_topic_v2)
    guard = make_guard(
        config,
        directory / "auth" / "auth.json",
        disk,
        ROUTES,
        cluster=config.broker_cluster_name,
        retry_owners=retry_names.owners,
        changes=UserJournal(journal, lambda: storage.store.log_uuid, storage.answers.settled),
    )
    return BrokerTables(
        topics=topics,
        groups=groups,
        offsets=offsets,
        modes=RequestModes(disk, directory / "messageRequestMode.json", threads, journal, sync_tables),
        retry_names=retry_names,
        guard=guard,
    )
