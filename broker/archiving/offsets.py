"""Where the local log and its queues go on beside an archive. Pure: no offset that it ever named is given again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Queue = tuple[str, int]


def log_goes_on_at(log_end: int, resume_at: int | None) -> int | None:
    """The position from which on the log begins anew; None: it goes on where it ends."""
    return resume_at if resume_at is not None and log_end < resume_at else None


def queues_to_raise(following: Mapping[Queue, int], next_offset: Callable[[str, int], int]) -> dict[Queue, int]:
    """Queues that would give offsets again -> where they go on instead.

    `following` is one above what the archive has named, or may soon; `next_offset` what the local log would give next.
    """
    return {(topic, queue): first for (topic, queue), first in following.items() if next_offset(topic, queue) < first}
