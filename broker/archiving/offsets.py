"""Next offsets of a log and its queues beside an archive, so that no archived offset is assigned again. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Queue = tuple[str, int]


def log_resume_offset(log_end: int, resume_at: int | None) -> int | None:
    """Return the physical offset at which the log restarts; None if it resumes at its end."""
    return resume_at if resume_at is not None and log_end < resume_at else None


def queues_to_raise(following: Mapping[Queue, int], next_offset: Callable[[str, int], int]) -> dict[Queue, int]:
    """Return the next offsets of the queues that would assign archived offsets again.

    `following` maps queues to the offset after the last one that the archive names or may name soon. `next_offset`
    returns the next offset by the local log.
    """
    return {(topic, queue): first for (topic, queue), first in following.items() if next_offset(topic, queue) < first}
