"""The client. Read client, session, connection, route; then draft, producer, transaction, request_reply; then
consumers with pull, group, rebalance, process_queue, delivery, fetcher, positions, consumer, lite_pull and
pop_consumer; then group_requests, admin; sync wraps them."""

from neve.client.client import AsyncClient, connect
from neve.client.connection import ConnectionFailed
from neve.client.consumer import Consumer
from neve.client.lite_pull import LitePullConsumer
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
from neve.client.options import ClientOptions
from neve.client.pop_consumer import PopConsumer
from neve.client.pull import Subscription
from neve.client.received import Received
from neve.client.route import TopicRoute
from neve.client.transaction import LocalTransactionState, Transaction, TransactionProducer, TransactionResult

__all__ = [
    "AsyncClient",
    "BrokerInfo",
    "ClientOptions",
    "ConnectionFailed",
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
    "Subscription",
    "TopicConfig",
    "TopicRoute",
    "Transaction",
    "TransactionProducer",
    "TransactionResult",
    "connect",
]
