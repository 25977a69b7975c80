"""Wait for the route of a topic: a broker answers a creation before it registers the topic with the name server."""

from __future__ import annotations

from neve.client import AsyncClient
from neve.errors import BrokerError
from tests.kit.clock.waiting import until


async def is_routed(client: AsyncClient, topic: str, queues: int) -> None:
    """Return when the name server routes clients to this number of queues."""

    async def is_request_in_flight() -> bool:
        try:
            return len((await client.admin.topic_route(topic)).write_queues) == queues
        except BrokerError:
            return False

    await until(is_request_in_flight, f"the route of {topic}")
