"""The unit of a topic's `reserve.time`: whole hours; a million or more mean unlimited."""

HOUR_MS = 3_600_000
FOR_EVER_HOURS = 1_000_000


def ttl_ms_of(hours: int | None) -> int | None:
    """Return the TTL in milliseconds; None for an unlimited, unknown or invalid one, which deletes nothing."""
    return None if hours is None or not 0 < hours < FOR_EVER_HOURS else hours * HOUR_MS
