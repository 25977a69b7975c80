"""The figures of a measurement: counts, rates, latencies and CPU time."""

from __future__ import annotations

import math
from array import array
from typing import Any, NamedTuple

_SHARES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999))
# The share of one CPU core from which this command limits the result.
BUSY = 0.9


class Latencies:
    """All latencies of a measurement, in microseconds."""

    def __init__(self) -> None:
        self._all = array("Q")

    def add(self, seconds: float) -> None:
        self._all.append(max(round(seconds * 1e6), 0))

    def __len__(self) -> int:
        return len(self._all)

    def figures(self) -> dict[str, float | None]:
        """Return percentiles in milliseconds, by nearest rank."""
        ordered = sorted(self._all)
        count = len(ordered)
        percentiles = {
            f"{name}_ms": ordered[math.ceil(share * count) - 1] / 1000 if count else None for name, share in _SHARES
        }
        return {**percentiles, "max_ms": ordered[-1] / 1000 if count else None}


class Cost(NamedTuple):
    """CPU time in seconds; that of brokers is None if it cannot be read."""

    client: float
    brokers: float | None


def figures(what: str, messages: int, size: int, seconds: float, cost: Cost) -> dict[str, Any]:
    """Return all figures except latencies."""
    per_message = 1e6 / messages if messages else None
    return {
        "what": what,
        "messages": messages,
        "bytes": size,
        "seconds": round(seconds, 3),
        "messages_per_s": round(messages / seconds, 1) if seconds else None,
        "mib_per_s": round(size / seconds / (1 << 20), 2) if seconds else None,
        "client_cpu_us": round(cost.client * per_message, 2) if per_message else None,
        "broker_cpu_us": round(cost.brokers * per_message, 2) if per_message and cost.brokers is not None else None,
        "client_cpu_share": round(cost.client / seconds, 2) if seconds else None,
    }
