"""Measure the work of an event loop between two parts of a long computation (`infra.loop.parts`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from infra.loop.parts import Parts

#: The limit of function calls and returns in one turn. Each takes 0.1 µs to 1 µs, so together less than 10 ms.
CALLS_IN_A_TURN = 10_000


def calls_in_turns(parts: Parts[Any], watch: Callable[[bool], object] = lambda _: None) -> list[int]:
    """Run all parts on this thread; return the calls and returns of each turn. `watch` is called at both ends."""
    calls, turns = 0, list[int]()

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    while True:
        calls = 0
        watch(True)
        sys.setprofile(count)
        try:
            part = next(parts, None)
        finally:
            sys.setprofile(None)
            watch(False)
        turns.append(calls)
        if part is None:
            return turns
        part()
