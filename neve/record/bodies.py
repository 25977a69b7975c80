"""Decompress bodies according to their sysFlag; encode and decode batches.

Source: RocketMQ's CompressionType, MessageDecoder.
"""

from __future__ import annotations

import zlib
from struct import Struct
from typing import TYPE_CHECKING, Final

from neve.record.codec import MalformedRecord, need, take
from neve.record.layout import COMPRESSED, COMPRESSION_LZ4, COMPRESSION_MASK, COMPRESSION_ZSTD, I16

if TYPE_CHECKING:
    from collections.abc import Iterable

INFLATED_LENGTH_MAX: Final = 64 << 20

_ZSTD_STEP: Final = 1 << 10
_BATCH_HEAD = Struct(">iiiii")


def inflate(body: bytes, sys_flag: int, limit: int = INFLATED_LENGTH_MAX) -> bytes:
    """Return the decompressed body.

    Raises:
        ValueError: the body is damaged, or exceeds `limit` bytes when decompressed.
        ModuleNotFoundError: the body needs `lz4` or `zstandard`, which is not installed.
    """
    if not sys_flag & COMPRESSED:
        return body
    codec = sys_flag & COMPRESSION_MASK
    inflater = {COMPRESSION_LZ4: _inflate_lz4, COMPRESSION_ZSTD: _inflate_zstd}.get(codec, _inflate_zlib)
    inflated = inflater(body, limit + 1)
    if len(inflated) > limit:
        raise ValueError(f"the body is longer than {limit} bytes when inflated")
    return inflated


def _inflate_zlib(body: bytes, length_max: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        inflated = stream.decompress(body, length_max)
    except zlib.error as error:
        raise ValueError(f"the body does not match the compression in its sysFlag: {error}") from error
    return _whole(inflated, stream.eof, length_max)


def _inflate_lz4(body: bytes, length_max: int) -> bytes:
    import lz4.frame  # noqa: PLC0415 - an optional library

    stream = lz4.frame.LZ4FrameDecompressor()
    try:
        inflated = bytes(stream.decompress(body, max_length=length_max))
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"the body does not match the compression in its sysFlag: {error}") from error
    return _whole(inflated, bool(stream.eof), length_max)


def _inflate_zstd(body: bytes, length_max: int) -> bytes:
    import zstandard  # noqa: PLC0415 - an optional library

    # `decompress(max_output_size=…)` trusts the size that the frame declares, and a stream reader does not report a
    # truncated frame. Small steps bound the excess output to 32 MiB.
    stream = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
    parts: list[bytes] = []
    length = at = 0
    try:
        while at < len(body) and not stream.eof and length < length_max:
            parts.append(stream.decompress(body[at : at + _ZSTD_STEP]))
            length += len(parts[-1])
            at += _ZSTD_STEP
    except zstandard.ZstdError as error:
        raise ValueError(f"the body does not match the compression in its sysFlag: {error}") from error
    return _whole(b"".join(parts)[:length_max], stream.eof, length_max)


def _whole(inflated: bytes, is_at_end: bool, length_max: int) -> bytes:
    """Return the output. Raises ValueError if the stream is truncated before `length_max` bytes."""
    if not is_at_end and len(inflated) < length_max:
        raise ValueError("the body does not match the compression in its sysFlag: it is truncated")
    return inflated


def encode_batch(messages: Iterable[tuple[bytes, int, bytes]]) -> bytes:
    """Encode (body, flag, properties) as a SEND_BATCH_MESSAGE body: size, magic 0, crc 0, flag, body, properties."""
    parts: list[bytes] = []
    for body, flag, properties in messages:
        size = _BATCH_HEAD.size + len(body) + 2 + len(properties)
        parts += (_BATCH_HEAD.pack(size, 0, 0, flag, len(body)), body, I16.pack(len(properties)), properties)
    return b"".join(parts)


def decode_batch(blob: bytes | memoryview) -> list[tuple[int, bytes, bytes]]:
    """Decode a batch into (flag, body, properties) of each message.

    Raises:
        MalformedRecord: a length is inconsistent.
    """
    view, position = memoryview(blob), 0
    messages: list[tuple[int, bytes, bytes]] = []
    while position < len(view):
        size, _magic, _crc, flag, body_length = _BATCH_HEAD.unpack_from(need(view, position, _BATCH_HEAD.size))
        body, at = take(view, position + _BATCH_HEAD.size, body_length)
        (properties_length,) = I16.unpack_from(need(view, at, 2))
        properties, at = take(view, at + 2, properties_length)
        if at != position + size:
            raise MalformedRecord(f"a batched message declares {size} bytes and has {at - position}")
        messages.append((flag, body, properties))
        position = at
    return messages
