"""Search of log files for records that contain given bytes, on any thread: files are read, not mapped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from broker.store.errors import StoreCorrupt
from infra.disk.filesystem import Disk
from neve.record.layout import MAGIC_BLANK, MAGIC_V1, MAGIC_V2, RECORD_SIZE_MIN, SIZE_AND_MAGIC

_PIECE_BYTES = 1 << 20


def records_with(disk: Disk, path: Path, size: int, text: bytes) -> Iterator[bytes | None]:
    """Yield each record in the first `size` bytes of a log file that contains `text`.

    None is yielded after each piece of about a megabyte. Raises OSError, and StoreCorrupt if no record begins where one
    should.
    """
    at = 0
    while at + SIZE_AND_MAGIC.size <= size:
        piece = disk.read_at(path, at, min(_PIECE_BYTES, size - at))
        used, has_ended = 0, False
        while used + SIZE_AND_MAGIC.size <= len(piece):
            length, magic = SIZE_AND_MAGIC.unpack_from(piece, used)
            has_ended = magic == MAGIC_BLANK or not (length or magic)
            if has_ended:
                break
            if magic not in {MAGIC_V1, MAGIC_V2} or length < RECORD_SIZE_MIN or at + used + length > size:
                raise StoreCorrupt(f"{path} has no record at {at + used}")
            if used + length > len(piece):
                if used:
                    break
                piece = disk.read_at(path, at, length)
                if len(piece) < length:
                    raise StoreCorrupt(f"{path} ends within the record at {at}")
            if piece.find(text, used, used + length) >= 0:
                yield piece[used : used + length]
            used += length
        if has_ended or not used:
            return
        at += used
        yield None
