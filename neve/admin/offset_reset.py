"""The effect of a change of a committed offset. Computes only; sends no request.

min ...... target ...... committed ............... max      backward: [target, committed) is read again
min ...... committed .... target ................. max      forward:  [committed, target) is skipped
"""

from __future__ import annotations

from typing import NamedTuple

from neve.admin.lag import QueueProgress


class OffsetReset(NamedTuple):
    """The change of a group's committed offset in one queue.

    `cold` is how many of the skipped or repeated messages exist in the archive only; None if the broker does not
    report it.
    """

    progress: QueueProgress
    target: int
    skipped: int
    repeated: int
    cold: int | None


def is_within(progress: QueueProgress, target: int) -> bool:
    """Return whether the target is an offset of the queue, or its end."""
    return progress.min_offset <= target <= progress.max_offset


def plan_reset(progress: QueueProgress, target: int) -> OffsetReset:
    """Count the messages that the change skips or repeats. Offsets without a message count as far as brokers report."""
    low, high = progress.min_offset, progress.max_offset
    present = min(max(progress.committed, low), high)
    skipped = min(max(0, target - present), progress.lag)
    repeated = min(max(0, present - target), max(0, progress.messages - progress.lag))
    cold = None
    if progress.local_min_offset is not None:
        archived = min(progress.local_min_offset, max(present, target)) - min(present, target)
        cold = min(max(0, archived), skipped + repeated)
    return OffsetReset(progress, target, skipped, repeated, cold)
