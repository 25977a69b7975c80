"""Options that make Spark's JVMs start sooner, for tests that use one for seconds.

A session with one query takes 34 s of processor time with Java's defaults, 18 s with COMPILER, and 10 s if the classes
come from an archive, ready to run, instead of Spark's jars. `make servers` creates the archive:

    .venv/spark-classes.jsa     belongs to this environment's jars

Java ignores the archive, with a warning on stdout that _QUIET removes, if the class path or a jar has changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from neve.spark.jars import find_java, pyspark_jars

#: The optimizing compiler and the parallel collector pay off only after minutes.
COMPILER = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_QUIET = "-Xlog:cds*=off"
_ARCHIVE = Path(sys.prefix, "spark-classes.jsa")
_TRAINING_S = 600.0
_TRAINING = """
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
rows = spark.range(100).selectExpr("id", "id % 3 AS k", "cast(id AS string) AS s")
rows.write.parquet(sys.argv[1] + "/table")
table = spark.read.parquet(sys.argv[1] + "/table")
table.join(table, "id").groupBy(table.k).count().orderBy("k").toPandas()
stream = spark.readStream.schema(table.schema).parquet(sys.argv[1] + "/table").writeStream.format("parquet")
stream = stream.option("checkpointLocation", sys.argv[1] + "/checkpoint").trigger(availableNow=True)
stream.start(sys.argv[1] + "/copy").awaitTermination()
spark.stop()
"""


def driver_options() -> str:
    """Return the options of a driver, with the archive if it is up to date."""
    return f"{COMPILER} {_QUIET} -XX:SharedArchiveFile={_ARCHIVE}" if _is_up_to_date() else COMPILER


def _is_up_to_date() -> bool:
    sources = (Path(find_java()).resolve(), pyspark_jars())
    return _ARCHIVE.exists() and _ARCHIVE.stat().st_mtime > max(path.stat().st_mtime for path in sources)


def create_archive() -> None:
    """Create the archive unless it is up to date: run a session that loads what most tests use."""
    if _is_up_to_date():
        return
    with tempfile.TemporaryDirectory(dir=_ARCHIVE.parent) as directory:
        made = Path(directory, _ARCHIVE.name)
        environment = {
            **os.environ,
            "SPARK_SUBMIT_OPTS": f"{COMPILER} -XX:ArchiveClassesAtExit={made}",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        }
        # This ends with the JVM, which has the pipe too: it writes the archive when Python has ended.
        command = [sys.executable, "-c", _TRAINING, directory]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_TRAINING_S, check=False
        )
        assert made.exists(), f"Java wrote no class archive: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        made.replace(_ARCHIVE)


if __name__ == "__main__":
    create_archive()
