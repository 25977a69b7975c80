"""Decompress the bodies of many rows according to their sysFlag."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from neve.record.bodies import inflate
from neve.record.layout import COMPRESSED

#: Decompressed bytes after which a piece ends: an Arrow array of bytes is limited to 2 GiB.
PIECE_BYTES = 64 << 20


class BadBody(ValueError):
    """A body cannot be decompressed; the text begins with the place of the row."""


def inflated_pieces(rows: pa.RecordBatch, body_max: int) -> Iterator[tuple[pa.RecordBatch, pa.Array, pa.Array]]:
    """Yield the rows in pieces: (rows, decompressed bodies, errors).

    An error is null if its body was decompressed, was not compressed, or was null.

    Raises:
        ImportError: a body needs `lz4` or `zstandard`, which is not installed.
    """
    packed = _packed(rows)
    start = size = 0
    found: list[bytes | None] = []
    errors: list[str | None] = []
    bodies, flags = rows["body"], rows["sys_flag"]

    def piece(end: int) -> tuple[pa.RecordBatch, pa.Array, pa.Array]:
        of_piece, mask = rows.slice(start, end - start), packed.slice(start, end - start)
        stored, none = of_piece["body"], pa.nulls(end - start, pa.string())
        if not found:
            return of_piece, stored, none
        inflated = pc.replace_with_mask(stored, mask, pa.array(found, pa.binary()))
        return of_piece, inflated, pc.replace_with_mask(none, mask, pa.array(errors, pa.string()))

    for row in pc.indices_nonzero(packed).to_pylist():
        body, error = _inflated(bodies[row].as_py(), flags[row].as_py(), body_max)
        found.append(body)
        errors.append(error)
        size += len(body or b"")
        if size >= PIECE_BYTES:
            yield piece(row + 1)
            start, size, found, errors = row + 1, 0, [], []
    if start < rows.num_rows:
        yield piece(rows.num_rows)


def _packed(rows: pa.RecordBatch) -> pa.BooleanArray:
    marked = pc.not_equal(pc.bit_wise_and(rows["sys_flag"], COMPRESSED), 0)
    return pc.fill_null(pc.and_(marked, pc.is_valid(rows["body"])), False)


def _inflated(body: bytes, sys_flag: int, body_max: int) -> tuple[bytes | None, str | None]:
    try:
        return inflate(body, sys_flag, body_max), None
    except ValueError as error:
        return None, str(error)
    except ModuleNotFoundError as missing:
        raise ImportError(f"a body is compressed with {missing.name}: pip install {missing.name}") from None
