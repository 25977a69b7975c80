"""Up to where a master's log is safe, and who waits for that. Pure: what happens is told, and so is the time.

confirm   the least end that the members of the SyncStateSet (SSS) have, the master's own among them. What lies below it
          survives the death of any but the last of them; only that is acknowledged, and shown to readers.

It counts what a member has reported *on its present connection*: a member that is away, or has not reported since it
came back, holds it still, for it may have lost what it had. It never runs backwards. While a change of the SSS is asked
for (1001), and until an SSS with the epoch asked for or a later one has been *read*, the members of both count: the
change may be in force with its answer lost. Asked again and again from the same epoch, all that was asked for counts. A
refusal ends it only if every time that it was asked was refused: an earlier one may still be on its way.

    confirm <= what every member that could now be elected has

A slave joins the SSS when it has all that is confirmed, the begin of the present epoch, and what is archived. Where
the master is alone, and busy, it is never quite there: one that is nearly there is *courted*, it counts as if it were
in, so that confirm waits a round trip for it; who does not come to it within COURTED_FOR is let go, and left alone for
LEFT_ALONE_FOR.

Replication      confirm is            acknowledged                                     appended
NONE             own end               always                                           always
ASYNC            own end               not while cut off: neither a controller nor a    not while cut off
                                       slave was heard for `cut_off_after`
SYNC             as above              at confirm                                       if the SSS has `min_in_sync`
                                                                                        members; it stays that large
SYNC_AVAILABLE   as above              at confirm                                       always: the SSS may shrink to
                                                                                        the master

The master's own end is that of its log: whoever needs it on the disk waits for the flush as well. Times are seconds of
a monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from heapq import heappop, heappush
from typing import Generic, TypeVar

import msgspec

NEARLY_THERE = 1.0  # it had what was there so long ago
COURTED_FOR = 2.0
LEFT_ALONE_FOR = 20.0
TICK = 1.0  # `wish` is asked at least so often


class Replication(Enum):
    """The value of `replication`."""

    NONE = "none"
    ASYNC = "async"
    SYNC = "sync"
    SYNC_AVAILABLE = "sync-available"


class ConfirmRules(msgspec.Struct, frozen=True):
    """What is configured."""

    replication: Replication
    min_in_sync: int = 1
    shrink_after: float = 3.0  # a slave that lacks something for so long, without progress to the end, leaves the SSS
    cut_off_after: float = 10.0  # how soon another may have been elected

    def __post_init__(self) -> None:
        least = 2 if self.replication is Replication.SYNC else 1
        if self.min_in_sync < least:
            raise ValueError(f"{self.replication.value} with minInSyncReplicas {self.min_in_sync}")

    @property
    def waits(self) -> bool:
        """Whether an acknowledgement waits for the slaves."""
        return self.replication in (Replication.SYNC, Replication.SYNC_AVAILABLE)


class Held(Enum):
    """Why confirm does not reach the end of the log, for a metric and an operator."""

    NOTHING = "nothing"
    FENCED = "this member is not the master any more"
    TOO_FEW = "in-sync replicas not enough"
    AWAY = "a member of the SyncStateSet is not connected"
    SILENT = "a member of the SyncStateSet has not reported since it connected"
    BEHIND = "a member of the SyncStateSet does not have all of it"
    CUT_OFF = "neither a controller nor a slave is heard"


class SyncStateSet(msgspec.Struct, frozen=True):
    """As it was read: in an answer to 1001, 1002, 1003 or 1004, or in a 1008."""

    epoch: int
    members: frozenset[int]


class _Slave:
    """What is known of a slave on its present connection. `connection` is whatever tells one from the next."""

    __slots__ = ("caught_up", "connection", "end", "is_learner", "left_alone_until", "mark", "marked_at", "synced")

    def __init__(self, connection: object, is_learner: bool, own_end: int, now: float) -> None:
        self.connection, self.is_learner = connection, is_learner
        self.end = self.synced = -1  # not reported yet
        self.mark, self.marked_at = own_end, now  # it lacked this end at this time
        self.caught_up = False  # it has reached a mark
        self.left_alone_until = now

    def report(self, end: int, synced: int, own_end: int, now: float) -> None:
        self.end, self.synced = end, max(synced, self.synced)
        if end >= self.mark:
            self.caught_up = True
            self.mark, self.marked_at = own_end, now


class Confirm:
    """Of one master in one epoch; a member that is elected anew makes another. See the module."""

    def __init__(
        self,
        rules: ConfirmRules,
        own_id: int,
        master_epoch: int,
        sync_state_set: SyncStateSet,
        *,
        epoch_start: int,
        own_end: int,
        confirm: int,
        now: float,
        is_alone: bool = False,
    ) -> None:
        """`epoch_start` is the end of the log at the promotion, `confirm` what the member knew to be confirmed then.

        `is_alone`: the broker set has no other member; nobody else can be elected.
        """
        assert own_id in sync_state_set.members
        assert 0 <= confirm <= own_end and epoch_start <= own_end
        self.rules, self.own_id, self.master_epoch = rules, own_id, master_epoch
        self.epoch_start = epoch_start
        self.is_fenced = False
        # Asked for each append and each report, and never another.
        self._waits = rules.waits
        self._is_lonely = rules.replication is Replication.ASYNC and not is_alone
        self._is_enough = False  # who is in sync, of those that appends need
        self._set = sync_state_set
        self._asked: list[frozenset[int]] = []  # 1001s from the present SSS epoch on, whose outcome is not known
        self._courted = 0  # a member's id; 0: nobody
        self._courted_until = now
        self._counted: tuple[int, ...] = ()  # the slaves that confirm waits for
        self._own_end = own_end
        self._confirm = confirm
        self._archived = 0  # perhaps: whoever may be elected has it
        self._slaves: dict[int, _Slave] = {}
        self._away: dict[int, float] = dict.fromkeys(sync_state_set.members - {own_id}, now)
        self._heard = self._looked = now
        self._recount()

    # -- what a caller asks

    @property
    def value(self) -> int:
        """The confirm offset: never less than before."""
        return self._confirm

    @property
    def sync_state_set(self) -> SyncStateSet:
        """The one that was read last."""
        return self._set

    @property
    def is_altering(self) -> bool:
        """Whether the outcome of a 1001 is unknown."""
        return bool(self._asked)

    def may_append(self) -> bool:
        """Asked before an append, where it is not cut off; if not: SYSTEM_ERROR `in-sync replicas not enough`."""
        return self._is_enough and not self.is_fenced

    def acknowledged(self, now: float) -> int:
        """Below this a record may be acknowledged. `async` is silent while another may have been elected."""
        return -1 if self.is_fenced or self.is_cut_off(now) else self._confirm

    def is_cut_off(self, now: float) -> bool:
        """Whether an `async` master hears nobody for so long that another may be the master."""
        return self._is_lonely and now - self._heard > self.rules.cut_off_after

    def held(self, now: float) -> tuple[Held, int]:
        """What keeps confirm from the end of the log, and which member it is (0: none in particular)."""
        if self.is_fenced:
            return Held.FENCED, 0
        if self.is_cut_off(now):
            return Held.CUT_OFF, 0
        if not self.rules.waits or self._confirm == self._own_end:
            return Held.NOTHING, 0
        if not self._is_enough:
            return Held.TOO_FEW, 0
        for member in self._counted:
            slave = self._slaves.get(member)
            if slave is None:
                return Held.AWAY, member
            if slave.end < 0:
                return Held.SILENT, member
        return Held.BEHIND, min(self._counted, key=lambda member: (self._slaves[member].end, member))

    def synced(self, own_synced: int) -> int:
        """The least end that is on the disks of the SSS, as far as they tell. -1: not known."""
        ends = [own_synced]
        for member in self._counted:
            slave = self._slaves.get(member)
            ends.append(-1 if slave is None else slave.synced)
        return min(ends)

    def archivable(self, own_synced: int) -> int:
        """What is synced by all and confirmed may be archived. From here on nobody joins the SSS who lacks it.

        Where nothing waits for slaves one joins that is behind: elected, it would lack what the archive has. -1: not
        known.
        """
        end = min(self.synced(own_synced), self._confirm)
        self._archived = max(self._archived, end)
        return end

    def in_sync(self, member: int) -> bool:
        """Whether a member is in the SSS that was read last."""
        return member in self._set.members

    # -- what happens

    def appended(self, own_end: int) -> None:
        """The master's log ends there now."""
        assert own_end >= self._own_end
        self._own_end = own_end
        if not self._counted or not self._waits:
            self._advance()

    def connected(self, member: int, connection: object, now: float, *, is_learner: bool = False) -> None:
        """A slave came, with a new connection: what it reported on an older one counts no more."""
        assert member != self.own_id
        self._away.pop(member, None)
        self._slaves[member] = _Slave(connection, is_learner, self._own_end, now)

    def reported(self, member: int, connection: object, end: int, now: float, *, synced: int = -1) -> bool:
        """A slave has the log up to `end`. Whether that counted: what comes from an older connection does not.

        One that reports less than before, or more than there is, is not believed; its connection has to be closed.
        """
        slave = self._slaves.get(member)
        if slave is None or slave.connection is not connection or end > self._own_end or end < slave.end:
            return False
        lag = now - slave.marked_at
        slave.report(end, synced, self._own_end, now)
        self._heard = now
        if self._waits and member not in self._set.members:
            self._court(member, slave, lag, now)
        if member in self._counted:
            self._advance()
        return True

    def _court(self, member: int, slave: _Slave, lag: float, now: float) -> None:
        """A slave that is not in sync has reported: `lag` ago it lacked what it has by now, if that is its mark."""
        nearly = slave.caught_up and slave.marked_at == now and lag <= NEARLY_THERE and not slave.is_learner
        if nearly and not self._courted and not self._asked and now >= slave.left_alone_until:
            self._courted, self._courted_until = member, now + COURTED_FOR
            slave.left_alone_until = now + LEFT_ALONE_FOR
            self._recount()

    def disconnected(self, member: int, connection: object, now: float) -> None:
        """A slave's connection ended; that of an older one says nothing."""
        slave = self._slaves.get(member)
        if slave is not None and slave.connection is connection:
            del self._slaves[member]
            self._away[member] = now
            if member == self._courted:
                self._let_go()

    def controller_heard(self, now: float) -> None:
        """A controller has answered, and this member is the master for it."""
        self._heard = now

    def asked(self, members: Iterable[int]) -> int:
        """A 1001 for this set leaves now. From here on the members of both count. The SSS epoch that it is based on.

        To be called in the turn in which `wish` was: a slave that is behind confirm by now must not join.
        """
        wanted = frozenset(members)
        assert self.own_id in wanted and self.allows(wanted)
        self._asked.append(wanted)
        self._courted = 0
        self._recount()
        return self._set.epoch

    def end_of(self, member: int) -> int:
        """What a slave has reported on its present connection; -1: nothing yet, or it has none."""
        slave = self._slaves.get(member)
        return -1 if slave is None else slave.end

    def refused(self, members: Iterable[int], based_on: int) -> None:
        """An answer that refuses a 1001 came: one of those that were asked for this set has changed nothing.

        Not for FENCED_SYNC_STATE_SET_EPOCH: there the epoch has moved, and this 1001 may be what moved it. Read it.
        """
        wanted = frozenset(members)
        if wanted in self._asked and based_on == self._set.epoch:
            self._asked.remove(wanted)
            self._recount()

    def read(
        self, master_epoch: int, sync_state_set: SyncStateSet, now: float, *, forgets_in_place: bool = False
    ) -> bool:
        """The SSS was read at a controller. False: it is not to be believed, or this member is not the master any more.

        An older one is what a slow answer says and changes nothing. One that says something else under the same epoch
        is of a register that was set back: nobody may act on it. `forgets_in_place`: but for a controller (Apache's)
        that takes a member out whom an operator has it forget, and leaves the epoch as it was.
        """
        if master_epoch < self.master_epoch:
            return True
        known = self._set
        if master_epoch > self.master_epoch or self.own_id not in sync_state_set.members:
            self.is_fenced = True
            return False
        if sync_state_set.epoch < known.epoch:
            return True
        if sync_state_set.epoch == known.epoch:
            if forgets_in_place and sync_state_set.members < known.members:
                self._forgotten(sync_state_set)
            elif sync_state_set.members != known.members:
                is_slow = forgets_in_place and sync_state_set.members > known.members
                self.is_fenced = self.is_fenced or not is_slow
            return not self.is_fenced
        self._set = sync_state_set
        self._asked.clear()  # what was based on an older epoch is in force now, or never
        for member in sync_state_set.members - {self.own_id}:
            if member not in self._slaves:
                self._away.setdefault(member, now)
        self._recount()
        return True

    def _forgotten(self, sync_state_set: SyncStateSet) -> None:
        """What is asked for and is so by now is refused for ever, and changes nothing should it be done yet."""
        self._set = sync_state_set
        self._asked = [asked for asked in self._asked if asked != sync_state_set.members]
        self._recount()

    # -- what it wishes

    def wish(self, now: float) -> frozenset[int] | None:
        """The SSS to ask for by a 1001; None: the present one is right, or a change is under way.

        Asked each TICK at least, for who has everything lacks nothing from then on. Where this process stood still
        between two of them, it was not the slaves that were silent.
        """
        self._look(now)
        if self.is_fenced or self._asked:
            return None
        if self._courted and now >= self._courted_until:
            self._let_go()
        members = self._set.members
        leaving = [member for member in members if member != self.own_id and self._is_overdue(member, now)]
        joining = {
            member
            for member in self._slaves
            if member not in members and self._may_join(member) and not self._is_overdue(member, now)
        }
        room = max(len(members) + len(joining) - self._least, 0)
        # those that are gone for longest leave first, where not all may
        leaving.sort(key=lambda member: (self._lacks_since(member, now), member))
        wanted = (members - frozenset(leaving[:room])) | joining
        return wanted if wanted != members else None

    def _look(self, now: float) -> None:
        stood_still = max(now - self._looked - TICK, 0.0)
        self._looked = now
        for slave in self._slaves.values():
            slave.marked_at += stood_still
            if slave.end == self._own_end:
                slave.mark, slave.marked_at = slave.end, now
        for member in self._away:
            self._away[member] += stood_still

    def allows(self, wanted: frozenset[int]) -> bool:
        """Whether a 1001 for this set may be asked: again, or for the present one, to make a new epoch of it."""
        joining = wanted - self._set.members
        enough = len(wanted) >= min(self._least, len(self._set.members))
        return enough and all(member in self._slaves and self._may_join(member) for member in joining)

    @property
    def _least(self) -> int:
        return self.rules.min_in_sync if self.rules.replication is Replication.SYNC else 1

    def _may_join(self, member: int) -> bool:
        slave = self._slaves[member]
        if slave.is_learner or slave.end < max(self.epoch_start, self._archived):
            return False
        # where nothing waits for slaves confirm is the end of the log, and none is ever quite there
        return slave.end >= self._confirm if self.rules.waits else slave.caught_up

    def _is_overdue(self, member: int, now: float) -> bool:
        slave = self._slaves.get(member)
        if slave is not None and self.rules.waits and 0 <= slave.end < self._confirm:
            return True  # it has lost what it had
        return now - self._lacks_since(member, now) > self.rules.shrink_after

    def _lacks_since(self, member: int, now: float) -> float:
        slave = self._slaves.get(member)
        if slave is None:
            return self._away.get(member, now)
        return now if slave.end == self._own_end else slave.marked_at

    # -- inside

    def _let_go(self) -> None:
        self._courted = 0
        self._recount()

    def _recount(self) -> None:
        members = self._set.members
        for asked in self._asked:
            members |= asked
        if self._courted:
            members |= {self._courted}
        self._counted = tuple(sorted(members - {self.own_id}))
        self._is_enough = self._has_enough()
        self._advance()

    def _has_enough(self) -> bool:
        least = self.rules.min_in_sync
        return not self._waits or all(len(members) >= least for members in (self._set.members, *self._asked))

    def _advance(self) -> None:
        if self.is_fenced or not self._is_enough:
            return
        end = self._own_end
        if self._waits:
            for member in self._counted:
                slave = self._slaves.get(member)
                if slave is None:
                    return
                end = min(end, slave.end)
        self._confirm = max(self._confirm, end)


_Token = TypeVar("_Token")


class Waiting(Generic[_Token]):
    """Who waits for confirm: given back once, when it is there or when the time is up."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._by_end: list[tuple[int, int]] = []
        self._by_age: deque[tuple[float, int]] = deque()
        self._tokens: dict[int, _Token] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, end: int, token: _Token, now: float) -> None:
        """Until confirm is `end`."""
        number = self._next
        self._next += 1
        self._tokens[number] = token
        heappush(self._by_end, (end, number))
        self._by_age.append((now + self._timeout, number))

    def reached(self, confirm: int) -> Iterator[_Token]:
        """Those that confirm has reached, in the order of their ends."""
        by_end, tokens = self._by_end, self._tokens
        while by_end and by_end[0][0] <= confirm:
            number = heappop(by_end)[1]
            if number in tokens:
                yield tokens.pop(number)
        self._forget()

    def overdue(self, now: float) -> Iterator[_Token]:
        """Those that have waited too long: what they sent is stored, and not known to be safe."""
        by_age, tokens = self._by_age, self._tokens
        while by_age and by_age[0][0] <= now:
            number = by_age.popleft()[1]
            if number in tokens:
                yield tokens.pop(number)
        if not tokens:
            self._by_end.clear()

    def all(self) -> Iterator[_Token]:
        """Everyone: this member is not the master any more."""
        tokens, self._tokens = self._tokens, {}
        self._by_end.clear()
        self._by_age.clear()
        yield from tokens.values()

    def _forget(self) -> None:
        by_age, tokens = self._by_age, self._tokens
        while by_age and by_age[0][1] not in tokens:
            by_age.popleft()
