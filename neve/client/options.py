"""The options of a client. Defaults are those of RocketMQ's clients."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypedDict

from neve.clock import system_now_ms
from neve.entropy import Entropy, system_entropy
from neve.errors import ClientError


def _fresh_instance_name() -> str:
    return f"{os.getpid()}#{int.from_bytes(system_entropy(6))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Options of a client; all times are in seconds.

    Attributes:
        timeout: the time limit of a call, retries included.
        attempt_timeout: the time limit of one request within a call.
        connect_timeout: the time limit of opening a connection.
        send_retries: further brokers that a send tries after the first attempt.
        retry_when_not_stored_ok: whether a send also retries after FLUSH_DISK_TIMEOUT, FLUSH_SLAVE_TIMEOUT and
            SLAVE_NOT_AVAILABLE.
        compress_over: bodies of at least this many bytes are compressed.
        compress_type: `zlib`, or `lz4` or `zstd`, which need the package `lz4` or `zstandard` on both sides.
        compress_level: the compression level of that library.
        max_message_size: the largest body or batch in bytes.
        producer_group: the group that sends belong to.
        instance_name: the second part of the client id, unique on its machine.
        route_interval: the age at which a route is read again.
        heartbeat_interval: the time between two heartbeats.
        rebalance_interval: the time between two rebalances of a consumer.
        commit_interval: the time between two commits of a consumer's offsets.
        trace: whether sends and deliveries are recorded in the topic RMQ_SYS_TRACE_TOPIC.
        now_ms: the clock, in ms since 1970.
        entropy: the source of random bytes.
        credentials: access key and secret key that sign requests.
        tls: True for a context with the system's certificate authorities, or a context of your own.

    Raises:
        ClientError: a value is out of range.
    """

    timeout: float = 5.0
    attempt_timeout: float = 3.0
    connect_timeout: float = 3.0
    send_retries: int = 2
    retry_when_not_stored_ok: bool = False
    compress_over: int = 4096
    compress_type: str = "zlib"
    compress_level: int = 5
    max_message_size: int = 4 << 20
    producer_group: str = "NEVE_PRODUCER"
    instance_name: str = field(default_factory=_fresh_instance_name)
    route_interval: float = 30.0
    heartbeat_interval: float = 30.0
    rebalance_interval: float = 20.0
    commit_interval: float = 5.0
    trace: bool = False
    now_ms: Callable[[], int] = system_now_ms
    entropy: Entropy = system_entropy
    credentials: tuple[str, str] | None = field(default=None, repr=False)
    tls: ssl.SSLContext | bool = False

    def __post_init__(self) -> None:
        for name in _TIMES:
            if not getattr(self, name) > 0:
                raise ClientError(f"{name} must be more than 0 s, got {getattr(self, name)!r}")
        if self.send_retries < 0:
            raise ClientError(f"send_retries must be at least 0, got {self.send_retries}")


_TIMES = (
    "timeout",
    "attempt_timeout",
    "connect_timeout",
    "heartbeat_interval",
    "rebalance_interval",
    "commit_interval",
)


class OptionChanges(TypedDict, total=False):
    """The fields of `ClientOptions`, as keyword arguments of `connect`."""

    timeout: float
    attempt_timeout: float
    connect_timeout: float
    send_retries: int
    retry_when_not_stored_ok: bool
    compress_over: int
    compress_type: str
    compress_level: int
    max_message_size: int
    producer_group: str
    instance_name: str
    route_interval: float
    heartbeat_interval: float
    rebalance_interval: float
    commit_interval: float
    trace: bool
    now_ms: Callable[[], int]
    entropy: Entropy
    credentials: tuple[str, str] | None
    tls: ssl.SSLContext | bool
