"""Spark's own reader of Delta tables, for tests: run by a Python with matching PySpark and delta-spark.

It reads one query per line and writes the rows as JSON, or the text of the error.
"""

from __future__ import annotations

import json
import sys

import delta  # type: ignore[import-not-found]  # of the Python that runs this
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

_CONF = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.databricks.delta.snapshotPartitions": "1",  # For a table of some dozen files.
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def main() -> None:
    """Answer queries until the input ends."""
    builder = SparkSession.builder.master("local[1]")
    for key, value in _CONF.items():
        builder = builder.config(key, value)
    session = delta.configure_spark_with_delta_pip(builder).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    for line in sys.stdin:
        try:
            told = json.dumps([list(row) for row in session.sql(line).collect()])
        except (PySparkException, Py4JJavaError) as error:
            told = json.dumps(str(error))
        print(told, flush=True)


if __name__ == "__main__":
    main()
