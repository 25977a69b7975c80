"""`_neve/format.msgpack`: the version of a store's archives, and whose cluster they are."""

from __future__ import annotations

import contextlib

import msgspec

from infra.object_store.protocol import NotFound, ObjectStore, PreconditionFailed, UnknownOutcome
from neve.archive import keys
from neve.archive.journal import FORMAT_VERSION, NewerFormat
from tiered.journal.errors import ArchiveRefused


class StoreFormat(msgspec.Struct, frozen=True):
    """`_neve/format.msgpack`."""

    version: int
    cluster: str


def check_format(store: ObjectStore, prefix: str, cluster: str) -> None:
    """Written where it is missing. Raises NewerFormat, or ArchiveRefused where it is another cluster's."""
    key = keys.format_key(prefix)
    mine = StoreFormat(FORMAT_VERSION, cluster)
    try:
        found = msgspec.msgpack.decode(store.get(key), type=StoreFormat)
    except NotFound:
        with contextlib.suppress(PreconditionFailed, UnknownOutcome):  # read back: another broker may be first
            store.put(key, msgspec.msgpack.encode(mine), if_absent=True)
        found = msgspec.msgpack.decode(store.get(key), type=StoreFormat)
    except msgspec.DecodeError as error:
        raise ArchiveRefused(f"{store.url}: {key} can't be read: {error}") from error
    if found.version > FORMAT_VERSION:
        raise NewerFormat(
            f"{store.url} is of archive format {found.version}; this program knows up to {FORMAT_VERSION}"
        )
    if found.cluster != cluster:
        raise ArchiveRefused(
            f"{store.url} holds the archive of cluster {found.cluster}, this broker is of {cluster}: "
            "use another bucket or prefix"
        )
