"""Durations, sizes and times as people write them: `90m`, `8m`, `2026-01-31T08:00`. The only parsers of the product."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS = 1_000, 60_000, 3_600_000, 86_400_000
DURATION_MS: Mapping[str, int] = {
    "ms": 1, "s": SECOND_MS, "m": MINUTE_MS, "min": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS, "w": 7 * DAY_MS,
}  # fmt: skip
SIZE_BYTES: Mapping[str, int] = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")
_SIZE = re.compile(r"([0-9]+)\s*([kmg]?)")


def parse_duration_ms(text: str, *, bare_unit: str | None = None) -> int:
    """Return the milliseconds of a duration, such as `500ms`, `30s`, `90m`, `6h`, `1d` or `2w`.

    Args:
        bare_unit: the unit of a number without one; without it, a unit is required.

    Raises:
        ValueError: the text is not a duration.
    """
    found = _DURATION.fullmatch(text.strip().lower())
    unit = "" if found is None else str(found[2] or bare_unit or "")
    if found is None or unit not in DURATION_MS:
        raise ValueError(f"{text!r} is not a duration: write a number and a unit, as 30s, 90m, 6h or 1d")
    return round(float(found[1]) * DURATION_MS[unit])


def parse_size_bytes(text: str) -> int:
    """Return the bytes of a size, such as `512`, `64k`, `8m` or `1g`.

    Raises:
        ValueError: the text is not a size above 0.
    """
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None or not int(found[1]):
        raise ValueError(f"{text!r} is not a size: write 512, 64k, 8m or 1g")
    return int(found[1]) * SIZE_BYTES[found[2]]


def parse_instant_ms(text: str, now_ms: int | None = None) -> int:
    """Return milliseconds since 1970 of an ISO 8601 time, without a zone in UTC.

    Args:
        now_ms: the present time; with it, a duration before now is accepted as well, such as `-90m`.

    Raises:
        ValueError: the text is neither.
    """
    if now_ms is not None and text.startswith("-"):
        return now_ms - parse_duration_ms(text[1:])
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        ago = "" if now_ms is None else ", or a duration before now, as -90m"
        raise ValueError(f"{text!r} is not a time: write ISO 8601, as 2026-01-31T08:00{ago}") from None
    return datetime_ms(moment)


def datetime_ms(moment: datetime) -> int:
    """Return milliseconds since 1970 of a datetime, without a zone in UTC."""
    aware = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return int(aware.timestamp() * 1000)


def duration_text(ms: int) -> str:
    """Return the shortest exact spelling of a duration, as `parse_duration_ms` reads it."""
    for unit in ("d", "h", "m", "s"):
        if ms and ms % DURATION_MS[unit] == 0:
            return f"{ms // DURATION_MS[unit]}{unit}"
    return f"{ms}ms"
