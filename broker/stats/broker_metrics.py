"""Registration of the broker's metrics by component; series by topic and group are in `topic_metrics`."""

from __future__ import annotations

from collections.abc import Callable

from broker.archiving.archive import AnyArchive
from broker.broker_stats import BrokerStats
from broker.clients.broker_outer_api import BrokerOuterApi
from broker.clients.client_manager import ClientManager
from broker.clients.rebalance_lock import RebalanceLock
from broker.ha.ha_client import HaClient
from broker.ha.member_events import View
from broker.ha.replicas_manager import ReplicasManager
from broker.ha.slave_session import SlaveState
from broker.intake.flusher import Flusher
from broker.intake.intake import Intake
from broker.intake.replication import GroupTransfer
from broker.long_polling.pull_request_hold import PullRequestHold
from broker.metadata.slave_synchronize import SlaveSynchronize
from broker.pop.pop_book import PopBook
from broker.pop.revive import PopRevive
from broker.reading.backlog_turns import BacklogTurns
from broker.role import BrokerRole, Role
from broker.stats.conditions import Conditions
from broker.stats.health import Health
from broker.stats.totals import Totals
from broker.store.message_store import MessageStore
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.loop.supervisor import Faults
from infra.observe.metrics import Histogram, Metrics

_ROLES = {Role.FENCED: 0, Role.SLAVE: 1, Role.SLAVE_IN_SYNC: 2, Role.MASTER: 3}


def register_traffic(metrics: Metrics, totals: Totals, intake: Intake, stats: BrokerStats) -> None:
    """Register totals of messages and bytes."""
    counter = metrics.counter
    counter("messages_in_total", "messages stored", totals.put)
    counter("messages_out_total", "messages read", totals.got)
    counter("bytes_in_total", "bytes stored", lambda: intake.bytes)
    counter("bytes_out_total", "bytes read", lambda: stats.bytes_out)


def register_latencies(metrics: Metrics, sends: Histogram, pulls: Histogram) -> None:
    """Register latencies within the broker, without network time and queueing in clients."""
    metrics.histogram("send_seconds", "time from reading a send to its answer, including sync and replication", sends)
    metrics.histogram(
        "pull_seconds", "time from the start of a pull's read to its answer, only pulls with messages", pulls
    )


def register_conditions(metrics: Metrics, conditions: Conditions) -> None:
    """Register the conditions that all pages report."""
    text = "1 while the condition lasts; /readyz has its time, cause and effect"
    metrics.labelled("condition", text, "condition", conditions.metric)


def register_groups(metrics: Metrics, offsets: ConsumerOffsetManager, pops: PopBook, revive: PopRevive) -> None:
    """Register numbers of committed offsets and popped messages."""
    counter, gauge = metrics.counter, metrics.gauge
    text = "committed offsets, one for each group and queue; maxConsumerOffsets is the limit"
    gauge("consumer_offsets", text, lambda: offsets.count)
    gauge("pop_queues", "queues in the pop book, counted for each group", lambda: len(pops.queues))
    counter("pop_revives_total", "popped messages redelivered after their invisible time", lambda: revive.revived)
    gauge("pop_revives_waiting", "expired popped messages waiting to be read", lambda: revive.waiting)


def register_clients(  # noqa: PLR0917 - one parameter per component
    metrics: Metrics,
    clients: ClientManager,
    locks: RebalanceLock,
    hold: PullRequestHold,
    backlog_turns: BacklogTurns,
    name_servers: BrokerOuterApi,
) -> None:
    """Register numbers of clients and of waiting requests."""
    gauge = metrics.gauge
    gauge("client_bytes", "bytes of heartbeat data of all connections", lambda: clients.bytes)
    gauge("queue_locks", "queues locked by ordered consumers", lambda: locks.count)
    gauge("held_pulls", "pulls waiting for a message", lambda: hold.count)
    gauge(
        "backlog_reads_waiting", "pulls of backlogs waiting for a turn of the event loop", lambda: backlog_turns.waiting
    )
    gauge("consumer_groups_online", "groups with a connected member", lambda: len(clients.consumers))
    gauge("name_servers", "name servers where this broker is registered", lambda: len(name_servers.registered))


def register_store(
    metrics: Metrics, store: MessageStore, flusher: Flusher, topics: TopicConfigManager, used_ratio: Callable[[], float]
) -> None:
    """Register figures of the log, its queues and its disk."""
    counter, gauge = metrics.counter, metrics.gauge
    gauge(
        "flush_lag_bytes",
        "bytes appended and not yet flushed",
        lambda: store.max_physical_offset - store.visibility.flushed,
    )
    counter("flush_rounds_total", "group commits", lambda: flusher.rounds)
    counter(
        "index_skipped_keys_total",
        "keys not indexed because the disk was full",
        lambda: store.index.skipped,
    )
    gauge(
        "disk_used_ratio",
        "used share of the data disk, as `df` counts it: used / (used + available)",
        used_ratio,
    )
    gauge("topics", "topics of this broker", lambda: len(topics.topics))


def register_replication(metrics: Metrics, transfer: GroupTransfer | None) -> None:
    """Register replication waits; all are 0 without a broker set."""
    metrics.gauge(
        "replication_waiting",
        "answers waiting for confirmation by the broker set",
        lambda: transfer.waiting if transfer else 0,
    )
    metrics.counter(
        "replication_timeouts_total",
        "answers not confirmed by the broker set within slaveTimeout",
        lambda: transfer.timeouts if transfer else 0,
    )


def register_set(metrics: Metrics, role: BrokerRole, replicas: ReplicasManager | None) -> None:
    """Register the state of the broker set; without one, a master without slaves."""
    counter, gauge = metrics.counter, metrics.gauge

    def of_set(take: Callable[[ReplicasManager], float]) -> Callable[[], float]:
        return lambda: take(replicas) if replicas is not None else 0

    def of_view(take: Callable[[View], float]) -> Callable[[], float]:
        return of_set(lambda set_: take(set_.member.record.view))

    gauge(
        "set_role",
        "0: no role yet, 1: slave, 2: in-sync slave, 3: master, or not in a set",
        lambda: _ROLES[role.current],
    )
    gauge("set_epoch", "master epoch of the broker set", of_view(lambda view: view.master_epoch))
    gauge(
        "set_in_sync",
        "in-sync members, as last reported",
        of_view(lambda view: len(view.sync_state_set)),
    )
    gauge(
        "set_members",
        "members in the controller's register, in sync or not; 0 with Apache's controller",
        of_set(lambda set_: set_.requests.registered),
    )
    gauge("set_slaves", "connected slaves of this member", of_set(lambda set_: len(set_.term.ha_service.slaves)))
    gauge(
        "set_unconfirmed_bytes",
        "bytes of the log not confirmed by all in-sync members",
        of_set(lambda set_: set_.unconfirmed),
    )
    gauge(
        "set_controllers",
        "controllers connected to this broker",
        of_set(lambda set_: set_.requests.controllers.connected),
    )
    counter("set_switches_total", "changes of this member's role", of_set(lambda set_: set_.switches.total()))
    counter(
        "set_cuts_total", "diverged tails truncated and kept in diverged/", of_set(lambda set_: set_.tail.truncations)
    )
    counter("set_refused_total", "refused slaves", of_set(lambda set_: set_.term.ha_service.refused.total()))


def register_following(
    metrics: Metrics, client: Callable[[], HaClient | None], synchronize: SlaveSynchronize | None
) -> None:
    """Register the state of a slave; all figures are 0 on other brokers."""

    def is_attached() -> int:
        following = client()
        session = following.session if following is not None else None
        return int(session is not None and session.state is SlaveState.FOLLOWING)

    metrics.gauge("slave_attached", "1 while this broker follows its master's log", is_attached)
    metrics.counter(
        "slave_polls_failed_total",
        "failed polls of the master for its tables and committed offsets",
        lambda: 0 if synchronize is None else synchronize.failures,
    )
    metrics.counter(
        "slave_polls_taken_total",
        "polls of the master whose tables were installed",
        lambda: 0 if synchronize is None else synchronize.installed,
    )


def register_followed(metrics: Metrics, archive: AnyArchive) -> None:
    """Register the state of a slave that archives an Apache master's log; constant on other brokers."""
    metrics.gauge(
        "archive_diverged",
        "1: the followed master's log resumed below archived offsets, and archiving has stopped",
        lambda: int(archive.divergence is not None),
    )
    metrics.gauge(
        "archive_safe_below",
        "log offset up to which an Apache master's log may be archived; -1: unknown",
        lambda: archive.safe_below,
    )


def register_tasks(
    metrics: Metrics, health: Health, faults: Faults, archive: AnyArchive, foreign: Callable[[], int]
) -> None:
    """Register failures of the broker's own tasks."""
    counter, gauge, jobs = metrics.counter, metrics.gauge, archive.jobs
    counter("task_failures_total", "failed runs of the broker's tasks", health.failures)
    gauge("tasks_in_trouble", "tasks that fail repeatedly, hang or have ended", lambda: len(health.troubles()))
    counter("items_set_aside_total", "messages, answers and waiting pulls that failed alone", faults.total)
    counter(
        "foreign_records_total",
        "records in internal topics that were ignored: damaged, or not written by a neve broker",
        foreign,
    )
    counter("job_failures_total", "failed runs of jobs", lambda: sum(jobs.failures.values()))


def register_archive(metrics: Metrics, archive: AnyArchive, conditions: Conditions) -> None:
    """Register figures of the archive, of cold reads, and of the clock that decides about expiry."""
    counter, gauge = metrics.counter, metrics.gauge
    journal, reader, clock = archive.journal, archive.reader, archive.safe_clock
    if reader is not None:
        gauge("cold_queue", "row groups queued for a fetch", lambda: reader.waiting)
        counter("cold_filters_total", "objects whose filters or bounds a query read", lambda: reader.counts.filters)
        counter("cold_fetches_total", "row groups fetched", lambda: reader.counts.fetches)
        counter(
            "cold_fetched_bytes_total",
            "bytes of row groups and footers that the store sent",
            lambda: reader.counts.fetched_bytes,
        )
        counter("cold_fetch_failures_total", "fetches of row groups that failed", lambda: reader.counts.failures)
        counter(
            "cold_disk_hits_total",
            "row groups fetched from the disk cache",
            lambda: reader.counts.disk_hits,
        )
        counter("cold_memory_hits_total", "cold reads whose row group was in memory", lambda: reader.counts.memory_hits)
        gauge("cold_memory_bytes", "decoded row groups in memory", lambda: reader.cached_bytes)
    if journal is not None:
        gauge("archive_epoch", "epoch of this broker's archive", lambda: journal.ownership.epoch)
        gauge("archive_fenced", "1 while another process owns the archive", lambda: int(journal.ownership.fenced))
        gauge(
            "archive_online",
            "1 while the store answers",
            lambda: int((journal.ownership.online or not journal.ownership.leads) and conditions.store_away() is None),
        )
    gauge("clock_trusted", "0 while expiry does not use the wall clock", lambda: int(clock.state().trusted))
    gauge(
        "clock_behind_seconds",
        "time by which expiry lags behind the wall clock while the clock is not trusted",
        lambda: clock.state().behind_ms / 1000,
    )
    counter("clock_jumps_total", "changes of the wall clock by more than five minutes", lambda: clock.jumps)
