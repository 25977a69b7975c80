"""Positions of a stream of the archive, and the rows between two of them. Pure.

    {"version": 1, "since": ms,                         `since` only if the stream began at a time
     "brokers": {"broker-a": {"through": 41,            the stream has read the rows of the entries 0 ... 41,
                              "left": {"orders": {"0": [[100, 199]]}}}}}       except for these

This is the offset of a stream in Spark's checkpoint. An entry adds the rows of the objects that it commits. No row is
added twice: compaction, expiry and the return of expired objects add none. The rows between two positions therefore
depend only on the positions and the entries between them, and not on the present location of the rows.

A stream begins at the end of a broker's journal, with the earlier rows that it is to read as `left`. If a limit ends
within an entry, the other rows of the entry are `left`.

Spark stores the end of a batch, but requests the initial position again after a crash, when there may be more rows. An
initial position therefore has `"initial": true`, and the next one has the beginning of the stream (`"begin": {...}`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from neve.spark.planning.rows import Rows, count, minus, rows_of, runs_of, taken, union

VERSION = 1
_OF_QUEUES = 2  # queue_positions.VERSION
#: Entries without rows that do not make a batch of their own: the maximum by which a position may lag.
IDLE_ENTRIES = 128

Added = Sequence[tuple[int, Rows]]  # (number, rows) of consecutive entries


class BadPosition(ValueError):
    """The checkpoint has no position of this version."""


class Place(NamedTuple):
    """The position in the journal of one broker."""

    through: int
    left: Rows


class Position(NamedTuple):
    """The position of a stream.

    Args:
        since: the stream returns no row that was stored before, milliseconds.
        begin: the initial position, in the position that ends the first batch.
    """

    brokers: Mapping[str, Place]
    since: int | None = None
    is_initial: bool = False
    begin: Position | None = None


def follows(start: Position, brokers: Mapping[str, Place]) -> Position:
    """Return the end of a batch that begins at `start`; `start` itself if nothing changed."""
    if brokers == start.brokers:
        return start
    return Position(brokers, start.since, begin=start._replace(begin=None) if start.is_initial else None)


def begin_of(start: Position, end: Position) -> Position:
    """Return where the batch that ends at `end` began, even if `start` is a later initial position than the first.

    The first batch of an empty stream ends at an initial position, and is empty.
    """
    return (end.begin or end) if start.is_initial else start


def advanced(place: Place, added: Added, most: int | None) -> Place:
    """Return the place after at most `most` rows; the same place if there are none.

    Args:
        added: the rows of the entries behind the place.
    """
    waiting = count(place.left)
    if most is not None and waiting > most:
        return Place(place.through, minus(place.left, taken(place.left, most)))
    room = None if most is None else most - waiting
    through, has_rows = place.through, waiting > 0
    for seq, rows in added:
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


def available(place: Place, added: Added) -> int:
    """Return the number of rows behind a place."""
    return count(place.left) + sum(count(rows) for _, rows in added)


def between(start: Place, end: Place, added: Added) -> Rows:
    """Return the rows between two places; `added` has those of the entries between, the last included."""
    return minus(union(start.left, *(rows for _, rows in added)), end.left)


def encoded(position: Position) -> dict[str, Any]:
    """Return the position as JSON; equal positions have equal text."""
    since = {} if position.since is None else {"since": position.since}
    initial = {"initial": True} if position.is_initial else {}
    begin = {} if position.begin is None else {"begin": encoded(position.begin)}
    return {"version": VERSION, **since, **initial, **begin, "brokers": _encoded(position.brokers)}


def _encoded(places: Mapping[str, Place]) -> dict[str, Any]:
    brokers: dict[str, Any] = {}
    for broker, place in sorted(places.items()):
        row: dict[str, Any] = {"through": place.through}
        left: dict[str, dict[str, list[list[int]]]] = {}
        for topic, queue, first, last in runs_of(place.left):
            left.setdefault(topic, {}).setdefault(str(queue), []).append([first, last])
        if left:
            row["left"] = left
        brokers[broker] = row
    return brokers


def decoded(row: Mapping[str, Any]) -> Position:
    """Parse a position. Raises BadPosition."""
    version = row.get("version")
    if version == _OF_QUEUES:
        raise BadPosition("this checkpoint was begun with the option namesrv: set it, or begin with a new checkpoint")
    if version != VERSION:
        raise BadPosition(f"the position in the checkpoint has version {version!r}, this neve reads {VERSION}")
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
            for broker, place in row["brokers"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadPosition(f"the checkpoint has no position of a stream of neve: {error!r}") from error
    begin = row.get("begin")
    return Position(brokers, row.get("since"), bool(row.get("initial")), None if begin is None else decoded(begin))
