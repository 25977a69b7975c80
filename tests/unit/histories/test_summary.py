"""Tests of the summary of history rounds, and of the criterion for success."""

from __future__ import annotations

from collections import Counter

from tests.histories.checker import Report, Violation
from tests.histories.summary import is_enough, summary

LATE = Violation("restless", "it never came about", is_void=True)
LOST = Violation("lost", "p-1")


def report(*violations: Violation, silent_ms: int = 2_000) -> Report:
    counts, faults = Counter({"sent, acknowledged": 10}), Counter({"kill": 2, "freeze": 1})
    return Report([*violations], counts, elections=1, faults=faults, silent_ms=silent_ms)


def test_summary_counts_rounds_by_verdict() -> None:
    reports = [report(), report(silent_ms=1_000), report(LATE, silent_ms=9_000), report(LATE, LOST, LOST)]
    assert summary(reports, 5) == (
        "4 rounds of 5: 2 held, 1 broken (lost 1, restless 1), 1 void; 40 sends acknowledged; 4 elections; "
        "faults: kill 8, freeze 4; longest without an acknowledged send: median 2.0 s, at most 9.0 s"
    )
    assert summary([], 5) == "0 rounds of 5: 0 held, 0 broken, 0 void; 0 sends acknowledged; 0 elections; faults: none"


def test_too_few_broken_or_mostly_void_rounds_are_not_enough() -> None:
    assert is_enough([report(), report(LATE)], 2)
    assert not is_enough([report()], 2)
    assert not is_enough([report(), report(LOST)], 2)
    assert not is_enough([report(), report(LATE), report(LATE)], 3)
