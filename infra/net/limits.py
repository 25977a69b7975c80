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
    backlog: int = 1024  # the listen queue, and the connections accepted in one batch
    idle_seconds: float = 120.0
    frame_seconds: float = 10.0
    max_in_flight: int = 1024  # asynchronous requests in progress per connection; above it reading pauses
    max_requests_out: int = 4096  # requests to the peer without an answer
    write_high_water: int = 4 * 1024 * 1024
    max_unwritten: int = 64 * 1024 * 1024  # bytes; a peer that does not read its answers is disconnected
    max_unfinished: int = 256 * 1024 * 1024  # bytes of unfinished frames of all peers


class Admission:
    """Refuses connections above a limit and counts them; logs the count each time it has doubled."""

    def __init__(self, configured: int, room: Callable[[], int] | None = None, *, with_tls: bool = False) -> None:
        """`room` returns the number of connections that the descriptors allow; None: no limit but `configured`."""
        self._configured, self._room = configured, room
        self._with_tls = with_tls
        self.refused = 0

    @property
    def most(self) -> int:
        """The limit of established connections."""
        return self._all - self.undecided

    @property
    def undecided(self) -> int:
        """With TLS, a quarter is reserved for connections before their first byte or in their TLS handshake."""
        return max(1, self._all // 4) if self._with_tls else 0

    @property
    def _all(self) -> int:
        return self._configured if self._room is None else min(self._configured, self._room())

    def admits(self, remote: tuple[str, int], count: int) -> bool:
        """Return whether another connection is allowed beside `count`; count a refusal."""
        if count < self.most:
            return True
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            log.warning("connection refused: %s:%d connections=%d refused=%d", *remote, count, self.refused)
        return False


class Holder(Protocol):
    """A connection with an unfinished frame."""

    remote: tuple[str, int]
    partial_since: float | None

    def give_up(self) -> None:
        """Close the connection and free its buffer."""


class UnfinishedFrames:
    """Bounds the bytes of unfinished frames of all connections; above the limit it closes the oldest connections."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[Holder, int] = {}
        self.bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._held)

    def note(self, connection: Holder, held: int) -> None:
        """Update the bytes of a connection, after a read that began or ended within a frame, and at its end (0)."""
        self.bytes += held - self._held.pop(connection, 0)
        if held:
            self._held[connection] = held
        if self.bytes > self._limit:
            self._make_room()

    def _make_room(self) -> None:
        """Close the connections with the oldest frames. It frees an eighth of the limit, so that the sort is rare."""
        for connection, held in sorted(self._held.items(), key=lambda item: item[0].partial_since or 0.0):
            if self.bytes <= self._limit - self._limit // 8:
                return
            log.warning(
                "connection closed: %s:%d unfinished frames of all hold %d bytes", *connection.remote, self.bytes
            )
            del self._held[connection]
            self.bytes -= held
            self.dropped += 1
            connection.give_up()


class BodiesInWork:
    """Bounds the bytes of request bodies in progress: a request may wait for a disk or for another client."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.bytes = 0

    def take(self, command: RemotingCommand) -> bool:
        """Reserve room for the body of a request; return whether there is any. An empty body always fits."""
        size = len(command.body)
        if size and self.bytes + size > self._limit:
            return False
        self.bytes += size
        return True

    def done(self, size: int, _: object) -> None:
        """Release the room of one request."""
        self.bytes -= size
