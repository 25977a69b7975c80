"""Commit and roll back transactional messages. First: neve topic create payments --queues 4"""

import asyncio

import neve
from neve.client import LocalTransactionState, Message

booked: set[str] = set()  # In production: a table of your database.


async def check(message: Message) -> LocalTransactionState:
    """The broker asks for the outcome if it received none."""
    return LocalTransactionState.COMMIT if message.msg_id in booked else LocalTransactionState.ROLLBACK


async def main() -> None:
    async with neve.connect("127.0.0.1:9876") as client:
        async with client.transaction_producer("bookkeeping", check=check) as producer:
            async with producer.transaction("payments", b"payment 1") as transaction:
                booked.add(transaction.id)  # Your own database transaction.
            async with producer.transaction("payments", b"payment 2") as transaction:
                await transaction.rollback()
        async with client.consumer("ledger", "payments", start="earliest") as consumer:
            while (message := await consumer.receive(timeout=10)) is not None:
                async with message:
                    print("received", message.body.decode())


asyncio.run(main())
