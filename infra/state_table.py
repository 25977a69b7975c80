"""States as a table: for each state and each event, which state follows. None: the pair can't happen.

An owner keeps its state and asks `following` alone what comes next.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class OutOfTurn(AssertionError):
    """Something was asked for what its state does not know: a fault of this program."""


def row(events: type[E], **cells: S) -> Mapping[E, S | None]:
    """A state's row, by the events' names in lower case; what is not named can't happen."""
    full: dict[E, S | None] = dict.fromkeys(events)
    full.update({events[name.upper()]: state for name, state in cells.items()})
    return full


def following(table: Mapping[S, Mapping[E, S | None]], state: S, event: E, *, owner: str) -> S:
    """
    Raises:
        OutOfTurn: the table marks the pair None; `owner` is whose state it is, for the text.
    """
    after = table[state][event]
    if after is None:
        raise OutOfTurn(f"{event.name} of {owner} that is {state.name}")
    return after
