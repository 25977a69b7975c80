"""Which brokers a producer keeps away from for a while: the slower the last answer, the longer."""

from __future__ import annotations

from collections.abc import Callable

# (answered within ms, then left alone for ms); the Java client's table.
_BACK_OFF = ((550, 0), (1_800, 5_000), (3_000, 6_000), (5_000, 10_000), (15_000, 30_000))
_FAILED_FOR_MS = 10_000


class FaultTable:
    """Remembers until when a broker should be left alone. `now_ms` must not go back."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._until: dict[str, int] = {}

    def answered(self, broker_name: str, latency_ms: float) -> None:
        pause = next((pause for limit, pause in _BACK_OFF if latency_ms < limit), _BACK_OFF[-1][1])
        if pause:
            self._until[broker_name] = self._now_ms() + pause
        else:
            self._until.pop(broker_name, None)

    def failed(self, broker_name: str) -> None:
        self._until[broker_name] = self._now_ms() + _FAILED_FOR_MS

    def is_available(self, broker_name: str) -> bool:
        until = self._until.get(broker_name)
        return until is None or until <= self._now_ms()
