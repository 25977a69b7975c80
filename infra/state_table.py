"""State machines as tables: the next state for each state and event; None if the event is impossible in the state.

The owner of a state changes it only to the result of `next_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class ImpossibleTransition(AssertionError):
    """An event occurred in a state that excludes it: a defect of this program."""


def row(events: type[E], **cells: S) -> Mapping[E, S | None]:
    """Return the row of a state from event names in lower case; events without a name here are impossible."""
    full: dict[E, S | None] = dict.fromkeys(events)
    full.update({events[name.upper()]: state for name, state in cells.items()})
    return full


def next_state(table: Mapping[S, Mapping[E, S | None]], state: S, event: E, *, owner: str) -> S:
    """Return the next state.

    Raises:
        ImpossibleTransition: the table has None for the pair; the text names `owner`.
    """
    after = table[state][event]
    if after is None:
        raise ImpossibleTransition(f"{event.name} of {owner} that is {state.name}")
    return after
