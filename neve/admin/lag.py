"""The progress of a consumer group in a queue, and its lag. Computes only; sends no request.

    min ........ local min ........ committed ........ max
     └─ cold ────────┘                  └─── lag ──────┘

Offsets below the local minimum exist in the archive only. Brokers without an archive report no local minimum, so the
number of cold messages is None.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from neve.client.model import ConsumeStats, MessageQueue, QueueStats


class QueueProgress(NamedTuple):
    """The progress of a group in one queue. `lag`, `cold` and `messages` count messages, not offsets."""

    queue: MessageQueue
    committed: int
    min_offset: int
    max_offset: int
    lag: int
    cold: int | None
    messages: int
    local_min_offset: int | None

    @property
    def next_offset(self) -> int:
        """The offset that the group reads next: offsets below the minimum no longer exist."""
        return max(self.committed, self.min_offset)


def progress_of(queue: MessageQueue, stats: ConsumeStats, bounds: QueueStats | None) -> QueueProgress:
    """Combine the answers of a broker about a group and about the queue, which were taken at different moments."""
    committed, high = stats.consumer_offset, stats.broker_offset
    low = 0 if bounds is None else min(bounds.min_offset, high)
    lag = stats.left if stats.left is not None else max(0, high - max(committed, low))
    cold = stats.left_cold
    if cold is None and bounds is not None and bounds.local_min_offset is not None:
        cold = 0
    messages = high - low if bounds is None else bounds.messages
    local = None if bounds is None else bounds.local_min_offset
    return QueueProgress(queue, committed, low, high, lag, None if cold is None else min(cold, lag), messages, local)


def total_lag(progress: Iterable[QueueProgress]) -> int:
    """Return the sum of the lags."""
    return sum(one.lag for one in progress)


def total_cold(progress: Iterable[QueueProgress]) -> int | None:
    """Return the number of cold messages; None if no broker reports any."""
    reported = [one.cold for one in progress if one.cold is not None]
    return sum(reported) if reported else None
