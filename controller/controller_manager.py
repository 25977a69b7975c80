"""A controller put together: register, liveness, port, and the scan for brokers that fell silent."""

from __future__ import annotations

import logging
from functools import partial
from importlib.metadata import version

from access.server_pages import ServerPages
from access.wiring import make_guard, make_server
from controller.broker_sets import BrokerSets
from controller.calls import BrokerCalls
from controller.controller_config import ControllerConfig
from controller.decision import DEFAULT_TIMEOUT_MS, Rules
from controller.liveness import Liveness
from controller.other_controllers import NO_OTHER_CONTROLLERS, OtherControllers
from controller.register import Register
from controller.requests import Requests
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.loop.supervisor import Supervisor, Trouble
from infra.net.remoting_server import Connection
from infra.net.request_router import RequestRouter
from infra.process.descriptors import budget
from infra.process.startup import open_files_limit

log = logging.getLogger(__name__)

BEAT_MS = 1_000  # from one heartbeat of a broker to the next
# How often this process looks if it stood still, and by how much that may be late before it counts as such. A broker
# beats each second and is dead for itself after three: one whose beat of a second ago was the last that was read before
# a standstill that nobody noticed lives all the same.
FIRST_MS = 2 * BEAT_MS  # in which all who live have beaten, also those whose connection a restart of this process broke
PULSE_MS = 250
STANDSTILL_MS = 1_000


class ControllerManager:
    """Starts and stops one controller on the running loop."""

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
        self._hears_since_ms = self._looked_ms = 0
        self._watches = True
        calls = BrokerCalls(config)
        self.sets = BrokerSets(
            register,
            others,
            self._liveness,
            calls,
            rules=self._rules,
            notifies=lambda: config.notify_broker_role_changed,
            spawn=self._supervisor.spawn,
        )
        self._router = router = RequestRouter()
        Requests(config, self.sets, self._liveness).register_on(router)
        guard = make_guard(config, config.auth_path, disk, cluster=config.cluster_name)
        descriptors = budget(open_files_limit(), 0)  # it maps nothing
        self._server = make_server(config, router, guard, descriptors, port=config.port, closed=self._closed)
        self._pages = ServerPages(
            clock, self._supervisor, port=config.admin_port, server=self._server, guard=guard, troubles=self.troubles
        )
        gauge, counter, sets = self._pages.metrics.gauge, self._pages.metrics.counter, self.sets
        text = "broker sets that this controller hears of"
        gauge("controller_sets", text, lambda: len(self._liveness.names()))
        text = "members of broker sets that live, as far as this controller hears"
        gauge("controller_members", text, lambda: sum(map(len, map(self._liveness.living, self._liveness.names()))))
        counter("controller_elections_total", "masters that this controller has made", lambda: sets.elections)
        counter("controller_changes_total", "changes of the register that it wrote", lambda: sets.changes)
        counter("controller_members_lost_total", "members that fell silent or hung up", lambda: self._lost)
        self._lost = 0
        #: Where its pages are.
        self.admin_address: tuple[str, int] | None = None

    @property
    def codes(self) -> frozenset[int]:
        """What it serves."""
        return self._router.codes

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._server.port

    def living(self, name: str) -> list[int]:
        """Who of a set lives, as far as this one hears."""
        return sorted(self._liveness.living(name))

    def troubles(self) -> list[Trouble]:
        """What is wrong with its own tasks, and with its register."""
        broken = self._register.broken
        return [*self._supervisor.troubles(), *([Trouble("register", "ended", broken)] if broken else [])]

    async def start(self) -> None:
        """Read the register, listen, begin to scan."""
        await self._register.open()
        self._hears_since_ms = self._looked_ms = self._liveness.now_ms()
        await self._server.start()
        self.admin_address = await self._pages.start()
        if self._others.renew_s:
            self._supervisor.every("lease", self._others.renew_s, self._others.renew, first_s=0)
            self._supervisor.every("tell", self._others.renew_s, self.sets.tell_others, first_s=0)
        period_s = self._config.scan_not_active_broker_interval / 1000
        self._supervisor.every("scan", period_s, self.scan)
        self._supervisor.every("pulse", self._pulse_ms / 1000, self._look)  # a scan may wait for the register
        log.info("controller of neve %s listens on %s:%d", version("neve"), self._config.bind_address, self.port)

    async def shutdown(self) -> None:
        """Answer what is under way and stop."""
        self._watches = False  # that it hangs up on a master itself makes nobody dead
        await self._server.shutdown()
        await self._pages.shutdown()
        await self._supervisor.stop()
        await self._others.close()
        await self._register.close()

    async def scan(self) -> None:
        """Hang up on brokers that fell silent, and elect where a master is missing."""
        self._look()
        if self._liveness.now_ms() - self._hears_since_ms < BEAT_MS:
            return  # it stood still, and what they have said meanwhile may not be read yet
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

    def _look(self) -> None:
        """If this process stood still, so that it heard nobody, who lives is who is heard from now on."""
        now_ms = self._liveness.now_ms()
        late_ms = now_ms - self._looked_ms - self._pulse_ms
        self._looked_ms = now_ms
        if late_ms <= STANDSTILL_MS:
            return
        log.warning("this controller stood still for %d ms: it waits for whom it has not heard since", late_ms)
        self._hears_since_ms = now_ms

    def _closed(self, connection: Connection) -> None:
        if not self._watches:
            return
        for name in self._liveness.closed(connection):
            log.info("a broker of %r hung up: %s:%d", name, *connection.remote)
            self._lost += 1
            self._supervisor.spawn("elect", partial(self.sets.lost, name))

    def _rules(self) -> Rules:
        self._look()
        return Rules(
            enable_elect_unclean_master=self._config.enable_elect_unclean_master,
            max_members=self._config.max_members,
            elects_from_ms=self._hears_since_ms + DEFAULT_TIMEOUT_MS,
            hears_since_ms=self._hears_since_ms,
            elects_first_from_ms=self._hears_since_ms + self._first_ms,
        )
