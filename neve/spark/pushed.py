"""Spark's filters as a filter for planning. Other filters are ignored: Spark applies all of them to each row."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from neve.spark.planning.wanted import RequestedRows

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SETS = {
    "topic": "topics",
    "broker": "brokers",
    "dt": "days",
    "queue_id": "queues",
    "tags": "tags",
    "msg_id": "msg_ids",
}


def wanted_by(filters: Iterable[Filter]) -> RequestedRows:
    """Return the conjunction of the filters."""
    wanted = RequestedRows()
    for one in filters:
        attribute: tuple[str, ...] = getattr(one, "attribute", ())
        if len(attribute) == 1:
            wanted = _and(wanted, type(one).__name__, attribute[0], getattr(one, "value", None))
    return wanted


def _and(wanted: RequestedRows, kind: str, column: str, value: Any) -> RequestedRows:
    if column in _SETS and kind in {"EqualTo", "EqualNullSafe", "In"}:
        values = frozenset(one for one in (value if kind == "In" else [value]) if one is not None)
        if kind == "EqualNullSafe" and value is None:
            return wanted
        before = getattr(wanted, _SETS[column])
        both: Any = {_SETS[column]: values if before is None else before & values}
        return wanted._replace(**both)
    if column == "queue_offset" and isinstance(value, int):
        low, high = _bounds(kind, value)
        return wanted._replace(first=_higher(wanted.first, low), last=_lower(wanted.last, high))
    if column == "store_timestamp" and isinstance(value, datetime) and value.tzinfo is not None:
        return wanted.within(*_times(kind, (value - _EPOCH) // timedelta(microseconds=1)))
    return wanted


def _bounds(kind: str, value: int) -> tuple[int | None, int | None]:
    """Return (lowest, highest) offset that pass a filter."""
    return {
        "EqualTo": (value, value),
        "EqualNullSafe": (value, value),
        "GreaterThan": (value + 1, None),
        "GreaterThanOrEqual": (value, None),
        "LessThan": (None, value - 1),
        "LessThanOrEqual": (None, value),
    }.get(kind, (None, None))


def _times(kind: str, micros: int) -> tuple[int | None, int | None]:
    """Return [since, until) in milliseconds, the unit of the column."""
    floor, ceiling = micros // 1000, -(-micros // 1000)
    return {
        "EqualTo": (ceiling, floor + 1),
        "EqualNullSafe": (ceiling, floor + 1),
        "GreaterThan": (floor + 1, None),
        "GreaterThanOrEqual": (ceiling, None),
        "LessThan": (None, ceiling),
        "LessThanOrEqual": (None, floor + 1),
    }.get(kind, (None, None))


def _higher(one: int | None, other: int | None) -> int | None:
    return max((bound for bound in (one, other) if bound is not None), default=None)


def _lower(one: int | None, other: int | None) -> int | None:
    return min((bound for bound in (one, other) if bound is not None), default=None)
