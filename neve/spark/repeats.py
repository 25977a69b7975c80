"""Rows that a sink or a replay sent more than once, read once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Properties that say which row, or which message, a message was made of.
IDENTITIES = ("NEVE_REPLAY", "NEVE_SINK")  # what is replayed keeps the NEVE_SINK that it had
_COLUMN = "__neve_identity"


def without_repeats(frame: DataFrame) -> DataFrame:
    """The frame with one row of those that say that they are the same: by the properties NEVE_SINK and NEVE_REPLAY.

    Rows that say nothing of the kind all stay. It needs the columns `topic`, `broker`, `queue_id`, `queue_offset` and
    `properties`. On a stream with a watermark what was seen is kept as long as the watermark asks for, else for ever.
    """
    from pyspark.sql import functions as f

    told = [
        f.when(f.col("properties")[name].isNotNull(), f.concat_ws("/", f.lit(name), "topic", f.col("properties")[name]))
        for name in IDENTITIES
    ]
    itself = f.concat_ws("/", f.lit("offset"), "topic", "broker", "queue_id", "queue_offset")
    marked = frame.withColumn(_COLUMN, f.coalesce(*told, itself))
    is_bounded = frame.isStreaming and _has_watermark(frame)
    once = marked.dropDuplicatesWithinWatermark([_COLUMN]) if is_bounded else marked.dropDuplicates([_COLUMN])
    return once.drop(_COLUMN)


def _has_watermark(frame: DataFrame) -> bool:
    """`withWatermark` notes it in the column's metadata."""
    return any("spark.watermarkDelayMs" in field.metadata for field in frame.schema.fields)
