"""Progress reports of long jobs to a waiting caller: events, each a flat mapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Progress = Callable[[dict[str, Any]], None]


def report_event(progress: Progress | None, **event: Any) -> None:
    """Report an event if a caller waits for it."""
    if progress is not None:
        progress(event)
