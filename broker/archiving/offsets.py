"""Where the local log and its queues go on beside an archive. Pure: no offset that it ever named is given again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

Queue = tuple[str, int]


def log_goes_on_at(log_end: int, resume_at: int | None) -> int | None:
    """The position from which on the log begins anew; None: it goes on where it ends."""
    return resume_at if resume_at is not None and log_end < resume_at else None


def queues_to_raise(following: Mapping[Queue, int], next_offset: Callable[[str, int], int]) -> dict[Queue, int]:
    """Queues that would give offsets again -> where they go on instead.

    `following` is one above what the archive has named, or may soon; `next_offset` what the local log would give next.
    """
    return {(topic, queue): first for (topic, queue), first in following.items() if next_offset(topic, queue) < first}


def minimums_to_raise(
    queues: Mapping[str, Iterable[int]],
    recorded: Callable[[str, int], int],
    minimum: Callable[[str, int], int],
) -> dict[str, dict[int, int]]:
    """What the archive has recorded as expired or deleted and an older copy of the log still shows, by topic."""
    rising: dict[str, dict[int, int]] = {}
    for topic, numbers in queues.items():
        above = {queue: recorded(topic, queue) for queue in numbers}
        above = {queue: offset for queue, offset in above.items() if offset > minimum(topic, queue)}
        if above:
            rising[topic] = above
    return rising
