"""What becomes of a group's messages when it is sent somewhere else in a queue: figures alone, nothing is asked here.

min ...... target ...... position ............... max      set back: [target, position) is read again
min ...... position .... target ................. max      set on:   [position, target) is skipped
"""

from __future__ import annotations

from typing import Any, NamedTuple

from neve.cli.lag import Standing


class Move(NamedTuple):
    """Of a group in one queue. `cold` of the messages it is about are in the archive alone; None: nobody tells."""

    standing: Standing
    target: int
    skipped: int
    again: int
    cold: int | None

    @property
    def is_none(self) -> bool:
        return self.target == self.standing.position

    def row(self) -> dict[str, Any]:
        queue = self.standing.queue
        return {
            "topic": queue.topic,
            "broker": queue.broker_name,
            "queue": queue.queue_id,
            "position": self.standing.position,
            "target": self.target,
            "skipped": self.skipped,
            "again": self.again,
            "cold": self.cold,
        }


def is_within(standing: Standing, target: int) -> bool:
    """Whether it is an offset that the queue has, or its end."""
    return standing.min_offset <= target <= standing.max_offset


def move(standing: Standing, target: int) -> Move:
    """Offsets that exist nowhere are neither skipped nor read again, as far as the counts of the queue tell."""
    low, high = standing.min_offset, standing.max_offset
    now = min(max(standing.position, low), high)
    skipped = min(max(0, target - now), standing.lag)
    again = min(max(0, now - target), max(0, standing.messages - standing.lag))
    cold = None
    if standing.local_min_offset is not None:
        archived = min(standing.local_min_offset, max(now, target)) - min(now, target)
        cold = min(max(0, archived), skipped + again)
    return Move(standing, target, skipped, again, cold)
