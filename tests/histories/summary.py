"""The results of all rounds of a mode in one line; a pure function.

20 rounds of 20: 18 held, 1 broken (lost 1), 1 void; 48211 sends acknowledged; 31 elections; faults: kill 12, freeze 9;
longest without an acknowledged send: median 2.1 s, at most 7.4 s
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from tests.histories.checker import Report, Verdict


def summary(reports: Sequence[Report], asked: int) -> str:
    """Return a summary for readers and for `grep`."""
    verdicts = Counter(report.verdict for report in reports)
    broken = Counter[str]()  # Rounds, by broken promise.
    faults = Counter[str]()
    for report in reports:
        faults += report.faults
        if report.verdict is Verdict.BROKEN:
            broken.update(sorted({violation.kind for violation in report.violations}))
    by = f" ({_listed(broken)})" if broken else ""
    held, spoilt, void = (verdicts[each] for each in (Verdict.HELD, Verdict.BROKEN, Verdict.VOID))
    acknowledged = sum(report.counts["sent, acknowledged"] for report in reports)
    parts = [
        f"{len(reports)} rounds of {asked}: {held} held, {spoilt} broken{by}, {void} void",
        f"{acknowledged} sends acknowledged",
        f"{sum(report.elections for report in reports)} elections",
        f"faults: {_listed(faults) or 'none'}",
    ]
    if reports:
        silent = [report.silent_ms / 1000 for report in reports]
        parts.append(
            f"longest without an acknowledged send: median {median(silent):.1f} s, at most {max(silent):.1f} s"
        )
    return "; ".join(parts)


def is_enough(reports: Sequence[Report], asked: int) -> bool:
    """Return whether all requested rounds exist, none is broken, and most are not void."""
    verdicts = Counter(report.verdict for report in reports)
    return len(reports) >= asked and not verdicts[Verdict.BROKEN] and verdicts[Verdict.HELD] >= verdicts[Verdict.VOID]


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{what} {count}" for what, count in counts.most_common())
