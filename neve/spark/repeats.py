"""Removal of rows that a sink, a replay or a producer sent more than once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Properties with the identity of the row or message from which a message was made. Replayed messages keep NEVE_SINK.
IDENTITIES = ("NEVE_REPLAY", "NEVE_SINK")
_COLUMN = "__neve_identity"


def without_repeats(frame: DataFrame, by: str | None = None) -> DataFrame:
    """Return the frame with one row per identity, by the properties NEVE_SINK and NEVE_REPLAY.

    The frame needs the columns `topic`, `broker`, `queue_id`, `queue_offset` and `properties`. A stream keeps the
    identities for the delay of its watermark; without a watermark it keeps all.

    Args:
        by: None keeps all rows without these properties. "msg_id" also compares the ids of these rows, within a topic:
            a producer that repeats a message without an answer keeps its id. It needs the column `msg_id`.
            Retry topics hold a row with one id for each redelivery.

    Raises:
        ValueError: `by` has another value.
    """
    from pyspark.sql import functions as f

    if by not in (None, "msg_id"):
        raise ValueError(f"by must be None or 'msg_id', got {by!r}")
    identities = [
        f.when(f.col("properties")[name].isNotNull(), f.concat_ws("/", f.lit(name), "topic", f.col("properties")[name]))
        for name in IDENTITIES
    ]
    if by is not None:
        identities.append(f.when(f.col("msg_id").isNotNull(), f.concat_ws("/", f.lit("msg_id"), "topic", "msg_id")))
    itself = f.concat_ws("/", f.lit("offset"), "topic", "broker", "queue_id", "queue_offset")
    marked = frame.withColumn(_COLUMN, f.coalesce(*identities, itself))
    is_bounded = frame.isStreaming and _has_watermark(frame)
    once = marked.dropDuplicatesWithinWatermark([_COLUMN]) if is_bounded else marked.dropDuplicates([_COLUMN])
    return once.drop(_COLUMN)


def _has_watermark(frame: DataFrame) -> bool:
    """Return whether a column has a watermark, which Spark stores in the metadata of the column."""
    return any("spark.watermarkDelayMs" in field.metadata for field in frame.schema.fields)
