"""neve: a message broker with tiered storage that speaks RocketMQ's Remoting protocol.

The names below are imported at first use, so that `import neve` alone stays fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neve.client import (
        AsyncClient,
        ClientOptions,
        Message,
        MessageQueue,
        PullResult,
        SendResult,
        connect,
    )
    from neve.errors import (
        BrokerError,
        ClientError,
        ConnectionFailed,
        ConnectionLost,
        NeveError,
        ProtocolError,
        RequestTimeout,
        UnknownOutcome,
    )

_HOMES = {
    "AsyncClient": "neve.client",
    "BrokerError": "neve.errors",
    "ClientError": "neve.errors",
    "ClientOptions": "neve.client",
    "ConnectionFailed": "neve.errors",
    "ConnectionLost": "neve.errors",
    "Message": "neve.client",
    "MessageQueue": "neve.client",
    "NeveError": "neve.errors",
    "ProtocolError": "neve.errors",
    "PullResult": "neve.client",
    "RequestTimeout": "neve.errors",
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
    "ConnectionLost",
    "Message",
    "MessageQueue",
    "NeveError",
    "ProtocolError",
    "PullResult",
    "RequestTimeout",
    "SendResult",
    "UnknownOutcome",
    "connect",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'neve' has no attribute {name!r}")
    return getattr(import_module(home), name)
