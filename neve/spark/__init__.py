"""Spark on neve's archive: `session` returns a configured Spark, `read_topic` a topic's archive as a DataFrame.

pyspark is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neve.spark.bodies import Bodies, decode_bodies, json_schema, split_bodies
    from neve.spark.builder import session
    from neve.spark.jars import SparkSetupError
    from neve.spark.reader import archive_files, read_topic
    from neve.spark.repeats import without_repeats

__all__ = [
    "Bodies",
    "SparkSetupError",
    "archive_files",
    "decode_bodies",
    "json_schema",
    "read_topic",
    "session",
    "split_bodies",
    "without_repeats",
]

_HOMES = {
    "Bodies": "neve.spark.bodies",
    "SparkSetupError": "neve.spark.jars",
    "archive_files": "neve.spark.reader",
    "decode_bodies": "neve.spark.bodies",
    "json_schema": "neve.spark.bodies",
    "read_topic": "neve.spark.reader",
    "session": "neve.spark.builder",
    "split_bodies": "neve.spark.bodies",
    "without_repeats": "neve.spark.repeats",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(name)
    return getattr(import_module(home), name)
