"""The text of the demo: numbered sections, times, comparisons, and progress on a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import click

from neve.clock import system_monotonic
from neve.demo.flights import Rows

_PROGRESS_S = 0.5
_ERASE_LINE = "\r\x1b[K"


@dataclass
class TimedStep:
    """One timed step; `done` counts the messages of `total` so far."""

    section: str
    title: str
    total: int | None = None
    done: int = 0
    seconds: float = 0.0

    def text(self) -> str:
        """Return the title with the number of messages, the time and the rate."""
        if self.total is None:
            return f"{self.title}: {self.seconds:.1f} s"
        return f"{self.total:,} {self.title}: {self.seconds:.1f} s, {self.total / max(self.seconds, 1e-3):,.0f}/s"

    def progress(self, seconds: float) -> str:
        """Return the state of the running step."""
        count = "" if self.total is None else f"{self.done:,} of {self.total:,} "
        return f"{count}{self.title} … {seconds:.0f} s"


@dataclass
class Story:
    """Prints the demo, and keeps its steps and comparisons for the report."""

    steps: list[TimedStep] = field(default_factory=list)
    proven: list[str] = field(default_factory=list)
    _sections: int = 0
    _section: str = ""

    def title(self, text: str) -> None:
        """Print the first lines."""
        click.echo(text)

    def section(self, title: str) -> None:
        """Begin a numbered section."""
        self._sections += 1
        self._section = title
        click.echo(f"\n{self._sections}. {title}")

    def line(self, text: str) -> None:
        """Print text, indented below its section."""
        click.echo("".join(f"   {line}".rstrip() + "\n" for line in text.splitlines()), nl=False)

    def table(self, columns: Sequence[str], rows: Rows) -> None:
        """Print rows with aligned columns."""
        for row in [columns, *rows]:
            self.line("".join(f"{cell:>9.2f}" if isinstance(cell, float) else f"{cell!s:>9}" for cell in row))

    def prove(self, text: str) -> None:
        """Print and keep a comparison that succeeded."""
        self.proven.append(text)
        self.line(f"proven: {text}")

    @contextmanager
    def step(self, title: str, total: int | None = None) -> Iterator[TimedStep]:
        """Time a step and print it at its end; on a terminal, its progress is shown meanwhile."""
        step = TimedStep(self._section, title, total)
        began, over = system_monotonic(), threading.Event()

        def show() -> None:
            while not over.wait(_PROGRESS_S):
                click.echo(f"{_ERASE_LINE}   {step.progress(system_monotonic() - began)}", nl=False)
            click.echo(_ERASE_LINE, nl=False)

        progress = threading.Thread(target=show, daemon=True) if sys.stdout.isatty() else None
        if progress is not None:
            progress.start()
        try:
            yield step
        finally:
            over.set()
            if progress is not None:
                progress.join()
        step.seconds = system_monotonic() - began
        self.steps.append(step)
        self.line(step.text())
