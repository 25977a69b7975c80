"""The corpus: real frames of stock clients, each kind once or twice, in one compressed file.

traffic.xz, decompressed:  { u8 direction | i32 length | frame of that length }*

`python -m tests.fuzz.record` records it again.
"""

from __future__ import annotations

import lzma
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

FILE = Path(__file__).with_name("traffic.xz")
_HEAD = struct.Struct(">Bi")


class Direction(IntEnum):
    """The sender and receiver of a frame."""

    CLIENT_TO_BROKER = 0
    BROKER_TO_CLIENT = 1
    TO_NAME_SERVER = 2
    FROM_NAME_SERVER = 3


@dataclass(frozen=True, slots=True)
class Recorded:
    """One frame without its length."""

    direction: Direction
    frame: bytes


def save(frames: Iterable[Recorded], path: Path = FILE) -> int:
    """Write the corpus; return its size on disk in bytes."""
    blob = b"".join(_HEAD.pack(item.direction, len(item.frame)) + item.frame for item in frames)
    path.write_bytes(lzma.compress(blob, preset=9))
    return path.stat().st_size


def load(path: Path = FILE) -> list[Recorded]:
    return list(_read(lzma.decompress(path.read_bytes())))


def _read(blob: bytes) -> Iterator[Recorded]:
    position = 0
    while position < len(blob):
        direction, length = _HEAD.unpack_from(blob, position)
        position += _HEAD.size + length
        yield Recorded(Direction(direction), blob[position - length : position])
    assert position == len(blob)
