"""Measurements of a long life, and the definition of bounded growth."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

#: The allowed excess of the last quarter over the previous one: a few percent, by chance of Zipf's law and of days.
TOLERANCE = 1.05


class DayFigures(msgspec.Struct):
    """Figures at the end of a day; requests are those of that day alone."""

    day: int
    topics: int  # Existing topics.
    names: int  # All topics that ever existed.
    messages: int  # Messages of that day.
    journal_entries: int  # Existing messages.
    journal_bytes: int
    entries: int  # New on that day.
    checkpoint_bytes: int
    state_bytes: int
    catalog_memory: int
    catalog_topics: int
    live: int  # Objects in the readers' view.
    waiting: int  # Objects out of view, not deleted yet.
    data_objects: int
    data_bytes: int
    local_bytes: int  # Tables, journal copy and everything else except the log.
    log_bytes: int
    requests: dict[str, int]


def told(figures: DayFigures) -> str:
    """Return a line of the table."""
    requests = " ".join(f"{kind} {count:,}" for kind, count in sorted(figures.requests.items()))
    return (
        f"day {figures.day:4d}  topics {figures.topics:,} (ever {figures.names:,})  messages/day {figures.messages:,}  "
        f"live {figures.live:,}  waiting {figures.waiting:,}  data {figures.data_bytes / 1e6:,.1f} MB  "
        f"journal {figures.journal_entries:,} entries, {figures.journal_bytes / 1e6:,.2f} MB  "
        f"checkpoints {figures.checkpoint_bytes / 1e6:,.2f} MB  state {figures.state_bytes / 1e6:,.2f} MB  "
        f"catalog {figures.catalog_memory / 1e6:,.2f} MB, {figures.catalog_topics:,} topics  "
        f"local {figures.local_bytes / 1e6:,.2f} MB + log {figures.log_bytes / 1e6:,.1f} MB  requests/day {requests}"
    )


#: Figures that must not increase in the last quarter.
BOUNDED = (
    "journal_entries", "journal_bytes", "entries", "checkpoint_bytes", "state_bytes", "catalog_memory",
    "catalog_topics", "live", "waiting", "data_objects", "data_bytes", "local_bytes", "log_bytes",
)  # fmt: skip


def growing(days: Sequence[DayFigures], slack: Mapping[str, int] | None = None) -> list[str]:
    """Return the figures that grew in the last quarter of the days, beyond the growth of traffic.

    `slack` is the allowed growth of figures that change in large steps.
    """
    quarter = len(days) // 4
    before, last = days[-2 * quarter : -quarter], days[-quarter:]
    allowed = TOLERANCE * max(1.0, _mean(one.messages for one in last) / _mean(one.messages for one in before))
    measured = {name: (_values(before, name), _values(last, name)) for name in BOUNDED}
    for kind in sorted({kind for one in days for kind in one.requests}):
        measured[f"{kind} requests a day"] = _requests(before, kind), _requests(last, kind)
    found = []
    for name, values in measured.items():
        was, now = map(_mean, values)
        if now > was * allowed + (slack or {}).get(name, 0):
            found.append(f"{name}: {now:,.0f} in the last quarter, {was:,.0f} in the one before")
    return sorted(found)


def _values(days: Sequence[DayFigures], name: str) -> list[float]:
    return [getattr(one, name) for one in days]


def _requests(days: Sequence[DayFigures], kind: str) -> list[float]:
    return [one.requests.get(kind, 0) for one in days]


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def memory_of(root: Any) -> int:
    """Return the bytes of an object and of all that it alone references: containers, and the archive's classes."""
    seen: set[int] = set()
    total, todo = 0, [root]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        todo += _held(one)
    return total


def _held(one: Any) -> Iterator[Any]:
    if isinstance(one, dict):
        yield from one.keys()
        yield from one.values()
    elif isinstance(one, list | tuple | set | frozenset):
        yield from one
    elif isinstance(one, str | bytes | bytearray | memoryview | array | int | float | type | type(None)):
        return
    elif type(one).__module__.partition(".")[0] == "neve":
        if hasattr(one, "__dict__"):
            yield vars(one)
        for kind in type(one).__mro__:
            for slot in vars(kind).get("__slots__", ()):
                if (value := getattr(one, slot, None)) is not None:
                    yield value
        if isinstance(one, msgspec.Struct):
            yield from (getattr(one, name) for name in one.__struct_fields__)
