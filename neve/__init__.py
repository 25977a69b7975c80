"""Neve: a message broker with tiered storage that speaks RocketMQ's Remoting protocol; what users import.

The names below are loaded when first used: `import neve` alone stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neve.client import (
        AsyncClient,
        ClientOptions,
        ConnectionFailed,
        Message,
        MessageQueue,
        PullResult,
        SendResult,
        connect,
    )
    from neve.errors import BrokerError, ClientError, NeveError, ProtocolError, UnknownOutcome

_HOMES = {
    "AsyncClient": "neve.client",
    "BrokerError": "neve.errors",
    "ClientError": "neve.errors",
    "ClientOptions": "neve.client",
    "ConnectionFailed": "neve.client",
    "Message": "neve.client",
    "MessageQueue": "neve.client",
    "NeveError": "neve.errors",
    "ProtocolError": "neve.errors",
    "PullResult": "neve.client",
    "SendResult": "neve.client",
    "UnknownOutcome": "neve.errors",
    "connect": "neve.client",
}

__all__ = [
    "AsyncClient",
    "BrokerError",
    "ClientError",
    "ClientOptions",
    "ConnectionFailed",
    "Message",
    "MessageQueue",
    "NeveError",
    "ProtocolError",
    "PullResult",
    "SendResult",
    "UnknownOutcome",
    "connect",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'neve' has no attribute {name!r}")
    return getattr(import_module(home), name)
