"""Work in Python on the machines of a Spark: one task for each unit, through Spark Connect as well.

Those machines need neve, as `format("neve")` does. The units travel with the function, so they are to be few or small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from neve.spark.builder import is_remote

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

U = TypeVar("U")

_SLOTS_OF_A_SERVER = 16  # where Spark Connect does not say how many tasks run at once


def spread(spark: SparkSession, units: Sequence[U], work: Callable[[U], Iterator[Any]], schema: str) -> DataFrame:
    """A frame of the Arrow batches that `work` makes of each unit; it is done when the frame is."""

    def each(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for at in batch["id"].to_pylist():
                yield from work(units[at])

    return spark.range(0, len(units), 1, max(len(units), 1)).mapInArrow(each, schema)


def slots(spark: SparkSession) -> int:
    """How many tasks run at once."""
    if is_remote(spark):
        return _SLOTS_OF_A_SERVER
    return int(spark.sparkContext.defaultParallelism)


def shared_out(units: Sequence[U], weight: Callable[[U], int], parts: int) -> list[list[U]]:
    """So many parts at most, of about the same weight: the heaviest first, each to the lightest part."""
    shares: list[list[U]] = [[] for _ in range(min(parts, len(units)))]
    weights = [0] * len(shares)
    for unit in sorted(units, key=weight, reverse=True):
        lightest = weights.index(min(weights))
        shares[lightest].append(unit)
        weights[lightest] += max(weight(unit), 1)
    return shares
