"""The writing side of a broker's journal: who owns the archive, and what may be appended.

Its local copy (`local_journal`) lets a broker start while the store is down: it knows its archive's end, serves hot
traffic, and takes its EPOCH when the store answers. A store whose journal disagrees with the copy is another store, and
refused. What the journal is now goes by the table in `state`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from infra import failpoint
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.objects.probe import probe
from infra.objects.store import ObjectStore, ObjectStoreError, StoreUnavailable, UnknownOutcome
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import entry_exists
from neve.archive.format.journal import AnyEntry, EntriesDeleted, Epoch, Erase, Expire, Forget, Intent, NewerFormat
from neve.entropy import Entropy, system_entropy
from tiered.journal.checkpoints import CHECKPOINT_ENTRIES, Checkpoints
from tiered.journal.errors import ArchiveRefused, Fenced, NotAttached, NotMaster, WouldLoseRows
from tiered.journal.identity import Identity, IdentityFile
from tiered.journal.known_archive import KnownArchive
from tiered.journal.local_journal import LocalJournal
from tiered.journal.shortening import Shortening
from tiered.journal.state import Event, JournalState, State
from tiered.journal.store_format import check_format
from tiered.journal.tail import TRIES, JournalTail

log = logging.getLogger(__name__)


_ALONE = 0  # the master epoch of a broker that is in no set
#: Of an archive that is another data directory's.
WAY_OUT = "bring that data directory back, use --restore-from with an empty one, or use another brokerName"
_NO_MASTER = "this member is not the master of its set"
# Whether the own log is the one that an archive is of, by what both hold; None: they have nothing in common.
Proof = Callable[[Catalog], bool | None]


@dataclass(frozen=True, slots=True)
class GoOnFrom:
    """What the broker does before its first send: nothing, or go on above what the archive has named."""

    online: bool
    epoch: int
    resume_at: int | None  # the log goes on at the first segment border ≥ this
    queue_next: dict[tuple[str, int], int]  # lower bounds for the next offset of each queue


@dataclass(frozen=True, slots=True)
class _Claim:
    """Under what conditions an EPOCH is taken."""

    log_end: int | None = None  # while nothing has been served yet
    whoever_had_it: bool = False
    master_epoch: int = _ALONE  # of this broker in its set
    goes_on_above: bool = False  # should the archive name more than its log had at its promotion
    before: Callable[[], None] | None = None  # called when nothing speaks against it any more


class JournalWriter:
    """Thread-safe; one request at a time."""

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
        proof: Proof | None = None,
        way_out: str = WAY_OUT,
    ) -> None:
        """`proof`: a member of a broker set has one. `way_out`: where the archive is another data directory's."""
        self.store, self.prefix, self.broker = store, prefix, broker
        self._cluster, self._entropy = cluster, entropy
        copy = LocalJournal(local, disk)
        self._tail = JournalTail(store, prefix, broker, copy, clock, entropy)
        self._known = KnownArchive(IdentityFile(local, disk), self._tail.catalog, broker, log_uuid)
        self._checkpoints = Checkpoints(self._tail, checkpoint_entries)
        self._shortening = Shortening(self._tail, checkpoint_entries)
        self._state = JournalState()
        self._proof, self._way_out = proof, way_out
        # There an entry may still come to stand that was put and not answered; once another does, it never will.
        self._open_at = -1
        self._told_uuid = ""  # by the master that is followed; told on the loop, taken here
        self._naming = threading.Lock()  # of the log: held for no longer than that takes
        self._proved_in: tuple[int | None, str] | None = None  # role and log
        self._promoted_at = 0  # where the log ended then
        self._role: int | None = _ALONE  # the own master epoch, as was told last; None: a member that is not the master
        self._met: int | None = _ALONE  # the role that the state goes by
        self._why_follower = _NO_MASTER
        self.epoch = 0  # ours, once one was won; before, the one of the last start
        self._lock = threading.RLock()

    @property
    def state(self) -> State:
        return self._state.now

    @property
    def online(self) -> bool:
        """Entries may be appended."""
        return self._state.now is State.ONLINE and self._role == self._met

    @property
    def fenced(self) -> bool:
        """Another process has taken the archive over."""
        return self._state.now in {State.FENCED, State.DEPOSED} and self._role == self._met

    @property
    def leads(self) -> bool:
        """Whether this broker is to write the archive: it is in no set, or its master."""
        return self._role is not None

    @property
    def master_epoch(self) -> int | None:
        """In which epoch of its set it leads; 0: it is in none. None: it follows."""
        return self._role

    @property
    def log_uuid(self) -> str:
        """By which the archive knows the log, as far as this member was told."""
        with self._naming:
            return self._told_uuid or self._known.log_uuid

    @property
    def catalog(self) -> Catalog:
        """What the journal adds up to."""
        return self._tail.catalog

    @property
    def writer(self) -> str:
        """This process, as its entries name it."""
        return self._tail.writer

    @property
    def aborted(self) -> set[str]:
        """Keys that an ABORT closed: never to be planned again."""
        return self._tail.aborted

    # ---- start

    @property
    def reaches(self) -> int:
        """The highest log offset that the archive names, or may soon."""
        return max(self.catalog.rounds.intent_end, self._known.high)

    def attach(self, log_end: int, *, is_copy: bool = False) -> GoOnFrom:
        """Before the first send: settle whose archive this is, and from where the local log may go on.

        `is_copy`: it goes on as another one does, wherever that is.
        """
        with self._lock:
            self._state.happens(Event.ATTACH)
            identity = self._load()
            if identity is None:
                probe(self.store, self._entropy)
                self._take_over(_Claim(log_end))
            else:
                if identity.log_uuid != self._known.own_uuid:
                    self._state.happens(Event.REFUSED)
                    raise ArchiveRefused(self._refusal(identity.high))
                self._try_take_over(log_end)
            return self._go_on_from(identity, log_end, is_copy=is_copy)

    def attach_restoring(self, claim: Callable[[], None], *, take_over: bool) -> None:
        """For a restore: the archive becomes this log's, whoever had it; who had it is fenced from here on.

        `claim` is called when nothing speaks against it any more, right before the EPOCH. Without `take_over` only an
        archive that is this log's already is taken: an earlier try of the same restore made it so.
        Raises ArchiveRefused where there is nothing to restore, StoreUnavailable where nothing can be settled.
        """
        with self._lock:
            self._state.happens(Event.RESTORE)
            self._load()
            if not entry_exists(self.store, self.broker, self.prefix)(0):
                self._state.happens(Event.REFUSED)
                raise ArchiveRefused(f"there is no archive of broker {self.broker}: nothing to restore from")
            probe(self.store, self._entropy)
            self._take_over(_Claim(whoever_had_it=take_over, before=claim))

    def attach_following(self, why: str = _NO_MASTER) -> None:
        """A member's start: what the local copy has is known; the store is asked when the first job is.

        `why` nothing is appended here: told to who wants to.
        """
        with self._lock:
            self._role, self._met, self._why_follower = None, None, why
            self._state.happens(Event.FOLLOW)
            self._load()

    def ensure_online(self) -> None:
        """Take the EPOCH that the start, or a promotion, could not take; at the start of each job."""
        with self._lock:
            self._meet_role()
            if not self.online:
                self._probe_as_member()
                self._take_over(_Claim(master_epoch=self._met or _ALONE))

    def renew_epoch(self) -> None:
        """A further EPOCH of our own: names that an ABORT closed come again under another epoch."""
        with self._lock:
            self.follow()
            self._meet_role()
            if not self.online:
                raise Fenced(self._fence_text())
            self._take_over(_Claim(master_epoch=self._met or _ALONE))

    # ---- role, in a broker set

    def become_slave(self, why: str = _NO_MASTER) -> None:
        """What the master appends is followed. From any thread, at once; a request under way may still be answered.

        `why`: told to who wants to append.
        """
        self._why_follower = why
        self._role = None

    def become_master(self, master_epoch: int, log_end: int) -> None:
        """The archive is this member's to write, once it has its EPOCH. As `become_slave`.

        Its log ends at `log_end`, and takes nothing of its own yet.
        """
        assert master_epoch > _ALONE, "no set has such an epoch"
        self._promoted_at = log_end
        self._role = master_epoch

    def go_on_above(self) -> GoOnFrom:
        """Of a new master that may lack what the archive names: the EPOCH, and where its log goes on.

        Raises as `ensure_online`: then nothing may be appended to the log yet.
        """
        with self._lock:
            self._meet_role()
            if not self.online:
                self._probe_as_member()
                self._take_over(_Claim(master_epoch=self._met or _ALONE, goes_on_above=True))
            return self._go_on_from(None, self._promoted_at)

    def _meet_role(self) -> None:
        """What the set has told since. Raises where nothing may be appended in this role."""
        if self._role != self._met:
            self._met = self._role
            self._state.happens(Event.FOLLOW if self._met is None else Event.LEAD)
        if self.fenced:
            raise Fenced(self._fence_text())
        if self._met is None:
            raise NotMaster(f"archive of {self.broker}: {self._why_follower}")

    def is_same_log(self, log_uuid: str) -> None:
        """A member's log is its master's as far as it goes; `log_uuid`: the archive's name of that.

        From any thread, at once; written down with the next look at the journal, and before an EPOCH.
        """
        with self._naming:
            self._told_uuid = log_uuid

    def was_same_log(self, log_uuid: str) -> None:
        """As it was told in an earlier life, at the start: what is written down since counts more."""
        if self._known.log_uuid == self._known.own_uuid:
            self.is_same_log(log_uuid)

    def _probe_as_member(self) -> None:
        """As `attach` does; a member's start asks nothing of the store."""
        if self._met != _ALONE and self.epoch == 0:
            probe(self.store, self._entropy)

    def _is_of_this_log(self) -> bool:
        """Whether the archive is of the own log, by its name or by what it holds."""
        known, catalog = self._known, self.catalog
        if self._takes_told_name():
            known.save(self.epoch)
        has_name = not catalog.log_uuid or catalog.log_uuid == known.log_uuid
        is_follower = self._met is None
        if self._met == _ALONE or self._proof is None or (has_name and is_follower):
            return has_name
        if has_name and self._proved_in == (self._met, catalog.log_uuid):
            return True  # a master's log is only appended to
        found = self._proof(catalog)
        if found is None or not found:
            return has_name and found is None
        if not has_name:
            log.warning("the archive of %s knows this log as %s: it holds the same", self.broker, catalog.log_uuid)
            known.log_uuid = catalog.log_uuid
        self._proved_in = self._met, catalog.log_uuid
        return True

    def _takes_told_name(self) -> bool:
        """Whether the log has another one now. What the archive itself says counts more: a master may not know it."""
        known, name = self._known, self.catalog.log_uuid
        with self._naming:
            told, self._told_uuid = self._told_uuid, ""
            is_new = told not in {"", known.log_uuid} and (not name or name != known.log_uuid)
            if is_new:
                known.log_uuid = told
            return is_new

    # ---- whose it is

    def _load(self) -> Identity | None:
        try:
            identity = self._known.load()
            self._tail.replay()
        except (ArchiveRefused, NewerFormat):
            self._state.happens(Event.REFUSED)
            raise
        if identity is not None:
            self.epoch = identity.epoch
        return identity

    def _try_take_over(self, log_end: int) -> None:
        """Without the store the broker starts, too, and notes from where on it does without."""
        try:
            self._take_over(_Claim(log_end))
        except (StoreUnavailable, UnknownOutcome) as error:
            log.error("the archive store can't be reached; hot traffic only until it answers: %s", error)
            self._state.happens(Event.NO_ANSWER)
            self._known.goes_offline_at(log_end)
            self._known.save(self.epoch)

    def _take_over(self, claim: _Claim) -> None:
        for _ in range(TRIES):
            try:
                self._tail.confirm_copy(of_one_name=self._met == _ALONE and not claim.whoever_had_it)
                self._tail.catch_up(self._checkpoints.period // 2)
                self._tail.follow()
                self._check_owner(claim)
            except (ArchiveRefused, NewerFormat):
                self._state.happens(Event.REFUSED)
                raise
            self._meet_role()  # it may have changed while the store was asked
            if claim.master_epoch != self._met:
                raise NotAttached(f"archive of {self.broker}: this member has another master epoch by now")
            if self._met != _ALONE and self.catalog.master_epoch > claim.master_epoch:
                self._fence()
            if claim.before is not None:
                claim.before()
            self.epoch = self.catalog.epoch + 1
            self._known.save(self.epoch)
            entry = Epoch(
                owner=self.writer,
                log_uuid=self._known.log_uuid,
                broker=self.broker,
                master_epoch=claim.master_epoch,
            )
            with contextlib.suppress(EntriesDeleted):  # as if another's stood there
                if self._tail.put_next(entry, self.epoch):
                    self._epoch_won()
                    return
        raise UnknownOutcome(f"archive of {self.broker}: no EPOCH won in {TRIES} tries; is another broker starting?")

    def _epoch_won(self) -> None:
        self._state.happens(Event.EPOCH_WON)
        self._known.heard = self.epoch
        if self._met != _ALONE:
            self._known.count_what_stands()
            self._known.save(self.epoch)
        if self._known.offline_from is not None:
            self._known.offline_from = None
            self._known.save(self.epoch)
        log.info("archive of %s: epoch %d at entry %d", self.broker, self.epoch, self.catalog.next_seq - 1)

    def _check_owner(self, claim: _Claim) -> None:
        check_format(self.store, self.prefix, self._cluster)
        known, catalog, end = self._known, self.catalog, self.catalog.rounds.intent_end
        if catalog.epoch < known.least_epoch:
            raise ArchiveRefused(self._tail.other_store(f"epoch {known.least_epoch}"))
        if not claim.whoever_had_it and not self._is_of_this_log():
            raise ArchiveRefused(self._refusal(end))
        is_new = catalog.master_epoch < claim.master_epoch
        if is_new and end > self._promoted_at and not claim.goes_on_above:
            raise ArchiveRefused(
                f"the archive of {self.broker} reaches {end}, and this member became the master with a log that ended "
                f"at {self._promoted_at}: it was elected without what its set had archived"
            )
        if catalog.master_epoch and claim.master_epoch == _ALONE and not claim.whoever_had_it:
            raise ArchiveRefused(
                f"the archive of {self.broker} is a broker set's, in its master epoch {catalog.master_epoch}: start "
                "this broker as a member of it, or use --restore-from with an empty data directory"
            )
        if known.may_have_given_again(claim.log_end):
            raise ArchiveRefused(
                f"archive of broker {self.broker} reaches {end}, which this older copy of its data directory "
                f"never knew: it went on from {known.offline_from} without its store and may have given the "
                "same offsets again. Read what is new out of it, then use --restore-from with an empty directory"
            )

    def _refusal(self, high: int) -> str:
        return f"archive of broker {self.broker} reaches {high} and belongs to another data directory: {self._way_out}"

    def _go_on_from(self, identity: Identity | None, log_end: int, *, is_copy: bool = False) -> GoOnFrom:
        high = max(self.catalog.rounds.intent_end, identity.high if identity else 0)
        following = {
            (topic, queue): last + 1
            for topic, named in self._known.named.everything().items()
            for queue, last in named.items()
        }
        resume_at = high if log_end < high and not is_copy else None
        if resume_at is not None:
            log.error(
                "the local log of %s ends at %d, below its archive at %d: the log goes on above it; what lay between "
                "and is in no committed object is lost and will be recorded as a GAP",
                self.broker,
                log_end,
                high,
            )
        return GoOnFrom(self.online, self.epoch, resume_at, following)

    # ---- append

    def append(self, entry: AnyEntry, *, plan: int | None = None, master_epoch: int | None = None) -> int:
        """Append at the next number; returns it. Raises Fenced, UnknownOutcome, WouldLoseRows or the store's error.

        `plan` is the mark (`plan_mark`) at which an INTENT or the minimums of an EXPIRE were planned. Raises StalePlan.
        `master_epoch`: what leads to the entry was seen in it; what a member saw before it was a slave counts no more.
        """
        with self._lock:
            self._meet_role()
            if not self.online:
                raise NotAttached(f"archive of {self.broker}: no EPOCH yet")
            if master_epoch not in {None, self._met}:
                raise NotAttached(f"archive of {self.broker}: begun under another master epoch, it begins again")
            if _names_offsets(entry) or (isinstance(entry, Expire) and plan is not None):
                # What an entry names is durable here before the entry can stand: no start can miss it.
                self._known.remember(entry, plan, self.epoch)
                failpoint.hit("journal.after_identity")
            self.check_rows(entry)
            try:
                is_ours = self._tail.put_next(entry, self.epoch)
            except EntriesDeleted as error:
                self.follow()  # who has deleted entries has taken the archive over
                raise UnknownOutcome(f"archive of {self.broker}: {error}") from error
            except ObjectStoreError:
                self._open_at = self.catalog.next_seq
                raise
            if not is_ours:
                self._fence()
            return self.catalog.next_seq - 1

    def check_rows(self, entry: AnyEntry) -> None:
        """For who writes others before it, too. Raises WouldLoseRows."""
        if isinstance(entry, Erase) and (lost := self.catalog.lost_by(entry)):
            raise WouldLoseRows(f"archive of {self.broker}: rows of {', '.join(lost)} would be nowhere")

    def follow(self) -> None:
        """Read what stands in the journal beyond our knowledge: the late success of an unknown outcome, or a fence."""
        with self._lock:
            if self._role is None:
                self._follow_master()
                return
            self._tail.follow()
            if self.online and (self.catalog.epoch != self.epoch or self.catalog.owner != self.writer):
                self._fence()

    def _follow_master(self) -> None:
        """Raises ArchiveRefused where the archive is not of this log: nothing may go by it then."""
        with contextlib.suppress(NotMaster):
            self._meet_role()
        try:
            self._tail.confirm_copy()
            self._tail.catch_up(self._checkpoints.period // 2)
            self._tail.follow()
            if not self._is_of_this_log():
                raise ArchiveRefused(self._refusal(self.catalog.rounds.intent_end))
        except (ArchiveRefused, NewerFormat):
            self._state.happens(Event.REFUSED)
            raise
        self._tail.shorten_copy()

    def checkpoint_if_due(self) -> bool:
        """Write the catalog down when enough entries have come since the last time; True if it was."""
        with self._lock:
            return self.online and self._checkpoints.is_due() and self._checkpoints.write(self.append)

    # ---- names that are forgotten

    def forget(self, topics: Sequence[str]) -> list[str]:
        """Of these deleted topics those of which the archive has nothing left; their names are gone when this returns.

        The caller has seen that its own log has nothing of them either, and no plan is under way.
        """
        with self._lock:
            self.follow()
            left = {tombstone.topic for tombstone in self.catalog.forgettable()}
            gone = [topic for topic in topics if topic in left]
            if gone:
                self.append(Forget(topics=gone))
            is_news = self.catalog.next_seq > self._open_at and self._known.named.count_what_stands()
            if gone or is_news:  # the latter where an earlier run, or process, came to its end here
                self._known.save(self.epoch)
            return gone

    # ---- shortening

    def entries_to_delete(self, now_ms: int, retention_ms: int) -> list[int]:
        """Numbers of the entries that nobody needs any more, lowest first. Before the first goes, all say so."""
        with self._lock:
            if not self.online:
                return []
            return self._shortening.due(now_ms, retention_ms)

    def delete_entries(self, numbers: Sequence[int]) -> None:
        """Of those, in their order. Raises the store's error: then what is left comes again."""
        self._shortening.delete(numbers)

    # ---- topics that begin again

    def plan_mark(self) -> int:
        """Taken before a round is planned; see `append`."""
        return self._known.named.mark()

    def has_named(self, topic: str) -> bool:
        """Whether the archive knows of offsets of the topic, or may soon."""
        return topic in self._known.named

    def begin_again(self, topic: str) -> bool:
        """Let a deleted topic begin at offset 0 again; False if the archive may know one of its offsets.

        The caller removes the topic's queues before it does anything else: a plan that was made with them is refused.
        """
        return not self.fenced and self._known.named.begin_again(topic)

    # ---- fence

    def _fence(self) -> None:
        self._state.happens(Event.SUPERSEDED if self._met == _ALONE else Event.DEPOSED)
        raise Fenced(self._fence_text())

    def _fence_text(self) -> str:
        return (
            f"archive of {self.broker}: epoch {self.catalog.epoch} by {self.catalog.owner}, ours is {self.epoch}; "
            "no more archiving, deleting or evicting here"
        )


def _names_offsets(entry: AnyEntry) -> TypeGuard[Intent]:
    """A rewrite's rows have been named by a round."""
    return isinstance(entry, Intent) and not entry.kind
