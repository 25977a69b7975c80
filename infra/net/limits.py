"""The limits that protect a server from its clients: connections, unfinished frames, requests in progress."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from neve.remoting.command import RemotingCommand
from neve.remoting.frame import MAX_FRAME

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemotingLimits:
    """The resources that one peer may use."""

    max_frame: int = MAX_FRAME
    max_connections: int = 8192
    backlog: int = 1024  # connections that wait to be accepted, and are at once
    idle_seconds: float = 120.0
    frame_seconds: float = 10.0
    max_in_flight: int = 1024  # answers still being computed, per connection; beyond it reading pauses
    max_requests_out: int = 4096  # requests to the peer that wait for their answer
    write_high_water: int = 4 * 1024 * 1024
    max_unwritten: int = 64 * 1024 * 1024  # a peer that reads nothing while answers it waited for arrive is dropped
    max_unfinished: int = 256 * 1024 * 1024  # what unfinished frames hold, of all peers together


class Admission:
    """Refuses connections above a limit and counts them; logs the count each time it has doubled."""

    def __init__(self, configured: int, room: Callable[[], int] | None = None, *, with_tls: bool = False) -> None:
        """`room`: how many the process has descriptors for now; None: as many as are configured."""
        self._configured, self._room = configured, room
        self._with_tls = with_tls
        self.refused = 0

    @property
    def most(self) -> int:
        """How many connections there may be now."""
        return self._all - self.undecided

    @property
    def undecided(self) -> int:
        """With TLS, a quarter is reserved for connections before their first byte or in their TLS handshake."""
        return max(1, self._all // 4) if self._with_tls else 0

    @property
    def _all(self) -> int:
        return self._configured if self._room is None else min(self._configured, self._room())

    def admits(self, remote: tuple[str, int], count: int) -> bool:
        """Whether there may be one more than there are."""
        if count < self.most:
            return True
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            log.warning("refusing %s:%d: %d connections already", *remote, count)
        return False


class Holder(Protocol):
    """A connection in the middle of a frame."""

    remote: tuple[str, int]
    partial_since: float | None

    def give_up(self) -> None:
        """Drop it, and what it holds, now."""


class UnfinishedFrames:
    """What the unfinished frames of all connections hold; above the limit the oldest are given up."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[Holder, int] = {}
        self.bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._held)

    def note(self, connection: Holder, held: int) -> None:
        """Told after each read that ends, or began, in the middle of a frame, and when the connection is gone."""
        self.bytes += held - self._held.pop(connection, 0)
        if held:
            self._held[connection] = held
        if self.bytes > self._limit:
            self._make_room()

    def _make_room(self) -> None:
        """An eighth at once: who fills it again pays for the next look at all of them. Who sends is young."""
        for connection, held in sorted(self._held.items(), key=lambda item: item[0].partial_since or 0.0):
            if self.bytes <= self._limit - self._limit // 8:
                return
            log.warning("dropping %s:%d: unfinished frames hold %d bytes in all", *connection.remote, self.bytes)
            del self._held[connection]
            self.bytes -= held
            self.dropped += 1
            connection.give_up()


class BodiesInWork:
    """What requests hold whose answer is still computed: it may wait for a disk, or for another client."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.bytes = 0

    def take(self, command: RemotingCommand) -> bool:
        """Whether there is room for its body; for none there always is."""
        size = len(command.body)
        if size and self.bytes + size > self._limit:
            return False
        self.bytes += size
        return True

    def done(self, size: int, _: object) -> None:
        """Once for each that was taken."""
        self.bytes -= size
