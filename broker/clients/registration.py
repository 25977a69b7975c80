"""This broker and its topics at the name servers: at the start, at their period, and when topics change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from broker.clients.broker_outer_api import BrokerOuterApi
from broker.tables.topic_config_manager import TopicConfigManager

MASTER_ID = 0
#: So many topics are told one by one.
_FEW = 8
#: After that the whole table is told: what a name server has that was started anew, or lost one of them.
_LATER_S = 1.0


class Registration:
    """Says what there is now to all name servers; without any it has nothing to do."""

    def __init__(
        self,
        name_servers: BrokerOuterApi,
        topics: TopicConfigManager,
        broker_id: Callable[[], int | None] | None = None,
    ) -> None:
        """`broker_id`: as what this broker is known now, None: nobody may come to it; without it, as configured."""
        self._name_servers, self._topics, self._broker_id = name_servers, topics, broker_id
        self._wanted = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """The topics have changed; nobody waits for the name servers to hear it."""
        self._wanted.set()

    async def now(self) -> None:
        """Returns when each name server has answered or failed."""
        if not self._name_servers.are_there:
            return
        if self._broker_id is not None:
            broker_id = self._broker_id()
            if broker_id is None:
                return
            self._name_servers.broker_id = broker_id
        await self._name_servers.register(self._topics.to_wire())

    async def topics(self, names: Sequence[str]) -> None:
        """New or changed ones: as `now`. A few are told by themselves, and all of the table a moment later.

        Else each of ten thousand topics that are made one after another would send all that are there.
        """
        few = names if len(names) <= _FEW else ()
        if not (self._is_master and few and await self._name_servers.register_topics(few, self._topics.select)):
            await self.now()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(_LATER_S, self._soon_now)

    @property
    def _is_master(self) -> bool:
        return self._broker_id is None or self._broker_id() == MASTER_ID

    def _soon_now(self) -> None:
        self._later = None
        self.soon()

    async def keep(self) -> None:
        """Never ends: does what was wanted soon, and saves the topics that it told."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self.now()
                if self._broker_id is None:  # in a set that may wait for others; what is there the log says as well
                    await self._topics.file.save()
            except Exception:
                self._wanted.set()  # for the next try
                raise

    async def take_back(self) -> None:
        """The broker ends."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._name_servers.are_there:
            await self._name_servers.unregister()
