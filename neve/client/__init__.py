"""The Python client. Imports point down:

sync                     the synchronous client
client                   the asyncio client
consumers | admin        push, pop and lite pull consumers | administration
group | send             membership, fetching, offsets, settling | producers
trace | net              message traces | connections, name servers, routes, requests, membership
model | options | security | validators
times
"""

from neve.client.admin import Admin
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
from neve.client.send.batch_sender import BatchItem, BatchSender
from neve.client.send.transaction import LocalTransactionState, Transaction, TransactionProducer, TransactionResult
from neve.client.times import Start, Time

__all__ = [
    "Admin",
    "AsyncClient",
    "BatchItem",
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
    "Start",
    "StoredPull",
    "Subscription",
    "Time",
    "TopicConfig",
    "TopicRoute",
    "Transaction",
    "TransactionProducer",
    "TransactionResult",
    "connect",
]
