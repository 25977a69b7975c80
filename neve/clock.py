"""The machine's clocks, for clients and commands; servers are given a `Clock` (infra.clock)."""

from __future__ import annotations

import time


def system_now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def system_monotonic() -> float:
    """Seconds of a clock that nobody sets."""
    return time.monotonic()


def own_cpu_seconds() -> float:
    """What this process has used of processors."""
    return time.process_time()
