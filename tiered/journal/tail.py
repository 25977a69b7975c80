"""The journal's end: what stands in the store is applied and copied, and what is new is put at the next number.

Entries are deleted in time, lowest first, so a number that is free may be one that was deleted. What is read or put at
a number counts only if the entry before it is found to stand after that, as it was: then none from there on is deleted.
A process that slept so long finds it gone, and goes on at a checkpoint; what it has put stands below all that is read.
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
    CutShort,
    check_exists,
    entry_exists,
    following,
    is_shortened,
    journal_end,
    with_newest_checkpoint,
)
from neve.archive.catalog.topic_parts import topics_in
from neve.archive.format import keys
from neve.archive.format.checkpoint import CheckpointHead, PackName, Place, decode_checkpoint
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
from neve.entropy import Entropy, unique_name
from tiered.journal.errors import ArchiveRefused
from tiered.journal.local_journal import LocalJournal, OtherBroker, renamed

TRIES = 8


class JournalTail:
    """The catalog is what the journal adds up to, up to `catalog.next_seq`. One thread at a time, but for readers."""

    def __init__(  # noqa: PLR0917
        self, store: ObjectStore, prefix: str, broker: str, local: LocalJournal, clock: Clock, entropy: Entropy
    ) -> None:
        self.store, self.prefix, self.broker = store, prefix, broker
        self.writer = unique_name(entropy)  # of this process: names it in each entry
        self.catalog = Catalog()
        self.aborted: set[str] = set()  # keys that an ABORT closed: never to be planned again
        self._local, self._clock = local, clock
        self._attempt = 0
        self._copied_from = NO_CHECKPOINT  # the local copy begins there, as far as this process knows
        self._unconfirmed: bytes | None = None  # the last entry of the local copy, until the store has shown it

    # ---- reading

    def replay(self) -> None:
        """What the local copy has."""
        try:
            self._unconfirmed = self._local.replay(self.catalog, self.broker, self._apply)
        except OtherBroker as other:
            raise ArchiveRefused(renamed(str(other), self.broker)) from other

    def confirm_copy(self, *, of_one_name: bool = False) -> None:
        """The last entry of the local copy must stand in the store; otherwise this is another store.

        Of a copy that is too old for that a newer checkpoint goes on. `of_one_name`: one of the same log alone, which
        is known by its name: the copy is not given up for what may be another store.
        """
        if self._unconfirmed is None:
            return
        try:
            found = self.store.get(self.key_of(self.catalog.next_seq - 1))
        except NotFound:
            found = b""
        log_uuid = self.catalog.log_uuid if of_one_name else ""
        if found != self._unconfirmed and not self._goes_on_at_a_checkpoint(log_uuid):
            raise ArchiveRefused(self.other_store(f"entry {self.catalog.next_seq - 1}"))
        self._unconfirmed = None  # only now: a job that comes again must meet the same refusal

    def follow(self) -> None:
        """Entry by entry to the end; from a checkpoint on where the next ones are deleted by now."""
        try:
            self._follow()
        except EntriesDeleted as error:
            if not self._goes_on_at_a_checkpoint():
                raise ArchiveRefused(self.other_store(f"entry {self.catalog.next_seq - 1}")) from error
            self._follow()

    def _follow(self) -> None:
        catalog = self.catalog
        try:
            for seq, entry, data in following(self.store, self.broker, self.prefix, catalog.next_seq, catalog.anchor):
                self._accept(seq, entry, data)
        except CutShort as error:
            raise StoreUnavailable(str(error)) from error

    def _goes_on_at_a_checkpoint(self, log_uuid: str = "") -> bool:
        """Whether the journal is shortened, and a checkpoint is above what is known: of that log, if one is told."""
        before = self.catalog.next_seq
        if not is_shortened(self.store, self.broker, self.prefix):
            return False

        def use(found: CheckpointHead, content: bytes) -> None:
            if log_uuid in {"", found.log_uuid}:
                self._go_on_from(found, content)

        with_newest_checkpoint(self.store, self.broker, self.prefix, use)
        return self.catalog.next_seq > before

    def shorten_copy(self) -> None:
        """What another writer's checkpoint has need not be copied entry by entry."""
        seq = self.catalog.checkpoint
        if seq <= self._copied_from:
            return
        key = keys.checkpoint_key(self.prefix, self.broker, seq)
        try:
            content = self.store.get(key)
            found = decode_checkpoint(content, self.broker, seq)
            packs = self._copy_packs(found)
        except (NotFound, Damaged):
            return  # the copy is longer then
        self.copy_goes_on_at(content, seq, self.store.get(self.key_of(seq)), packs)

    def catch_up(self, far: int) -> None:
        """So far behind, from the newest checkpoint on and not entry by entry."""
        end = journal_end(entry_exists(self.store, self.broker, self.prefix), self.catalog.next_seq)
        if end - self.catalog.next_seq >= far:
            with_newest_checkpoint(self.store, self.broker, self.prefix, self._go_on_from)

    def _go_on_from(self, found: CheckpointHead, content: bytes) -> None:
        """Raises Damaged, NotFound: then nothing has changed."""
        if found.through_seq < self.catalog.next_seq:
            return
        packs = self._copy_packs(found)
        last = self.store.get(self.key_of(found.through_seq))
        if found.entry != anchor(last):
            raise Damaged(f"entry {found.through_seq} is not the one that the checkpoint has")
        self.catalog.restore(found, topics_in(found, self._local.read_pack))
        self.copy_goes_on_at(content, found.through_seq, last, packs)

    def _copy_packs(self, found: CheckpointHead) -> Collection[PackName]:
        """What a checkpoint names is here when this returns, and is what it says. Raises Damaged, NotFound."""
        sizes = found.sizes()
        lacking = {name for name, size in sizes.items() if not self._local.has_pack(name, size)}
        parts: dict[PackName, list[Place]] = {}
        for row in found.rows() if lacking else ():
            for place in row.places:
                if place.pack in lacking:
                    parts.setdefault(place.pack, []).append(place)
        for name in lacking:
            data = self.store.get(keys.pack_key(self.prefix, self.broker, *name))
            for place in parts.get(name, ()):
                place.taken_from(data)
            self._local.keep_pack(name, data)
        return sizes

    # ---- writing

    def put_next(self, entry: AnyEntry, epoch: int) -> bool:
        """True: the entry stands. False: another writer's entry stands there (it is applied).

        Raises EntriesDeleted: what stands there, if anything does, is no entry of the journal.
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
            # No two PUTs have the same bytes: what came first and was deleted must not be there again as it was.
            data = encode_entry(msgspec.structs.replace(entry, time_ms=entry.time_ms + number))
            failpoint.hit("journal.before_put")
            try:
                self.store.put(key, data, if_absent=True)
                found: bytes | None = data
            except (PreconditionFailed, UnknownOutcome):
                found = self.read_back(key)
            if found is None:
                continue  # nothing stands there yet: the same entry again
            self._check_before(seq)
            standing = decode_entry(found)
            self._accept(seq, standing, found)
            if standing.writer != self.writer:
                return False
            if standing.attempt == self._attempt:
                return True
            # An earlier append of ours, whose answer was lost: it counts, and ours takes the next number.
        raise UnknownOutcome(
            f"journal of {self.broker}: entry {self.catalog.next_seq} is undecided after {TRIES} tries"
        )

    def _check_before(self, seq: int) -> None:
        """Raises EntriesDeleted, or UnknownOutcome where the store does not say."""
        if not seq:
            return  # of entry 0 nothing is deleted but itself, and it gives way to a SHORTENED
        try:
            check_exists(self.store, self.key_of(seq - 1), self.catalog.anchor)
        except (ObjectStoreError, CutShort) as error:
            raise UnknownOutcome(f"entry {seq} of {self.broker} stands, and may be one too late: {error}") from error

    def read_back(self, key: str) -> bytes | None:
        """What stands there after an unknown outcome; None: nothing."""
        try:
            return self.store.get(key)
        except NotFound:
            return None
        except ObjectStoreError as error:
            raise UnknownOutcome(f"{key}: written or not is unknown: {error}") from error

    def keep_pack(self, name: PackName, data: bytes) -> None:
        """In the local copy, before a checkpoint that names it."""
        self._local.keep_pack(name, data)

    def copy_goes_on_at(self, checkpoint: bytes, through_seq: int, last: bytes, packs: Collection[PackName]) -> None:
        """The local copy begins at a checkpoint that stands, and that names these packs."""
        self._local.begin_at(checkpoint, through_seq, last, packs)
        self._copied_from = through_seq

    def key_of(self, seq: int) -> str:
        return keys.journal_key(self.prefix, self.broker, seq)

    def other_store(self, known: str) -> str:
        """Why this store is refused."""
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
