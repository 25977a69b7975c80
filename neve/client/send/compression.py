"""Compresses the bodies of messages; the sysFlag has the algorithm."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

from neve.errors import ClientError
from neve.record.layout import COMPRESSED, COMPRESSION_LZ4, COMPRESSION_ZLIB, COMPRESSION_ZSTD


def compress(body: bytes, kind: str, level: int) -> tuple[bytes, int]:
    """Return the compressed body and its sysFlag.

    Args:
        body: the body.
        kind: `zlib`, `lz4` or `zstd`; the last two need the package `lz4` or `zstandard`.
        level: the compression level.

    Raises:
        ClientError: the kind is unknown, or its package is not installed.
    """
    found = _KINDS.get(kind)
    if found is None:
        raise ClientError(f"unknown compression {kind!r}; known are {', '.join(_KINDS)}")
    deflate, flag = found
    try:
        return deflate(body, level), COMPRESSED | flag
    except ModuleNotFoundError as missing:
        raise ClientError(f"compression {kind} needs the package {missing.name}") from missing


def _lz4(body: bytes, level: int) -> bytes:
    import lz4.frame  # noqa: PLC0415 - an optional library

    return bytes(lz4.frame.compress(body, compression_level=level))


def _zstd(body: bytes, level: int) -> bytes:
    import zstandard  # noqa: PLC0415 - an optional library

    return zstandard.ZstdCompressor(level=level).compress(body)


_KINDS: Mapping[str, tuple[Callable[[bytes, int], bytes], int]] = {
    "zlib": (zlib.compress, COMPRESSION_ZLIB),
    "lz4": (_lz4, COMPRESSION_LZ4),
    "zstd": (_zstd, COMPRESSION_ZSTD),
}
