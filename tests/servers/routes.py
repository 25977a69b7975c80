"""What a name server tells of a topic, as soon as it does: a broker answers who makes one before it tells of it."""

from __future__ import annotations

from neve.client import AsyncClient
from neve.errors import BrokerError
from tests.waiting import until


async def is_routed(client: AsyncClient, topic: str, queues: int) -> None:
    """Returns when the name server would send a client to so many queues of it."""

    async def is_told() -> bool:
        try:
            return len((await client.admin.topic_route(topic)).write_queues) == queues
        except BrokerError:
            return False

    await until(is_told, f"the route of {topic}")
