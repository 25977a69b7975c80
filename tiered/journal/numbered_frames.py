"""Frames of a local file that is only appended to; what a crash tore off its end is seen.

Each is [u32 length][u32 crc32 of number and content][u64 number][content], big endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

_HEAD = struct.Struct(">IIQ")

assert _HEAD.size == 16, "no padding: read with the same layout"


def frame(number: int, content: bytes) -> bytes:
    return _HEAD.pack(len(content), zlib.crc32(number.to_bytes(8, "big") + content), number) + content


def frames(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """(number, content, end of the frame) up to the first that is torn."""
    position = 0
    while position + _HEAD.size <= len(data):
        length, crc, number = _HEAD.unpack_from(data, position)
        content = data[position + _HEAD.size : position + _HEAD.size + length]
        if len(content) < length or zlib.crc32(number.to_bytes(8, "big") + content) != crc:
            return
        position += _HEAD.size + length
        yield number, content, position
