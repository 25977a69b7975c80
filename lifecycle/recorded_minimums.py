"""Comparison of the minimums recorded in the archive with those of the local log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping


def minimums_to_raise(
    queues: Mapping[str, Iterable[int]],
    recorded: Callable[[str, int], int],
    minimum: Callable[[str, int], int],
) -> dict[str, dict[int, int]]:
    """Return the recorded minimums above the local ones, by topic and queue.

    `minimum` is called only for queues with a recorded minimum.
    """
    rising: dict[str, dict[int, int]] = {}
    for topic, numbers in queues.items():
        found = {queue: recorded(topic, queue) for queue in numbers}
        above = {queue: offset for queue, offset in found.items() if offset and offset > minimum(topic, queue)}
        if above:
            rising[topic] = above
    return rising
