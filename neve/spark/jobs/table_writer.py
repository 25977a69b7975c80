"""The rows of a table's run by Spark: read, decoded, written aside by day, and counted again from what was written.

Objects of which all rows are wanted go through the JVM's reader; of the others a task in Python takes the rows.
Where dead letters have a table of their own, each of the two writers leaves out what is the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from neve.spark.bodies import decode_bodies
from neve.spark.builder import parse_store
from neve.spark.jobs.spread import slots, spread
from neve.spark.jobs.table_log import Span, TableFile, TableLog
from neve.spark.jobs.table_rows import Output, Written, positions_of, sorted_out
from neve.spark.planning.planner import Wanted
from neve.spark.planning.rows import Rows
from neve.spark.planning.slices import Slice, tasks_of
from neve.spark.reader import ROW_SCHEMA, parquet_of, scan

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from neve.archive.format.journal import CommittedObject

# What a table has of each row, besides its body; the day is its folder.
COLUMNS = ("broker", "queue_id", "queue_offset", "store_timestamp", "born_timestamp", "msg_id", "tags", "keys",
           "properties", "reconsume_times")  # fmt: skip
_BODY = {"bytes": ("body",), "text": ("text",)}
ALL, GOOD, DEAD = "all", "good", "dead"  # by whether their bodies could be decoded
_STORED = "__neve_stored"
_PLACES = "broker STRING, queue_id INT, queue_offset BIGINT, dt STRING"
_PART_BYTES = 16 << 20


class SparkWriter:
    """Of one run."""

    def __init__(
        self,
        spark: SparkSession,
        topic: str,
        store: str,
        log: TableLog,
        full_path: Callable[[str], str],
        *,
        kind: str,
        schema: StructType | str | None,
        schema_file: str | None,
        message: str | None,
        registry: str | None,
        on_error: str,
        flat: bool,
        half: str = ALL,
    ) -> None:
        self._spark, self._topic, self._store, self._log, self._full_path = spark, topic, store, log, full_path
        self._decode = partial(
            decode_bodies, kind=kind, schema=schema, schema_file=schema_file, message=message, registry=registry,
            on_error=on_error,
        )  # fmt: skip
        self._kind, self._flat, self._half = kind, flat, half
        self._schema = self._of_half(self._typed(scan(spark, parse_store(store), topic, []))).schema

    @property
    def is_half(self) -> bool:
        """Whether another table has the other rows."""
        return self._half != ALL

    def columns(self) -> str:
        """The table's, as Spark tells a schema."""
        return str(self._schema.json())

    def write(self, slices: Sequence[Slice], names: Mapping[str, CommittedObject], staged: str) -> Output:
        """New rows."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        whole, parts = sorted_out(slices, names)
        frame = None
        if whole:
            frame = scan(self._spark, parse_store(self._store), self._topic, whole)
        if parts:
            some = self._rows_of(parts)
            frame = some if frame is None else frame.unionByName(some)
        assert frame is not None, "there are slices"
        typed = self._typed(frame)
        if not self.is_half:
            written = self._written(typed, staged)
            return Output(written, sum(one.rows for one in written))
        seen = Observation()
        written = self._written(self._of_half(typed.observe(seen, f.count(f.lit(1)).alias("rows"))), staged)
        return Output(written, int(seen.get["rows"]))

    def rewrite(self, files: Sequence[TableFile], without: Mapping[str, Rows], staged: str) -> list[Written]:
        """What else is in these files."""
        from pyspark.sql import functions as f

        read = [(self._full_path(file.path), file.size) for file in files]
        frame = parquet_of(self._spark, read, self._schema, self._full_path("").rstrip("/"))
        gone = self._spark.createDataFrame(
            positions_of(without), "of_broker STRING, of_queue INT, first BIGINT, last BIGINT"
        )
        is_gone = (
            (f.col("broker") == f.col("of_broker"))
            & (f.col("queue_id") == f.col("of_queue"))
            & f.col("queue_offset").between(f.col("first"), f.col("last"))
        )
        return self._written(frame.join(f.broadcast(gone), is_gone, "left_anti"), staged)

    def _rows_of(self, parts: Sequence[Slice]) -> DataFrame:
        from pyspark.sql.pandas.types import to_arrow_schema
        from pyspark.sql.types import StructType

        schema = " ".join(ROW_SCHEMA.split())
        target = to_arrow_schema(StructType.fromDDL(schema), timezone="UTC")
        tasks = tasks_of(parts, _PART_BYTES, slots(self._spark))
        return spread(self._spark, tasks, partial(_rows_of_task, self._store, target), schema)

    def _typed(self, frame: DataFrame) -> DataFrame:
        if self._half == DEAD:
            decoded = self._decode(frame.withColumn(_STORED, frame["body"]))
            return decoded.select(*COLUMNS, decoded[_STORED].alias("body"), "body_codec", "body_error", "dt")
        decoded = self._decode(frame)
        body = [name for name in (*_BODY.get(self._kind, ("value",)), "body_error") if name in decoded.columns]
        chosen = decoded.select(*COLUMNS, *body, "dt")
        if not self._flat:
            return chosen
        fields = getattr(chosen.schema["value"].dataType, "names", None) if "value" in chosen.columns else None
        if fields is None:
            raise ValueError("flat: bodies that are values of a schema with fields alone have columns")
        if clash := sorted(set(fields) & set(chosen.columns)):
            raise ValueError(f"flat: the table has columns {', '.join(clash)} already")
        rest = [name for name in chosen.columns if name not in ("value", "dt")]
        return chosen.select(*rest, *(chosen["value"].getField(name).alias(name) for name in fields), "dt")

    def _of_half(self, typed: DataFrame) -> DataFrame:
        if self._half == ALL:
            return typed
        is_dead = typed["body_error"].isNotNull()
        return typed.where(is_dead) if self._half == DEAD else typed.where(~is_dead).drop("body_error")

    def _written(self, frame: DataFrame, staged: str) -> list[Written]:
        frame.write.partitionBy("dt").mode("error").parquet(self._full_path(staged))
        found = self._log.staged(staged)
        sizes = {tuple(key.rsplit("/", 2)[1:]): (key, size) for key, size in found.items()}
        read = [(self._full_path(key), size) for key, size in found.items()]
        places = parquet_of(self._spark, read, _PLACES, self._full_path(staged).rstrip("/"))
        return sorted(_told(row, sizes) for row in _counted(places).collect())


def _counted(places: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    of_queue = places.groupBy("dt", f.col("_metadata.file_name").alias("file"), "broker", "queue_id").agg(
        f.min("queue_offset").alias("first"), f.max("queue_offset").alias("last"), f.count("*").alias("rows")
    )
    spans = f.collect_list(f.struct("broker", "queue_id", "first", "last"))
    return of_queue.groupBy("dt", "file").agg(f.sum("rows").alias("rows"), f.sort_array(spans).alias("spans"))


def _told(row: Any, sizes: Mapping[tuple[str, ...], tuple[str, int]]) -> Written:
    key, size = sizes[f"dt={row.dt}", row.file]
    return Written(key, row.dt, size, row.rows, tuple(Span(*span) for span in row.spans))


def _rows_of_task(store: str, target: pa.Schema, task: Sequence[Slice]) -> Iterator[pa.RecordBatch]:
    """On the machine that runs it."""
    from neve.spark.batches import rows_of_task

    yield from rows_of_task(store, list(task), Wanted(), target)
