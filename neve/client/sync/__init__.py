"""The client for programs without asyncio: what they import is here."""

from neve.client.sync.client import Client, connect
from neve.client.sync.consumer import Consumer, Received
from neve.client.sync.transaction import Transaction, TransactionProducer

__all__ = ["Client", "Consumer", "Received", "Transaction", "TransactionProducer", "connect"]
