"""The archive's format: keys, journal entries, the catalog they add up to, and rows that rebuild to records.

Reading lives here, free of sockets: it asks for bytes through `ObjectSource`; `source` has one for a directory and one
for S3 (boto3). Only that, `schema`, `rebuild` and `reader` need the `[archive]` extra; the rest runs on the standard
library and msgspec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neve.archive.reader import Archive, ObjectSource

__all__ = ["open"]

_EXTRA = ("numpy", "pyarrow")


def open(source: str | ObjectSource, prefix: str = "") -> Archive:
    """The archive of a store, read with no broker alive, as it stands now.

    Args:
        source: `dir:PATH`, `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`, or anything with the methods of
            `ObjectSource`. Credentials come from the AWS variables, a profile or the machine's role.
        prefix: below which the archive lies in the source; a URL has it already.

    Raises:
        FileNotFoundError: there is no archive.
        ValueError: the URL is none.
        ImportError: the [archive] extra is not installed; clients come without it.
    """
    try:
        from neve.archive.reader import Archive as _Archive  # noqa: PLC0415
        from neve.archive.source import open_source  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] not in _EXTRA:
            raise
        raise ImportError(f"reading an archive needs {missing.name}: pip install 'neve[archive]'") from None

    return _Archive(open_source(source) if isinstance(source, str) else source, prefix)
