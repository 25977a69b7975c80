"""Ask a question in a topic, and receive the reply of a consumer.

neve topic create questions --queues 4 && python examples/request_reply.py
"""

import asyncio

import neve


async def answer(client: neve.AsyncClient) -> None:
    async with client.consumer("desk", "questions") as consumer:
        async for question in consumer:
            await client.reply(question, b"17 EUR")


async def main() -> None:
    async with neve.connect("127.0.0.1:9876") as shop, neve.connect("127.0.0.1:9876") as desk:
        answering = asyncio.create_task(answer(desk))
        reply = await shop.request("questions", b"What does it cost?", timeout=30)
        print(reply.body.decode())
        answering.cancel()


asyncio.run(main())
