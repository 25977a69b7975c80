"""Checkpoints as brokers write them, without a journal."""

from __future__ import annotations

from infra.objects.store import ObjectStore
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.topic_parts import topics_in
from neve.archive.format.checkpoint import PackName, decode_checkpoint
from neve.archive.format.keys import checkpoint_key, pack_key


def put_checkpoint(store: ObjectStore, catalog: Catalog, broker: str, prefix: str = "") -> bytes:
    """Write a checkpoint after the last applied entry; the next one may refer to it."""
    seq = catalog.next_seq - 1
    written = catalog.write_checkpoint(
        broker, lambda number, data: _put(store, pack_key(prefix, broker, seq, number), data)
    )
    store.put(checkpoint_key(prefix, broker, seq), written.content)
    catalog.adopt_checkpoint(written)
    return written.content


def _put(store: ObjectStore, key: str, data: bytes) -> None:
    store.put(key, data)


def restored(catalog: Catalog, broker: str = "b") -> Catalog:
    """Return the catalog after a round trip through a checkpoint."""
    packs: dict[PackName, bytes] = {}
    seq = catalog.next_seq - 1
    written = catalog.write_checkpoint(broker, lambda number, data: packs.update({PackName(seq, number): data}))
    head = decode_checkpoint(written.content, broker, seq)
    again = Catalog()
    again.restore(head, topics_in(head, packs.__getitem__))
    return again
