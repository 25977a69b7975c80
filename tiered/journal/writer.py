"""The writing side of a broker's journal: fence, identity, checkpoints.

Its local copy (`local_journal`) lets a broker start while the store is down: it knows its archive's end, serves hot
traffic, and takes its EPOCH when the store answers. A store whose journal disagrees with the copy is another store, and
refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from infra import failpoint
from infra.clock import Clock
from infra.disk import Disk
from infra.object_store.probe import probe
from infra.object_store.protocol import (
    NotFound,
    ObjectStore,
    ObjectStoreError,
    PreconditionFailed,
    StoreUnavailable,
    UnknownOutcome,
)
from neve.archive import keys
from neve.archive.catalog import Catalog
from neve.archive.checkpoint import encode_checkpoint
from neve.archive.follow import checkpoint_before, journal_end, newest_checkpoint, stands
from neve.archive.journal import (
    FORMAT_VERSION,
    NO_CHECKPOINT,
    Abort,
    AnyEntry,
    Checkpoint,
    Epoch,
    Expire,
    Intent,
    NewerFormat,
    decode_entry,
    encode_entry,
)
from neve.entropy import Entropy, system_entropy, unique_name
from tiered.journal.local_journal import Identity, LocalJournal, OtherBroker
from tiered.journal.named_topics import NamedTopics

_log = logging.getLogger(__name__)
_TRIES = 8
CHECKPOINT_ENTRIES = 256
CHECKPOINTS_KEPT = 3  # the newest, and those that serve when it is damaged


class Fenced(Exception):
    """Another process owns this archive now: no more archiving, deleting or unlinking here."""


class ArchiveRefused(Exception):
    """The archive in this place is not this broker's; the message says what to do."""


class NotAttached(StoreUnavailable):
    """The store has not answered since the start, so this process has no EPOCH yet."""


class StoreFormat(msgspec.Struct, frozen=True):
    """`_neve/format.msgpack`."""

    version: int
    cluster: str


@dataclass(frozen=True, slots=True)
class GoOnFrom:
    """What the broker does before its first send: nothing, or go on above what the archive has named."""

    online: bool
    epoch: int
    resume_at: int | None  # the log goes on at the first segment border ≥ this
    queue_next: dict[tuple[str, int], int]  # lower bounds for the next offset of each queue


class JournalWriter:
    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        broker: str,
        log_uuid: str,
        *,
        local: Path,
        disk: Disk,
        clock: Clock,
        cluster: str = "DefaultCluster",
        checkpoint_entries: int = CHECKPOINT_ENTRIES,
        entropy: Entropy = system_entropy,
    ) -> None:
        self.store, self.prefix, self.broker = store, prefix, broker
        self.writer = unique_name(entropy)
        self.catalog = Catalog()
        self.aborted: set[str] = set()  # keys that an ABORT closed: never to be planned again
        self.epoch = 0
        self.fenced = False
        self.online = False
        self._taking_over = False
        self._claim: Callable[[], None] | None = None
        self._log_uuid, self._cluster = log_uuid, cluster
        self._local, self._clock = LocalJournal(local, disk), clock
        self._checkpoint_entries = checkpoint_entries
        self._attempt = 0
        self._high = 0
        self._offline_from: int | None = None
        self._starting_at: int | None = None  # the log's end, while nothing has been served yet
        # By the local identity: the epoch that the last start wanted, and the highest that stood in the store. A store
        # that has not heard of the latter, or of the one before the former, is another store.
        self._known_epoch = self._heard = 0
        self._named = NamedTopics(self.catalog)
        self._mirror_end: bytes | None = None
        self._lock = threading.RLock()

    # --- start ---------------------------------------------------------------------------------------------

    def attach(self, log_end: int) -> GoOnFrom:
        """Before the first send: settle whose archive this is, and from where the local log may go on."""
        with self._lock:
            identity = self._load_identity()
            self._starting_at = log_end
            self._replay()
            if identity is None:
                probe(self.store)
                self._take_over()
            else:
                if identity.log_uuid != self._log_uuid:
                    raise ArchiveRefused(self._refusal(identity.high))
                self._try_take_over()
                if not self.online:
                    self._go_offline_from(log_end)
            self._starting_at = None
            return self._go_on_from(identity, log_end)

    def attach_restoring(self, claim: Callable[[], None], *, take_over: bool) -> None:
        """For a restore: the archive becomes this log's, whoever had it; who had it is fenced from here on.

        `claim` is called when nothing speaks against it any more, right before the EPOCH. Without `take_over` only an
        archive that is this log's already is taken: an earlier try of the same restore made it so.
        Raises ArchiveRefused where there is nothing to restore, StoreUnavailable where nothing can be settled.
        """
        with self._lock:
            self._load_identity()
            self._replay()
            if not stands(self.store, self.broker, self.prefix)(0):
                raise ArchiveRefused(f"there is no archive of broker {self.broker}: nothing to restore from")
            probe(self.store)
            self._claim, self._taking_over = claim, take_over
            self._take_over()
            self._claim, self._taking_over = None, False

    def ensure_online(self) -> None:
        """Take the EPOCH that the start could not take; at the start of each job."""
        with self._lock:
            if self.fenced:
                raise Fenced(self._fence_text())
            if not self.online:
                self._take_over()

    def renew_epoch(self) -> None:
        """A further EPOCH of our own: names that an ABORT closed come again under another epoch."""
        with self._lock:
            self.follow()
            if self.fenced or not self.online:
                raise Fenced(self._fence_text())
            self._take_over()

    def _try_take_over(self) -> None:
        try:
            self._take_over()
        except (StoreUnavailable, UnknownOutcome) as error:
            _log.error("the archive store can't be reached; hot traffic only until it answers: %s", error)

    def _go_offline_from(self, log_end: int) -> None:
        """What is appended from here on may collide with what an archive out of reach names: checked later."""
        self._offline_from = log_end if self._offline_from is None else min(log_end, self._offline_from)
        self._save_identity()

    def _take_over(self) -> None:
        for _ in range(_TRIES):
            self._check_mirror()
            self._catch_up()
            self._follow()
            self._check_owner()
            if self._claim is not None:
                self._claim()
            self.epoch = self.catalog.epoch + 1
            self._save_identity()
            entry = Epoch(owner=self.writer, log_uuid=self._log_uuid, broker=self.broker)
            if self._put_next(entry):
                self.online, self._heard = True, self.epoch
                if self._offline_from is not None:
                    self._offline_from = None
                    self._save_identity()
                _log.info("archive of %s: epoch %d at entry %d", self.broker, self.epoch, self.catalog.next_seq - 1)
                return
        raise UnknownOutcome(f"archive of {self.broker}: no EPOCH won in {_TRIES} tries; is another broker starting?")

    def _check_owner(self) -> None:
        self._check_format()
        if self.catalog.epoch < max(self._known_epoch - 1, self._heard):
            raise ArchiveRefused(self._other_store(f"epoch {max(self._known_epoch - 1, self._heard)}"))
        if self.catalog.log_uuid and self.catalog.log_uuid != self._log_uuid and not self._taking_over:
            raise ArchiveRefused(self._refusal(self.catalog.intent_end))
        if self._may_have_given_again():
            raise ArchiveRefused(
                f"archive of broker {self.broker} reaches {self.catalog.intent_end}, which this older copy of its data "
                f"directory never knew: it went on from {self._offline_from} without its store and may have given the "
                "same offsets again. Read what is new out of it, then use --restore-from with an empty directory"
            )

    def _may_have_given_again(self) -> bool:
        """Whether offsets that we gave without the store are among those that the archive names and we never knew.

        A log that ends below all of them goes on above (`attach`); one that has grown past them can't be told apart.
        """
        end, start = self.catalog.intent_end, self._starting_at
        is_news = self._offline_from is not None and end > max(self._high, self._offline_from)
        return is_news and (start is None or start >= end)

    def _refusal(self, high: int) -> str:
        return (
            f"archive of broker {self.broker} reaches {high} and belongs to another data directory: "
            "bring that data directory back, use --restore-from with an empty one, or use another brokerName"
        )

    def _check_format(self) -> None:
        key = keys.format_key(self.prefix)
        mine = StoreFormat(FORMAT_VERSION, self._cluster)
        try:
            found = msgspec.msgpack.decode(self.store.get(key), type=StoreFormat)
        except NotFound:
            with contextlib.suppress(PreconditionFailed, UnknownOutcome):  # read back: another broker may be first
                self.store.put(key, msgspec.msgpack.encode(mine), if_absent=True)
            found = msgspec.msgpack.decode(self.store.get(key), type=StoreFormat)
        except msgspec.DecodeError as error:
            raise ArchiveRefused(f"{self.store.url}: {key} can't be read: {error}") from error
        if found.version > FORMAT_VERSION:
            raise NewerFormat(
                f"{self.store.url} is of archive format {found.version}; this program knows up to {FORMAT_VERSION}"
            )
        if found.cluster != self._cluster:
            raise ArchiveRefused(
                f"{self.store.url} holds the archive of cluster {found.cluster}, this broker is of {self._cluster}: "
                "use another bucket or prefix"
            )

    def _go_on_from(self, identity: Identity | None, log_end: int) -> GoOnFrom:
        high = max(self.catalog.intent_end, identity.high if identity else 0)
        following = {
            (topic, queue): last + 1
            for topic, named in self._named.everything().items()
            for queue, last in named.items()
        }
        resume_at = high if log_end < high else None
        if resume_at is not None:
            _log.error(
                "the local log of %s ends at %d, below its archive at %d: the log goes on above it; what lay between "
                "and is in no committed object is lost and will be recorded as a GAP",
                self.broker,
                log_end,
                high,
            )
        return GoOnFrom(self.online, self.epoch, resume_at, following)

    # --- append --------------------------------------------------------------------------------------------

    def append(self, entry: AnyEntry, *, plan: int | None = None) -> int:
        """Append at the next number; returns it. Raises Fenced, UnknownOutcome or the store's error.

        `plan` is the mark (`plan_mark`) at which an INTENT or the minimums of an EXPIRE were planned. Raises StalePlan.
        """
        with self._lock:
            if self.fenced:
                raise Fenced(self._fence_text())
            if not self.online:
                raise NotAttached(f"archive of {self.broker}: no EPOCH yet")
            if isinstance(entry, Intent) or (isinstance(entry, Expire) and plan is not None):
                self._remember(entry, plan)
            if not self._put_next(entry):
                self._fence()
            return self.catalog.next_seq - 1

    # --- topics that begin again ---------------------------------------------------------------------------

    def plan_mark(self) -> int:
        """Taken before a round is planned; see `append`."""
        return self._named.mark()

    def has_named(self, topic: str) -> bool:
        """Whether the archive knows of offsets of the topic, or may soon."""
        return topic in self._named

    def begin_again(self, topic: str) -> bool:
        """Let a deleted topic begin at offset 0 again; False if the archive may know one of its offsets.

        The caller removes the topic's queues before it does anything else: a plan that was made with them is refused.
        """
        return not self.fenced and self._named.begin_again(topic)

    def follow(self) -> None:
        """Read what stands in the journal beyond our knowledge: the late success of an unknown outcome, or a fence."""
        with self._lock:
            self._follow()
            if self.online and (self.catalog.epoch != self.epoch or self.catalog.owner != self.writer):
                self._fence()

    def _put_next(self, entry: AnyEntry) -> bool:
        """True: the entry stands. False: another writer's entry stands there (it is applied)."""
        self._attempt += 1
        entry = msgspec.structs.replace(
            entry,
            writer=self.writer,
            attempt=self._attempt,
            epoch=self.epoch,
            checkpoint=self.catalog.checkpoint,
            time_ms=self._clock.now_ms(),
        )
        data = encode_entry(entry)
        for _ in range(_TRIES):
            seq = self.catalog.next_seq
            key = keys.journal_key(self.prefix, self.broker, seq)
            failpoint.hit("journal.before_put")
            try:
                self.store.put(key, data, if_absent=True)
                found: bytes | None = data
            except (PreconditionFailed, UnknownOutcome):
                found = self._read_back(key)
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
            f"journal of {self.broker}: entry {self.catalog.next_seq} is undecided after {_TRIES} tries"
        )

    def _read_back(self, key: str) -> bytes | None:
        try:
            return self.store.get(key)
        except NotFound:
            return None
        except ObjectStoreError as error:
            raise UnknownOutcome(f"{key}: written or not is unknown: {error}") from error

    def _follow(self) -> None:
        while True:
            seq = self.catalog.next_seq
            try:
                data = self.store.get(keys.journal_key(self.prefix, self.broker, seq))
            except NotFound:
                return
            self._accept(seq, decode_entry(data), data)

    def _accept(self, seq: int, entry: AnyEntry, data: bytes) -> None:
        self._apply(seq, entry)
        self._local.append(seq, data)

    def _catch_up(self) -> None:
        """Far behind, from the newest checkpoint on and not entry by entry."""
        end = journal_end(stands(self.store, self.broker, self.prefix), self.catalog.next_seq)
        if end - self.catalog.next_seq < self._checkpoint_entries // 2:
            return
        found = newest_checkpoint(self.store, self.broker, self.prefix, end)
        if found is None or found[0].through_seq < self.catalog.next_seq:
            return
        state, content = found
        last = self.store.get(keys.journal_key(self.prefix, self.broker, state.through_seq))
        self.catalog.restore(state)
        self._local.begin_at(content, state.through_seq, last)

    # --- checkpoints ---------------------------------------------------------------------------------------

    def checkpoint_if_due(self) -> bool:
        """Write the catalog down when enough entries have come since the last time; True if it was."""
        with self._lock:
            through = self.catalog.next_seq - 1
            if self.fenced or not self.online or through - self.catalog.checkpoint < self._checkpoint_entries:
                return False
            content = encode_checkpoint(self.catalog.state(self.broker))
            key = keys.checkpoint_key(self.prefix, self.broker, through)
            try:
                self.store.put(key, content, if_absent=True)
            except (PreconditionFailed, UnknownOutcome):
                if self._read_back(key) != content:
                    _log.warning("%s is not there, or is another's; a later entry gets a checkpoint", key)
                    return False
            failpoint.hit("journal.after_checkpoint")
            last = self.store.get(keys.journal_key(self.prefix, self.broker, through))
            self.append(Checkpoint(key=key, through_seq=through, sha256=hashlib.sha256(content).hexdigest()))
            self._local.begin_at(content, through, last)
            self._drop_old_checkpoint(through)
            return True

    def _drop_old_checkpoint(self, newest: int) -> None:
        """Entries stay for ever, checkpoints need not: one that few would fall back to goes."""
        seq = newest
        for _ in range(CHECKPOINTS_KEPT):
            seq = checkpoint_before(self.store, self.broker, self.prefix, seq)
            if seq <= NO_CHECKPOINT:
                return
        self.store.delete(keys.checkpoint_key(self.prefix, self.broker, seq))

    def _apply(self, seq: int, entry: AnyEntry) -> None:
        if isinstance(entry, Abort):
            open_names = self.catalog.open_intents().get(entry.round, [])
            self.aborted.update(entry.keys or [name.key for name in open_names])
        self.catalog.apply(seq, entry)

    def _fence(self) -> None:
        self.fenced = True
        self.online = False
        raise Fenced(self._fence_text())

    def _fence_text(self) -> str:
        return (
            f"archive of {self.broker}: epoch {self.catalog.epoch} by {self.catalog.owner}, ours is {self.epoch}; "
            "no more archiving, deleting or evicting here"
        )

    # --- local files ---------------------------------------------------------------------------------------

    def _load_identity(self) -> Identity | None:
        identity = self._local.read_identity()
        if identity is not None:
            if identity.broker not in {"", self.broker}:
                raise ArchiveRefused(self._renamed(identity.broker))
            self.epoch = self._known_epoch = identity.epoch
            self._heard = identity.heard
            self._high, self._offline_from = identity.high, identity.offline_from
            self._named.load(identity.named)
        return identity

    def _remember(self, entry: Intent | Expire, plan: int | None) -> None:
        """What an entry names is durable here before the entry can stand: no start can miss it."""
        self._named.remember(entry, plan)
        if isinstance(entry, Intent):
            self._high = max(self._high, *(name.end for name in entry.names), 0)
        self._save_identity()
        failpoint.hit("journal.after_identity")

    def _save_identity(self) -> None:
        self._high = max(self._high, self.catalog.intent_end)
        identity = Identity(
            FORMAT_VERSION,
            self._log_uuid,
            self.epoch,
            self._high,
            self._named.everything(),
            self._offline_from,
            self.broker,
            self._heard,
        )
        self._local.write_identity(identity)

    def _replay(self) -> None:
        try:
            self._mirror_end = self._local.replay(self.catalog, self.broker, self._apply)
        except OtherBroker as other:
            raise ArchiveRefused(self._renamed(str(other))) from other

    def _check_mirror(self) -> None:
        """The last mirrored entry must stand in the store; otherwise this is another store."""
        if self._mirror_end is None:
            return
        try:
            found = self.store.get(keys.journal_key(self.prefix, self.broker, self.catalog.next_seq - 1))
        except NotFound:
            found = b""
        if found != self._mirror_end:
            raise ArchiveRefused(self._other_store(f"entry {self.catalog.next_seq - 1}"))
        self._mirror_end = None  # only now: a job that comes again must meet the same refusal

    def _renamed(self, before: str) -> str:
        return (
            f"the data directory has the archive of broker {before}, this is {self.broker}: name it {before} again, or "
            "use another data directory"
        )

    def _other_store(self, known: str) -> str:
        return (
            f"{self.store.url} does not hold the journal that broker {self.broker} knows up to {known}: "
            "has storeUrl changed, or was the bucket emptied?"
        )
