"""Spark on neve's archive: `session` makes a configured Spark, `read_topic` a topic's archive as a DataFrame.

pyspark is imported on use only: `import neve.spark` costs nothing and works without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neve.spark.builder import session
    from neve.spark.jars import SparkSetupError
    from neve.spark.reader import archive_files, read_topic

__all__ = ["SparkSetupError", "archive_files", "read_topic", "session"]

_HOMES = {
    "SparkSetupError": "neve.spark.jars",
    "archive_files": "neve.spark.reader",
    "read_topic": "neve.spark.reader",
    "session": "neve.spark.builder",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(name)
    return getattr(import_module(home), name)
