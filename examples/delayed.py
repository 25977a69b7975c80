"""Deliver one message after two seconds, and recall another one before its time.

neve topic create reminders --queues 4 && python examples/delayed.py
"""

import asyncio

import neve


async def main() -> None:
    async with neve.connect("127.0.0.1:9876") as client:
        recalled = await client.send("reminders", b"recalled", delay=3600)
        assert recalled.recall_handle is not None
        await client.recall("reminders", recalled.recall_handle)
        await client.send("reminders", b"pay the invoice", delay=2)
        async with client.consumer("secretary", "reminders", start="earliest") as consumer:
            async for message in consumer:
                waited_ms = message.store_timestamp - message.born_timestamp
                print(f"{message.body.decode()}: delivered after {waited_ms / 1000:.0f} s")
                break


asyncio.run(main())
