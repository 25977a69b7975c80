"""Tests of the client on the event loops of applications: asyncio and uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from neve.client import connect
from tests.kit.cluster.fake_cluster import DEADLINE_S
from tests.kit.cluster.group_broker import GroupBroker

LOOPS = [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]


@pytest.mark.parametrize("loop", LOOPS)
def test_sending_and_consuming_work_on_any_loop(
    fake_cluster: Any, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def work() -> None:
        broker = GroupBroker(3)
        async with asyncio.timeout(DEADLINE_S), fake_cluster(broker) as cluster:
            async with connect(cluster.namesrv.address) as client:
                assert (await client.send("t", b"x")).queue_offset == 7
                await client.send_oneway("t", b"y" * 5000)
                async with client.consumer("g", "t", start="earliest") as consumer:
                    for offset in range(3):
                        message = await consumer.receive(5)
                        assert message is not None
                        assert message.queue_offset == offset
                        await message.ack()
            assert broker.offsets["t"] == 3

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(work())
