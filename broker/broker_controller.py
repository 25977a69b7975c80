"""Start and stop of a broker (RocketMQ's BrokerController). `broker.wiring` creates its parts.

Two tables list the steps of a start and of a stop. A simulation passes another `Machine`; the parts and the steps are
the same.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from broker.archiving.archive import AnyArchive
from broker.archiving.pins import Pins
from broker.archiving.restore import Restore
from broker.config import BrokerConfig
from broker.ha.replicas_manager import SwitchoverRefused
from broker.importing.store_import import ImportReport, StoreImport
from broker.intake.replication import BrokerSetState
from broker.loading import check_directory, load_all, recover_log
from broker.machine import Machine
from broker.promotion.promotion import PromotionApi, refuse_present
from broker.store.config import StoreConfig
from broker.wiring.pages import register_admin, register_export
from broker.wiring.parts import make_parts
from broker.wiring.recovery import BrokerRecovery
from broker.wiring.server import make_ports
from broker.wiring.tasks import start_tasks
from infra.loop.supervisor import Stop
from infra.process.startup import EXIT_FAILED, EXIT_IN_USE, StartupError

log = logging.getLogger(__name__)

_VIP_OFFSET = 2

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
    """Starts and stops all parts of a broker.

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
        broker_set: BrokerSetState | None = None,
    ) -> None:
        """Create all parts.

        `store_config` creates the store's settings from the configuration's. `pins` replaces the pins of waiting
        messages, which keep segments of the log. `broker_set` is the admission by the set that this broker is a member
        of; None: it is a single broker.
        """
        self.parts = make_parts(config, machine, store_config=store_config, pins=pins, broker_set=broker_set)
        self.runtime, self.storage, self.tables = self.parts.runtime, self.parts.storage, self.parts.tables
        self.messages, self.service = self.parts.messages, self.parts.service
        self.replicas = self.parts.replicas.manager
        self.ports = make_ports(self.parts)
        self.config, self.address, self.life = config, self.runtime.address, self.runtime.life
        self._recovery = BrokerRecovery(self.parts, restore)
        self._name_parts()
        #: Steps that did not end when the broker stopped. Their threads would keep the process alive.
        self.left_behind: list[str] = []
        #: Addresses of the admin port and of RocketMQ's metrics; None: the port is not open.
        self.admin_address: tuple[str, int] | None = None
        self.metrics_address: tuple[str, int] | None = None

    def _name_parts(self) -> None:
        """Give parts a short name for programs that embed a broker, such as simulations."""
        runtime, storage, tables, messages = self.runtime, self.storage, self.tables, self.messages
        service, ports, replicas = self.service, self.ports, self.parts.replicas
        self.clock, self.role, self.faults = runtime.clock, runtime.role, runtime.faults
        self.store, self.writer, self.journal = storage.store, storage.writer, storage.journal
        self.flusher, self.membership, self.group_transfer = storage.flusher, storage.membership, storage.group_transfer
        self.topics, self.groups, self.offsets = tables.topics, tables.groups, tables.offsets
        self.modes, self.retry_names, self.guard = tables.modes, tables.retry_names, tables.guard
        self.schedule, self.timers, self.transactions = messages.schedule, messages.timers, messages.transactions
        self.pops, self.polling, self.metadata = messages.pops, messages.polling, messages.metadata
        self.last_poll, self.persistence, self.promotion = messages.last_poll, messages.persistence, messages.promotion
        self.clients, self.stats, self.intake, self.hold = service.clients, service.stats, service.intake, service.hold
        self.tiered, self.backlog_turns, self.pop_service = service.tiered, service.backlog_turns, service.pop_service
        self.revive, self.check_back, self.locks = service.revive, service.check_back, service.locks
        self.registration, self.plain_slave = replicas.registration, self.parts.archive.plain_slave
        self.router, self.server, self.health = ports.router, ports.server, ports.health
        self.topic_metrics, self.topic_deletion = ports.topic_metrics, ports.topic_deletion

    @property
    def archive(self) -> AnyArchive:
        """The archive, which the start opens."""
        return self.parts.archive.opened.get()

    # -- start

    @property
    def starting(self) -> Sequence[Step]:
        """Return the steps of a start. A step that fails leaves nothing of its own behind."""
        recovery = self._recovery
        return (
            Step("free ports", self._check_ports),
            Step("directory", recovery.check_directory),
            Step("promotion", recovery.check_promotion),
            Step("log", recovery.open_log, recovery.close_log),
            Step("tables", recovery.load_tables),
            Step("archive", recovery.open_archive, recovery.close_archive),
            Step("positions", recovery.settle_positions),
            Step("ports", self._listen, self.ports.close),
            *([] if self.replicas is None else [Step("HA port", self.replicas.start, self.replicas.shutdown)]),
            Step("tasks", self._start_tasks, self.runtime.supervisor.stop),
            Step("name servers", self.parts.replicas.registration.now),
            Step("jobs", self._start_jobs),
        )

    async def take_in(self, importing: StoreImport, api: PromotionApi) -> ImportReport:
        """Import an Apache broker's directory, in place of a start. The configuration is a slave's.

        The next start as master is its promotion. Raise StartupError; an import that has begun can be resumed. `api`
        checks that the Apache broker has stopped before anything is written. Messages that it accepted later would be
        in no copy.
        """
        run, store, messages = self.runtime.threads.run, self.storage.store, self.messages
        await run(importing.look)
        own = self.config.broker_name, "{}:{}".format(*self.address)
        await refuse_present(api, importing.master(), own, self.config.name_servers)
        await run(importing.begin)
        await run(check_directory, self.config, self.runtime.disk)
        try:
            await run(recover_log, self.config, store, following=True)
            await run(load_all, (*self.parts.tables_of_log, messages.metadata, messages.last_poll))
            await importing.copy(store, self.storage.flusher)
            await importing.take_tables(store, messages.metadata, messages.last_poll, messages.persistence)
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
        config, check_port = self.config, self.runtime.machine.check_port
        check_port(config.bind_address, config.listen_port, "port")
        check_port("127.0.0.1", max(config.admin_port, 0), "adminPort")
        if self.replicas is not None:
            check_port(config.bind_address, self.runtime.ha_port, "haListenPort")
        if self.runtime.exports:
            config.metrics_labels  # noqa: B018 - raises now if they are invalid
            host = config.metrics_prom_exporter_host or self.address[0]
            check_port(host, config.metrics_prom_exporter_port, "metricsPromExporterPort")

    async def _listen(self) -> None:
        ports, config = self.ports, self.config
        try:
            await ports.server.start()
            assert ports.server.port == self.address[1], "records and ids carry another port"
            await self._listen_vip(self.address[1] - _VIP_OFFSET)
            if config.admin_port >= 0:
                register_admin(self.parts, ports)
                await self.runtime.threads.run(ports.admin_token.renew)
                self.admin_address = await ports.admin.start()
                config.admin_port = self.admin_address[1]  # clients of the configuration find the port here
            if self.runtime.exports:
                register_export(self.parts, ports)
                self.metrics_address = await ports.exporter.start()
            elif config.metrics_exporter_type != "DISABLE":
                log.warning(
                    "metricsExporterType=%s: metrics are not pushed, PROM exposes", config.metrics_exporter_type
                )
        except BaseException as error:
            await ports.close()
            if isinstance(error, OSError):
                raise StartupError(f"can't listen: {error.strerror or error}", EXIT_IN_USE) from error
            raise

    async def _listen_vip(self, port: int) -> None:
        """Listen on the port of old clients. Only log a failure: another broker of this machine may use the port."""
        try:
            await self.ports.server.listen(port)
        except OSError as error:
            log.warning("VIP port %d: %s", port, error.strerror or error)

    async def _start_tasks(self) -> None:
        start_tasks(self.parts, self.ports)

    async def _start_jobs(self) -> None:
        self.archive.start_jobs()

    # -- stop

    def stop(self) -> None:
        """Request a clean stop, which `shutdown` does."""
        self.life.ask_to_end()

    @property
    def _stopping(self) -> Sequence[StopStep]:
        """Return the steps of a stop. A step that fails or hangs does not prevent the others."""
        run, synced, alone = self.runtime.threads.run, frozenset({_SYNC_FAILED}), frozenset({_LEFT_BEHIND})
        flusher, replicas = self.storage.flusher, self.replicas
        return (
            *([] if replicas is None else [StopStep("hand over", self._hand_over)]),
            StopStep("name servers", self.parts.replicas.registration.take_back),
            StopStep("archive", self.archive.shutdown),
            StopStep("tables", self.messages.persistence.run, synced),
            StopStep("flush", flusher.flush_now, synced),
            *([] if replicas is None else [StopStep("broker set", replicas.shutdown)]),
            StopStep("connections", self.ports.server.shutdown),
            StopStep("tasks", self.runtime.supervisor.stop),
            StopStep("last state", self.archive.write_last_state, synced | alone),
            StopStep("pages", self.ports.close_pages),
            StopStep("reads", self._close_reads),
            StopStep("flusher", lambda: run(flusher.close), alone),
            StopStep("store", lambda: run(self._close_store), alone),
        )

    async def _hand_over(self) -> None:
        """Switch over to another member before the stop, so that no client waits for a timeout."""
        assert self.replicas is not None
        if not self.replicas.role.leads:
            return
        try:
            await self.replicas.switch_over()
        except SwitchoverRefused as error:
            log.info("no switchover, the set elects a master after this one has stopped: %s", error)

    async def _close_reads(self) -> None:
        self.service.tiered.close()

    def _close_store(self) -> None:
        store, replicas = self.storage.store, self.replicas
        if replicas is not None and store.end.failure is None:
            store.after_flush(store.visibility.flush())
            if store.visibility.flushed == store.max_physical_offset:
                replicas.life.end()
        store.shutdown()

    async def shutdown(self) -> None:
        """Stop within a bounded time, even if steps fail or hang. The next start recovers the rest as after a crash."""
        steps = self._stopping
        stop = Stop("broker", _STOP_S)
        self.life.stop()
        self.ports.server.stop_accepting()
        self.service.arriving.release_all()
        for step in steps:
            now = {
                *({_SYNC_FAILED} if self.storage.flusher.failed else ()),
                *({_LEFT_BEHIND} if stop.left_behind else ()),
            }
            if not now & step.unless:
                await stop.step(step.name, step.do())
        self.left_behind = stop.left_behind
        if self.left_behind:
            self.life.exit_code = self.life.exit_code or EXIT_FAILED
        log.info("broker %s stopped", self.config.broker_name)
