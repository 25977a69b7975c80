"""What a user may set about a client; the defaults are RocketMQ's."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from neve.clock import system_now_ms
from neve.entropy import Entropy, system_entropy


def _fresh_instance_name() -> str:
    return f"{os.getpid()}#{int.from_bytes(system_entropy(6))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """All times are in seconds."""

    timeout: float = 5.0  # of a whole call, its retries included
    attempt_timeout: float = 3.0  # of one request inside a call
    connect_timeout: float = 3.0
    send_retries: int = 2  # on other brokers, after the first attempt
    retry_when_not_stored_ok: bool = False  # also after FLUSH_DISK_TIMEOUT and the like
    compress_over: int = 4096  # bodies of this many bytes and more are deflated
    compress_type: str = "zlib"  # or lz4, zstd: they need the packages `lz4`, `zstandard` on both sides
    compress_level: int = 5
    max_message_size: int = 4 << 20
    producer_group: str = "NEVE_PRODUCER"
    instance_name: str = field(default_factory=_fresh_instance_name)
    route_interval: float = 30.0
    heartbeat_interval: float = 30.0
    rebalance_interval: float = 20.0
    commit_interval: float = 5.0
    trace: bool = False  # what becomes of messages is sent to RMQ_SYS_TRACE_TOPIC
    now_ms: Callable[[], int] = system_now_ms
    entropy: Entropy = system_entropy
    credentials: tuple[str, str] | None = field(
        default=None, repr=False
    )  # access key and secret key: requests are signed
    tls: ssl.SSLContext | bool = False  # True: a context with the system's trusted certificates
