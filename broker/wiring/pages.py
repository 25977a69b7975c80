"""Pages of the ports for administrators and metrics. The archive has to be open."""

from __future__ import annotations

import functools

from access import server_pages
from broker.ha.ha_client import HaClient
from broker.stats import broker_metrics
from broker.stats.admin_pages import AdminPages, register_pages
from broker.stats.group_lags import GroupLags
from broker.stats.rocketmq_metrics import Gauges, RequestLatencies, RocketmqMetrics
from broker.wiring.parts import BrokerParts
from broker.wiring.server import Ports
from infra.loop.pace import SCRAPE_SHARE, Pace
from infra.observe.metrics_page import MetricsPage


def register_admin(parts: BrokerParts, ports: Ports) -> None:
    """Register the pages of the admin port, and the metrics that they show."""
    runtime, storage, tables, messages = parts.runtime, parts.storage, parts.tables, parts.messages
    service, replicas, metrics = parts.service, parts.replicas.manager, ports.metrics
    archive = parts.archive.opened.get()
    pages = AdminPages(
        runtime.config,
        runtime.life,
        archive,
        metrics=metrics,
        topic_metrics=ports.topic_metrics,
        health=ports.health,
        conditions=ports.conditions,
        pace=functools.partial(Pace, runtime.clock, runtime.threads),
        clock=runtime.clock,
        replicas=replicas,
    )
    register_pages(ports.admin, pages)
    broker_metrics.register_traffic(metrics, service.totals, service.intake, service.stats)
    broker_metrics.register_latencies(metrics, storage.answers.latency, service.pull_latency)
    server_pages.register_guard(metrics, tables.guard)
    broker_metrics.register_conditions(metrics, ports.conditions)
    broker_metrics.register_groups(metrics, tables.offsets, messages.pops, service.revive)
    server_pages.register_server(metrics, ports.server)
    broker_metrics.register_clients(
        metrics, service.clients, service.locks, service.hold, service.backlog_turns, service.name_servers
    )
    broker_metrics.register_store(metrics, storage.store, storage.flusher, tables.topics, runtime.used_ratio)
    broker_metrics.register_replication(metrics, storage.group_transfer)
    broker_metrics.register_set(metrics, runtime.role, replicas)
    broker_metrics.register_following(metrics, functools.partial(_following, parts), parts.archive.synchronize)
    broker_metrics.register_followed(metrics, archive)
    service.tiered.register_metrics(metrics)
    broker_metrics.register_tasks(metrics, ports.health, runtime.faults, archive, storage.writer.internal.ignored.total)
    broker_metrics.register_archive(metrics, archive, ports.conditions)


def _following(parts: BrokerParts) -> HaClient | None:
    """Return the connection to the master, of a slave."""
    if parts.archive.plain_slave is not None:
        return parts.archive.plain_slave.client
    return None if parts.replicas.manager is None else parts.replicas.manager.role.client


def register_export(parts: BrokerParts, ports: Ports) -> None:
    """Register the page of RocketMQ's metrics."""
    runtime, tables, messages, service = parts.runtime, parts.tables, parts.messages, parts.service
    exported = RocketmqMetrics(
        runtime.config,
        runtime.clock,
        stats=service.stats,
        store=parts.storage.store,
        topics=tables.topics,
        groups=tables.groups,
        clients=service.clients,
        lags=GroupLags(
            runtime.clock,
            tiered=service.tiered,
            topics=tables.topics,
            offsets=tables.offsets,
            pops=messages.pops,
            retry_names=tables.retry_names,
            topic_metrics=ports.topic_metrics,
        ),
        latencies=RequestLatencies(parts.storage.answers.latency, service.pull_latency),
        transactions=ports.ended,
        gauges=Gauges(
            timers=lambda: len(messages.timers),
            pulls=lambda: service.backlog_turns.waiting,
            revived=lambda: service.revive.revived,
            used_bytes=lambda: runtime.disk.room(runtime.config.root).used,
        ),
    )
    page = MetricsPage(exported.take, functools.partial(Pace, runtime.clock, runtime.threads, SCRAPE_SHARE))
    ports.exporter.on_shutdown(page.close)
    ports.exporter.route("GET", "/metrics", page.show, at_once=2)
