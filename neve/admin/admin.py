"""Opens the administration of a cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from neve.admin.brokers import Brokers
from neve.admin.errors import Unreachable
from neve.admin.groups import Groups
from neve.admin.requests import ServerRequests, new_pool, split_addresses
from neve.admin.topics import Topics
from neve.admin.users import Users
from neve.client import AsyncClient, ClientOptions
from neve.client import connect as connect_client


class ClusterAdmin:
    """The administration of one cluster. The list of brokers is the one at the time of construction."""

    def __init__(self, client: AsyncClient, requests: ServerRequests) -> None:
        self._requests = requests
        self.client = client
        self.brokers = Brokers(requests)
        self.topics = Topics(requests)
        self.groups = Groups(requests, client)

    def groups_at(self, broker: str) -> Groups:
        """Return the consumer groups as one broker has them."""
        return Groups(self._requests.limited_to(broker), self.client)

    async def users(self) -> Users:
        """Return the users and policies of all servers that keep any.

        Raises:
            AdminError: no server keeps users, or one of them does not answer.
        """
        users = Users(self._requests)
        await users.discover()
        return users


@asynccontextmanager
async def connect(
    namesrv: str, *, options: ClientOptions | None = None, may_lack_brokers: bool = False, **changes: Any
) -> AsyncGenerator[ClusterAdmin]:
    """Yield the administration of the cluster behind these name servers.

    Args:
        namesrv: name servers, `host:port` separated by `;`.
        may_lack_brokers: accept name servers that know no broker.
        changes: fields of `ClientOptions`.

    Raises:
        Unreachable: the name servers know no broker.
    """
    chosen = replace(options or ClientOptions(), **changes)
    async with connect_client(namesrv, options=chosen) as client:
        brokers = await client.admin.cluster_info()
        if not brokers and not may_lack_brokers:
            raise no_broker()
        pool = new_pool(chosen.credentials, chosen.tls)
        try:
            yield ClusterAdmin(client, ServerRequests(pool, split_addresses(namesrv), brokers))
        finally:
            await pool.close()


def no_broker() -> Unreachable:
    """Return the error for a name server whose list of brokers is empty."""
    return Unreachable(
        "the name server knows no broker: start one, and check that its namesrvAddr names this name server"
    )
