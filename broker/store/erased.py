"""Erased offsets of a queue: their records stay in the log until its files are evicted, but no request returns them.

Spans are (first, last), sorted and disjoint, and immutable. Pure functions.
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
    """Return the first offset at or above the given one that is not erased."""
    at = bisect_right(spans, offset, key=_first) - 1
    return spans[at][1] + 1 if at >= 0 and offset <= spans[at][1] else offset


def before(spans: Spans, offset: int) -> int:
    """Return the last offset at or below the given one that is not erased; -1 if there is none."""
    at = bisect_right(spans, offset, key=_first) - 1
    return spans[at][0] - 1 if at >= 0 and offset <= spans[at][1] else offset


def meeting(spans: Spans, first: int, end: int) -> Spans:
    """Return the spans that overlap [first, end)."""
    low = bisect_right(spans, first, key=_first) - 1
    low += low < 0 or spans[low][1] < first
    return spans[low : bisect_right(spans, end - 1, key=_first)]


def has(spans: Spans, span: Span) -> bool:
    """Return whether one span contains the given one entirely."""
    return behind(spans, span[0]) > span[1]


def left_of(count: int, first: int, erased_spans: Spans) -> npt.NDArray[np.bool_]:
    """Return, for `count` offsets from `first` on, which of them are not erased."""
    left = np.ones(count, np.bool_)
    for begin, last in erased_spans:
        left[max(begin - first, 0) : last + 1 - first] = False
    return left


def united(spans: Spans, more: Iterable[Span]) -> Spans:
    """Return the union of the spans and others, which may be in any order."""
    found: list[Span] = []
    for first, last in sorted((*spans, *more)):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


def within(spans: Spans, low: int, end: int) -> Spans:
    """Return the spans clipped to [low, end); the same object if nothing changes."""
    if not spans or (low <= spans[0][0] and spans[-1][1] < end):
        return spans
    return (
        tuple((max(first, low), min(last, end - 1)) for first, last in meeting(spans, low, end)) if low < end else NONE
    )


def _first(span: Span) -> int:
    return span[0]
