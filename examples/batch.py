"""Send 10,000 messages in batches, several of them in flight at a time.

neve topic create readings --queues 4 && python examples/batch.py
"""

import asyncio

import neve


async def main() -> None:
    async with neve.connect("127.0.0.1:9876") as client:
        async with client.batch_sender(in_flight=8) as sender:
            for number in range(10_000):
                await sender.put("readings", f"reading {number}", order_key=number % 10)
        print(f"stored {sender.sent} messages, {sender.repeated} of them sent more than once")


asyncio.run(main())
