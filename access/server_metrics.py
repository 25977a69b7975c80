"""What every server that speaks Remoting counts of its port and of its guard."""

from access.guard import SignatureGuard, Unguarded
from infra.net.remoting_server import RemotingServer
from infra.observe.metrics import Metrics


def register_server(metrics: Metrics, server: RemotingServer) -> None:
    """Connections, and what they hold."""
    counter, gauge, admission = metrics.counter, metrics.gauge, server.admission
    gauge("unfinished_bytes", "held by unfinished frames of all connections", lambda: server.unfinished.bytes)
    gauge("in_work_bytes", "bodies of requests in work, of all connections", lambda: server.in_work.bytes)
    gauge("connections", "connections of clients", lambda: len(server.connections))
    gauge("connections_max", "connections that there may be: maxConnections and the open files", lambda: admission.most)
    counter("connections_refused_total", "connections closed because there were too many", lambda: admission.refused)


def register_guard(metrics: Metrics, guard: SignatureGuard | Unguarded) -> None:
    """Who may not."""
    text = "requests that nobody signed rightly, or whose user has no right to them"
    metrics.counter("requests_refused_total", text, lambda: guard.refused)
