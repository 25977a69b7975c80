"""Ownership of a broker's archive: which process may append to the journal.

A broker outside a broker set owns its archive until another process takes it over. In a broker set the master owns it,
and a member without that role follows the journal. `state` defines the states.

With the local copy (`local_journal`) a broker starts while the store is unreachable: it knows its archive's end, serves
hot traffic, and takes its EPOCH when the store answers. A store whose journal contradicts the copy is another store and
is refused.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from infra.objects.probe import probe
from infra.objects.store import StoreUnavailable, UnknownOutcome
from neve.archive.catalog.journal_reader import entry_exists
from neve.archive.format.journal import EntriesDeleted, Epoch, NewerFormat
from neve.entropy import system_entropy
from tiered.journal.errors import ArchiveRefused, Fenced, NotAttached, NotMaster
from tiered.journal.identity import ArchiveIdentity
from tiered.journal.known_archive import KnownArchive
from tiered.journal.log_name import LogName
from tiered.journal.state import Event, JournalState, State
from tiered.journal.store_format import check_format
from tiered.journal.tail import TRIES, JournalTail

log = logging.getLogger(__name__)

_ALONE = 0  # the master epoch of a broker outside a broker set
#: The remedy if the archive is another data directory's.
WAY_OUT = "bring that data directory back, use --restore-from with an empty one, or use another brokerName"
_NO_MASTER = "this member is not the master of its set"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The offsets from which the broker resumes before its first send."""

    online: bool
    epoch: int
    resume_at: int | None  # the log resumes at the first segment border at or above this; None if it continues
    queue_next: dict[tuple[str, int], int]  # lower bounds for the next offset of each queue


@dataclass(frozen=True, slots=True)
class _Claim:
    """The conditions under which an EPOCH is taken."""

    log_end: int | None = None  # set before the first send
    from_any_owner: bool = False
    master_epoch: int = _ALONE  # of this broker in its set
    may_resume_above: bool = False  # if the archive names more than the log had at the promotion
    before: Callable[[], None] | None = None  # called after all checks have passed


class Ownership:
    """Ownership of one archive, by role, epoch and fence. Thread-safe; one request at a time.

    Entries may be appended only while this process has the newest EPOCH, in the role that the broker has now.
    """

    def __init__(
        self,
        tail: JournalTail,
        known: KnownArchive,
        log_name: LogName,
        *,
        cluster: str,
        catch_up_entries: int,
        way_out: str = WAY_OUT,
    ) -> None:
        """`catch_up_entries`: at this distance from the journal's end, a checkpoint is loaded.

        `way_out` is the remedy in a refusal.
        """
        self._tail, self._known, self._log_name = tail, known, log_name
        self._cluster, self._catch_up_entries, self._way_out = cluster, catch_up_entries, way_out
        self._store, self._broker, self._catalog = tail.store, tail.broker, tail.catalog
        self._state = JournalState()
        self._promoted_at = 0  # the log's end at the promotion
        self._role: int | None = _ALONE  # the master epoch of this broker as last set; None if it is not the master
        self._applied: int | None = _ALONE  # the role that the state reflects
        self._why_follower = _NO_MASTER
        self.epoch = 0  # our own once it is taken, before that of the last start
        self.lock = threading.RLock()  # held during each request for the journal

    @property
    def state(self) -> State:
        """The current state."""
        return self._state.now

    @property
    def online(self) -> bool:
        """Whether entries may be appended."""
        return self._state.now is State.ONLINE and self._role == self._applied

    @property
    def fenced(self) -> bool:
        """Whether another process has taken the archive over."""
        return self._state.now in {State.FENCED, State.DEPOSED} and self._role == self._applied

    @property
    def leads(self) -> bool:
        """Whether this broker writes the archive: it is outside a broker set, or the master of one."""
        return self._role is not None

    @property
    def master_epoch(self) -> int | None:
        """The master epoch of this broker; 0 outside a broker set, None if it follows."""
        return self._role

    # ---- start

    @property
    def reaches(self) -> int:
        """The highest log offset that the archive names or may name soon."""
        return max(self._catalog.rounds.intent_end, self._known.high)

    def attach(self, log_end: int, *, is_copy: bool = False) -> ResumePoint:
        """Determine, before the first send, whose archive this is and where the local log resumes.

        With `is_copy` the log is a copy of another one and continues as that does. Raises ArchiveRefused.
        """
        with self.lock:
            self._state.happens(Event.ATTACH)
            identity = self._load()
            if identity is None:
                probe(self._store, system_entropy)
                self._take_over(_Claim(log_end))
            else:
                if identity.log_uuid != self._known.own_uuid:
                    self._state.happens(Event.REFUSED)
                    raise ArchiveRefused(self._refusal(identity.high))
                self._try_take_over(log_end)
            return self._resume_point(identity, log_end, is_copy=is_copy)

    def attach_restoring(self, claim: Callable[[], None], *, take_over: bool) -> None:
        """Take an archive over for a restore; its previous owner is fenced from then on.

        Args:
            claim: called after all checks have passed, right before the EPOCH.
            take_over: if false, only an archive that an earlier attempt of the same restore took over is accepted.

        Raises:
            ArchiveRefused: there is nothing to restore.
            StoreUnavailable: the store does not answer.
        """
        with self.lock:
            self._state.happens(Event.RESTORE)
            self._load()
            if not entry_exists(self._store, self._broker, self._tail.prefix)(0):
                self._state.happens(Event.REFUSED)
                raise ArchiveRefused(f"there is no archive of broker {self._broker}: nothing to restore from")
            probe(self._store, system_entropy)
            self._take_over(_Claim(from_any_owner=take_over, before=claim))

    def attach_following(self, why: str = _NO_MASTER) -> None:
        """Start as a member of a broker set from the local copy; the store is contacted by the first job.

        `why` is the error text of appends.
        """
        with self.lock:
            self._role, self._applied, self._why_follower = None, None, why
            self._state.happens(Event.FOLLOW)
            self._load()

    def confirm(self) -> None:
        """Own the archive as of its newest entry; called at the start of each job. Raises Fenced, NotMaster."""
        self.ensure_online()
        self.follow()

    def ensure_online(self) -> None:
        """Take the EPOCH if the start or a promotion could not."""
        with self.lock:
            self._apply_role()
            if not self.online:
                self._probe_as_member()
                self._take_over(_Claim(master_epoch=self._applied or _ALONE))

    def renew_epoch(self) -> None:
        """Take a further EPOCH, so that objects that an ABORT closed can be planned under another epoch."""
        with self.lock:
            self.follow()
            self._apply_role()
            if not self.online:
                raise Fenced(self._fence_text())
            self._take_over(_Claim(master_epoch=self._applied or _ALONE))

    # ---- role, in a broker set

    def become_slave(self, why: str = _NO_MASTER) -> None:
        """Follow the master's entries from now on. Callable from any thread; a running request may still complete.

        `why` is the error text of appends.
        """
        self._why_follower = why
        self._role = None

    def become_master(self, master_epoch: int, log_end: int) -> None:
        """Write the archive once the EPOCH is taken. Callable from any thread.

        The log ends at `log_end`, and no message was appended since the promotion.
        """
        assert master_epoch > _ALONE, "the epochs of broker sets begin at 1"
        self._promoted_at = log_end
        self._role = master_epoch

    def resume_above(self) -> ResumePoint:
        """Take the EPOCH of a new master whose log may lack archived messages; return where its log resumes.

        Raises as `ensure_online`; then nothing may be appended to the log yet.
        """
        with self.lock:
            self._apply_role()
            if not self.online:
                self._probe_as_member()
                self._take_over(_Claim(master_epoch=self._applied or _ALONE, may_resume_above=True))
            return self._resume_point(None, self._promoted_at)

    def _apply_role(self) -> None:
        """Apply the role that was set meanwhile. Raises Fenced or NotMaster if it does not allow appends."""
        if self._role != self._applied:
            self._applied = self._role
            self._state.happens(Event.FOLLOW if self._applied is None else Event.LEAD)
        if self.fenced:
            raise Fenced(self._fence_text())
        if self._applied is None:
            raise NotMaster(f"archive of {self._broker}: {self._why_follower}")

    def _probe_as_member(self) -> None:
        """Probe the store, which a member's start does not contact."""
        if self._applied != _ALONE and self.epoch == 0:
            probe(self._store, system_entropy)

    def _is_of_this_log(self) -> bool:
        """Return whether the archive is of the local log, by its name or its content."""
        if self._log_name.take(self._catalog):
            self._known.save(self.epoch)
        return self._log_name.is_of(self._catalog, self._applied)

    # ---- ownership

    def _load(self) -> ArchiveIdentity | None:
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
        """Take the archive over; if the store is unreachable, record the log's end and start without it."""
        try:
            self._take_over(_Claim(log_end))
        except (StoreUnavailable, UnknownOutcome) as error:
            log.error("archive store unreachable, serving hot traffic only: error=%s", error)
            self._state.happens(Event.NO_ANSWER)
            self._known.start_offline(log_end)
            self._known.save(self.epoch)

    def _take_over(self, claim: _Claim) -> None:
        for _ in range(TRIES):
            try:
                self._tail.confirm_copy(of_one_name=self._applied == _ALONE and not claim.from_any_owner)
                self._tail.catch_up(self._catch_up_entries)
                self._tail.follow()
                self._check_owner(claim)
            except (ArchiveRefused, NewerFormat):
                self._state.happens(Event.REFUSED)
                raise
            self._apply_role()  # it may have changed meanwhile
            if claim.master_epoch != self._applied:
                raise NotAttached(f"archive of {self._broker}: this member has another master epoch by now")
            if self._applied != _ALONE and self._catalog.master_epoch > claim.master_epoch:
                self.fence()
            if claim.before is not None:
                claim.before()
            self.epoch = self._catalog.epoch + 1
            self._known.save(self.epoch)
            entry = Epoch(
                owner=self._tail.writer,
                log_uuid=self._known.log_uuid,
                broker=self._broker,
                master_epoch=claim.master_epoch,
            )
            with contextlib.suppress(EntriesDeleted):  # treated as another writer's entry
                if self._tail.put_next(entry, self.epoch):
                    self._epoch_won()
                    return
        raise UnknownOutcome(f"archive of {self._broker}: no EPOCH won in {TRIES} tries; is another broker starting?")

    def _epoch_won(self) -> None:
        self._state.happens(Event.EPOCH_WON)
        self._known.heard = self.epoch
        if self._applied != _ALONE:
            self._known.forget_pending()
            self._known.save(self.epoch)
        if self._known.offline_from is not None:
            self._known.offline_from = None
            self._known.save(self.epoch)
        log.info("archive of %s: epoch %d at entry %d", self._broker, self.epoch, self._catalog.next_seq - 1)

    def _check_owner(self, claim: _Claim) -> None:
        check_format(self._store, self._tail.prefix, self._cluster)
        known, catalog, end = self._known, self._catalog, self._catalog.rounds.intent_end
        if catalog.epoch < known.least_epoch:
            raise ArchiveRefused(self._tail.other_store(f"epoch {known.least_epoch}"))
        if not claim.from_any_owner and not self._is_of_this_log():
            raise ArchiveRefused(self._refusal(end))
        is_new = catalog.master_epoch < claim.master_epoch
        if is_new and end > self._promoted_at and not claim.may_resume_above:
            raise ArchiveRefused(
                f"the archive of {self._broker} reaches {end}, and this member became the master with a log that ended "
                f"at {self._promoted_at}: it was elected without what its set had archived"
            )
        if catalog.master_epoch and claim.master_epoch == _ALONE and not claim.from_any_owner:
            raise ArchiveRefused(
                f"the archive of {self._broker} is a broker set's, in its master epoch {catalog.master_epoch}: start "
                "this broker as a member of it, or use --restore-from with an empty data directory"
            )
        if known.may_have_reassigned(claim.log_end):
            raise ArchiveRefused(
                f"archive of broker {self._broker} reaches {end}, unknown to this older copy of its data "
                f"directory: it continued from {known.offline_from} without its store and may have assigned the "
                "same offsets again. Read what is new out of it, then use --restore-from with an empty directory"
            )

    def _refusal(self, high: int) -> str:
        return f"archive of broker {self._broker} reaches {high} and belongs to another data directory: {self._way_out}"

    def _resume_point(self, identity: ArchiveIdentity | None, log_end: int, *, is_copy: bool = False) -> ResumePoint:
        high = max(self._catalog.rounds.intent_end, identity.high if identity else 0)
        following = {
            (topic, queue): last + 1
            for topic, named in self._known.named.everything().items()
            for queue, last in named.items()
        }
        resume_at = high if log_end < high and not is_copy else None
        return ResumePoint(self.online, self.epoch, resume_at, following)

    def follow(self) -> None:
        """Apply the new entries of the journal. Raises Fenced if another process has taken the archive over."""
        with self.lock:
            if self._role is None:
                self._follow_master()
                return
            self._tail.follow()
            if self.online and (self._catalog.epoch != self.epoch or self._catalog.owner != self._tail.writer):
                self.fence()

    def _follow_master(self) -> None:
        """Follow as a member of a broker set. Raises ArchiveRefused if the archive is not of this log."""
        with contextlib.suppress(NotMaster):
            self._apply_role()
        try:
            self._tail.confirm_copy()
            self._tail.catch_up(self._catch_up_entries)
            self._tail.follow()
            if not self._is_of_this_log():
                raise ArchiveRefused(self._refusal(self._catalog.rounds.intent_end))
        except (ArchiveRefused, NewerFormat):
            self._state.happens(Event.REFUSED)
            raise
        self._tail.shorten_copy()

    # ---- append

    def require(self, master_epoch: int | None = None) -> None:
        """Raise unless this process may append an entry, planned in `master_epoch` if it is given.

        Raises Fenced, NotMaster, or NotAttached if there is no EPOCH or the master epoch has changed.
        """
        self._apply_role()
        if not self.online:
            raise NotAttached(f"archive of {self._broker}: no EPOCH yet")
        if master_epoch not in {None, self._applied}:
            raise NotAttached(f"archive of {self._broker}: planned under another master epoch; the job starts again")

    def fence(self) -> NoReturn:
        """Record that another process has taken the archive over. Raises Fenced."""
        self._state.happens(Event.SUPERSEDED if self._applied == _ALONE else Event.DEPOSED)
        raise Fenced(self._fence_text())

    def _fence_text(self) -> str:
        return (
            f"archive of {self._broker}: epoch {self._catalog.epoch} by {self._catalog.owner}, ours is {self.epoch}; "
            "this broker no longer archives, deletes or evicts"
        )
