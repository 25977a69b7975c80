"""What a controller needs: its router with or without the check in front."""

from __future__ import annotations

from pathlib import Path

from access.admin import AuthAdmin
from access.config import SecurityConfig
from access.guard import Guard, open_store
from access.permissions import RetryOwners
from infra.disk import Disk
from infra.request_router import RequestRouter


def guarded(
    router: RequestRouter,
    config: SecurityConfig,
    path: Path,
    disk: Disk,
    *,
    cluster: str,
    retry_owners: RetryOwners = lambda _: (),
) -> RequestRouter | Guard:
    """The router itself when authentication is off; else behind the check, with 3001 to 3010 served as well."""
    store = open_store(config, path, disk)
    if store is None:
        return router
    AuthAdmin(store).register_on(router)
    return Guard(router, store, authorize=config.authorization_enabled, cluster=cluster, retry_owners=retry_owners)
