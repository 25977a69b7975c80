"""Sends and every kind of consumer on uvloop, because web servers run applications on that loop."""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop

from neve import connect
from tests.client_conformance.conftest import DEADLINE_S, create_topic

RECEIVE_S = 30


def test_sending_and_each_kind_of_consumer_work_on_uvloop(server: Any, unique: str) -> None:
    async def work() -> None:
        async with asyncio.timeout(DEADLINE_S), connect(server.namesrv) as client:
            await create_topic(client, unique, 1)
            await client.send(unique, b"zero")
            await client.send_oneway(unique, b"one" * 10_000)
            async with client.consumer(f"{unique}-pull", unique, start="earliest") as consumer:
                pulled = [await anext(consumer) for _ in range(2)]
            async with client.pop_consumer(f"{unique}-pop", unique, start="earliest") as popper:
                popped = [await popper.receive(RECEIVE_S) for _ in range(2)]
                await asyncio.gather(*(message.ack() for message in popped if message is not None))
            async with client.lite_pull_consumer(f"{unique}-lite", start="earliest") as lite:
                await lite.subscribe(unique)
                polled: list[Any] = []
                while len(polled) < 2:
                    polled += await lite.poll(RECEIVE_S)
            for received in (pulled, popped, polled):
                assert sorted(len(message.body) for message in received if message is not None) == [4, 30_000]
            assert await client.committed(f"{unique}-pull", unique, 0) == 2

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())
