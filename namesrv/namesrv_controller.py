"""Construction of a name server: tables, settings, port, and the scan for silent brokers."""

from __future__ import annotations

import logging
from importlib.metadata import version

from access.route import register_handlers
from access.server_pages import ServerPages
from access.wiring import make_guard, make_server
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.loop.supervisor import Supervisor, Trouble
from infra.net.remoting_server import Connection
from infra.net.request_router import RequestRouter
from infra.net.tls import server_tls
from infra.process.descriptors import budget
from infra.process.startup import open_files_limit
from namesrv.kv_config_manager import KvConfigManager
from namesrv.namesrv_config import NamesrvConfig
from namesrv.request_processor import ROUTES, RequestProcessor
from namesrv.route_info_manager import RouteInfoManager

log = logging.getLogger(__name__)

FIRST_SCAN_S = 5.0
PRINT_KV_S = 600.0
FIRST_PRINT_S = 60.0


class NamesrvController:
    """Starts and stops one name server on the running event loop."""

    def __init__(self, config: NamesrvConfig, clock: Clock, disk: Disk) -> None:
        self._config = config
        self.kv = KvConfigManager(config.kv_path, disk)
        self.routes = RouteInfoManager(clock, config)
        self._supervisor = Supervisor("namesrv")
        self._router = router = RequestRouter()
        register_handlers(router, RequestProcessor(config, self.routes, self.kv))
        auth = config.kv_path.parent / "auth" / "auth.json"
        guard = make_guard(config, auth, disk, ROUTES, cluster=config.cluster_name)
        descriptors = budget(open_files_limit(), 0)  # a name server has no mappings
        tls = server_tls(config.tls_server_mode, config.tls_cert_path, config.tls_key_path)
        self._server = make_server(
            config, router, guard, descriptors, port=config.listen_port, tls=tls, closed=self._closed
        )
        self._pages = ServerPages(
            clock, self._supervisor, port=config.admin_port, server=self._server, guard=guard, troubles=self.troubles
        )
        gauge, routes = self._pages.metrics.gauge, self.routes
        gauge("namesrv_brokers", "registered addresses of brokers", lambda: routes.counts.brokers)
        gauge("namesrv_topics", "topics with a route", lambda: routes.counts.topics)
        gauge("namesrv_routes", "routes: topics, counted once per broker", lambda: routes.counts.routes)
        self._pages.metrics.counter(
            "namesrv_brokers_lost_total",
            "brokers removed as silent or disconnected",
            lambda: self._lost,
        )
        self._lost = 0
        #: The address of the admin port.
        self.admin_address: tuple[str, int] | None = None

    @property
    def codes(self) -> frozenset[int]:
        """The request codes that it serves."""
        return self._router.codes

    def troubles(self) -> list[Trouble]:
        """Return the faults of its tasks."""
        return self._supervisor.troubles()

    @property
    def port(self) -> int:
        """The port of the server."""
        return self._server.port

    async def start(self) -> None:
        """Read the settings, open the port and start the scan."""
        self.kv.load()
        await self._server.start()
        self.admin_address = await self._pages.start()
        period = self._config.scan_not_active_broker_interval / 1000
        self._supervisor.every("scan", period, self.scan, first_s=min(FIRST_SCAN_S, period))
        self._supervisor.every("print-kv", PRINT_KV_S, self.kv.print_all, first_s=FIRST_PRINT_S)
        log.info("neve %s name server listens on %s:%d", version("neve"), self._config.bind_address, self.port)

    async def shutdown(self) -> None:
        """Finish requests in progress and stop."""
        await self._server.shutdown()
        await self._pages.shutdown()
        await self._supervisor.stop()

    def scan(self) -> None:
        """Remove silent brokers and close their connections."""
        for identity, connection in self.routes.expire():
            log.warning("broker removed: silent name=%r address=%r", identity.name, identity.address)
            self._lost += 1
            if isinstance(connection, Connection):
                connection.close()

    def _closed(self, connection: Connection) -> None:
        for identity in self.routes.connection_closed(connection):
            log.warning("broker removed: disconnected name=%r address=%r", identity.name, identity.address)
            self._lost += 1
