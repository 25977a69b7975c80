"""Times as people write them."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from neve.cli.quantities import time
from neve.clock import system_now_ms


def to_ms(text: str) -> int:
    """Milliseconds since 1970 of ISO 8601 text, without a zone in UTC; or of a span of time before now, as `-90m`."""
    if text.startswith("-"):
        return system_now_ms() - int(time(text[1:]) * 1000)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is neither an ISO 8601 time, as 2026-01-31T08:00, nor -90m") from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)
