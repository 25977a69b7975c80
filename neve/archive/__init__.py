"""The archive's format: keys, journal entries, the catalog they add up to, and rows that rebuild to records.

Reading lives here, free of sockets: it asks for bytes through `ObjectSource`. Only `schema`, `rebuild` and `reader`
need the `[archive]` extra; the rest runs on the standard library and msgspec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neve.archive.reader import Archive, ObjectSource

__all__ = ["open"]


def open(source: ObjectSource, prefix: str = "") -> Archive:
    """The archive below `prefix`, read with no broker alive."""
    from neve.archive.reader import Archive as _Archive  # noqa: PLC0415 - needs pyarrow; clients come without it

    return _Archive(source, prefix)
