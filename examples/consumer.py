"""Consume the paid orders in the group `billing`. Send orders with producer.py first.

python examples/consumer.py
"""

import asyncio
import json

import neve


async def main() -> None:
    async with (
        neve.connect("127.0.0.1:9876") as client,
        client.consumer("billing", {"orders": "paid"}, start="earliest") as consumer,
    ):
        while (message := await consumer.receive(timeout=10)) is not None:
            async with message:  # acknowledged at the end of the block; redelivered if the block raises
                order = json.loads(message.body)
                print(f"order {order['id']}: {order['amount']:.2f} EUR, shop {message.properties['shop']}")


asyncio.run(main())
