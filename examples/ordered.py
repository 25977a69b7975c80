"""Keep the order of the messages of each order: one key goes to one queue, and one member reads a queue in order.

neve topic create shipments --queues 4 && python examples/ordered.py
"""

import asyncio

import neve


async def main() -> None:
    async with neve.connect("127.0.0.1:9876") as client:
        for step in ("created", "paid", "shipped"):
            for order in (1, 2):
                await client.send("shipments", f"order {order} {step}", order_key=f"order {order}")
        async with client.consumer("warehouse", "shipments", start="earliest", in_order=True) as consumer:
            while (message := await consumer.receive(timeout=10)) is not None:
                async with message:
                    print(f"offset {message.queue_offset}: {message.body.decode()}")


asyncio.run(main())
