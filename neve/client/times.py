"""Points in time, as callers give them."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from neve.errors import ClientError

#: Milliseconds since 1970, or a datetime with a time zone.
Time = int | datetime
#: Where a consumer begins: at the first message, behind the last one, or at the first message stored at a time.
Start = Literal["earliest", "latest"] | Time


def time_ms(when: Time) -> int:
    """Return a point in time as milliseconds since 1970.

    Raises:
        ClientError: `when` is a datetime without a time zone, or no point in time.
    """
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise ClientError(f"a datetime needs a time zone, got {when!r}")
        return round(when.timestamp() * 1000)
    if type(when) is not int:
        raise ClientError(f"a time is a datetime or milliseconds since 1970, got {when!r}")
    return when


def start_position(start: Start) -> str | int:
    """Return "earliest", "latest" or a time in milliseconds since 1970.

    Raises:
        ClientError: `start` is none of these.
    """
    if isinstance(start, str):
        if start not in ("earliest", "latest"):
            raise ClientError(f"start must be 'earliest', 'latest' or a time, got {start!r}")
        return start
    return time_ms(start)
