"""Python's garbage collector in a server that keeps millions of objects.

A full collection looks at every object that was ever made and still lives, and nothing else runs meanwhile: 0.3 s for
each million. So what lived through one is not looked at again: each full collection sees only what came since the last,
at most some 5,000 objects, a millisecond or two. Python counts how many more objects there are: where one goes for each
that comes, as maps of files do at their bound, it counts nothing and they would all be new together. Who makes such
things has them looked at himself, a thousand at a time (`Comers`).

What is no longer used goes by its reference count, as ever; only a circle of objects that lived through a full
collection and is dropped later stays for ever. What a server drops has therefore to be without circles: connections,
queues, waiting requests. Tests hold that.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

# Objects until the youngest are looked at, then how many such looks until the next older are, and so on: a full
# collection comes after 400 * 5 * 2 objects more, or one such look later.
_THRESHOLDS = (400, 4, 1)
_FULL = 2
# Of those that come for others that go, from which on a full collection is due.
_COMERS = 1_000


class Comers:
    """Counts objects of a kind that live long and take each other's place; `one_more` for each that is made."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since = 0

    def one_more(self) -> None:
        """Another has been made. Until `settle`, and in programs without it, nothing happens."""
        self._since += 1
        if self._since >= _COMERS:
            self._since = 0
            if _freeze in gc.callbacks:
                gc.collect()


def settle() -> None:
    """Call it once, when code and tables are loaded; they are left alone from here on."""
    gc.collect()
    gc.freeze()
    # A full collection waits for a quarter as many objects as the last one left: now it left none.
    gc.collect()
    gc.set_threshold(*_THRESHOLDS)
    if _freeze not in gc.callbacks:
        gc.callbacks.append(_freeze)


def leave_alone() -> None:
    """Something large has just been made, to live for seconds: no collection is to look through it.

    A table of 50,000 rows costs each of them milliseconds. Until `settle`, and in programs without it, nothing happens.
    """
    if _freeze in gc.callbacks:
        gc.freeze()


def _freeze(phase: str, info: Mapping[str, Any]) -> None:
    if phase == "stop" and info["generation"] == _FULL:
        gc.freeze()
