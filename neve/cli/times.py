"""Times as people write them."""

from __future__ import annotations

from datetime import UTC, datetime

import click


def to_ms(text: str) -> int:
    """Milliseconds since 1970 of ISO 8601 text; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not an ISO 8601 time, such as 2026-01-31T08:00") from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)
