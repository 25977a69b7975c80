"""What the archive has recorded as expired or deleted, and the local log still shows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping


def minimums_to_raise(
    queues: Mapping[str, Iterable[int]],
    recorded: Callable[[str, int], int],
    minimum: Callable[[str, int], int],
) -> dict[str, dict[int, int]]:
    """By topic and queue. The log is asked for its `minimum` where something is `recorded`, and nowhere else."""
    rising: dict[str, dict[int, int]] = {}
    for topic, numbers in queues.items():
        found = {queue: recorded(topic, queue) for queue in numbers}
        above = {queue: offset for queue, offset in found.items() if offset and offset > minimum(topic, queue)}
        if above:
            rising[topic] = above
    return rising
