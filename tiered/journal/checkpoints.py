"""Checkpoints: the catalog is written down when the journal has grown; the newest few stay.

First the packs of what changed, then the checkpoint that names them, then the entry that names that. A crash on the way
leaves objects that no entry names; they go with those of the checkpoints that are dropped.
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
CHECKPOINTS_KEPT = 3  # the newest, and those that serve when it is damaged

assert CHECKPOINTS_KEPT >= 2, "one that is damaged needs one before it"


class _Anothers(Exception):
    """What stands under a name is not what we wrote, or nothing does."""


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
        key = keys.checkpoint_key(tail.prefix, tail.broker, through)
        try:
            written = tail.catalog.write_checkpoint(tail.broker, self._put_pack)
            failpoint.hit("journal.after_packs")
            self._put(key, written.content)
        except _Anothers as error:
            log.warning("%s is not there, or is another's; a later entry gets a checkpoint", error)
            return False
        failpoint.hit("journal.after_checkpoint")
        last = tail.store.get(tail.key_of(through))
        tail.catalog.adopt_checkpoint(written)
        append(Checkpoint(key=key, through_seq=through, sha256=hashlib.sha256(written.content).hexdigest()))
        tail.copy_goes_on_at(written.content, through, last, written.packed.sizes)
        self._drop_old(through, written.packed.sizes.keys())
        return True

    def _put_pack(self, number: int, data: bytes) -> None:
        tail = self._tail
        through = tail.catalog.next_seq - 1
        self._put(keys.pack_key(tail.prefix, tail.broker, through, number), data)
        tail.keep_pack(PackName(through, number), data)

    def _put(self, key: str, data: bytes) -> None:
        """Raises _Anothers."""
        tail = self._tail
        try:
            tail.store.put(key, data, if_absent=True)
        except (PreconditionFailed, UnknownOutcome):
            if tail.read_back(key) != data:
                raise _Anothers(key) from None

    def _drop_old(self, newest: int, named: Collection[PackName]) -> None:
        """Checkpoints that few would fall back to go, and what they alone name.

        A checkpoint names packs of its own and of the one before it in the journal, so what none that stays names, no
        later one will. Where one of them can't be read, all stays.
        """
        tail, kept = self._tail, set(named)
        staying = [seq for seq in checkpoints(tail.store, tail.broker, tail.prefix) if seq <= newest][:CHECKPOINTS_KEPT]
        if len(staying) < CHECKPOINTS_KEPT:
            return
        oldest = staying[-1]
        for seq in staying[1:]:
            try:
                found = decode_checkpoint(
                    tail.store.get(keys.checkpoint_key(tail.prefix, tail.broker, seq)), tail.broker, seq
                )
            except (Damaged, NotFound) as error:
                log.warning("checkpoints before %d stay for now: %s", oldest, error)
                return
            kept.update(found.sizes())
        for info in list(tail.store.list(keys.checkpoints_prefix(tail.prefix, tail.broker))):
            parsed = keys.parse_checkpoint_key(info.key)
            if parsed is None or parsed[0] >= oldest:
                continue
            seq, number = parsed
            if number is None or PackName(seq, number) not in kept:
                tail.store.delete(info.key)
