"""Progress of a command on stderr."""

from __future__ import annotations

import asyncio
import sys

import click

_EVERY_S = 1.0


class MessageProgress:
    """Counts messages and prints the count: on a terminal in one line that is rewritten, otherwise a line each time."""

    def __init__(self, verb: str, *, shown: bool) -> None:
        self._verb, self._shown = verb, shown
        self._now = asyncio.get_running_loop().time
        self._began = self._printed = self._now()
        self._over = "\r" if sys.stderr.isatty() else ""
        self._is_open = False
        self.messages = 0

    def count(self, messages: int) -> None:
        """Add messages to the count."""
        self.messages += messages
        if self._shown and self._now() - self._printed >= _EVERY_S:
            self._printed = self._now()
            self._is_open = bool(self._over)
            click.echo(f"{self._over}{self._text()}", err=True, nl=not self._over)

    def end(self) -> str:
        """End the line; return the duration and the rate."""
        if self._is_open:
            click.echo(err=True)
            self._is_open = False
        return f"{self._now() - self._began:.1f} s, {self._rate():,.0f}/s"

    def _text(self) -> str:
        return f"{self._verb} {self.messages:,} messages, {self._rate():,.0f}/s"

    def _rate(self) -> float:
        return self.messages / max(self._now() - self._began, 1e-3)


def shown_by_default() -> bool:
    """Return whether stderr is a terminal and stdin is not."""
    return sys.stderr.isatty() and not sys.stdin.isatty()
