"""The admin port of a name server or controller: metrics and health, on loopback; and metrics of every server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import Metric

from access.guard import SignatureGuard, Unguarded
from infra.clock import Clock
from infra.loop.pace import SCRAPE_SHARE, Pace
from infra.loop.supervisor import Supervisor, Trouble
from infra.loop.threads import SYSTEM_THREADS
from infra.net.admin_http import AdminHttp, Request, Response
from infra.net.remoting_server import RemotingServer
from infra.observe.conditions import EXPIRED, EXPIRES, CertificateConditions, Condition, ConditionLog
from infra.observe.metrics import Metrics, of_process
from infra.observe.metrics_page import MetricsPage

log = logging.getLogger(__name__)

_LOOK_S = 1.0


class ServerPages:
    """The pages of one server. With port -1 there are none, but conditions are still logged."""

    def __init__(
        self,
        clock: Clock,
        supervisor: Supervisor,
        *,
        port: int,
        server: RemotingServer,
        guard: SignatureGuard | Unguarded,
        troubles: Callable[[], Sequence[Trouble]],
    ) -> None:
        """`troubles` returns the faults of the server's tasks and dependencies."""
        self._supervisor, self._port, self._troubles = supervisor, port, troubles
        self._server, self._clock = server, clock
        self._condition_log = ConditionLog(clock, log)
        self._certificate = CertificateConditions(clock, None)
        #: The owner adds its own metrics.
        self.metrics = Metrics()
        register_server(self.metrics, server)
        register_guard(self.metrics, guard)
        text = "tasks that fail repeatedly, hang or have ended"
        self.metrics.gauge("tasks_in_trouble", text, lambda: len(troubles()))
        text = "failed runs of the server's tasks"
        self.metrics.counter("task_failures_total", text, supervisor.failures.total)
        text = "1 while the condition lasts; /readyz has its time, cause and effect"
        self.metrics.labelled("condition", text, "condition", self._conditions_by_name)
        self._http = AdminHttp(port=max(port, 0))
        page = MetricsPage(self._families, lambda: Pace(clock, SYSTEM_THREADS, SCRAPE_SHARE))
        self._http.on_shutdown(page.close)
        self._http.route("GET", "/metrics", page.show, at_once=2)
        self._http.route("GET", "/livez", self._live)
        self._http.route("GET", "/readyz", self._ready)

    async def start(self) -> tuple[str, int] | None:
        """Start the pages and return their address. Raises OSError."""
        self._certificate = CertificateConditions(self._clock, self._server.certificate)
        self._supervisor.every("conditions", _LOOK_S, lambda: self._condition_log.look(self._certificate.now()))
        return await self._http.start() if self._port >= 0 else None

    async def shutdown(self) -> None:
        await self._http.shutdown()

    async def _families(self) -> Iterable[Metric]:
        return [*self.metrics.families(), *of_process()]

    def _conditions(self) -> list[Condition]:
        return self._condition_log.dated(self._certificate.now())

    def _conditions_by_name(self) -> dict[str, int]:
        there = {one.name for one in self._conditions()}
        return {name: int(name in there) for name in (EXPIRED, EXPIRES)}

    async def _live(self, request: Request) -> Response:
        """Answer 503 if only a restart helps."""
        troubles = self._troubles()
        dead = any(one.kind != "failing" for one in troubles)
        return _page("not live" if dead else "live", 503 if dead else 200, troubles)

    async def _ready(self, request: Request) -> Response:
        """Answer 503 if a task fails repeatedly."""
        troubles = self._troubles()
        return _page("not ready" if troubles else "ready", 503 if troubles else 200, troubles, self._conditions())


def _page(word: str, status: int, troubles: Sequence[Trouble], conditions: Sequence[Condition] = ()) -> Response:
    lines = [word, *(f"task {name}: {kind} {text}" for name, kind, text in troubles), *(one.line for one in conditions)]
    return Response(status, "".join(f"{line}\n" for line in lines).encode())


def register_server(metrics: Metrics, server: RemotingServer) -> None:
    """Add the metrics of connections and of the memory that they hold."""
    counter, gauge, admission = metrics.counter, metrics.gauge, server.admission
    gauge("unfinished_bytes", "bytes of unfinished frames of all connections", lambda: server.unfinished.bytes)
    gauge("in_work_bytes", "bytes of request bodies in progress", lambda: server.in_work.bytes)
    gauge("connections", "client connections", lambda: len(server.connections))
    gauge("connections_max", "limit of connections, by maxConnections and open files", lambda: admission.most)
    counter("connections_refused_total", "connections refused above the limit", lambda: admission.refused)


def register_guard(metrics: Metrics, guard: SignatureGuard | Unguarded) -> None:
    """Add the metric of refused requests."""
    text = "requests with an invalid signature or without permission"
    metrics.counter("requests_refused_total", text, lambda: guard.refused)
