"""Where a stream stands, as arithmetic: positions, and the rows between two of them. Pure.

    {"version": 1, "since": ms,                         `since` only where the stream began at a time
     "brokers": {"broker-a": {"through": 41,            all rows that entries 0 … 41 of its journal brought lie behind,
                              "left": {"orders": {"0": [[100, 199]]}}}}}       but for these

That is a stream's offset, as Spark keeps it in its checkpoint. An entry brings the rows of the objects that it commits;
none brings a row that another has brought, and what is compacted, expires or comes back brings none. So the rows
between two positions follow from the positions and the entries between them, whatever has become of their objects.

A stream joins a broker's journal at its end, with what it shall have of the rows before that as `left`. A limit that
ends within an entry leaves the rest of its rows there.

Spark keeps where a batch ends. Where the first one begins it asks again after a crash, when more has come: so an
initial position says that it is one (`"initial": true`), and the one behind it where the stream began (`"begin": {…}`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from neve.spark.planning.rows import Rows, count, minus, rows_of, runs_of, taken, union

VERSION = 1
_OF_BOTH_TIERS = 2  # neve.spark.tiers.positions
#: Entries that brought nothing and are not followed by a batch of no rows: so far a position may lag behind.
IDLE_ENTRIES = 128

Brought = Sequence[tuple[int, Rows]]  # (number, rows) of entries, dense, in order


class BadPosition(ValueError):
    """Text that is no position of this version."""


class Place(NamedTuple):
    """Where a stream stands in one broker's journal."""

    through: int
    left: Rows


class Position(NamedTuple):
    """`since`: the stream has no row that was stored before. `begin`: where the stream began, in the position that ends
    its first batch."""

    brokers: Mapping[str, Place]
    since: int | None = None
    is_initial: bool = False
    begin: Position | None = None


def follows(start: Position, brokers: Mapping[str, Place]) -> Position:
    """The end of a batch from `start` on; `start` itself where it would be the same place."""
    if brokers == start.brokers:
        return start
    return Position(brokers, start.since, begin=start._replace(begin=None) if start.is_initial else None)


def begin_of(start: Position, end: Position) -> Position:
    """Where the batch that ends there began, though Spark may be told another initial position than at the first time.

    A stream that found nothing has an initial position as the end of its first batch, too: there is nothing before it.
    """
    return (end.begin or end) if start.is_initial else start


def advanced(place: Place, brought: Brought, most: int | None) -> Place:
    """The place after at most so many rows more; the same place where there is nothing to be read.

    `brought`: of the entries that follow the place.
    """
    waiting = count(place.left)
    if most is not None and waiting > most:
        return Place(place.through, minus(place.left, taken(place.left, most)))
    room = None if most is None else most - waiting
    through, has_rows = place.through, waiting > 0
    for seq, rows in brought:
        some = count(rows)
        if room is not None and some > room:
            if room:
                return Place(seq, minus(rows, taken(rows, room)))
            return Place(through, {}) if has_rows else place
        room = None if room is None else room - some
        through, has_rows = seq, has_rows or some > 0
    if has_rows or through - place.through >= IDLE_ENTRIES:
        return Place(through, {})
    return place


def available(place: Place, brought: Brought) -> int:
    """How many rows there are to be read from a place on."""
    return count(place.left) + sum(count(rows) for _, rows in brought)


def between(start: Place, end: Place, brought: Brought) -> Rows:
    """The rows that lie behind `end` and not behind `start`; `brought`: of the entries between, the last included."""
    return minus(union(start.left, *(rows for _, rows in brought)), end.left)


def encoded(position: Position) -> dict[str, Any]:
    """As Spark writes it down: equal positions become equal text."""
    since = {} if position.since is None else {"since": position.since}
    initial = {"initial": True} if position.is_initial else {}
    begin = {} if position.begin is None else {"begin": encoded(position.begin)}
    return {"version": VERSION, **since, **initial, **begin, "brokers": _encoded(position.brokers)}


def _encoded(places: Mapping[str, Place]) -> dict[str, Any]:
    brokers: dict[str, Any] = {}
    for broker, place in sorted(places.items()):
        told: dict[str, Any] = {"through": place.through}
        left: dict[str, dict[str, list[list[int]]]] = {}
        for topic, queue, first, last in runs_of(place.left):
            left.setdefault(topic, {}).setdefault(str(queue), []).append([first, last])
        if left:
            told["left"] = left
        brokers[broker] = told
    return brokers


def decoded(told: Mapping[str, Any]) -> Position:
    """Raises BadPosition."""
    version = told.get("version")
    if version == _OF_BOTH_TIERS:
        raise BadPosition(
            "this checkpoint was begun with the option namesrv: go on with it, or begin with a new checkpoint"
        )
    if version != VERSION:
        raise BadPosition(f"the checkpoint has a position of version {version!r}, this program knows {VERSION}")
    try:
        brokers = {
            broker: Place(
                int(place["through"]),
                rows_of(
                    (topic, int(queue), int(first), int(last))
                    for topic, queues in place.get("left", {}).items()
                    for queue, spans in queues.items()
                    for first, last in spans
                ),
            )
            for broker, place in told["brokers"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadPosition(f"the checkpoint has no position of a neve stream: {error!r}") from error
    begin = told.get("begin")
    return Position(brokers, told.get("since"), bool(told.get("initial")), None if begin is None else decoded(begin))
