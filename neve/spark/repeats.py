"""Rows that a sink or a replay sent more than once, read once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Properties that say which row, or which message, a message was made of.
IDENTITIES = ("NEVE_REPLAY", "NEVE_SINK")  # what is replayed keeps the NEVE_SINK that it had
_COLUMN = "__neve_identity"


def without_repeats(frame: DataFrame, by: str | None = None) -> DataFrame:
    """Return the frame with one row of those that were made of one: by the properties NEVE_SINK and NEVE_REPLAY.

    It needs the columns `topic`, `broker`, `queue_id`, `queue_offset` and `properties`. A stream keeps the identities
    that it has seen for as long as its watermark asks for; without a watermark it keeps all.

    Args:
        by: None keeps all rows without these properties. "msg_id" also compares the ids of these rows, within a topic:
            a producer that sends a message again, because no answer came, keeps its id. It needs the column `msg_id`.
            Retry topics hold a row with one id for each redelivery.

    Raises:
        ValueError: `by` is something else.
    """
    from pyspark.sql import functions as f

    if by not in (None, "msg_id"):
        raise ValueError(f"by must be None or 'msg_id', got {by!r}")
    told = [
        f.when(f.col("properties")[name].isNotNull(), f.concat_ws("/", f.lit(name), "topic", f.col("properties")[name]))
        for name in IDENTITIES
    ]
    if by is not None:
        told.append(f.when(f.col("msg_id").isNotNull(), f.concat_ws("/", f.lit("msg_id"), "topic", "msg_id")))
    itself = f.concat_ws("/", f.lit("offset"), "topic", "broker", "queue_id", "queue_offset")
    marked = frame.withColumn(_COLUMN, f.coalesce(*told, itself))
    is_bounded = frame.isStreaming and _has_watermark(frame)
    once = marked.dropDuplicatesWithinWatermark([_COLUMN]) if is_bounded else marked.dropDuplicates([_COLUMN])
    return once.drop(_COLUMN)


def _has_watermark(frame: DataFrame) -> bool:
    """`withWatermark` notes it in the column's metadata."""
    return any("spark.watermarkDelayMs" in field.metadata for field in frame.schema.fields)
