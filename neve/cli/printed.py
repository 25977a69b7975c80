"""Counts and prints the messages of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neve.cli.message_formats import Form
from neve.cli.stdout_bytes import StdoutBytes

if TYPE_CHECKING:
    from neve.client import Message


class Printed:
    """Prints at most `limit` messages. With `bodies_end`, prints only bodies, each followed by it."""

    def __init__(self, form: Form, *, limit: int | None, bodies_end: bytes | None = None) -> None:
        self._form, self.limit, self.bodies_end = form, limit, bodies_end
        self._out = StdoutBytes()
        self.count = 0
        self.watched = self._out.watched
        self.flush = self._out.flush

    @property
    def is_full(self) -> bool:
        return self.count == self.limit

    def add(self, message: Message) -> bool:
        """Print a message; return whether the output should be flushed."""
        assert not self.is_full
        self.count += 1
        return self._out.add(self._form(message))

    def add_bodies(self, bodies: list[bytes]) -> bool:
        """Print bodies; return whether the output should be flushed."""
        assert self.bodies_end is not None
        if self.limit is not None:
            bodies = bodies[: self.limit - self.count]
        self.count += len(bodies)
        return bool(bodies) and self._out.add(self.bodies_end.join(bodies) + self.bodies_end)
