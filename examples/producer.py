"""Send five orders with a tag, a key and a property.

neve topic create orders --queues 4 && python examples/producer.py
"""

import asyncio
import json

import neve


async def main() -> None:
    async with neve.connect("127.0.0.1:9876") as client:
        for number in range(1, 6):
            body = json.dumps({"id": number, "amount": 10.0 * number})
            tag = "paid" if number % 2 else "open"
            sent = await client.send("orders", body, tags=tag, keys=[f"order-{number}"], properties={"shop": "north"})
            print(f"order {number}: {sent.status.name} in queue {sent.queue.queue_id} at offset {sent.queue_offset}")


asyncio.run(main())
