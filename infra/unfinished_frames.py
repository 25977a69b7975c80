"""What all of a server's connections may hold together: unfinished frames, and bodies of requests that are in work."""

from __future__ import annotations

import logging
from typing import Protocol

from neve.remoting.command import RemotingCommand

log = logging.getLogger(__name__)


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
