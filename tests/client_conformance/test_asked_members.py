"""Administrators' requests that the broker forwards to a Python group member: status, one message, offset reset."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from neve.client import AsyncClient, MessageQueue, Received
from neve.remoting.body import lenient_loads
from neve.remoting.codes import RequestCode

Run = Callable[..., None]
RECEIVE_S = 40  # A reset takes effect at the next pull, and the current pull may wait 15 s at the broker.


async def ask(client: AsyncClient, server: Any, code: RequestCode, **ext: str) -> Any:
    """Return the parsed body of the broker's answer."""
    answer = await client._session.requests.ask(server.broker, code, ext, timeout=15)
    return lenient_loads(answer.body) if answer.body else None


def test_member_reports_its_running_info(run: Run, unique: str, server: Any) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        await client.send(topic, b"x", tags="A", queue=3)
        async with client.consumer(unique, {topic: "A || B"}, start="earliest", in_order=True) as consumer:
            assert await consumer.receive(RECEIVE_S) is not None
            info = await ask(
                client,
                server,
                RequestCode.GET_CONSUMER_RUNNING_INFO,
                consumerGroup=unique,
                clientId=client.client_id,
                jstackEnable="true",
            )
            assert info["properties"]["PROP_CONSUMEORDERLY"] == "true"
            assert {data["topic"] for data in info["subscriptionSet"]} == {topic, f"%RETRY%{unique}"}
            queue = info["mqTable"][consumer.assigned[3]]
            assert (queue["cachedMsgCount"], queue["commitOffset"], queue["locked"]) == (1, 0, True)
            assert info["statusTable"][topic]["pullTPS"] > 0
            assert "test_asked_members" in info["jstack"]

    run(work)


def test_member_reports_its_offsets(run: Run, unique: str, server: Any) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for _ in range(2):
            await client.send(topic, b"x", queue=1)
        async with client.consumer(unique, topic, start="earliest") as consumer:
            message = await consumer.receive(RECEIVE_S)
            assert message is not None
            await message.ack()
            code = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
            status = await ask(client, server, code, topic=topic, group=unique, clientAddr="")
            (table,) = status["consumerTable"].values()
            assert table == {queue: int(queue.queue_id == 1) for queue in consumer.assigned}

    run(work)


def test_member_consumes_a_message_on_request_and_returns_the_result(run: Run, unique: str, server: Any) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        sent = await client.send(topic, b"again", queue=0)
        seen: list[bytes] = []

        async def handle(message: Received) -> None:
            seen.append(message.body)
            if len(seen) == 3:
                raise ZeroDivisionError

        consumer = client.consumer(unique, topic, start="earliest")
        async with consumer:
            running = asyncio.create_task(consumer.run(handle))

            async def on_demand() -> Any:
                code = RequestCode.CONSUME_MESSAGE_DIRECTLY
                ext = {"consumerGroup": unique, "clientId": client.client_id, "msgId": sent.offset_msg_id}
                return await ask(client, server, code, topic=topic, brokerName=sent.queue.broker_name, **ext)

            while not seen:
                await client.max_offset(topic, 0)
            assert (await on_demand())["consumeResult"] == "CR_SUCCESS"
            failed = await on_demand()
            assert (failed["consumeResult"], failed["remark"]) == ("CR_THROW_EXCEPTION", "ZeroDivisionError()")
            assert seen == [b"again"] * 3
        await running
        assert await client.committed(unique, topic, MessageQueue(*sent.queue)) == 1

    run(work)


def test_offsets_of_a_running_member_are_reset(run: Run, unique: str, server: Any) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        await client.send(topic, b"once more", queue=2)
        async with client.consumer(unique, topic, start="earliest", long_poll=1.0) as consumer:
            assert await consumer.receive(RECEIVE_S) is not None
            await consumer.commit()
            code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
            await ask(client, server, code, topic=topic, group=unique, timestamp="0", isForce="true")
            message = await consumer.receive(RECEIVE_S)
            assert message is not None
            assert message.body == b"once more"

    run(work)
