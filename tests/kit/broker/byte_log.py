"""A log as both ends of a stream see it: records of a length and a filling, in files of equal size."""

from __future__ import annotations

from broker.store.described import Described
from broker.store.errors import LogMismatch

END = b"\xff"


def record(filling: int, size: int = 10) -> bytes:
    """Return a record of `size` bytes: its length in two bytes, then filling bytes."""
    assert 3 <= size < 0xFF00 and 0 < filling < 255
    return size.to_bytes(2) + bytes([filling]) * (size - 2)


class ByteLog:
    """A log that ends with whole records and holds back an unfinished one.

    Bytes behind a file's END marker are padding.
    """

    def __init__(self, file_size: int = 1 << 20, begin: int = 0) -> None:
        self.file_size = file_size
        self.min_physical_offset = begin
        self.data = bytearray()
        self.used: dict[int, int] = {}  # the number of used bytes of each file that has ended
        self.flushed_offset = begin
        self.described = Described()  # empty: this log has no descriptions of its records
        self._held = b""
        self._next = -1
        self.reads: list[tuple[int, int]] = []

    @property
    def max_physical_offset(self) -> int:
        return self.min_physical_offset + len(self.data)

    @property
    def newest_segment_base(self) -> int:
        end = self.max_physical_offset
        return max(end - 1, 0) // self.file_size * self.file_size

    @property
    def replica_offset(self) -> int:
        return self.max_physical_offset if self._next < 0 else self._next

    def content(self) -> bytes:
        return bytes(self.data)

    def append(self, raw: bytes) -> None:
        """Append records, as a master does."""
        left = self.file_size - self.max_physical_offset % self.file_size
        if len(raw) + 1 > left:
            self._end_file(left)
        self.data += raw

    def _end_file(self, left: int) -> None:
        base = self.max_physical_offset - (self.file_size - left)
        self.data += END
        self.used[base] = self.max_physical_offset - base
        self.data += bytes(left - 1)

    def log_bytes(self, start: int, end: int, limit: int, *, padding: bool = False) -> tuple[int, memoryview]:
        self.reads.append((start, limit))
        base = start // self.file_size * self.file_size
        file_end = base + self.file_size
        if base in self.used and not padding:
            if start >= base + self.used[base]:
                start, base, file_end = file_end, file_end, file_end + self.file_size
            if base in self.used:
                file_end = base + self.used[base]
        stop = max(min(end, self.max_physical_offset, file_end, start + limit), start)
        if start >= end:
            return start, memoryview(b"")
        low = self.min_physical_offset
        return start, memoryview(bytes(self.data))[start - low : stop - low]

    def append_replica(self, data: bytes | memoryview, at: int, description: bytes | memoryview = b"") -> None:
        assert not description
        if not self.data and self._next < 0:
            self.min_physical_offset = at
        if at == self.max_physical_offset:
            self._held = b""
        elif at != self.replica_offset:
            raise LogMismatch(f"bytes at {at}, where {self.replica_offset} is next")
        self._next = at + len(data)
        behind_end = 0 if self._held else max(self.max_physical_offset - at, 0)
        stream = self._held + bytes(data)[behind_end:]
        while stream:
            if stream[:1] == END:
                left = self.file_size - self.max_physical_offset % self.file_size
                self._end_file(left)
                stream = stream[left:]
                continue
            size = int.from_bytes(stream[:2])
            if len(stream) < 2 or len(stream) < size:
                break
            if size < 3:
                raise LogMismatch(f"at {self.max_physical_offset} no record")
            self.data += stream[:size]
            stream = stream[size:]
        self._held = stream

    def go_on_with_master_at(self, physical_offset: int) -> None:
        raise LogMismatch(f"no file ends at {self.max_physical_offset}, and bytes come at {physical_offset}")

    def truncate(self, to: int) -> None:
        """Truncate the log to a record's start."""
        position = 0
        while position < len(self.data):
            size = int.from_bytes(self.data[position : position + 2])
            if self.data[position : position + 1] == END:
                size = self.file_size - (self.min_physical_offset + position) % self.file_size
            if self.min_physical_offset + position + size > to:
                break
            position += size
        del self.data[position:]
        self.forget()

    def forget(self) -> None:
        self._held, self._next = b"", -1
