"""`_neve/format.msgpack`: the format version of a store's archives, and their cluster."""

from __future__ import annotations

import contextlib

import msgspec

from infra.objects.store import NotFound, ObjectStore, PreconditionFailed, UnknownOutcome
from neve.archive.format import keys
from neve.archive.format.journal import FORMAT_VERSION, NewerFormat
from tiered.journal.errors import ArchiveRefused

_ATTEMPTS = 3


class StoreFormat(msgspec.Struct, frozen=True):
    """`_neve/format.msgpack`."""

    version: int
    cluster: str


def check_format(store: ObjectStore, prefix: str, cluster: str) -> None:
    """Check the format of a store, and write it if it is missing.

    Raises:
        NewerFormat: the store has a higher format version.
        ArchiveRefused: the store belongs to another cluster, or the object is damaged.
    """
    key = keys.format_key(prefix)
    mine = StoreFormat(FORMAT_VERSION, cluster)
    try:
        found = msgspec.msgpack.decode(_found_or_written(store, key, msgspec.msgpack.encode(mine)), type=StoreFormat)
    except msgspec.DecodeError as error:
        raise ArchiveRefused(f"{store.url}: {key} cannot be read: {error}") from error
    if found.version > FORMAT_VERSION:
        raise NewerFormat(
            f"{store.url} has archive format {found.version}; this program knows formats up to {FORMAT_VERSION}"
        )
    if found.cluster != cluster:
        raise ArchiveRefused(
            f"{store.url} holds the archive of cluster {found.cluster}, this broker is of {cluster}: "
            "use another bucket or prefix"
        )


def _found_or_written(store: ObjectStore, key: str, content: bytes) -> bytes:
    """Return the object, which another broker may have written first. Raises UnknownOutcome."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(NotFound):
            return store.get(key)
        with contextlib.suppress(PreconditionFailed, UnknownOutcome):
            store.put(key, content, if_absent=True)
    try:
        return store.get(key)
    except NotFound as error:
        raise UnknownOutcome(f"{store.url}: {key} is not stored after {_ATTEMPTS} attempts") from error
