"""The client. Read client, session, connection, route; then producer, pull, consumer, admin; sync wraps them."""

from neve.client.client import AsyncClient, connect
from neve.client.connection import ConnectionFailed
from neve.client.consumer import Consumer
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
from neve.client.pull import Subscription
from neve.client.received import Received
from neve.client.route import TopicRoute

__all__ = [
    "AsyncClient",
    "BrokerInfo",
    "ClientOptions",
    "ConnectionFailed",
    "ConsumeStats",
    "Consumer",
    "Message",
    "MessageQueue",
    "PullResult",
    "PullStatus",
    "QueueStats",
    "Received",
    "SendResult",
    "SendStatus",
    "Subscription",
    "TopicConfig",
    "TopicRoute",
    "connect",
]
