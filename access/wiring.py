"""How a controller guards its server: first the guard, which handlers ask too; then the handlers; then both."""

from __future__ import annotations

from pathlib import Path

from access.admin import AuthAdmin
from access.config import SecurityConfig
from access.guard import Guard, GuardedHandler, SignatureGuard, Unguarded, open_store
from access.permissions import RetryOwners
from access.store import NO_CHANGE_LOG, ChangeLog
from infra.disk import Disk
from infra.request_router import RequestRouter


def make_guard(
    config: SecurityConfig,
    path: Path,
    disk: Disk,
    *,
    cluster: str,
    retry_owners: RetryOwners = lambda _: (),
    changes: ChangeLog = NO_CHANGE_LOG,
) -> SignatureGuard | Unguarded:
    """Of users and policies in the file at `path`; of none when authentication is off. Raises StartupError."""
    store = open_store(config, path, disk, changes)
    if store is None:
        return Unguarded()
    return SignatureGuard(store, authorize=config.authorization_enabled, cluster=cluster, retry_owners=retry_owners)


def guarded(router: RequestRouter, guard: Guard) -> RequestRouter | GuardedHandler:
    """The router itself when authentication is off; else behind the guard, with 3001 to 3010 served as well."""
    if not isinstance(guard, SignatureGuard):
        return router
    AuthAdmin(guard.store).register_on(router)
    return GuardedHandler(guard, router)
