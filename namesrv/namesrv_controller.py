"""A name server put together: tables, settings, port, and the scan for brokers that fell silent."""

from __future__ import annotations

import logging
from importlib.metadata import version

from access.server_pages import ServerPages
from access.wiring import make_guard, make_server
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.loop.supervisor import Supervisor, Trouble
from infra.net.remoting_server import Connection
from infra.net.request_router import RequestRouter
from infra.process.descriptors import budget
from infra.process.startup import open_files_limit
from namesrv.kv_config_manager import KvConfigManager
from namesrv.namesrv_config import NamesrvConfig
from namesrv.request_processor import RequestProcessor
from namesrv.route_info_manager import RouteInfoManager

log = logging.getLogger(__name__)

FIRST_SCAN_S = 5.0
PRINT_KV_S = 600.0
FIRST_PRINT_S = 60.0


class NamesrvController:
    """Starts and stops one name server on the running loop."""

    def __init__(self, config: NamesrvConfig, clock: Clock, disk: Disk) -> None:
        self._config = config
        self.kv = KvConfigManager(config.kv_path, disk)
        self.routes = RouteInfoManager(clock, config)
        self._supervisor = Supervisor("namesrv")
        self._router = router = RequestRouter()
        RequestProcessor(config, self.routes, self.kv).register_on(router)
        auth = config.kv_path.parent / "auth" / "auth.json"
        guard = make_guard(config, auth, disk, cluster=config.cluster_name)
        descriptors = budget(open_files_limit(), 0)  # it maps nothing
        self._server = make_server(config, router, guard, descriptors, port=config.listen_port, closed=self._closed)
        self._pages = ServerPages(
            clock, self._supervisor, port=config.admin_port, server=self._server, guard=guard, troubles=self.troubles
        )
        gauge, routes = self._pages.metrics.gauge, self.routes
        gauge("namesrv_brokers", "brokers' addresses that are registered", lambda: routes.counts.brokers)
        gauge("namesrv_topics", "topics that some broker has", lambda: routes.counts.topics)
        gauge("namesrv_routes", "topics on a broker, of all brokers together", lambda: routes.counts.routes)
        self._pages.metrics.counter(
            "namesrv_brokers_lost_total", "brokers that fell silent or hung up", lambda: self._lost
        )
        self._lost = 0
        #: Where its pages are.
        self.admin_address: tuple[str, int] | None = None

    @property
    def codes(self) -> frozenset[int]:
        """What it serves."""
        return self._router.codes

    def troubles(self) -> list[Trouble]:
        """What is wrong with its own tasks."""
        return self._supervisor.troubles()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._server.port

    async def start(self) -> None:
        """Read the settings, listen, begin to scan."""
        self.kv.load()
        await self._server.start()
        self.admin_address = await self._pages.start()
        period = self._config.scan_not_active_broker_interval / 1000
        self._supervisor.every("scan", period, self.scan, first_s=min(FIRST_SCAN_S, period))
        self._supervisor.every("print-kv", PRINT_KV_S, self.kv.print_all, first_s=FIRST_PRINT_S)
        log.info("name server of neve %s listens on %s:%d", version("neve"), self._config.bind_address, self.port)

    async def shutdown(self) -> None:
        """Answer what is under way and stop."""
        await self._server.shutdown()
        await self._pages.shutdown()
        await self._supervisor.stop()

    def scan(self) -> None:
        """Take out brokers that fell silent, and hang up on them."""
        for identity, connection in self.routes.expire():
            log.warning("broker %r at %r is silent and taken out", identity.name, identity.address)
            self._lost += 1
            if isinstance(connection, Connection):
                connection.close()

    def _closed(self, connection: Connection) -> None:
        for identity in self.routes.connection_closed(connection):
            log.warning("broker %r at %r hung up and is taken out", identity.name, identity.address)
            self._lost += 1
