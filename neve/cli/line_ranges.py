"""Numbers of lines, said shortly."""

from __future__ import annotations

from collections.abc import Iterable


def ranges(numbers: Iterable[int], at_most: int = 8) -> str:
    """`3, 7-9, 12`; of more than `at_most` of such pieces the first ones, and how many numbers are left out."""
    pieces: list[list[int]] = []
    for number in sorted(set(numbers)):
        if pieces and pieces[-1][1] == number - 1:
            pieces[-1][1] = number
        else:
            pieces.append([number, number])
    said = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in pieces[:at_most])
    left = sum(high - low + 1 for low, high in pieces[at_most:])
    return said + (f" and {left} more" if left else "")
