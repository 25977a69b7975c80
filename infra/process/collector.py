"""Python's garbage collector in a server that keeps millions of objects.

A full collection traverses every live object and stops the process for 0.3 s per million of them. Objects that survive
a full collection are therefore frozen: the next one traverses only newer objects, at most some 5,000, in a millisecond
or two. Python starts a collection when the number of objects has grown. In a bounded cache, as of mapped files, a new
object replaces an old one and the number does not grow, so such a cache counts its new objects itself (`Turnover`).

Reference counting frees unused objects as usual. Only a reference cycle that is dropped after it was frozen is never
freed, so objects that a server drops (connections, queues, waiting requests) must not be part of a cycle. Tests check
that.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

# See `gc.set_threshold`: a full collection starts after about 400 * 5 * 2 new objects.
_THRESHOLDS = (400, 4, 1)
_FULL = 2
# Objects that replaced others until a full collection is due.
_REPLACED = 1_000


class Turnover:
    """Counts the new objects of a bounded cache, and starts a full collection when there are many."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since = 0

    def add(self) -> None:
        """Count one new object. Without effect before `settle`."""
        self._since += 1
        if self._since >= _REPLACED:
            self._since = 0
            if _freeze in gc.callbacks:
                gc.collect()


def settle() -> None:
    """Freeze all objects; called once, when code and tables are loaded."""
    gc.collect()
    gc.freeze()
    # Python delays a full collection until new objects are a quarter of the last survivors: now there are none.
    gc.collect()
    gc.set_threshold(*_THRESHOLDS)
    if _freeze not in gc.callbacks:
        gc.callbacks.append(_freeze)


def freeze_new() -> None:
    """Exempt a large object that was just made from collections: a table of 50,000 rows would cost each milliseconds.

    Without effect before `settle`.
    """
    if _freeze in gc.callbacks:
        gc.freeze()


def _freeze(phase: str, info: Mapping[str, Any]) -> None:
    if phase == "stop" and info["generation"] == _FULL:
        gc.freeze()
