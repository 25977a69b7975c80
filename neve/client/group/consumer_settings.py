"""The settings of a group consumer. Defaults are RocketMQ's where it has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from neve.client.group.allocation import Allocation
from neve.client.group.fetcher import FlowLimits
from neve.client.times import Start
from neve.errors import ClientError


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """The settings of a group consumer; see `AsyncClient.consumer`."""

    start: Start = "latest"
    auto_ack: bool = True
    in_order: bool = False
    broadcast: bool = False
    allocation: str | Allocation = "average"
    pull_batch: int = 32
    max_buffered: int = 1000
    max_buffered_bytes: int = 64 << 20
    max_buffered_per_queue: int = 1000
    long_poll: float = 15.0
    max_redeliveries: int | None = None
    pause_after_nack: float = 1.0
    consume_timeout: float = 900.0
    close_timeout: float = 15.0
    offsets_directory: str | Path | None = None

    def __post_init__(self) -> None:
        if not self.consume_timeout > 0:
            raise ClientError(f"consume_timeout must be more than 0 s, got {self.consume_timeout!r}")
        if self.close_timeout < 0:
            raise ClientError(f"close_timeout must be at least 0 s, got {self.close_timeout!r}")

    @property
    def redeliveries(self) -> int:
        """The redeliveries before a message is a dead letter: by default 16, and in order unlimited."""
        if self.max_redeliveries is not None:
            return self.max_redeliveries
        return 2**31 - 1 if self.in_order else 16

    @property
    def limits(self) -> FlowLimits:
        return FlowLimits(
            batch=self.pull_batch,
            wait=self.long_poll,
            messages=self.max_buffered,
            bytes=self.max_buffered_bytes,
            queue_messages=self.max_buffered_per_queue,
        )
