"""The progress and lag of a consumer group as text and as rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neve.admin.lag import QueueProgress


_UNITS = (("d", 86_400, 1 << 62), ("h", 3600, 24), ("m", 60, 60), ("s", 1, 60))


def share_text(cold: int | None, lag: int) -> str | None:
    """Return the share of the lag that is cold, as a percentage that is 0% or 100% only if it is exact."""
    if cold is None:
        return None
    share = 100 * cold / lag if lag else 0.0
    return f"{share:.0f}%" if share in {0.0, 100.0} else f"{min(max(share, 0.1), 99.9):.1f}%"


def behind_text(milliseconds: int | None) -> str | None:
    """Return a duration in its largest whole unit and the next one, as `1d3h`."""
    if milliseconds is None:
        return None
    seconds = max(milliseconds, 0) // 1000
    counts = [(seconds // size % within, unit) for unit, size, within in _UNITS]
    first = next((at for at, (count, _) in enumerate(counts) if count), len(counts) - 1)
    shown = counts[first : first + 2]
    return "".join(f"{count}{unit}" for at, (count, unit) in enumerate(shown) if count or at == 0)


def progress_row(one: QueueProgress) -> dict[str, Any]:
    """Return the row of a queue."""
    return {
        "topic": one.queue.topic,
        "broker": one.queue.broker_name,
        "queue": one.queue.queue_id,
        "committed": one.committed,
        "min_offset": one.min_offset,
        "max_offset": one.max_offset,
        "lag": one.lag,
        "cold": one.cold,
    }


def lag_row(one: QueueProgress, behind_ms: int | None) -> dict[str, Any]:
    """Return the row of a queue with the age of the oldest message that is not read."""
    row = progress_row(one)
    cold = row.pop("cold")
    return {**row, "behind": behind_text(behind_ms), "behind_ms": behind_ms, "cold": cold}
