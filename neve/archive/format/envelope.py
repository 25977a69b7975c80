"""The envelope of checkpoints and state slots.

    msgpack map {"kind": "CATALOG" | "STATE", "version": n,   a reader refuses a higher version
                 "codec": "zlib", "size": bytes,              of the content
                 "sha256": hex,                               over the content
                 "body": bin}                                 the content, compressed

The envelope carries its own checksum, so a reader detects a damaged one and falls back to the one before it.
"""

import hashlib
import zlib

import msgspec

from neve.archive.format.journal import NewerFormat

CODEC = "zlib"
_LEVEL = 6


class Damaged(ValueError):
    """The bytes differ from what was written; an older copy, or the journal itself, serves instead."""


class _Kind(msgspec.Struct):
    kind: str
    version: int


class _Sealed(msgspec.Struct):
    kind: str
    version: int
    codec: str
    size: int
    sha256: str
    body: bytes


def seal(kind: str, version: int, content: bytes) -> bytes:
    """Compress the content and wrap it in an envelope."""
    digest = hashlib.sha256(content).hexdigest()
    return msgspec.msgpack.encode(_Sealed(kind, version, CODEC, len(content), digest, zlib.compress(content, _LEVEL)))


def unseal(kind: str, newest: int, data: bytes, limit: int) -> bytes:
    """Return the verified content of an envelope.

    Args:
        kind: the expected kind.
        newest: the newest version that the caller reads.
        data: the envelope.
        limit: the highest accepted size of the content in bytes.

    Raises:
        NewerFormat: the version is above `newest`.
        Damaged: the kind differs, the envelope is truncated or altered, or the content exceeds `limit`.
    """
    try:
        head = msgspec.msgpack.decode(data, type=_Kind)
        if head.kind == kind and head.version > newest:
            raise NewerFormat(f"{kind} of format {head.version}: this program knows formats up to {newest}")
        sealed = msgspec.msgpack.decode(data, type=_Sealed)
        if sealed.kind != kind or sealed.codec != CODEC or sealed.size > limit:
            raise Damaged(
                f"expected {kind} of at most {limit} bytes in {CODEC}, got {sealed.kind} of {sealed.size} bytes in "
                f"{sealed.codec}"
            )
        content = zlib.decompressobj().decompress(sealed.body, sealed.size + 1)
    except (msgspec.DecodeError, zlib.error) as error:
        raise Damaged(f"not a {kind} envelope: {error}") from error
    if len(content) != sealed.size or hashlib.sha256(content).hexdigest() != sealed.sha256:
        raise Damaged(f"{kind}: the content does not match its size or checksum")
    return content
