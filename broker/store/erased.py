"""Offsets of a queue that were erased: they stay in the log until its files go, and no request returns them.

Spans are (first, last), sorted, apart from each other, and never changed in place. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]
Spans = tuple[Span, ...]
NONE: Spans = ()


def behind(spans: Spans, offset: int) -> int:
    """The first offset at or above that was not erased."""
    at = bisect_right(spans, offset, key=_first) - 1
    return spans[at][1] + 1 if at >= 0 and offset <= spans[at][1] else offset


def before(spans: Spans, offset: int) -> int:
    """The last offset at or below that was not erased; -1 where there is none."""
    at = bisect_right(spans, offset, key=_first) - 1
    return spans[at][0] - 1 if at >= 0 and offset <= spans[at][1] else offset


def meeting(spans: Spans, first: int, end: int) -> Spans:
    """Those that have some of [first, end)."""
    low = bisect_right(spans, first, key=_first) - 1
    low += low < 0 or spans[low][1] < first
    return spans[low : bisect_right(spans, end - 1, key=_first)]


def has(spans: Spans, span: Span) -> bool:
    """Whether one of them has all of it."""
    return behind(spans, span[0]) > span[1]


def left_of(count: int, first: int, gone: Spans) -> npt.NDArray[np.bool_]:
    """Of so many offsets from one on, which were not erased."""
    left = np.ones(count, np.bool_)
    for begin, last in gone:
        left[max(begin - first, 0) : last + 1 - first] = False
    return left


def united(spans: Spans, more: Iterable[Span]) -> Spans:
    """They and others, in any order."""
    found: list[Span] = []
    for first, last in sorted((*spans, *more)):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


def within(spans: Spans, low: int, end: int) -> Spans:
    """What they have of [low, end); the same object where that is all."""
    if not spans or (low <= spans[0][0] and spans[-1][1] < end):
        return spans
    return (
        tuple((max(first, low), min(last, end - 1)) for first, last in meeting(spans, low, end)) if low < end else NONE
    )


def _first(span: Span) -> int:
    return span[0]
