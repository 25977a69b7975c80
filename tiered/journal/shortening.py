"""Shorten the journal: delete old entries one after another, lowest number first.

An entry may be deleted when all of these hold: by the store's own modification time it is older than the retention;
it is below the last entry of the oldest kept checkpoint, which is read back whole first; the state slots confirm which
entry followed it.

A reader that resumes checks that the entry before its position still exists (`tail`,
`neve.archive.catalog.journal_reader`). That check is correct as long as deletion is in order: an entry is deleted only
after the one below it is known to be deleted. An object that records the first remaining entry would not work, because
a late PUT of a superseded broker could lower it again. Before the first deletion, entry 0 is replaced by SHORTENED for
good; a program that searches for the end from there refuses it. Two brokers that delete concurrently, and one that
resumes after a crash, delete the same entries in the same order.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Sequence

from infra import failpoint
from infra.objects.store import NotFound, UnknownOutcome
from neve.archive.catalog.journal_reader import checkpoints, is_shortened
from neve.archive.catalog.topic_parts import topics_in
from neve.archive.format import keys
from neve.archive.format.broker_state import read_slots
from neve.archive.format.checkpoint import PackName, decode_checkpoint
from neve.archive.format.envelope import Damaged
from neve.archive.format.journal import Shortened, encode_entry
from tiered.journal.checkpoints import CHECKPOINTS_KEPT
from tiered.journal.tail import TRIES, JournalTail

log = logging.getLogger(__name__)


class Shortening:
    """Deletes old entries of one journal, at least `least` at a time."""

    def __init__(self, tail: JournalTail, least: int) -> None:
        self._tail, self._least = tail, least

    def due(self, now_ms: int, retention_ms: int) -> list[int]:
        """Return the numbers of entries that may be deleted, lowest first."""
        tail = self._tail
        aged: list[int] = []
        listed = sorted(tail.store.list(keys.journals_prefix(tail.prefix, tail.broker)), key=lambda info: info.key)
        for info in listed:
            seq = keys.parse_journal_key(info.key)
            if not seq:
                continue
            if info.modified_ms + retention_ms > now_ms:
                break
            aged.append(seq)
        if len(aged) < self._least:
            return []
        limit = self._covered_below()
        for state in read_slots(tail.store, tail.broker, tail.prefix).values():
            limit = min(limit, state.next_seq)  # a restore reads the topics deleted since the slot
        found = [seq for seq in aged if seq < limit]
        return found if len(found) >= self._least else []

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete entries in this order, lowest first. Raises the store's error, or UnknownOutcome."""
        if not numbers:
            return
        self._replace_entry_0()
        failpoint.hit("journal.before_shortening")
        for seq in numbers:
            self._delete(seq)
            failpoint.hit("journal.after_entry_deleted")

    def _covered_below(self) -> int:
        """Return the last entry of the oldest kept checkpoint; 0 if they are too few or one is incomplete."""
        tail = self._tail
        kept = checkpoints(tail.store, tail.broker, tail.prefix)[:CHECKPOINTS_KEPT]
        if len(kept) < CHECKPOINTS_KEPT:
            return 0
        return kept[-1] if all(self._is_whole(seq, with_packs=seq == kept[-1]) for seq in kept) else 0

    def _is_whole(self, seq: int, *, with_packs: bool) -> bool:
        tail = self._tail
        try:
            data = tail.store.get(keys.checkpoint_key(tail.prefix, tail.broker, seq))
            found = decode_checkpoint(data, tail.broker, seq)
            if with_packs:
                deque(topics_in(found, self._read_pack), maxlen=0)
        except (Damaged, NotFound) as error:
            log.warning("journal not shortened: checkpoint incomplete: seq=%d error=%s", seq, error)
            return False
        return True

    def _read_pack(self, pack: PackName) -> bytes:
        return self._tail.store.get(keys.pack_key(self._tail.prefix, self._tail.broker, *pack))

    def _replace_entry_0(self) -> None:
        """Replace entry 0 by SHORTENED. Raises UnknownOutcome, or the store's error; then nothing is deleted."""
        tail = self._tail
        if is_shortened(tail.store, tail.broker, tail.prefix):
            return
        entry = Shortened(writer=tail.writer, epoch=tail.catalog.epoch, checkpoint=tail.catalog.checkpoint)
        with contextlib.suppress(UnknownOutcome):
            tail.store.put(tail.key_of(0), encode_entry(entry))
        if not is_shortened(tail.store, tail.broker, tail.prefix):
            raise UnknownOutcome(f"journal of {tail.broker}: whether SHORTENED is stored is unknown")

    def _delete(self, seq: int) -> None:
        """Delete an entry; on return it is deleted. Raises UnknownOutcome."""
        tail = self._tail
        key = tail.key_of(seq)
        for _ in range(TRIES):
            try:
                tail.store.delete(key)
            except UnknownOutcome:
                if tail.read_back(key) is not None:
                    continue
            return
        raise UnknownOutcome(f"journal of {tail.broker}: whether entry {seq} is deleted is unknown")
