"""Decode one row group from its byte range and the object's footer, so that a cold read needs one range GET."""

import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from neve.archive.rows.rebuild import COLUMNS, REPEATED, rebuild, tag_codes
from neve.archive.rows.schema import DamagedObject

Int64s = npt.NDArray[np.int64]


class _OneRange:
    """A file of which only one range is available; given the footer, Parquet reads nothing else."""

    def __init__(self, start: int, data: bytes, size: int) -> None:
        self._start, self._data, self._size = start, pa.py_buffer(data), size
        self._position = 0
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Read bytes; Arrow calls this if it cannot use a buffer."""
        return bytes(self.read_buffer(size))

    def read_buffer(self, size: int = -1) -> pa.Buffer:
        """Return a slice without copying."""
        begin = self._position - self._start
        if size < 0 or begin < 0 or begin + size > len(self._data):
            raise DamagedObject(f"a read of {size} bytes at {self._position} is outside the row group")
        self._position += size
        return self._data.slice(begin, size)


class DecodedRows:
    """The records of a row group, with the columns that select by offset, tag and time."""

    __slots__ = ("offsets", "positions", "tags", "times", "wire")

    def __init__(self, wire: memoryview, positions: Int64s, offsets: Int64s, tags: Int64s, times: Int64s) -> None:
        self.wire, self.positions, self.offsets, self.tags, self.times = wire, positions, offsets, tags, times


def may_span(metadata: pq.FileMetaData, index: int, physical_offset: int) -> bool:
    """Return whether a row group may contain the record at a physical offset; without statistics it may."""
    group = metadata.row_group(index)
    for column in range(group.num_columns):
        chunk = group.column(column)
        if chunk.path_in_schema == "commit_log_offset" and chunk.is_stats_set and chunk.statistics.has_min_max:
            return bool(chunk.statistics.min <= physical_offset <= chunk.statistics.max)
    return True


def decode_group(
    metadata: pq.FileMetaData, index: int, start: int, data: bytes, *, size: int, topic: str, wire_bytes: int
) -> DecodedRows:
    """Decode a row group into records. Raises DamagedObject if a checksum or a length is wrong."""
    table = read_group(metadata, index, start, data, size=size, columns=COLUMNS)
    rebuilt = rebuild(table, topic)
    if len(rebuilt.wire) != wire_bytes:
        raise DamagedObject(f"row group {index} rebuilds to {len(rebuilt.wire)} bytes, not {wire_bytes}")
    times = pc.fill_null(table.column("store_timestamp").cast(pa.int64()), -1).to_numpy()
    offsets = table.column("queue_offset").to_numpy()
    return DecodedRows(rebuilt.wire, rebuilt.positions, offsets, tag_codes(table, rebuilt), times)


def read_group(
    metadata: pq.FileMetaData, index: int, start: int, data: bytes, *, size: int, columns: Sequence[str]
) -> pa.Table:
    """Read columns of a row group from its bytes, which begin at `start` in the object. Raises DamagedObject."""
    try:
        source = pa.PythonFile(_OneRange(start, data, size), mode="r")
        with pq.ParquetFile(
            source, metadata=metadata, page_checksum_verification=True, pre_buffer=False, read_dictionary=list(REPEATED)
        ) as file:
            return file.read_row_group(index, columns=list(columns), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DamagedObject(f"row group {index} cannot be decoded: {error}") from error
