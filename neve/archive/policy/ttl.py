"""What the number in a topic's `reserve.time` means: whole hours, from a million on for ever."""

HOUR_MS = 3_600_000
FOR_EVER_HOURS = 1_000_000


def ttl_ms_of(hours: int | None) -> int | None:
    """As a time; None: for ever. A TTL that is not known, or no number of hours, deletes nothing."""
    return None if hours is None or not 0 < hours < FOR_EVER_HOURS else hours * HOUR_MS
