"""The end of the journal: read new entries into the catalog and the local copy, and put entries at the next number.

Entries are deleted in time, lowest first, so a free number may belong to a deleted entry. A read or a put at a number
counts only if the entry before it is found unchanged afterwards: then none from there on is deleted. A process that was
suspended for too long finds that entry deleted, and resumes at a checkpoint; an object it has put is below all entries
that are read.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from infra import failpoint
from infra.clock import Clock
from infra.objects.store import (
    NotFound,
    ObjectStore,
    ObjectStoreError,
    PreconditionFailed,
    StoreUnavailable,
    UnknownOutcome,
)
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import (
    IncompleteAnswer,
    check_exists,
    entry_exists,
    following,
    is_shortened,
    journal_end,
    with_newest_checkpoint,
)
from neve.archive.catalog.topic_parts import topics_in
from neve.archive.format import keys
from neve.archive.format.checkpoint import CheckpointHead, PackName, PartPlace, decode_checkpoint
from neve.archive.format.envelope import Damaged
from neve.archive.format.journal import (
    NO_CHECKPOINT,
    Abort,
    AnyEntry,
    EntriesDeleted,
    anchor,
    decode_entry,
    encode_entry,
)
from neve.entropy import system_entropy, unique_name
from tiered.journal.errors import ArchiveRefused
from tiered.journal.local_journal import LocalJournal, OtherBroker, renamed

TRIES = 8


class JournalTail:
    """The journal up to `catalog.next_seq`. Used by one thread at a time; the catalog has concurrent readers."""

    def __init__(self, store: ObjectStore, prefix: str, broker: str, local: LocalJournal, clock: Clock) -> None:
        self.store, self.prefix, self.broker = store, prefix, broker
        self.writer = unique_name(system_entropy)  # identifies this process in its entries
        self.catalog = Catalog()
        self.aborted: set[str] = set()  # keys that an ABORT closed, which must not be planned again
        self._local, self._clock = local, clock
        self._attempt = 0
        self._copied_from = NO_CHECKPOINT  # the checkpoint at which the local copy begins, if known
        self._unconfirmed: bytes | None = None  # the last entry of the local copy, until the store confirms it

    # ---- reading

    def replay(self) -> None:
        """Load the local copy. Raises ArchiveRefused if it is another broker's."""
        try:
            self._unconfirmed = self._local.replay(self.catalog, self.broker, self._apply)
        except OtherBroker as other:
            raise ArchiveRefused(renamed(str(other), self.broker)) from other

    def confirm_copy(self, *, of_one_name: bool = False) -> None:
        """Check that the store has the last entry of the local copy; if that is deleted, load a newer checkpoint.

        With `of_one_name` only a checkpoint of the same log is loaded, because the copy is not abandoned for a store
        that may be another one. Raises ArchiveRefused for another store.
        """
        if self._unconfirmed is None:
            return
        try:
            found = self.store.get(self.key_of(self.catalog.next_seq - 1))
        except NotFound:
            found = b""
        log_uuid = self.catalog.log_uuid if of_one_name else ""
        if found != self._unconfirmed and not self._load_newer_checkpoint(log_uuid):
            raise ArchiveRefused(self.other_store(f"entry {self.catalog.next_seq - 1}"))
        self._unconfirmed = None  # only now, so that a repeated job gets the same refusal

    def follow(self) -> None:
        """Apply all new entries; if the next ones are deleted, load a checkpoint first."""
        try:
            self._follow()
        except EntriesDeleted as error:
            if not self._load_newer_checkpoint():
                raise ArchiveRefused(self.other_store(f"entry {self.catalog.next_seq - 1}")) from error
            self._follow()

    def _follow(self) -> None:
        catalog = self.catalog
        try:
            for seq, entry, data in following(self.store, self.broker, self.prefix, catalog.next_seq, catalog.anchor):
                self._accept(seq, entry, data)
        except IncompleteAnswer as error:
            raise StoreUnavailable(str(error)) from error

    def _load_newer_checkpoint(self, log_uuid: str = "") -> bool:
        """Load a newer checkpoint of a shortened journal, of this log if it is given; return whether there was one."""
        before = self.catalog.next_seq
        if not is_shortened(self.store, self.broker, self.prefix):
            return False

        def use(found: CheckpointHead, content: bytes) -> None:
            if log_uuid in {"", found.log_uuid}:
                self._load_checkpoint(found, content)

        with_newest_checkpoint(self.store, self.broker, self.prefix, use)
        return self.catalog.next_seq > before

    def shorten_copy(self) -> None:
        """Restart the local copy at a newer checkpoint of another writer."""
        seq = self.catalog.checkpoint
        if seq <= self._copied_from:
            return
        key = keys.checkpoint_key(self.prefix, self.broker, seq)
        try:
            content = self.store.get(key)
            found = decode_checkpoint(content, self.broker, seq)
            packs = self._copy_packs(found)
        except (NotFound, Damaged):
            return  # the copy stays longer
        self.restart_copy(content, seq, self.store.get(self.key_of(seq)), packs)

    def catch_up(self, far: int) -> None:
        """Load the newest checkpoint if the catalog is at least `far` entries behind the end."""
        end = journal_end(entry_exists(self.store, self.broker, self.prefix), self.catalog.next_seq)
        if end - self.catalog.next_seq >= far:
            with_newest_checkpoint(self.store, self.broker, self.prefix, self._load_checkpoint)

    def _load_checkpoint(self, found: CheckpointHead, content: bytes) -> None:
        """Load a checkpoint. Raises Damaged or NotFound, and then changes nothing."""
        if found.through_seq < self.catalog.next_seq:
            return
        packs = self._copy_packs(found)
        last = self.store.get(self.key_of(found.through_seq))
        if found.entry != anchor(last):
            raise Damaged(f"entry {found.through_seq} differs from the anchor in the checkpoint")
        self.catalog.restore(found, topics_in(found, self._local.read_pack))
        self.restart_copy(content, found.through_seq, last, packs)

    def _copy_packs(self, found: CheckpointHead) -> Collection[PackName]:
        """Copy the packs of a checkpoint that are not stored locally, and verify them. Raises Damaged, NotFound."""
        sizes = found.sizes()
        missing = {name for name, size in sizes.items() if not self._local.has_pack(name, size)}
        parts: dict[PackName, list[PartPlace]] = {}
        for row in found.rows() if missing else ():
            for place in row.places:
                if place.pack in missing:
                    parts.setdefault(place.pack, []).append(place)
        for name in missing:
            data = self.store.get(keys.pack_key(self.prefix, self.broker, *name))
            for place in parts.get(name, ()):
                place.taken_from(data)
            self._local.keep_pack(name, data)
        return sizes

    # ---- writing

    def put_next(self, entry: AnyEntry, epoch: int) -> bool:
        """Put an entry at the next number.

        Returns:
            True if the entry is in the journal; False if another writer's is at its number, which was applied.

        Raises:
            EntriesDeleted: the number is below deleted entries.
            UnknownOutcome: the result is unknown.
        """
        self._attempt += 1
        entry = msgspec.structs.replace(
            entry,
            writer=self.writer,
            attempt=self._attempt,
            epoch=epoch,
            checkpoint=self.catalog.checkpoint,
            time_ms=self._clock.now_ms(),
        )
        for number in range(TRIES):
            seq = self.catalog.next_seq
            key = self.key_of(seq)
            # No two PUTs have the same bytes, so that a deleted object never exists again unchanged.
            data = encode_entry(msgspec.structs.replace(entry, time_ms=entry.time_ms + number))
            failpoint.hit("journal.before_put")
            try:
                self.store.put(key, data, if_absent=True)
                found: bytes | None = data
            except (PreconditionFailed, UnknownOutcome):
                found = self.read_back(key)
            if found is None:
                continue  # the number is free: retry with the same entry
            self._check_before(seq)
            stored = decode_entry(found)
            self._accept(seq, stored, found)
            if stored.writer != self.writer:
                return False
            if stored.attempt == self._attempt:
                return True
            # An earlier append of this process, whose answer was lost: it is valid, and this one takes the next number.
        raise UnknownOutcome(
            f"journal of {self.broker}: the outcome of entry {self.catalog.next_seq} is unknown after {TRIES} tries"
        )

    def _check_before(self, seq: int) -> None:
        """Check that the entry before `seq` exists. Raises EntriesDeleted, or UnknownOutcome without an answer."""
        if not seq:
            return  # entry 0 is never missing: SHORTENED replaces it
        try:
            check_exists(self.store, self.key_of(seq - 1), self.catalog.anchor)
        except (ObjectStoreError, IncompleteAnswer) as error:
            raise UnknownOutcome(
                f"entry {seq} of {self.broker} is stored but may be below deleted entries: {error}"
            ) from error

    def read_back(self, key: str) -> bytes | None:
        """Read an object after an unknown outcome; None if there is none."""
        try:
            return self.store.get(key)
        except NotFound:
            return None
        except ObjectStoreError as error:
            raise UnknownOutcome(f"{key}: the outcome of the write is unknown: {error}") from error

    def keep_pack(self, name: PackName, data: bytes) -> None:
        """Store a pack in the local copy, before the checkpoint that references it."""
        self._local.keep_pack(name, data)

    def restart_copy(self, checkpoint: bytes, through_seq: int, last: bytes, packs: Collection[PackName]) -> None:
        """Restart the local copy at a stored checkpoint that references these packs."""
        self._local.begin_at(checkpoint, through_seq, last, packs)
        self._copied_from = through_seq

    def key_of(self, seq: int) -> str:
        """Return the key of an entry."""
        return keys.journal_key(self.prefix, self.broker, seq)

    def other_store(self, known: str) -> str:
        """Explain why a store is refused."""
        return (
            f"{self.store.url} does not hold the journal that broker {self.broker} knows up to {known}: "
            "has storeUrl changed, or was the bucket emptied?"
        )

    def _accept(self, seq: int, entry: AnyEntry, data: bytes) -> None:
        self._apply(seq, entry, data)
        assert self.catalog.next_seq == seq + 1, "entries are dense"
        self._local.append(seq, data)

    def _apply(self, seq: int, entry: AnyEntry, data: bytes) -> None:
        if isinstance(entry, Abort):
            self.aborted.update(self.catalog.rounds.closed_by(entry))
        self.catalog.apply(seq, entry, anchor(data))
