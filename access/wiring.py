"""Construction of a server's guard and port, and of its identity towards other servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from access.admin import ROUTES, AuthAdmin
from access.config import SecurityConfig
from access.guard import Guard, GuardedHandler, SignatureGuard, Unguarded, inner_credentials, open_store
from access.permissions import RetryOwners
from access.route import Route, register_handlers
from access.store import NO_CHANGE_LOG, ChangeLog
from infra.disk.filesystem import Disk
from infra.net.limits import RemotingLimits
from infra.net.remoting_peer import PeerSecurity
from infra.net.remoting_server import Connection, RemotingServer
from infra.net.request_router import RequestRouter
from infra.net.tls import ServerTls, client_context
from infra.process.descriptors import DescriptorBudget


class PortConfig(Protocol):
    """The configuration of a port and of its limits."""

    bind_address: str
    max_connections: int
    max_unfinished_bytes: int


def make_guard(
    config: SecurityConfig,
    path: Path,
    disk: Disk,
    routes: Mapping[int, Route],
    *,
    cluster: str,
    retry_owners: RetryOwners = lambda _: (),
    changes: ChangeLog = NO_CHANGE_LOG,
) -> SignatureGuard | Unguarded:
    """Return the guard for the users and policies at `path`, or for no authentication. Raises StartupError.

    `routes` are the rows of all codes that the server answers; those of users and policies are added.
    """
    store = open_store(config, path, disk, changes)
    if store is None:
        return Unguarded()
    return SignatureGuard(
        store,
        {code: route.permission for code, route in {**routes, **ROUTES}.items()},
        authorize=config.authorization_enabled,
        cluster=cluster,
        retry_owners=retry_owners,
    )


def peer_security(config: SecurityConfig) -> PeerSecurity:
    """Return how this server presents itself to other servers. Raises StartupError."""
    tls = client_context(config.tls_trust_cert_path) if config.tls_enable else None
    return PeerSecurity(inner_credentials(config), tls)


def guarded(router: RequestRouter, guard: Guard) -> RequestRouter | GuardedHandler:
    """Return the router itself without authentication; else behind the guard, with requests 3001 to 3010.

    Raises ValueError for a handler of a code that the guard has no permission for.
    """
    if not isinstance(guard, SignatureGuard):
        return router
    register_handlers(router, AuthAdmin(guard.store))
    without = sorted(router.codes - guard.permissions.keys())
    if without:
        raise ValueError(f"request codes without a permission: {without}")
    return GuardedHandler(guard, router)


def make_server(
    config: PortConfig,
    router: RequestRouter,
    guard: Guard,
    descriptors: DescriptorBudget,
    *,
    port: int,
    tls: ServerTls | None,
    in_use: Callable[[], int] = lambda: 0,
    closed: Callable[[Connection], None] | None = None,
) -> RemotingServer:
    """Return a server of `router` behind the guard; `in_use` counts other descriptors."""
    return RemotingServer(
        guarded(router, guard),
        reads=router.reads,
        express=router.express,
        host=config.bind_address,
        port=port,
        limits=RemotingLimits(
            max_connections=config.max_connections,
            max_unfinished=config.max_unfinished_bytes,
            backlog=descriptors.accepts,
        ),
        room=lambda: descriptors.connections(in_use()),
        closed=closed,
        tls=tls,
    )
