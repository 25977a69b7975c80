"""Tests of settling messages by their delivery: pulled, popped, or sent by an administrator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from neve.client import Consumer, PopConsumer, Received, connect
from neve.errors import ClientError
from neve.remoting.codes import RequestCode
from neve.remoting.command import RemotingCommand
from tests.kit.clock.waiting import until
from tests.kit.cluster.group_broker import GroupBroker, record
from tests.kit.cluster.pop_broker import PopBroker, RetryBroker

DELIVERING = pytest.mark.parametrize("kind", ["consumer", "pop_consumer"])
LIMIT_S = 5


async def ack(_: Any, message: Received) -> None:
    await message.ack()


async def nack(_: Any, message: Received) -> None:
    await message.nack()


async def fail(consumer: Consumer | PopConsumer, message: Received) -> None:
    await consumer.failed(message, ZeroDivisionError("by hand"), 0)


async def nack_with_delay(consumer: PopConsumer, message: Received) -> None:
    await message.nack(delay=7)


VERDICTS = [
    ("consumer", ack, "CR_SUCCESS"),
    ("consumer", nack, "CR_LATER"),
    ("consumer", fail, "CR_THROW_EXCEPTION"),
    ("pop_consumer", ack, "CR_SUCCESS"),
    ("pop_consumer", nack, "CR_LATER"),
    ("pop_consumer", fail, "CR_THROW_EXCEPTION"),
    ("pop_consumer", nack_with_delay, "CR_LATER"),
]


@pytest.mark.parametrize(("kind", "settle", "verdict"), VERDICTS)
async def test_verdict_on_an_administrators_message_is_returned(
    fake_cluster: Any, kind: str, settle: Callable[[Any, Received], Awaitable[None]], verdict: str
) -> None:
    broker = PopBroker(0)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        getattr(client, kind)("g", "t", start="earliest") as consumer,
    ):
        server = cluster.brokers[0]
        ext = {"consumerGroup": "g", "brokerName": "b0"}
        server.push(RemotingCommand(RequestCode.CONSUME_MESSAGE_DIRECTLY, 99, ext=ext, body=record(5)))
        message = await consumer.receive(LIMIT_S)
        assert (message.queue_offset, message.body) == (5, b"x" * 10)
        await settle(consumer, message)
        await ack(consumer, message)  # only the first verdict counts
        await until(lambda: any(one.is_response and one.opaque == 99 for one in server.requests))
        (answer,) = [one for one in server.requests if one.is_response]
        told = json.loads(answer.body)
        assert (answer.code, told["consumeResult"], "by hand" in told["remark"]) == (0, verdict, settle is fail)
        assert (broker.acked, broker.let_go, broker.sent_back, broker.offsets.get("t", 0)) == ([], [], [], 0)


@DELIVERING
async def test_message_of_another_consumer_cannot_be_settled(fake_cluster: Any, kind: str) -> None:
    async with (
        fake_cluster(PopBroker(1)) as cluster,
        connect(cluster.namesrv.address) as client,
        getattr(client, kind)("g", "t", start="earliest") as consumer,
    ):
        message = await consumer.receive(LIMIT_S)
        stray = replace(message, receipt=None)
        for settling in (stray.ack, stray.nack):
            with pytest.raises(ClientError, match="not delivered by this consumer"):
                await settling()
        await message.ack()


async def test_expired_message_is_late_in_traces_of_both_consumers(fake_cluster: Any) -> None:
    """Pulled messages of a pop consumer get ConsumeReturnType TIME_OUT like any pulled message."""

    async def ends(kind: str, broker: GroupBroker, source: Callable[[Any], Any]) -> list[str]:
        async with fake_cluster(broker) as cluster:
            async with connect(cluster.namesrv.address, trace=True) as client:
                consumer = getattr(client, kind)("g", "t", start="earliest")
                async with consumer:
                    message = await consumer.receive(LIMIT_S)
                    ages = asyncio.get_running_loop().time() + 4000
                    await source(consumer).settlement.expire_overdue(ages)
                    await message.ack()
            sent = [one.body.decode() for one in cluster.brokers[0].requests if one.code == 310]
            lines = [line.split("\x01") for body in sent for line in body.split("\x02")]
            return [line[6] for line in lines if line[0] == "SubAfter"]

    assert await ends("consumer", GroupBroker(1), lambda consumer: consumer.source) == ["1"]
    assert await ends("pop_consumer", RetryBroker(1), lambda consumer: consumer.source.retries) == ["1"]


async def test_hold_limit_of_zero_is_refused(fake_cluster: Any) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        with pytest.raises(ClientError, match="hold_limit must be more than 0 s"):
            client.pop_consumer("g", "t", hold_limit=0)
