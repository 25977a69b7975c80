"""Checkpoints: the catalog is written down when the journal has grown; the newest few stay."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

from infra import failpoint
from infra.object_store.protocol import PreconditionFailed, UnknownOutcome
from neve.archive import keys
from neve.archive.follow import checkpoint_before
from neve.archive.journal import NO_CHECKPOINT, AnyEntry, Checkpoint
from tiered.journal.tail import JournalTail

log = logging.getLogger(__name__)
CHECKPOINT_ENTRIES = 256
CHECKPOINTS_KEPT = 3  # the newest, and those that serve when it is damaged

assert CHECKPOINTS_KEPT >= 2, "one that is damaged needs one before it"


class Checkpoints:
    """One after each `period` entries."""

    def __init__(self, tail: JournalTail, period: int) -> None:
        self._tail, self.period = tail, period

    def is_due(self) -> bool:
        catalog = self._tail.catalog
        return catalog.next_seq - 1 - catalog.checkpoint >= self.period

    def write(self, append: Callable[[AnyEntry], int]) -> bool:
        """False: what stands under its name is another's. `append` puts the entry that names it."""
        tail = self._tail
        through = tail.catalog.next_seq - 1
        content = tail.catalog.encoded(tail.broker)
        key = keys.checkpoint_key(tail.prefix, tail.broker, through)
        try:
            tail.store.put(key, content, if_absent=True)
        except (PreconditionFailed, UnknownOutcome):
            if tail.read_back(key) != content:
                log.warning("%s is not there, or is another's; a later entry gets a checkpoint", key)
                return False
        failpoint.hit("journal.after_checkpoint")
        last = tail.store.get(tail.key_of(through))
        append(Checkpoint(key=key, through_seq=through, sha256=hashlib.sha256(content).hexdigest()))
        tail.copy_goes_on_at(content, through, last)
        self._drop_old(through)
        return True

    def _drop_old(self, newest: int) -> None:
        """Entries stay for ever, checkpoints need not: one that few would fall back to goes."""
        tail, seq = self._tail, newest
        for _ in range(CHECKPOINTS_KEPT):
            seq = checkpoint_before(tail.store, tail.broker, tail.prefix, seq)
            if seq <= NO_CHECKPOINT:
                return
        tail.store.delete(keys.checkpoint_key(tail.prefix, tail.broker, seq))
