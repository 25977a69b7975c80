"""Named places where a test makes the process die or an operation fail.

A place costs one truth test while nothing is armed. `NEVE_FAILPOINT=name[:nth]=ACTION`, with commas between several,
arms places in a child process and its descendants. `nth` counts the visits in each process from 1. Actions: `crash`
(SIGKILL), `error`, and for a worker `crash_parent` (its parent is killed, the worker survives) and `crash_both`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ENVIRONMENT = "NEVE_FAILPOINT"


class FailpointError(OSError):
    """The failure that an armed place raises."""


@dataclass(slots=True)
class _Armed:
    action: Callable[[str], None]
    remaining: int


_armed: dict[str, _Armed] = {}


def _crash(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _crash_parent(name: str) -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def _crash_both(name: str) -> None:
    _crash_parent(name)
    _crash(name)


def _error(name: str) -> None:
    raise FailpointError(f"failpoint {name}")


_ACTIONS: dict[str, Callable[[str], None]] = {
    "crash": _crash,
    "crash_parent": _crash_parent,
    "crash_both": _crash_both,
    "error": _error,
}


def hit(name: str) -> None:
    """Mark a place; without effect unless it is armed."""
    if _armed:
        _fire(name)


def _fire(name: str) -> None:
    armed = _armed.get(name)
    if armed is None:
        return
    armed.remaining -= 1
    if armed.remaining == 0:
        armed.action(name)


def arm(name: str, action: str | Callable[[str], None] = "error", nth: int = 1) -> None:
    """Run an action at the nth visit of a place: a named one, or a callable that gets the name of the place."""
    _armed[name] = _Armed(_ACTIONS[action] if isinstance(action, str) else action, nth)


def disarm(name: str | None = None) -> None:
    """Disarm one place, or all."""
    if name is None:
        _armed.clear()
    else:
        _armed.pop(name, None)


@contextmanager
def armed(name: str, action: str | Callable[[str], None] = "error", nth: int = 1) -> Iterator[None]:
    """Arm a place for the length of a block."""
    arm(name, action, nth)
    try:
        yield
    finally:
        disarm(name)


def arm_from(specification: str) -> None:
    """Arm the places of a specification such as `offload.after_intent:2=crash`."""
    for item in filter(None, specification.split(",")):
        place, separator, action = item.partition("=")
        name, _, nth = place.partition(":")
        if not separator or action not in _ACTIONS or not name:
            raise ValueError(f"{ENVIRONMENT} must be name[:nth]={'|'.join(_ACTIONS)}, got {item!r}")
        arm(name, action, int(nth) if nth else 1)


arm_from(os.environ.get(ENVIRONMENT, ""))
