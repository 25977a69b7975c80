"""A journal that grows by commits of many topics."""

from __future__ import annotations

from random import Random

import msgspec

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.checkpoint import CheckpointHead, decode_checkpoint
from neve.archive.format.journal import (
    AnyEntry,
    Checkpoint,
    Commit,
    CommittedObject,
    encode_entry,
)
from neve.archive.format.keys import checkpoint_key, journal_key, pack_key
from tests.kit.archive.checkpoints import put_checkpoint
from tests.kit.archive.random_objects import name_of
from tests.kit.store.memory_store import MemoryStore

CUT = "%RETRY%" + "%" * 120  # too long for an object key
TOPICS = [*(f"topic-{number:02}" for number in range(30)), CUT]


class GrowingJournal:
    """Entries of one broker in a store, and the catalog that results from them."""

    def __init__(self) -> None:
        self.store, self.catalog, self.newest = MemoryStore(), Catalog(), -1
        self.following = dict.fromkeys(TOPICS, 0)

    def append(self, *entries: AnyEntry) -> None:
        for entry in entries:
            stands = msgspec.structs.replace(entry, checkpoint=self.newest)
            self.store.put(journal_key("", "b", self.catalog.next_seq), encode_entry(stands), if_absent=True)
            self.catalog.apply(self.catalog.next_seq, stands)

    def checkpoint(self) -> None:
        seq = self.catalog.next_seq - 1
        put_checkpoint(self.store, self.catalog, "b")
        self.append(Checkpoint(key=checkpoint_key("", "b", seq), through_seq=seq))
        self.newest = seq

    def commit(self, topic: str, count: int) -> list[CommittedObject]:
        random, first = Random(f"{topic} {self.following[topic]}"), self.following[topic]
        self.following[topic] += count
        names = [name_of(random, topic, number) for number in range(first, first + count)]
        self.append(Commit(round=1, names=names))
        return names

    def packs(self) -> list[str]:
        """Return the packs of the newest checkpoint."""
        head = decode_checkpoint(self.store.objects[checkpoint_key("", "b", self.newest)][0])
        assert isinstance(head, CheckpointHead)
        return [pack_key("", "b", *name) for name in head.sizes()]

    def reads(self) -> list[str]:
        found: list[str] = []
        self.store.on_call = lambda verb, key: found.append(key) if verb in {"get", "get_range"} else None
        return found
