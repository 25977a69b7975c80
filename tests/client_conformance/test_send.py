"""Plain sending: what is acknowledged is read back, from either broker."""

from __future__ import annotations

from collections.abc import Callable

from neve.client import AsyncClient


def test_what_was_sent_is_read_back(run: Callable[..., None]) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        sent = await client.send(topic, b"body", tags="A", keys=["k"], properties={"colour": "red"}, queue=1)
        (got,) = (await client.pull(topic, 1, 0, wait=10)).messages
        assert (got.body, got.tags, got.keys, got.properties["colour"]) == (b"body", "A", ("k",), "red")
        assert (got.msg_id, got.queue, got.queue_offset) == (sent.msg_id, sent.queue, sent.queue_offset)

    run(work)
