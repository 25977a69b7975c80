"""Frames of a local append-only file; a frame that a crash has torn at the end is detected.

A frame is [u32 length][u32 crc32 of number and content][u64 number][content], big endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

_HEAD = struct.Struct(">IIQ")

assert _HEAD.size == 16, "the layout has no padding"


def frame(number: int, content: bytes) -> bytes:
    """Encode a frame."""
    return _HEAD.pack(len(content), zlib.crc32(number.to_bytes(8, "big") + content), number) + content


def frames(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Yield (number, content, end position) of each frame up to the first torn one."""
    position = 0
    while position + _HEAD.size <= len(data):
        length, crc, number = _HEAD.unpack_from(data, position)
        content = data[position + _HEAD.size : position + _HEAD.size + length]
        if len(content) < length or zlib.crc32(number.to_bytes(8, "big") + content) != crc:
            return
        position += _HEAD.size + length
        yield number, content, position
