"""How far a group is in a queue, and what it has left to read: figures alone, nothing is asked here.

    min ........ local min ........ position ........ max
     └─ cold ────────┘                  └── the lag ───┘

What lies below the local minimum, the archive alone has. A broker without one tells of no such place: how much is cold
is then None.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from neve.client import MessageQueue
    from neve.client.model import ConsumeStats, QueueStats


_UNITS = (("d", 86_400, 1 << 62), ("h", 3600, 24), ("m", 60, 60), ("s", 1, 60))


class Standing(NamedTuple):
    """A group in a queue."""

    queue: MessageQueue
    position: int
    min_offset: int
    max_offset: int
    lag: int
    cold: int | None
    messages: int
    local_min_offset: int | None

    @property
    def next_offset(self) -> int:
        """Of what it reads next: what is below the minimum is gone."""
        return max(self.position, self.min_offset)


def standing(queue: MessageQueue, stats: ConsumeStats, bounds: QueueStats | None) -> Standing:
    """By what brokers tell of the group, and of the queue itself; both were asked one after the other."""
    position, high = stats.consumer_offset, stats.broker_offset
    low = 0 if bounds is None else min(bounds.min_offset, high)
    lag = stats.left if stats.left is not None else max(0, high - max(position, low))
    cold = stats.left_cold
    if cold is None and bounds is not None and bounds.local_min_offset is not None:
        cold = 0
    messages = high - low if bounds is None else bounds.messages
    local = None if bounds is None else bounds.local_min_offset
    return Standing(queue, position, low, high, lag, None if cold is None else min(cold, lag), messages, local)


def total_lag(standings: Iterable[Standing]) -> int:
    return sum(one.lag for one in standings)


def total_cold(standings: Iterable[Standing]) -> int | None:
    """None: no broker tells of any."""
    told = [one.cold for one in standings if one.cold is not None]
    return sum(told) if told else None


def share_text(cold: int | None, lag: int) -> str | None:
    """The share of the lag that is cold, for people."""
    if cold is None:
        return None
    share = 100 * cold / lag if lag else 0.0
    return f"{share:.0f}%" if share in {0.0, 100.0} else f"{min(max(share, 0.1), 99.9):.1f}%"


def behind_text(milliseconds: int | None) -> str | None:
    """A span of time for people: in its largest whole unit and the next."""
    if milliseconds is None:
        return None
    seconds = max(milliseconds, 0) // 1000
    counts = [(seconds // size % within, unit) for unit, size, within in _UNITS]
    first = next((at for at, (count, _) in enumerate(counts) if count), len(counts) - 1)
    shown = counts[first : first + 2]
    return "".join(f"{count}{unit}" for at, (count, unit) in enumerate(shown) if count or at == 0)


def row(one: Standing, behind_ms: int | None = None, *, told: bool = False) -> dict[str, Any]:
    """As the verbs show it; with `told` also how long the oldest message that is not read has waited."""
    shown: dict[str, Any] = {
        "topic": one.queue.topic,
        "broker": one.queue.broker_name,
        "queue": one.queue.queue_id,
        "position": one.position,
        "min_offset": one.min_offset,
        "max_offset": one.max_offset,
        "lag": one.lag,
    }
    if told:
        shown |= {"behind": behind_text(behind_ms), "behind_ms": behind_ms}
    return shown | {"cold": one.cold}
