"""The client. Imports point down, and so does a reading of it:

sync                     the same without asyncio
client                   what users hold
consumers | admin        push, pop, lite pull: one shell, three supplies
group | send             what members of a group do | what a send is made of, and who takes it
trace | net              what is noted | connections, name servers, routes
model | options | security | validators
"""

from neve.client.client import AsyncClient, connect
from neve.client.consumers.lite_pull import LitePullConsumer
from neve.client.consumers.pop import PopConsumer
from neve.client.consumers.push import Consumer
from neve.client.group.pull import StoredPull, Subscription
from neve.client.group.received import Received
from neve.client.model import (
    BrokerInfo,
    ConsumeStats,
    Message,
    MessageQueue,
    PullResult,
    PullStatus,
    QueueStats,
    SendResult,
    SendStatus,
    TopicConfig,
)
from neve.client.net.route import TopicRoute
from neve.client.options import ClientOptions
from neve.client.send.batch_sender import BatchLimits, BatchSender, ToSend
from neve.client.send.transaction import LocalTransactionState, Transaction, TransactionProducer, TransactionResult

__all__ = [
    "AsyncClient",
    "BatchLimits",
    "BatchSender",
    "BrokerInfo",
    "ClientOptions",
    "ConsumeStats",
    "Consumer",
    "LitePullConsumer",
    "LocalTransactionState",
    "Message",
    "MessageQueue",
    "PopConsumer",
    "PullResult",
    "PullStatus",
    "QueueStats",
    "Received",
    "SendResult",
    "SendStatus",
    "StoredPull",
    "Subscription",
    "ToSend",
    "TopicConfig",
    "TopicRoute",
    "Transaction",
    "TransactionProducer",
    "TransactionResult",
    "connect",
]
