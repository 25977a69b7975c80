"""Neve's client through failovers of a broker set: calls succeed and groups keep their committed offsets."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from neve.client import AsyncClient, connect
from neve.client.consumers.base import DeliveringConsumer
from tests.kit.clock.waiting import until
from tests.kit.server.broker_set import BrokerSet

TOPIC, GROUP = "orders", "g"
_CALL_S = 60.0  # A role change takes a second, and the machine is shared.


@asynccontextmanager
async def client_of(brokers: BrokerSet) -> AsyncIterator[AsyncClient]:
    async with connect(brokers.name_server.namesrv, timeout=_CALL_S) as client:
        await client.admin.create_topic(TOPIC, queues=1)
        yield client


async def send(client: AsyncClient, numbers: range, sent: list[int] | None = None) -> None:
    """Send messages one after the other; each call must succeed."""
    for number in numbers:
        await client.send(TOPIC, str(number))
        if sent is not None:
            sent.append(number)


async def stored(client: AsyncClient) -> list[int]:
    """Return the messages in queue order without adjacent duplicates: a send whose connection broke is repeated."""
    found = [int(message.body) async for message in client.reader(TOPIC)]
    return [number for at, number in enumerate(found) if at == 0 or found[at - 1] != number]


async def receive_all(consumer: DeliveringConsumer, count: int, read: set[int]) -> None:
    while len(read) < count:
        message = await consumer.receive()
        assert message is not None
        read.add(int(message.body))
        await message.ack()


async def test_sends_survive_a_killed_master_and_are_stored_in_order(tmp_path: Path) -> None:
    with BrokerSet(tmp_path, replication="sync") as brokers:
        async with client_of(brokers) as client:
            for first in (0, 400):
                former, sent = brokers.master, list[int]()
                sending = asyncio.create_task(send(client, range(first, first + 400), sent))
                await until(lambda sent=sent: len(sent) >= 100, "some are sent")  # type: ignore[misc]
                former.kill()
                await sending
                await asyncio.to_thread(former.start)
                await asyncio.to_thread(brokers.wait_until_in_sync, *brokers.members)
            assert await stored(client) == list(range(800))


async def test_sends_survive_a_frozen_master_that_wakes_as_a_slave(tmp_path: Path) -> None:
    with BrokerSet(tmp_path, replication="sync", controllerHeartBeatTimeoutMills="3s") as brokers:
        async with client_of(brokers) as client:
            former = brokers.master
            await send(client, range(10))
            former.signal(signal.SIGSTOP)
            try:
                await send(client, range(10, 20))
                assert brokers.master is not former
            finally:
                former.signal(signal.SIGCONT)
            await asyncio.to_thread(brokers.wait_until_in_sync, *brokers.members)
            await send(client, range(20, 30))
            assert await stored(client) == list(range(30))


async def test_group_resumes_at_its_committed_offset_on_the_new_master(tmp_path: Path) -> None:
    with BrokerSet(tmp_path, replication="sync") as brokers:
        async with client_of(brokers) as client, client.consumer(GROUP, TOPIC, start="earliest") as consumer:
            read = set[int]()
            reading = asyncio.create_task(receive_all(consumer, 300, read))
            first = await client.send(TOPIC, "0", keys="first")
            await send(client, range(1, 100))
            brokers.master.kill()
            await send(client, range(100, 300))
            await reading
            assert (await client.admin.view_message(first.offset_msg_id)).body == b"0", "who stored it is gone"
            assert [message.body for message in await client.admin.query_messages(TOPIC, "first")] == [b"0"]

            async def is_known() -> bool:
                end = len([None async for _ in client.reader(TOPIC)])
                return await client.committed(GROUP, TOPIC, 0) == end

            await until(is_known, "the new master knows that the group is at the end")


async def test_slaves_serve_reads_without_a_master(tmp_path: Path) -> None:
    """No master is elected during the test."""

    with BrokerSet(tmp_path, replication="sync", slaveReadEnable="true") as brokers:
        async with client_of(brokers) as client:
            await send(client, range(500))
            async with client.consumer(GROUP, TOPIC, start="earliest", max_buffered=32) as consumer:
                read = set[int]()
                await receive_all(consumer, 1, read)
                master = brokers.master
                brokers.controller.kill()
                master.kill()
                await receive_all(consumer, 500, read)
