"""The journal's end: what stands in the store is applied and copied, and what is new is put at the next number."""

from __future__ import annotations

import msgspec

from infra import failpoint
from infra.clock import Clock
from infra.object_store.protocol import (
    NotFound,
    ObjectStore,
    ObjectStoreError,
    PreconditionFailed,
    UnknownOutcome,
)
from neve.archive import keys
from neve.archive.catalog import Catalog
from neve.archive.checkpoint import PackedState, decode_checkpoint
from neve.archive.follow import journal_end, newest_checkpoint, stands
from neve.archive.journal import NO_CHECKPOINT, Abort, AnyEntry, decode_entry, encode_entry
from neve.archive.sealed import Damaged
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

    def confirm_copy(self) -> None:
        """The last entry of the local copy must stand in the store; otherwise this is another store."""
        if self._unconfirmed is None:
            return
        try:
            found = self.store.get(self.key_of(self.catalog.next_seq - 1))
        except NotFound:
            found = b""
        if found != self._unconfirmed:
            raise ArchiveRefused(self.other_store(f"entry {self.catalog.next_seq - 1}"))
        self._unconfirmed = None  # only now: a job that comes again must meet the same refusal

    def follow(self) -> None:
        """Entry by entry to the end."""
        while True:
            seq = self.catalog.next_seq
            try:
                data = self.store.get(self.key_of(seq))
            except NotFound:
                return
            self._accept(seq, decode_entry(data), data)

    def shorten_copy(self) -> None:
        """What another writer's checkpoint has need not be copied entry by entry."""
        seq = self.catalog.checkpoint
        if seq <= self._copied_from:
            return
        key = keys.checkpoint_key(self.prefix, self.broker, seq)
        try:
            content = self.store.get(key)
            decode_checkpoint(content, self.broker, seq, PackedState)
        except (NotFound, Damaged):
            return  # the copy is longer then
        self.copy_goes_on_at(content, seq, self.store.get(self.key_of(seq)))

    def catch_up(self, far: int) -> None:
        """So far behind, from the newest checkpoint on and not entry by entry."""
        end = journal_end(stands(self.store, self.broker, self.prefix), self.catalog.next_seq)
        if end - self.catalog.next_seq < far:
            return
        found = newest_checkpoint(self.store, self.broker, self.prefix, end)
        if found is None or found[0].through_seq < self.catalog.next_seq:
            return
        state, content = found
        last = self.store.get(self.key_of(state.through_seq))
        self.catalog.restore(state)
        self.copy_goes_on_at(content, state.through_seq, last)

    # ---- writing

    def put_next(self, entry: AnyEntry, epoch: int) -> bool:
        """True: the entry stands. False: another writer's entry stands there (it is applied)."""
        self._attempt += 1
        entry = msgspec.structs.replace(
            entry,
            writer=self.writer,
            attempt=self._attempt,
            epoch=epoch,
            checkpoint=self.catalog.checkpoint,
            time_ms=self._clock.now_ms(),
        )
        data = encode_entry(entry)
        for _ in range(TRIES):
            seq = self.catalog.next_seq
            key = self.key_of(seq)
            failpoint.hit("journal.before_put")
            try:
                self.store.put(key, data, if_absent=True)
                found: bytes | None = data
            except (PreconditionFailed, UnknownOutcome):
                found = self.read_back(key)
            if found is None:
                continue  # nothing stands there yet: the same PUT again
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

    def read_back(self, key: str) -> bytes | None:
        """What stands there after an unknown outcome; None: nothing."""
        try:
            return self.store.get(key)
        except NotFound:
            return None
        except ObjectStoreError as error:
            raise UnknownOutcome(f"{key}: written or not is unknown: {error}") from error

    def copy_goes_on_at(self, checkpoint: bytes, through_seq: int, last: bytes) -> None:
        """The local copy begins at a checkpoint that stands."""
        self._local.begin_at(checkpoint, through_seq, last)
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
        self._apply(seq, entry)
        assert self.catalog.next_seq == seq + 1, "entries are dense"
        self._local.append(seq, data)

    def _apply(self, seq: int, entry: AnyEntry) -> None:
        if isinstance(entry, Abort):
            self.aborted.update(self.catalog.closed_by(entry))
        self.catalog.apply(seq, entry)
