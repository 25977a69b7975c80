"""The envelope of what the archive derives from its journal and its broker: checkpoints and state slots.

    msgpack map {"kind": "CATALOG" | "STATE", "version": n,   a higher version than known is refused
                 "codec": "zlib", "size": bytes,              of the content
                 "sha256": hex,                               over the content
                 "body": bin}                                 the content, compressed

It carries its own checksum, so that a reader can tell a damaged one by itself and take the one before.
"""

import hashlib
import zlib

import msgspec

from neve.archive.format.journal import NewerFormat

CODEC = "zlib"
_LEVEL = 6


class Damaged(ValueError):
    """The bytes are not what was written; there is an older one, or the journal itself."""


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
    """The content compressed, in the envelope that `unseal` checks."""
    digest = hashlib.sha256(content).hexdigest()
    return msgspec.msgpack.encode(_Sealed(kind, version, CODEC, len(content), digest, zlib.compress(content, _LEVEL)))


def unseal(kind: str, version: int, data: bytes, limit: int) -> bytes:
    """The content, checked; `limit` bounds it in bytes. Raises as `unseal_any`."""
    return unseal_any(kind, version, data, limit)[1]


def unseal_any(kind: str, newest: int, data: bytes, limit: int) -> tuple[int, bytes]:
    """(version, content), checked, of any version up to the newest that is known.

    Raises:
        NewerFormat: a newer program wrote it.
        Damaged: it is something else, cut short, altered or above the limit.
    """
    try:
        head = msgspec.msgpack.decode(data, type=_Kind)
        if head.kind == kind and head.version > newest:
            raise NewerFormat(f"{kind} of format {head.version}: this program knows up to {newest}")
        sealed = msgspec.msgpack.decode(data, type=_Sealed)
        if sealed.kind != kind or sealed.codec != CODEC or sealed.size > limit:
            raise Damaged(f"a {sealed.kind} of {sealed.size} bytes in {sealed.codec}, not a {kind} up to {limit}")
        content = zlib.decompressobj().decompress(sealed.body, sealed.size + 1)
    except (msgspec.DecodeError, zlib.error) as error:
        raise Damaged(f"not a {kind}: {error}") from error
    if len(content) != sealed.size or hashlib.sha256(content).hexdigest() != sealed.sha256:
        raise Damaged(f"{kind}: its content is not what was written")
    return head.version, content
