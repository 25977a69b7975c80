"""A replay as it is stored in its file: the request, and the cursor of each queue.

The ranges are fixed when the task begins, so messages that are sent later, also by the task itself, are not read. A
position is the next offset to read; all selected messages below it are stored in the target.
"""

from __future__ import annotations

from typing import Any

import msgspec

RUNNING, DONE, CANCELLED, FAILED = "running", "done", "cancelled", "failed"
ORIGIN, RETRY = "origin", "retry"


class Filters(msgspec.Struct, frozen=True, omit_defaults=True):
    """The filters on messages. `since`, `until`: store time in [since, until), ms since 1970."""

    tags: tuple[str, ...] = ()
    key: str | None = None
    since: int | None = None
    until: int | None = None
    origin: str | None = None  # the topic of origin of dead letters


class CopyTarget(msgspec.Struct, frozen=True, omit_defaults=True):
    """The target: a topic, or for dead letters of a group the topic of origin, or the retry topic of the group."""

    topic: str | None = None
    back: str | None = None  # ORIGIN or RETRY
    group: str = ""
    keeps_queues: bool = False


class Range(msgspec.Struct):
    """The offsets [begin, end) of one queue, and the cursor `position`.

    Args:
        passed: the end of earlier tasks of the same name.
        into: with keeps_queues, the broker of the target queue; one broker, so that the order is kept.
    """

    broker: str
    queue: int
    begin: int
    end: int
    position: int
    passed: int = 0
    into: str = ""


class Task(msgspec.Struct, kw_only=True):
    """A task. Times are ms since 1970; `rate` is messages per second, 0 for no limit."""

    name: str
    source: str
    target: CopyTarget
    namesrv: str
    to_namesrv: str
    store: str | None = None
    filters: Filters = Filters()
    rate: float = 0.0
    ranges: list[Range] = []
    state: str = RUNNING
    error: str = ""
    read: int = 0
    sent: int = 0
    sent_bytes: int = 0
    expired: int = 0  # offsets that expired during the task
    created: int = 0
    changed: int = 0

    @property
    def left(self) -> int:
        """The number of offsets to read; some may not exist."""
        return sum(one.end - one.position for one in self.ranges)

    def report(self) -> dict[str, Any]:
        """Return the values that `neve replay` prints."""
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
