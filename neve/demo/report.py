"""The report of the demo: one HTML page with tables and plots in SVG, which loads nothing."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.metadata import version
from typing import Any

from neve.cli.output import size_text
from neve.demo.flights import Rows
from neve.demo.story import Story

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --first: #3b7ea1; --second: #d9822b; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 58rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .2rem .8rem; text-align: left; border-bottom: 1px solid var(--line); }
.number { text-align: right; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: currentColor; }
.bar { fill: var(--first); } .points { fill: none; stroke: var(--second); stroke-width: 2; }
.axis { stroke: currentColor; stroke-width: 1; } .end { text-anchor: end; } .middle { text-anchor: middle; }
code { background: var(--line); padding: .1rem .3rem; border-radius: .2rem; overflow-wrap: anywhere; }
"""
_WIDTH, _HEIGHT, _LEFT, _TOP = 900, 260, 50, 20


@dataclass(frozen=True)
class ArchivedTopic:
    """A topic in the archive: its objects, and the bytes of its messages there and in the log."""

    topic: str
    objects: int
    rows: int
    size_bytes: int
    log_bytes: int


@dataclass
class Results:
    """The figures that the report shows."""

    archived: list[ArchivedTopic] = field(default_factory=list)
    carriers: Rows = ()
    hours: Rows = ()


def page(story: Story, results: Results, next_commands: Iterable[tuple[str, str]], seconds: float) -> str:
    """Return the page."""
    steps = [
        (step.section, step.title, step.total, f"{step.seconds:.1f}",
         None if step.total is None else f"{step.total / max(step.seconds, 1e-3):,.0f}")
        for step in story.steps
    ]  # fmt: skip
    archived = [
        (one.topic, one.objects, one.rows, size_text(one.size_bytes), size_text(one.log_bytes))
        for one in results.archived
    ]
    hours = [str(row[0]) for row in results.hours]
    machine = f"neve {version('neve')}, Python {platform.python_version()}, {platform.platform()}"
    parts = [
        "<h1>neve demo: flights from New York in 2013</h1>",
        f"<p>Every result of the demo equals the source data. It ran for {seconds:.0f} s with {escape(machine)}.</p>",
        "<h2>Proven</h2><ol>", *(f"<li>{escape(text)}</li>" for text in story.proven), "</ol>",
        "<h2>Steps</h2>", _table(("section", "step", "messages", "seconds", "per second"), steps),
        "<h2>Archive</h2>", _table(("topic", "objects", "rows", "in the archive", "in the log"), archived),
        "<h2>Mean departure delay by carrier, in minutes</h2>",
        _plot([str(row[0]) for row in results.carriers], [row[2] for row in results.carriers]),
        "<h2>Mean departure delay in minutes (bars) and wind speed in mph (line), by hour</h2>",
        _plot(hours, [row[2] for row in results.hours], [row[4] for row in results.hours]),
        "<h2>Where to look next</h2><ul>",
        *(f"<li><code>{escape(command)}</code>: {escape(purpose)}</li>" for command, purpose in next_commands),
        "</ul>",
    ]  # fmt: skip
    head = f'<meta charset="utf-8"><title>neve demo</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, int):
            return f'<td class="number">{value:,}</td>'
        return f"<td>{escape('' if value is None else str(value))}</td>"

    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "\n".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _plot(labels: Sequence[str], bars: Sequence[float | None], line: Sequence[float | None] = ()) -> str:
    """Return bars with their values, and a line on the same scale; a missing value has neither."""
    known = [value for value in (*bars, *line) if value is not None]
    high, low = max([*known, 0.0]), min([*known, 0.0])
    scale, room = _HEIGHT / ((high - low) or 1.0), (_WIDTH - _LEFT) / max(len(labels), 1)

    def y(value: float) -> float:
        return _TOP + (high - value) * scale

    def x(at: int) -> float:
        return _LEFT + (at + 0.5) * room

    parts = []
    for at, (label, value) in enumerate(zip(labels, bars, strict=True)):
        parts.append(f'<text class="middle" x="{x(at):.1f}" y="{_TOP + _HEIGHT + 34}">{escape(label)}</text>')
        if value is not None:
            top, bottom = sorted((y(value), y(0.0)))
            parts.append(
                f'<rect class="bar" x="{x(at) - room * 0.35:.1f}" y="{top:.1f}" width="{room * 0.7:.1f}" '
                f'height="{bottom - top:.1f}"><title>{escape(label)}: {value:.2f}</title></rect>'
            )
            above = top - 4 if value >= 0 else bottom + 14
            parts.append(f'<text class="middle" x="{x(at):.1f}" y="{above:.1f}">{round(value)}</text>')
    points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in enumerate(line) if value is not None)
    if points:
        parts.append(f'<polyline class="points" points="{points}"/>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{y(0.0):.1f}" y2="{y(0.0):.1f}"/>')
    parts += [
        f'<text class="end" x="{_LEFT - 6}" y="{y(value) + 4:.1f}">{round(value)}</text>' for value in {high, 0.0, low}
    ]
    return f'<svg role="img" viewBox="0 0 {_WIDTH} {_HEIGHT + _TOP + 40}">' + "".join(parts) + "</svg>"
