"""What a long job tells of itself while somebody waits: events, each a flat mapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Progress = Callable[[dict[str, Any]], None]


def tell(progress: Progress | None, **event: Any) -> None:
    """Where nobody waits, to nobody."""
    if progress is not None:
        progress(event)
