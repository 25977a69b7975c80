"""Message bodies as the producer had them: inflating inside Spark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

INFLATED_LENGTH_MAX = 64 << 20


def inflater(limit: int = INFLATED_LENGTH_MAX) -> Callable[[bytes | None, str | None], bytes | None]:
    """A function for Spark's workers. It is nested so that it travels by value: workers need no neve installed."""

    def inflate(body: bytes | None, codec: str | None) -> bytes | None:
        if body is None:
            return None
        packed = bytes(body)
        if codec == "zlib":
            import zlib

            try:
                inflated = zlib.decompressobj().decompress(packed, limit + 1)
            except zlib.error:
                return None  # the row is there with its stored body; `damaged` and `body_crc` tell more
        elif codec == "lz4":
            import lz4.frame

            try:
                inflated = lz4.frame.LZ4FrameDecompressor().decompress(packed, max_length=limit + 1)
            except RuntimeError:
                return None
        elif codec == "zstd":
            import zstandard

            try:
                reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(packed)
                inflated = reader.read(limit + 1)
            except zstandard.ZstdError:
                return None
        else:
            return None
        if len(inflated) > limit:
            raise ValueError(f"a body is longer than {limit} bytes when inflated")
        return inflated

    return inflate


def inflated_body(limit: int) -> Any:
    """A column: the body, inflated where `body_codec` says that it is packed; null where it does not inflate."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import BinaryType

    run = f.udf(inflater(limit), BinaryType(), useArrow=False)  # Arrow would ask for pandas
    packed = f.col("body_codec") != "none"
    # only packed bodies travel to Python
    return f.when(packed, run(f.when(packed, f.col("body")), f.col("body_codec"))).otherwise(f.col("body"))
