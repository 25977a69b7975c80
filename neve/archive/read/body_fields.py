"""The fields and types of a topic's JSON bodies by month, with the first and last offset of each. Pure.

It also selects the row groups of a sample. First and last occurrences are those within the sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from math import ceil
from typing import Any, NamedTuple

import msgspec

from neve.archive.read.selection import Chosen

COLUMNS = ("broker", "queue_id", "queue_offset", "store_timestamp", "body", "body_error")
_GROUPS_MIN = 8  # row groups of a month and broker, if there are as many
_PATHS_MAX = 2_000  # bounds the fields of objects whose names are ids
_DEPTH_MAX = 12
_MORE = "(more names)"
_TYPES = {bool: "BOOLEAN", int: "BIGINT", float: "DOUBLE", str: "STRING", type(None): "NULL"}


class MessagePlace(NamedTuple):
    """The place of a message; places are ordered by time."""

    time_ms: int
    broker: str
    queue: int
    offset: int

    def text(self) -> str:
        """Return `broker/queue@offset`."""
        return f"{self.broker}/{self.queue}@{self.offset}"


class Field(NamedTuple):
    """A name in a body, `a.b` within an object and `a[]` within a list, and the type of its value."""

    name: str
    type: str


class Occurrences(NamedTuple):
    """The occurrences of a field in a month: their number, the first and the last."""

    messages: int
    first: MessagePlace
    last: MessagePlace


class MonthOfField(NamedTuple):
    """A line of the report; `change` is + for a field new in the month, - for one that the month lacks."""

    month: str
    field: Field
    change: str
    of: int  # sampled messages of the month
    seen: Occurrences


class BodyFields:
    """The fields seen so far."""

    def __init__(self) -> None:
        self._months: dict[str, dict[Field, Occurrences]] = {}
        self.messages: Counter[str] = Counter()  # sampled, by month

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows with `COLUMNS`."""
        for row in rows:
            at: datetime | None = row["store_timestamp"]
            month = "unknown" if at is None else at.strftime("%Y-%m")
            place = MessagePlace(
                -1 if at is None else int(at.timestamp() * 1000), row["broker"], row["queue_id"], row["queue_offset"]
            )
            self.messages[month] += 1
            self._note(self._months.setdefault(month, {}), set(fields_of(row["body"], row["body_error"])), place)

    def _note(self, month: dict[Field, Occurrences], found: set[Field], place: MessagePlace) -> None:
        for field in found:
            known = field if field in month or len(month) < _PATHS_MAX else Field(_MORE, "")
            seen = month.get(known)
            if seen is None:
                month[known] = Occurrences(1, place, place)
            else:
                month[known] = Occurrences(seen.messages + 1, min(seen.first, place), max(seen.last, place))

    def lines(self) -> Iterator[MonthOfField]:
        """Yield the lines ordered by month and field."""
        before: dict[Field, Occurrences] | None = None
        for month, fields in sorted(self._months.items()):
            removed = {} if before is None else {field: seen for field, seen in before.items() if field not in fields}
            for field, seen in sorted({**fields, **removed}.items()):
                change = "-" if field in removed else "+" if before is not None and field not in before else ""
                shown = seen if field in fields else Occurrences(0, seen.first, seen.last)
                yield MonthOfField(month, field, change, self.messages[month], shown)
            before = fields


def fields_of(body: bytes | None, error: str | None = None) -> Iterator[Field]:
    """Yield the fields of a body; for one that is not a JSON object, a description."""
    if body is None:
        yield Field("(body)", "damaged" if error is None else "does not inflate")
        return
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        yield Field("(body)", "not JSON")
        return
    if isinstance(value, dict) and value:
        yield from _fields(value, "", _DEPTH_MAX)
    else:
        yield from (Field(f"(body){name}", kind) for name, kind in _fields(value, "", _DEPTH_MAX))


def _fields(value: Any, name: str, depth: int) -> Iterator[Field]:
    if isinstance(value, dict):
        if not value or not depth:
            yield Field(name, "OBJECT")
        for key, inner in value.items() if depth else ():
            yield from _fields(inner, f"{name}.{key}" if name else key, depth - 1)
    elif isinstance(value, list):
        if not value or not depth:
            yield Field(name, "ARRAY")
        for inner in value if depth else ():
            yield from _fields(inner, f"{name}[]", depth - 1)
    else:
        yield Field(name, _TYPES[type(value)])


def sampled(chosen: Iterable[Chosen], messages: int) -> list[Chosen]:
    """Select row groups of about `messages` messages per month and broker, evenly spaced."""
    objects = list(chosen)
    places: dict[tuple[str, str], list[tuple[int, int, int]]] = {}  # (time, object, row group)
    for number, (broker, name, groups, _) in enumerate(objects):
        for at in groups:
            newest = name.row_groups[at].newest_ms
            places.setdefault((_month(newest), broker), []).append((newest, number, at))
    kept: set[tuple[int, int]] = set()
    for found in places.values():
        found.sort()
        rows = sum(objects[number].name.row_groups[at].rows for _, number, at in found)
        count = min(len(found), max(_GROUPS_MIN, ceil(messages * len(found) / max(rows, 1))))
        indices = {round(step * (len(found) - 1) / max(count - 1, 1)) for step in range(count)}
        kept |= {found[index][1:] for index in indices}
    fewer = [
        one._replace(groups=[at for at in one.groups if (number, at) in kept]) for number, one in enumerate(objects)
    ]
    return [one for one in fewer if one.groups]


def _month(time_ms: int) -> str:
    return "unknown" if time_ms < 0 else datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m")
