"""Tests of the offset reset plan: skipped and repeated messages, and those only in the archive."""

from __future__ import annotations

import pytest

from neve.admin.lag import QueueProgress, progress_of
from neve.admin.offset_reset import is_within, plan_reset
from neve.client.model import ConsumeStats, MessageQueue, QueueStats


def at(
    position: int, *, low: int = 0, high: int = 10, local: int | None = None, messages: int | None = None
) -> QueueProgress:
    bounds = QueueStats(low, high, 0, high - low if messages is None else messages, local)
    return progress_of(MessageQueue("t", "b", 0), ConsumeStats(high, position, 0), bounds)


@pytest.mark.parametrize(
    ("position", "target", "skipped", "again", "cold"),
    [
        (4, 4, 0, 0, 0),
        (4, 9, 5, 0, 2),
        (7, 9, 2, 0, 0),
        (4, 0, 0, 4, 4),
        (8, 2, 0, 6, 4),
        (8, 7, 0, 1, 0),
        (12, 2, 0, 8, 4),
    ],
)
def test_offset_reset_counts_skipped_and_repeated_messages(
    position: int, target: int, skipped: int, again: int, cold: int
) -> None:
    found = plan_reset(at(position, local=6), target)
    assert (found.skipped, found.repeated, found.cold) == (skipped, again, cold)


def test_offset_reset_ignores_offsets_below_the_minimum() -> None:
    found = plan_reset(at(1, low=5), 8)
    assert (found.skipped, found.repeated, found.cold) == (3, 0, None)


def test_offset_reset_ignores_offsets_skipped_by_a_restore() -> None:
    bounds = QueueStats(0, 10_000_006, 0, 6)
    one = progress_of(MessageQueue("t", "b", 0), ConsumeStats(10_000_006, 2, 0, left=4), bounds)
    assert plan_reset(one, 10_000_006).skipped == 4
    ended = progress_of(MessageQueue("t", "b", 0), ConsumeStats(10_000_006, 10_000_006, 0), bounds)
    assert plan_reset(ended, 0).repeated == 6


def test_offset_reset_target_is_bounded_by_the_queue() -> None:
    assert [is_within(at(0, low=5), target) for target in (4, 5, 10, 11)] == [False, True, True, False]
