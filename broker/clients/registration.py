"""Registration of this broker with the name servers: at start, periodically, and when topics change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from broker.clients.broker_outer_api import BrokerOuterApi
from broker.ha.replicas_manager import ReplicasManager
from broker.tables.topic_config_manager import TopicConfigManager

MASTER_ID = 0
#: Maximum number of topics that are registered one by one.
_FEW = 8
#: Delay until the whole table follows, for name servers that restarted or missed a single topic.
_LATER_S = 1.0


class Registration:
    """Registers the current topics with all name servers; does nothing without name servers."""

    def __init__(
        self,
        name_servers: BrokerOuterApi,
        topics: TopicConfigManager,
        wanted: asyncio.Event,
        replicas: ReplicasManager | None = None,
    ) -> None:
        """Create it; a set `wanted` requests a registration. Without `replicas` the configured id is registered."""
        self._name_servers, self._topics, self._replicas = name_servers, topics, replicas
        self._wanted = wanted
        self._later: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """Request a registration after a change of topics, without waiting for it."""
        self._wanted.set()

    async def now(self) -> None:
        """Register now; returns when each name server has answered or failed."""
        if not self._name_servers.are_there:
            return
        if self._replicas is not None:
            broker_id = self._replicas.role.registered_as
            if broker_id is None:
                return
            self._name_servers.broker_id = broker_id
        await self._name_servers.register(self._topics.to_wire())

    async def topics(self, names: Sequence[str]) -> None:
        """Register new or changed topics now; a few are registered one by one, and the whole table follows later.

        Otherwise, ten thousand topics created one after another would each send the whole table.
        """
        few = names if len(names) <= _FEW else ()
        if not (self._is_master and few and await self._name_servers.register_topics(few, self._topics.select)):
            await self.now()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(_LATER_S, self._soon_now)

    @property
    def _is_master(self) -> bool:
        return self._replicas is None or self._replicas.role.registered_as == MASTER_ID

    def _soon_now(self) -> None:
        self._later = None
        self.soon()

    async def keep(self) -> None:
        """Process requested registrations, and save the registered topics; never returns."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self.now()
                if self._replicas is None:  # in a set, saving may wait for other members, and the log has the topics
                    await self._topics.file.save()
            except Exception:
                self._wanted.set()  # retried at the next call
                raise

    async def take_back(self) -> None:
        """Unregister the broker, which stops."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._name_servers.are_there:
            await self._name_servers.unregister()
