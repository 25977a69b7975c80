"""Deletion vectors: the hidden rows of a file, in the inline form of an `add` action.

    z85( magic 1681511377 <i4 | bitmaps 1 <i8 | high bits 0 <i4 | roaring bitmap ), zero-padded to a multiple of 4
    roaring bitmap, portable: 12347 | (containers - 1) << 16 <u4
                              a bit for each container: whether it has runs (all have here)
                              (high 16 bits, rows - 1) <u2 of each container
                              offset <u4 of each container, if there are 4 or more
                              runs <u2, (first, length - 1) <u2 of each run, of each container

Sources: Delta's protocol, "Deletion Vector Format"; the Roaring format specification.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MAGIC = 1681511377
_RUNS_COOKIE = 12347
_OFFSETS_FROM = 4  # containers
_CONTAINER = 1 << 16
ROWS_MAX = 1 << 32  # of one bitmap
_B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_TO_Z85 = bytes.maketrans(_B85, _Z85)


class DeletionVector(NamedTuple):
    """An inline deletion vector."""

    inline: str
    size: int  # bytes before z85 encoding
    rows: int

    def action(self) -> dict[str, object]:
        """Return the fields of an action."""
        return {
            "storageType": "i",
            "pathOrInlineDv": self.inline,
            "sizeInBytes": self.size,
            "cardinality": self.rows,
        }


def deletion_vector(spans: Sequence[tuple[int, int]]) -> DeletionVector:
    """Make a deletion vector from one or more ordered, disjoint spans of (first row, last row)."""
    assert spans and spans[0][0] >= 0 and spans[-1][1] < ROWS_MAX
    raw = struct.pack("<iqi", _MAGIC, 1, 0) + _roaring(spans)
    padded = raw + bytes(-len(raw) % 4)
    text = base64.b85encode(padded).translate(_TO_Z85).decode("ascii")
    return DeletionVector(text, len(raw), sum(last - first + 1 for first, last in spans))


def _roaring(spans: Iterable[tuple[int, int]]) -> bytes:
    containers: dict[int, list[tuple[int, int]]] = {}
    for first, last in spans:
        for high in range(first // _CONTAINER, last // _CONTAINER + 1):
            low = max(first, high * _CONTAINER) % _CONTAINER
            end = min(last, high * _CONTAINER + _CONTAINER - 1) % _CONTAINER
            containers.setdefault(high, []).append((low, end))
    flags = bytearray((len(containers) + 7) // 8)
    keys, bodies = bytearray(), []
    for number, (high, runs) in enumerate(containers.items()):
        flags[number // 8] |= 1 << (number % 8)
        keys += struct.pack("<HH", high, sum(last - first + 1 for first, last in runs) - 1)
        lengths = [part for first, last in runs for part in (first, last - first)]
        bodies.append(struct.pack(f"<H{len(lengths)}H", len(runs), *lengths))
    head = struct.pack("<I", _RUNS_COOKIE | (len(containers) - 1) << 16) + flags + keys
    begins = b""
    if len(containers) >= _OFFSETS_FROM:
        at = len(head) + 4 * len(containers)
        for body in bodies:
            begins += struct.pack("<I", at)
            at += len(body)
    return head + begins + b"".join(bodies)
