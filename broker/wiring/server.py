"""Last phase: the request handlers and the ports."""

from __future__ import annotations

from dataclasses import dataclass

from access.wiring import make_server
from broker import kept_config
from broker.archiving.deletion import TopicDeletion
from broker.archiving.restore import RestoredTables
from broker.intake.express_lane import ExpressSend
from broker.kept_config import KeptConfig
from broker.requests.end_transaction import EndTransactionProcessor
from broker.requests.replicated_answers import wait_for_replication
from broker.requests.role_gate import RoleGate
from broker.requests.table import register_all
from broker.stats.conditions import Conditions
from broker.stats.health import Health
from broker.stats.rocketmq_metrics import Transactions
from broker.stats.topic_metrics import TopicMetrics
from broker.wiring.parts import BrokerParts
from broker.wiring.requests import make_processors
from infra.net.admin_http import AdminHttp
from infra.net.admin_token import AdminToken
from infra.net.remoting_server import RemotingServer
from infra.net.request_router import RequestRouter
from infra.net.tls import server_tls
from infra.observe.metrics import Metrics
from lifecycle.scheduler import KNOWN_FAILURES
from neve.entropy import system_entropy


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The ports of a broker, and the figures that their pages show."""

    kept: KeptConfig
    topic_deletion: TopicDeletion
    router: RequestRouter
    server: RemotingServer
    metrics: Metrics
    topic_metrics: TopicMetrics
    health: Health
    conditions: Conditions
    #: Ended transactions, for RocketMQ's metrics.
    ended: Transactions
    admin_token: AdminToken
    #: Port for administrators, on loopback.
    admin: AdminHttp
    #: Port of RocketMQ's metrics, with `metricsExporterType=PROM`.
    exporter: AdminHttp

    async def close_pages(self) -> None:
        """Close the ports of the pages."""
        await self.admin.shutdown()
        await self.exporter.shutdown()

    async def close(self) -> None:
        """Close all ports, after a failed start."""
        await self.server.shutdown()
        await self.close_pages()


def make_ports(parts: BrokerParts) -> Ports:
    """Create the handlers and the ports. The start opens the ports."""
    runtime, storage, archive, service = parts.runtime, parts.storage, parts.archive, parts.service
    config, store, transactions = runtime.config, storage.store, parts.messages.transactions
    tls = server_tls(config.tls_server_mode, config.tls_cert_path, config.tls_key_path)
    conditions = Conditions(
        runtime.clock,
        runtime.life,
        archive.opened.get,
        name_servers=service.name_servers,
        replicas=parts.replicas.manager,
        plain_slave=archive.plain_slave,
        certificate=None if tls is None else tls.certificate,
    )
    kept = KeptConfig(config, runtime.disk, config.root / "config" / kept_config.FILE_NAME, runtime.threads)
    deletion, router = _make_topic_deletion(parts), RequestRouter()
    router.express = _make_express(parts).serve
    ended = _make_end_transaction(parts)
    register_all(router, make_processors(parts, ended, conditions=conditions, kept=kept, deletion=deletion))
    server = make_server(
        config,
        router,
        parts.tables.guard,
        runtime.descriptors,
        port=config.listen_port,
        tls=tls,
        in_use=lambda: store.log.descriptors,
    )
    if storage.replication.waits:
        wait_for_replication(router, storage.replication, storage.log_end)
    RoleGate(runtime.role, router, service.arriving)
    token = AdminToken(runtime.disk, config.root, system_entropy)
    return Ports(
        kept=kept,
        topic_deletion=deletion,
        router=router,
        server=server,
        metrics=Metrics(),
        topic_metrics=_make_topic_metrics(parts),
        health=Health(runtime.clock, runtime.supervisor, storage.flusher),
        conditions=conditions,
        ended=Transactions(ended.committed, ended.rolled_back, lambda: len(transactions)),
        admin_token=token,
        admin=AdminHttp(port=max(config.admin_port, 0), expected=KNOWN_FAILURES, token=token),
        exporter=AdminHttp(
            config.metrics_prom_exporter_host or runtime.address[0], config.metrics_prom_exporter_port, is_public=True
        ),
    )


def _make_topic_metrics(parts: BrokerParts) -> TopicMetrics:
    config, tables, service = parts.runtime.config, parts.tables, parts.service
    return TopicMetrics(
        service.stats,
        parts.storage.store,
        service.tiered,
        topics=tables.topics,
        offsets=tables.offsets,
        clients=service.clients,
        retry_names=tables.retry_names,
        clock=parts.runtime.clock,
        limit=lambda: config.metrics_max_series,
    )


def _make_topic_deletion(parts: BrokerParts) -> TopicDeletion:
    runtime, storage, tables, archive = parts.runtime, parts.storage, parts.tables, parts.archive
    return TopicDeletion(
        store=storage.store,
        journal=storage.journal,
        sync_log=storage.flusher.flush_now,
        tombstones=archive.opened.tombstones,
        tables=RestoredTables(tables.topics, tables.groups, tables.offsets),
        retry_names=tables.retry_names,
        pops=parts.messages.pops,
        arriving=parts.service.arriving,
        registration=parts.replicas.registration,
        pending_deletions=archive.pending_deletions,
        threads=runtime.threads,
    )


def _make_express(parts: BrokerParts) -> ExpressSend:
    return ExpressSend(
        parts.service.intake,
        parts.storage.writer,
        parts.runtime.config,
        parts.runtime.clock,
        answers=parts.storage.answers,
        topics=parts.tables.topics,
        stats=parts.service.stats,
        signed_sends=parts.tables.guard.signed_sends,
        address=parts.runtime.address,
    )


def _make_end_transaction(parts: BrokerParts) -> EndTransactionProcessor:
    return EndTransactionProcessor(
        parts.service.intake,
        parts.messages.transactions,
        parts.storage.store,
        parts.service.tiered,
        clock=parts.runtime.clock,
        topics=parts.tables.topics,
        guard=parts.tables.guard,
        settled=parts.storage.answers.settled,
    )
