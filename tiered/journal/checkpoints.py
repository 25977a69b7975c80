"""Write checkpoints of the catalog as the journal grows, and delete old ones.

First the packs with changed topics are stored, then the head of the checkpoint, then its CHECKPOINT entry. A crash in
between leaves unreferenced objects, which are deleted together with old checkpoints.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection

from infra import failpoint
from infra.objects.store import NotFound, PreconditionFailed, UnknownOutcome
from neve.archive.catalog.journal_reader import checkpoints
from neve.archive.format import keys
from neve.archive.format.checkpoint import PackName, decode_checkpoint
from neve.archive.format.envelope import Damaged
from neve.archive.format.journal import AnyEntry, Checkpoint
from tiered.journal.tail import JournalTail

log = logging.getLogger(__name__)
CHECKPOINT_ENTRIES = 256
CHECKPOINTS_KEPT = 3  # the newest and its fallbacks

assert CHECKPOINTS_KEPT >= 2, "a damaged checkpoint needs a fallback"


class _ForeignObject(Exception):
    """The object under a key is missing or is not the one that was written."""


class Checkpoints:
    """Writes a checkpoint after each `period` entries."""

    def __init__(self, tail: JournalTail, period: int) -> None:
        self._tail, self.period = tail, period

    def is_due(self) -> bool:
        """Return whether enough entries were appended since the last checkpoint."""
        catalog = self._tail.catalog
        return catalog.next_seq - 1 - catalog.checkpoint >= self.period

    def write(self, append: Callable[[AnyEntry], int]) -> bool:
        """Write a checkpoint, and append its CHECKPOINT entry with `append`.

        Returns False if another writer's object has its key; then a later entry gets a checkpoint.
        """
        tail = self._tail
        through = tail.catalog.next_seq - 1
        key = keys.checkpoint_key(tail.prefix, tail.broker, through)
        try:
            written = tail.catalog.write_checkpoint(tail.broker, self._put_pack)
            failpoint.hit("journal.after_packs")
            self._put(key, written.content)
        except _ForeignObject as error:
            log.warning("checkpoint not written: missing or foreign object: key=%s", error)
            return False
        failpoint.hit("journal.after_checkpoint")
        last = tail.store.get(tail.key_of(through))
        tail.catalog.adopt_checkpoint(written)
        append(Checkpoint(key=key, through_seq=through, sha256=hashlib.sha256(written.content).hexdigest()))
        tail.restart_copy(written.content, through, last, written.packed.sizes)
        self._drop_old(through, written.packed.sizes.keys())
        return True

    def _put_pack(self, number: int, data: bytes) -> None:
        tail = self._tail
        through = tail.catalog.next_seq - 1
        self._put(keys.pack_key(tail.prefix, tail.broker, through, number), data)
        tail.keep_pack(PackName(through, number), data)

    def _put(self, key: str, data: bytes) -> None:
        """Store an object. Raises _ForeignObject."""
        tail = self._tail
        try:
            tail.store.put(key, data, if_absent=True)
        except (PreconditionFailed, UnknownOutcome):
            if tail.read_back(key) != data:
                raise _ForeignObject(key) from None

    def _drop_old(self, newest: int, named: Collection[PackName]) -> None:
        """Delete the checkpoints before the kept ones, and the packs that only they reference.

        A checkpoint references only packs of its own and of its predecessor, so a pack that no kept checkpoint
        references is never referenced again. If a kept checkpoint cannot be read, nothing is deleted.
        """
        tail, kept = self._tail, set(named)
        found = [seq for seq in checkpoints(tail.store, tail.broker, tail.prefix) if seq <= newest]
        kept_seqs = found[:CHECKPOINTS_KEPT]
        if len(kept_seqs) < CHECKPOINTS_KEPT:
            return
        oldest = kept_seqs[-1]
        for seq in kept_seqs[1:]:
            try:
                data = tail.store.get(keys.checkpoint_key(tail.prefix, tail.broker, seq))
                head = decode_checkpoint(data, tail.broker, seq)
            except (Damaged, NotFound) as error:
                log.warning("old checkpoints kept: a newer one cannot be read: before=%d error=%s", oldest, error)
                return
            kept.update(head.sizes())
        for info in list(tail.store.list(keys.checkpoints_prefix(tail.prefix, tail.broker))):
            parsed = keys.parse_checkpoint_key(info.key)
            if parsed is None or parsed[0] >= oldest:
                continue
            seq, number = parsed
            if number is None or PackName(seq, number) not in kept:
                tail.store.delete(info.key)
