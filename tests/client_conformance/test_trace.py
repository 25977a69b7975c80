"""With `trace=True` RocketMQ's tool prints the producer, the consumers and the outcomes of a message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neve import BrokerError, connect
from neve.client import AsyncClient, LocalTransactionState
from neve.client.trace.format import TRACE_TOPIC
from tests.kit.clock.waiting import until
from tests.kit.server.apache import mqadmin

Run = Callable[..., None]
RECEIVE_S = 30


async def traced(client: AsyncClient, msg_id: str, count: int) -> list[list[str]]:
    """Return the fields of the trace lines of a message, once there are `count`."""
    found: list[list[str]] = []

    async def are_there() -> bool:
        try:
            messages = await client.admin.query_messages(TRACE_TOPIC, msg_id)
        except BrokerError:  # The first trace creates the topic, and the name server does not know it yet.
            return False
        lines = [line.split("\x01") for message in messages for line in message.body.decode().split("\x02")]
        found[:] = [line for line in lines if msg_id in line]
        return len(found) >= count

    await until(are_there, f"{count} traces of {msg_id}")
    return found


@pytest.mark.servers
def test_mqadmin_prints_producer_and_consumers_of_a_message(run: Run, unique: str, server: Any, tmp_path: Path) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        options: dict[str, Any] = {"trace": True, "producer_group": f"P{unique}"}
        async with connect(server.namesrv, **options) as tracing:
            sent = await tracing.send(topic, b"traced", tags="T", keys=["k1", "k2"])
            async with tracing.consumer(f"C{unique}", topic, start="earliest") as consumer:
                message = await consumer.receive(RECEIVE_S)
                assert message is not None
                await message.nack(delay_level=1)
                again = await consumer.receive(RECEIVE_S)
                assert again is not None
                await again.ack()
            async with tracing.pop_consumer(f"O{unique}", topic, start="earliest") as popping:
                popped = await popping.receive(RECEIVE_S)
                assert popped is not None
                await popped.ack()
            async with tracing.lite_pull_consumer(f"L{unique}", start="earliest") as asking:
                await asking.subscribe(topic)
                assert len(await asking.poll(RECEIVE_S)) == 1
        lines = await traced(client, sent.msg_id, 9)
        assert sorted(line[0] for line in lines) == ["Pub", *["SubAfter"] * 4, *["SubBefore"] * 4]
        said = await asyncio.to_thread(
            mqadmin, server.namesrv, "queryMsgTraceById", "-i", sent.msg_id, home=tmp_path / "admin"
        )
        rows = [line.split() for line in said.splitlines()]
        assert sorted((row[0], row[1], row[-1]) for row in rows if row and row[0] in {"Pub", "Sub"}) == [
            ("Pub", f"P{unique}", "success"),
            ("Sub", f"C{unique}", "failed"),
            ("Sub", f"C{unique}", "success"),
            ("Sub", f"L{unique}", "success"),
            ("Sub", f"O{unique}", "success"),
        ], said

    run(work)


def test_transaction_end_is_traced(run: Run, unique: str, server: Any) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        async with (
            connect(server.namesrv, trace=True) as tracing,
            tracing.transaction_producer(unique, check=lambda _: LocalTransactionState.UNKNOWN) as producer,
            producer.transaction(topic, b"paid") as transaction,
        ):
            pass
        half, end = sorted(await traced(client, transaction.id, 2), reverse=True)
        assert (half[0], half[3], half[11]) == ("Pub", unique, "1")
        assert (end[0], end[3], end[11], end[12]) == ("EndTransaction", unique, "COMMIT_MESSAGE", "false")

    run(work)
