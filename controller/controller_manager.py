"""Assembly of a controller: register, liveness, server, and the scan for silent brokers."""

from __future__ import annotations

import logging
from functools import partial
from importlib.metadata import version

from access.route import register_handlers
from access.server_pages import ServerPages
from access.wiring import make_guard, make_server
from controller.broker_sets import SetRegistry
from controller.calls import BrokerCalls
from controller.controller_config import ControllerConfig
from controller.decision import DEFAULT_TIMEOUT_MS, Rules
from controller.liveness import Liveness
from controller.other_controllers import NO_OTHER_CONTROLLERS, OtherControllers
from controller.register import Register
from controller.requests import ROUTES, ControllerProcessor
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.loop.supervisor import Supervisor, Trouble
from infra.net.remoting_server import Connection
from infra.net.request_router import RequestRouter
from infra.net.tls import server_tls
from infra.process.descriptors import budget
from infra.process.startup import open_files_limit

log = logging.getLogger(__name__)

BEAT_MS = 1_000  # heartbeat period of a broker
# All live brokers have sent a heartbeat within this time, even if a restart of this process broke their connection.
FIRST_MS = 2 * BEAT_MS
# Period of the check whether this process was suspended, and the delay that counts as a suspension. A shorter one is
# harmless: a broker sends a heartbeat each second and times out after three, so it still counts as alive afterwards.
PULSE_MS = 250
STANDSTILL_MS = 1_000


class ControllerManager:
    """One controller on the running event loop."""

    def __init__(
        self,
        config: ControllerConfig,
        clock: Clock,
        disk: Disk,
        register: Register,
        others: OtherControllers = NO_OTHER_CONTROLLERS,
        *,
        pulse_ms: int = PULSE_MS,
        first_ms: int = FIRST_MS,
    ) -> None:
        self._pulse_ms, self._first_ms = pulse_ms, first_ms
        self._config, self._register, self._others = config, register, others
        self._liveness = Liveness(clock)
        self._supervisor = Supervisor("controller")
        self._listening_since_ms = self._checked_ms = 0
        self._watches = True
        calls = BrokerCalls(config)
        self.sets = SetRegistry(
            register,
            others,
            self._liveness,
            calls,
            rules=self._rules,
            notifies=lambda: config.notify_broker_role_changed,
            spawn=self._supervisor.spawn,
        )
        self._router = router = RequestRouter()
        register_handlers(router, ControllerProcessor(config, self.sets, self._liveness))
        guard = make_guard(config, config.auth_path, disk, ROUTES, cluster=config.cluster_name)
        descriptors = budget(open_files_limit(), 0)  # a controller maps no files
        tls = server_tls(config.tls_server_mode, config.tls_cert_path, config.tls_key_path)
        self._server = make_server(config, router, guard, descriptors, port=config.port, tls=tls, closed=self._closed)
        self._pages = ServerPages(
            clock, self._supervisor, port=config.admin_port, server=self._server, guard=guard, troubles=self.troubles
        )
        gauge, counter, sets = self._pages.metrics.gauge, self._pages.metrics.counter, self.sets
        text = "broker sets with heartbeats to this controller"
        gauge("controller_sets", text, lambda: len(self._liveness.names()))
        text = "live members of broker sets, by heartbeats to this controller"
        gauge("controller_members", text, lambda: sum(map(len, map(self._liveness.living, self._liveness.names()))))
        counter("controller_elections_total", "masters elected by this controller", lambda: sets.elections)
        counter("controller_changes_total", "changes of the register written by this controller", lambda: sets.changes)
        counter(
            "controller_members_lost_total", "members that became silent or closed their connection", lambda: self._lost
        )
        self._lost = 0
        #: Address of the admin pages; None if they are off.
        self.admin_address: tuple[str, int] | None = None

    @property
    def codes(self) -> frozenset[int]:
        """The request codes that it serves."""
        return self._router.codes

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.port

    def living(self, name: str) -> list[int]:
        """Return the ids of a set's members that are alive for this controller."""
        return sorted(self._liveness.living(name))

    def troubles(self) -> list[Trouble]:
        """Return the faults of its tasks and of its register."""
        broken = self._register.broken
        return [*self._supervisor.troubles(), *([Trouble("register", "ended", broken)] if broken else [])]

    async def start(self) -> None:
        """Open the register, listen, and start the periodic tasks."""
        await self._register.open()
        self._listening_since_ms = self._checked_ms = self._liveness.now_ms()
        await self._server.start()
        self.admin_address = await self._pages.start()
        if self._others.renew_s:
            self._supervisor.every("lease", self._others.renew_s, self._others.renew, first_s=0)
            self._supervisor.every("tell", self._others.renew_s, self.sets.publish_all, first_s=0)
        period_s = self._config.scan_not_active_broker_interval / 1000
        self._supervisor.every("scan", period_s, self.scan)
        # separate: a scan may wait for the register
        self._supervisor.every("pulse", self._pulse_ms / 1000, self._check)
        log.info("controller of neve %s listens on %s:%d", version("neve"), self._config.bind_address, self.port)

    async def shutdown(self) -> None:
        """Answer the requests in progress and stop."""
        # From here on, this process closes connections itself, so a closed connection does not mean a dead broker.
        self._watches = False
        await self._server.shutdown()
        await self._pages.shutdown()
        await self._supervisor.stop()
        await self._others.close()
        await self._register.close()

    async def scan(self) -> None:
        """Close connections of silent brokers, and elect where a master is missing."""
        self._check()
        if self._liveness.now_ms() - self._listening_since_ms < BEAT_MS:
            return  # after a suspension, heartbeats may be received but not read yet
        silent = self._liveness.silent()
        for name, broker_id, connection in silent:
            log.warning("broker %d of %r is silent", broker_id, name)
            self._lost += 1
            if isinstance(connection, Connection):
                connection.abort()
            self._liveness.closed(connection)
        for name in {name for name, _, _ in silent}:
            self._supervisor.spawn("elect", partial(self.sets.lost, name))
        await self.sets.scan()

    def _check(self) -> None:
        """Detect a suspension of this process; after one, wait a time-out before a silent member counts as dead."""
        now_ms = self._liveness.now_ms()
        late_ms = now_ms - self._checked_ms - self._pulse_ms
        self._checked_ms = now_ms
        if late_ms <= STANDSTILL_MS:
            return
        log.warning("this controller was stalled for %d ms: silent brokers get a new timeout", late_ms)
        self._listening_since_ms = now_ms

    def _closed(self, connection: Connection) -> None:
        if not self._watches:
            return
        for name in self._liveness.closed(connection):
            log.info("a broker of %r closed its connection: %s:%d", name, *connection.remote)
            self._lost += 1
            self._supervisor.spawn("elect", partial(self.sets.lost, name))

    def _rules(self) -> Rules:
        self._check()
        return Rules(
            enable_elect_unclean_master=self._config.enable_elect_unclean_master,
            max_members=self._config.max_members,
            elects_from_ms=self._listening_since_ms + DEFAULT_TIMEOUT_MS,
            listening_since_ms=self._listening_since_ms,
            elects_first_from_ms=self._listening_since_ms + self._first_ms,
        )
