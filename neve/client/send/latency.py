"""Brokers that a producer avoids for a while: the slower the last answer, the longer.

As in RocketMQ's MQFaultStrategy, an answer that took at least `_LATENCY_MS[i]` makes its broker unavailable for
`_NOT_AVAILABLE_MS[i]`. A failure counts as an answer after 10 s. A broker that answered with an error is also
unreachable until its next success, and is then the last choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_LATENCY_MS = (50, 100, 550, 1_800, 3_000, 5_000, 15_000)
_NOT_AVAILABLE_MS = (0, 0, 2_000, 5_000, 6_000, 10_000, 30_000)
_ISOLATED_AS_MS = 10_000
assert len(_LATENCY_MS) == len(_NOT_AVAILABLE_MS)


@dataclass(slots=True)
class _Fault:
    until_ms: int = 0
    is_reachable: bool = True


class FaultTable:
    """Records until when each broker is avoided. `now_ms` is a monotonic clock."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._faults: dict[str, _Fault] = {}

    def answered(self, broker_name: str, latency_ms: float) -> None:
        """Record a success and its latency."""
        self._update(broker_name, latency_ms, is_reachable=True)

    def failed(self, broker_name: str) -> None:
        """Record that no answer arrived, or that the broker is unreachable."""
        self._update(broker_name, _ISOLATED_AS_MS, is_reachable=True)

    def refused(self, broker_name: str) -> None:
        """Record that the broker answered with an error."""
        self._update(broker_name, _ISOLATED_AS_MS, is_reachable=False)

    def is_available(self, broker_name: str) -> bool:
        fault = self._faults.get(broker_name)
        return fault is None or fault.until_ms <= self._now_ms()

    def is_reachable(self, broker_name: str) -> bool:
        fault = self._faults.get(broker_name)
        return fault is None or fault.is_reachable

    def _update(self, broker_name: str, latency_ms: float, *, is_reachable: bool) -> None:
        pause = _pause_ms(latency_ms)
        fault = self._faults.get(broker_name)
        if fault is None:
            if not pause and is_reachable:
                return  # a healthy broker needs no entry
            fault = self._faults[broker_name] = _Fault()
        fault.is_reachable = is_reachable
        if pause:  # a fast answer does not shorten the present pause
            fault.until_ms = max(fault.until_ms, self._now_ms() + pause)


def _pause_ms(latency_ms: float) -> int:
    reached = [pause for limit, pause in zip(_LATENCY_MS, _NOT_AVAILABLE_MS, strict=True) if latency_ms >= limit]
    return reached[-1] if reached else 0
