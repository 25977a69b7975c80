"""The machine's wall clock, for clients and commands; servers are given a `Clock` (infra.clock)."""

from __future__ import annotations

import time


def system_now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000
