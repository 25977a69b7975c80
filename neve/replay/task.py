"""A replay as it stands in its file: what was asked for when it began, and how far it is.

The ranges are settled at the beginning: what comes into the source later, also by the replay itself, is not meant. A
position is the next offset to read, and moves on when all below it is stored in the target.
"""

from __future__ import annotations

from typing import Any

import msgspec

RUNNING, DONE, CANCELLED, FAILED = "running", "done", "cancelled", "failed"
ORIGIN, RETRY = "origin", "retry"


class Filters(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which messages of the range are meant. Times are of the store, in ms since 1970, the end excluded."""

    tags: tuple[str, ...] = ()
    key: str | None = None
    since: int | None = None
    until: int | None = None
    origin: str | None = None  # of dead letters: the topic that they come from


class Target(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where messages go: a topic; or of dead letters, where each comes from, or to their group's retry topic."""

    topic: str | None = None
    back: str | None = None  # ORIGIN or RETRY
    group: str = ""  # of dead letters
    keeps_queues: bool = False


class Range(msgspec.Struct):
    """Offsets of one queue, the end excluded.

    `passed`: up to here those of the same name before this one went. `into`: where queues are kept, the broker whose
    queue of that number takes it all; one alone, or its order would be lost.
    """

    broker: str
    queue: int
    begin: int
    end: int
    position: int
    passed: int = 0
    into: str = ""


class Task(msgspec.Struct, kw_only=True):
    """Times are ms since 1970, the rate is messages a second; 0 for as many as can be."""

    name: str
    source: str
    target: Target
    namesrv: str
    to_namesrv: str
    store: str | None = None
    filters: Filters = Filters()
    rate: float = 0.0
    ranges: list[Range] = []
    state: str = RUNNING
    error: str = ""
    read: int = 0  # messages that the ranges had so far
    sent: int = 0  # of those the ones that were meant, and are stored
    sent_bytes: int = 0
    expired: int = 0  # offsets that went while it was on its way
    created: int = 0
    changed: int = 0

    @property
    def left(self) -> int:
        """Offsets that are not read yet; some of them may exist nowhere."""
        return sum(one.end - one.position for one in self.ranges)

    def report(self) -> dict[str, Any]:
        """For people and programs."""
        return {
            "name": self.name,
            "state": self.state,
            "source": self.source,
            "target": self.target.topic or f"{self.target.back} of {self.target.group}",
            "read": self.read,
            "sent": self.sent,
            "sent_bytes": self.sent_bytes,
            "expired_offsets": self.expired,
            "left_offsets": self.left,
            "error": self.error,
            "created": self.created,
            "changed": self.changed,
            "queues": [msgspec.to_builtins(one) for one in self.ranges],
        }
