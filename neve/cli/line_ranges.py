"""Ranges of line numbers as text."""

from __future__ import annotations

from collections.abc import Iterable


def ranges(numbers: Iterable[int], at_most: int = 8) -> str:
    """Return numbers as `3, 7-9, 12`, with at most `at_most` ranges and the count of the other numbers."""
    pieces: list[list[int]] = []
    for number in sorted(set(numbers)):
        if pieces and pieces[-1][1] == number - 1:
            pieces[-1][1] = number
        else:
            pieces.append([number, number])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in pieces[:at_most])
    left = sum(high - low + 1 for low, high in pieces[at_most:])
    return text + (f" and {left} more" if left else "")
