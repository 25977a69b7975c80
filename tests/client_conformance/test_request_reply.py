"""Request and reply: a reply reaches its requester, or the request times out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from neve.client import AsyncClient, Consumer, Message, connect, sync
from neve.errors import BrokerError, ClientError, UnknownOutcome


async def answer_all(client: AsyncClient, consumer: Consumer) -> None:
    async for message in consumer:
        await client.reply(
            message, message.body.upper() * (1 if len(message.body) < 100 else 10), properties={"re": "ply"}
        )


def test_each_requester_gets_its_own_reply(run: Callable[..., None], unique: str, server: Any) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        async with connect(server.namesrv) as other, other.consumer(unique, topic, start="earliest") as consumer:
            answering = asyncio.create_task(answer_all(other, consumer))
            replies = await asyncio.gather(
                *(client.request(topic, f"ask {number}", timeout=20, tags="T") for number in range(10)),
                client.request(topic, b"large " * 1000, timeout=20, order_key="k"),
            )
            answering.cancel()
        assert [reply.body for reply in replies[:10]] == [b"ASK %d" % number for number in range(10)]
        assert replies[10].body == b"LARGE " * 10_000
        assert replies[0].properties["re"] == "ply"

    run(work)


def test_request_without_reply_times_out_with_unknown_outcome(run: Callable[..., None]) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(UnknownOutcome):
            await client.request(topic, b"anybody?", timeout=0.5)
        assert asyncio.get_running_loop().time() - began < 5
        (message,) = (await client.pull(topic, 0, 0, wait=10)).messages
        assert (message.body, message.properties["TTL"]) == (b"anybody?", "500")
        # The requester is connected and ignores the reply.
        assert (await client.reply(message, b"too late")).status == "SEND_OK"

    run(work, queues=1)


def test_reply_requires_a_request_of_a_connected_requester(run: Callable[..., None], server: Any) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        await client.send(topic, b"no request")
        async with connect(server.namesrv) as gone:
            with pytest.raises(UnknownOutcome):
                await gone.request(topic, b"bye", timeout=1)
        plain, request = [(await client.pull(topic, 0, at, 1, wait=10)).messages[0] for at in (0, 1)]
        with pytest.raises(ClientError):
            await client.reply(plain, b"?")
        with pytest.raises(BrokerError) as caught:
            await client.reply(request, b"?")
        assert caught.value.code == 1

    run(work, queues=1)


def test_synchronous_request_gets_its_reply(server: Any, topic: str, unique: str) -> None:
    with sync.connect(server.namesrv) as client, sync.connect(server.namesrv) as other:

        def serve() -> None:
            with other.consumer(unique, topic, start="earliest") as consumer:
                message: Message | None = consumer.receive(20)
                assert message is not None
                other.reply(message, b"pong")

        thread = threading.Thread(target=serve)
        thread.start()
        assert client.request(topic, b"ping", timeout=20).body == b"pong"
        thread.join(20)
        assert not thread.is_alive()
