"""A report's tables as one page of HTML that needs nothing else: no script, no network, plots as SVG within it. Pure.

Every name comes from outside, of a topic as of a tag: all text goes through `_text`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]

PLOTTED_TOPICS = 20  # the largest; all of them are in the tables
_ROWS = 200  # of a table on the page; the files have all
_BARS = 15
_WIDTH, _HEIGHT = 900, 120

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:960px;padding:0 1em;color:#222}
h1{font-size:1.5em}h2{margin-top:2em;border-bottom:1px solid #ccc}h3{margin:1.4em 0 .3em;overflow-wrap:anywhere}
table{border-collapse:collapse;margin:.6em 0}td,th{padding:.15em .7em;border-bottom:1px solid #e4e4e4;text-align:left;
overflow-wrap:anywhere}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}svg{display:block;max-width:100%}
.bar{fill:#3b78b5}.axis{stroke:#999}text{font:12px system-ui,sans-serif;fill:#444}p.note{color:#666}
"""


def page(tables: Tables, *, store: str, made_ms: int) -> str:
    """The page. `tables`: by name, as `neve.spark.jobs.report` makes them."""
    traffic = tables["traffic"]
    made = datetime.fromtimestamp(made_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = [
        f"<h1>Archived traffic of {_text(store)}</h1>",
        f'<p class="note">As of {made}. Days and hours are UTC, by the time at which a broker stored a message; '
        "sizes are those of bodies as they are stored.</p>",
        "<h2>By topic</h2>",
        _table(_by_topic(traffic), ("topic", "days", "messages", "bytes", "mean", "largest", "damaged")),
        "<h2>By topic and day</h2>",
        _table(traffic, ("topic", "dt", "messages", "bytes", "largest", "first", "last", "damaged")),
    ]
    parts += [_of_topic(str(row["topic"]), tables) for row in _by_topic(traffic)[:PLOTTED_TOPICS]]
    for name, heading, columns in (
        ("retries", "Retries", ("group", "dt", "origin", "attempt", "messages")),
        ("dead_letters", "Dead letters", ("group", "dt", "origin", "messages")),
        ("lag", "Lag of consumer groups", ("group", "type", "model", "members", "lag", "cold")),
    ):
        rows = tables.get(name)
        if rows is not None:
            parts += [f"<h2>{heading}</h2>", _table(rows, columns) if rows else '<p class="note">None.</p>']
    head = f'<meta charset="utf-8"/><title>Archived traffic of {_text(store)}</title><style>{_STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _of_topic(topic: str, tables: Tables) -> str:
    hours = [row for row in tables["hours"] if row["topic"] == topic]
    sizes = [(f"up to {row['up_to']} bytes", int(row["messages"])) for row in tables["sizes"] if row["topic"] == topic]
    parts = [f"<h2>{_text(topic)}</h2>", "<h3>Messages by hour</h3>", _timeline(hours), "<h3>Sizes</h3>", _bars(sizes)]
    for name, column in (("tags", "tag"), ("producers", "producer")):
        counted: dict[str, int] = {}
        for row in tables[name]:
            if row["topic"] == topic:
                counted[str(row[column])] = counted.get(str(row[column]), 0) + int(row["messages"])
        largest = sorted(counted.items(), key=lambda one: (-one[1], one[0]))[:_BARS]
        parts += [f"<h3>{name.capitalize()}</h3>", _bars(largest)]
    return "".join(parts)


def _by_topic(traffic: Iterable[Row]) -> list[dict[str, Any]]:
    """The largest first."""
    found: dict[str, dict[str, Any]] = {}
    for row in traffic:
        of = found.setdefault(
            str(row["topic"]), {"topic": row["topic"], "days": 0, "messages": 0, "bytes": 0, "largest": 0, "damaged": 0}
        )
        of["days"] += 1
        of["largest"] = max(of["largest"], row["largest"] or 0)
        for name in ("messages", "bytes", "damaged"):
            of[name] += row[name] or 0
    for of in found.values():
        of["mean"] = of["bytes"] // max(of["messages"], 1)
    return sorted(found.values(), key=lambda of: (-of["messages"], of["topic"]))


def _table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    numeric = {name for name in columns if rows and all(isinstance(row.get(name), int | None) for row in rows)}

    def cell(kind: str, name: str, value: Any) -> str:
        of_number = ' class="n"' if name in numeric else ""
        shown = f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)
        return f"<{kind}{of_number}>{_text(shown)}</{kind}>"

    head = "".join(cell("th", name, name) for name in columns)
    body = "".join(f"<tr>{''.join(cell('td', name, row.get(name)) for name in columns)}</tr>" for row in rows[:_ROWS])
    more = f'<p class="note">And {len(rows) - _ROWS} rows more, in the files.</p>' if len(rows) > _ROWS else ""
    return f"<table><tr>{head}</tr>{body}</table>{more}"


def _timeline(hours: Sequence[Row]) -> str:
    """A bar for each hour that has messages; hours lie where they are in time."""
    if not hours:
        return '<p class="note">None with a time.</p>'
    times = [int(row["hour_ms"]) // 3_600_000 for row in hours]
    counts = [int(row["messages"]) for row in hours]
    first, span, most = min(times), max(times) - min(times) + 1, max(counts)
    width = _WIDTH / span
    bars = "".join(
        f'<rect class="bar" x="{(at - first) * width:.2f}" y="{_HEIGHT - count * _HEIGHT / most:.2f}" '
        f'width="{max(width - 1, 0.5):.2f}" height="{count * _HEIGHT / most:.2f}">'
        f"<title>{_hour(at)}: {count:,}</title></rect>"
        for at, count in zip(times, counts, strict=True)
    )
    axis = f'<line class="axis" x1="0" y1="{_HEIGHT}" x2="{_WIDTH}" y2="{_HEIGHT}"/>'
    texts = (
        f'<text x="0" y="{_HEIGHT + 16}">{_hour(first)}</text><text x="{_WIDTH}" y="{_HEIGHT + 16}" '
        f'text-anchor="end">{_hour(first + span - 1)}; at most {most:,} in an hour</text>'
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 22}" role="img">{bars}{axis}{texts}</svg>'


def _bars(counted: Sequence[tuple[str, int]]) -> str:
    if not counted:
        return '<p class="note">None.</p>'
    most = max(1, *(count for _, count in counted))
    lines = []
    for at, (name, count) in enumerate(counted):
        y, width = at * 20, 380 * count / most
        shown = name if len(name) <= 48 else f"{name[:47]}…"
        lines.append(
            f'<text x="0" y="{y + 14}">{_text(shown)}<title>{_text(name)}</title></text>'
            f'<rect class="bar" x="370" y="{y + 3}" width="{width:.2f}" height="14"/>'
            f'<text x="{376 + width:.2f}" y="{y + 14}">{count:,}</text>'
        )
    return f'<svg viewBox="0 0 {_WIDTH} {20 * len(counted) + 4}" role="img">{"".join(lines)}</svg>'


def _hour(number: int) -> str:
    return datetime.fromtimestamp(number * 3600, UTC).strftime("%Y-%m-%d %H:00")


def _text(value: str) -> str:
    """What no browser takes for a tag, or a character that no XML has."""
    return escape("".join(one if one.isprintable() else "\ufffd" for one in value))
