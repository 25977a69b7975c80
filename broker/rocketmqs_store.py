"""Detection of a data directory that RocketMQ's broker wrote, before any file in it is changed.

Its `checkpoint` is a page of five big-endian numbers (StoreCheckpoint: three times in ms since 1970, two offsets of the
log), while neve's is JSON. Its tables in `config` are JSON as fastjson writes it: numeric keys without quotes, and
without the `neveFormat` of neve's files.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

from infra.disk.filesystem import Disk

_NUMBERS = struct.Struct(">5q")
_PAGES = (4096, 16384, 65536)
_YEAR_2100_MS = 4_102_444_800_000
_FASTJSON_NUMBER_KEY = re.compile(rb"[{,]\s*\d+\s*:")
WHAT_TO_DO = "give neve a directory of its own; docs/migrate/overview.md describes the ways"


def is_one(disk: Disk, root: Path) -> bool:
    """Return whether RocketMQ's broker wrote the directory."""
    checkpoint = root / "checkpoint"
    if not disk.exists(checkpoint) or disk.size(checkpoint) not in _PAGES:
        return False
    page = disk.read(checkpoint)
    if len(page) < _NUMBERS.size or page.lstrip()[:1] == b"{":
        return False
    numbers: tuple[int, ...] = _NUMBERS.unpack_from(page)
    return min(numbers) >= -1 and max(numbers[:3]) < _YEAR_2100_MS


def is_table(data: bytes) -> bool:
    """Return whether RocketMQ wrote this file of `config`, which is not valid JSON."""
    return b'"neveFormat"' not in data and _FASTJSON_NUMBER_KEY.search(data) is not None


def refusal(disk: Disk, root: Path) -> str | None:
    """Return an error text for such a directory; None: it is not one."""
    if not is_one(disk, root):
        return None
    return f"{root} is a store of Apache RocketMQ's (it has RocketMQ's checkpoint), which neve can't open: {WHAT_TO_DO}"
