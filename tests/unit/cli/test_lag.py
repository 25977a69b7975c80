"""Tests of the lag figures of `neve group`."""

from __future__ import annotations

import pytest

from neve.admin.lag import progress_of, total_cold, total_lag
from neve.cli.lag import behind_text, share_text
from neve.client.model import ConsumeStats, MessageQueue, QueueStats

QUEUE = MessageQueue("t", "b", 0)


def bounds(low: int, high: int, local: int | None = None) -> QueueStats:
    return QueueStats(low, high, 0, high - low, local)


def test_offsets_below_the_minimum_are_not_lag() -> None:
    one = progress_of(QUEUE, ConsumeStats(10, 2, 0), bounds(6, 10))
    assert (one.lag, one.committed, one.next_offset, one.cold) == (4, 2, 6, None)


def test_missing_offsets_are_not_lag() -> None:
    one = progress_of(QUEUE, ConsumeStats(10_000_006, 2, 0, left=4), bounds(0, 10_000_006))
    assert one.lag == 4


def test_committed_offset_above_the_end_has_no_lag() -> None:
    assert progress_of(QUEUE, ConsumeStats(10, 12, 0), bounds(0, 10)).lag == 0


@pytest.mark.parametrize(("position", "cold"), [(2, 6), (8, None)])
def test_cold_lag_is_the_count_of_the_broker(position: int, cold: int | None) -> None:
    one = progress_of(QUEUE, ConsumeStats(10, position, 0, left_cold=cold), bounds(0, 10, 8))
    assert one.cold == (cold or 0)


def test_total_cold_lag_sums_the_reporting_brokers() -> None:
    told = progress_of(QUEUE, ConsumeStats(10, 0, 0, left_cold=4), bounds(0, 10, 4))
    silent = progress_of(QUEUE, ConsumeStats(10, 0, 0), bounds(0, 10))
    assert (total_lag([told, silent]), total_cold([told, silent]), total_cold([silent])) == (20, 4, None)


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(0, "0s"), (999, "0s"), (61_000, "1m1s"), (7_200_000, "2h"), (90_061_000, "1d1h"), (86_399_000, "23h59m")],
)
def test_time_span_is_printed_in_its_largest_units(milliseconds: int, text: str) -> None:
    assert behind_text(milliseconds) == text


@pytest.mark.parametrize(
    ("cold", "lag", "text"),
    [(None, 5, None), (0, 5, "0%"), (5, 5, "100%"), (1, 1_000_000, "0.1%"), (999_999, 1_000_000, "99.9%")],
)
def test_rounded_share_never_reads_as_none_or_all(cold: int | None, lag: int, text: str | None) -> None:
    assert share_text(cold, lag) == text
