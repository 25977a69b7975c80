"""Confirm offset of a master's log, and the queue of appends that wait for it. Pure: events and times are arguments.

confirm   the least log end among the members of the SyncStateSet (SSS), the master included. Bytes below it survive the
          loss of all members but one; only these are acknowledged and visible to readers.

A member counts with its last report *on its present connection*. A member that is disconnected, or has not reported
since it reconnected, holds confirm, because it may have lost bytes. Confirm never moves backwards.

While a change of the SSS (1001) is requested, the members of both sets count. The change may be in force even if its
answer was lost. This lasts until an SSS with the requested epoch or a later one has been *read*. If several sets were
requested from the same epoch, all of them count. A refusal ends this only if every request was refused: an earlier one
may still be in flight.

    confirm <= log end of every member that could now be elected

A slave joins the SSS when it has all confirmed bytes, the start of the present epoch, and all archived bytes. A lone
master that is busy is always slightly ahead of its slave. A slave that is nearly caught up is therefore *courted*: it
counts as a member, so that confirm waits one round trip for it. If it does not join within COURTED_FOR seconds, it
stops counting, and is not courted again for LEFT_ALONE_FOR seconds.

Replication      confirm is            acknowledged                                     appended
NONE             own end               always                                           always
ASYNC            own end               not while cut off: neither a controller nor a    not while cut off
                                       slave was heard for `isolated_after`
SYNC             SSS minimum           at confirm                                       if the SSS has `min_in_sync`
                                                                                        members; it stays that large
SYNC_AVAILABLE   SSS minimum           at confirm                                       always: the SSS may shrink to
                                                                                        the master

The SSS minimum is the definition of confirm above. The master's own end is the end of its log in memory. An append that
has to be durable waits for the flush as well. Times are seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from heapq import heappop, heappush
from typing import Generic, TypeVar

import msgspec

NEARLY_THERE = 1.0  # a slave is courted if it lacked its present end at most this many seconds ago
COURTED_FOR = 2.0
LEFT_ALONE_FOR = 20.0
TICK = 1.0  # the longest pause in seconds between two calls of `wish`


class ReplicationMode(Enum):
    """Mode of replication: the value of the setting `replication`."""

    NONE = "none"
    ASYNC = "async"
    SYNC = "sync"
    SYNC_AVAILABLE = "sync-available"


class ConfirmRules(msgspec.Struct, frozen=True):
    """Settings that decide about confirm."""

    replication: ReplicationMode
    min_in_sync: int = 1
    shrink_after: float = 3.0  # a slave that has not caught up for this many seconds leaves the SSS
    isolated_after: float = 10.0  # the time in seconds after which another master may have been elected

    def __post_init__(self) -> None:
        least = 2 if self.replication is ReplicationMode.SYNC else 1
        if self.min_in_sync < least:
            raise ValueError(f"{self.replication.value} with minInSyncReplicas {self.min_in_sync}")

    @property
    def waits(self) -> bool:
        """Return whether an acknowledgement waits for the slaves."""
        return self.replication in (ReplicationMode.SYNC, ReplicationMode.SYNC_AVAILABLE)


class HeldBack(Enum):
    """Reason why confirm is below the end of the log, for a metric and for operators."""

    NOTHING = "nothing"
    FENCED = "this member is no longer the master"
    TOO_FEW = "in-sync replicas not enough"
    AWAY = "a member of the SyncStateSet is not connected"
    SILENT = "a member of the SyncStateSet has not reported since it connected"
    BEHIND = "a member of the SyncStateSet does not have the whole log"
    CUT_OFF = "neither a controller nor a slave responds"


class SyncStateSet(msgspec.Struct, frozen=True):
    """SyncStateSet as read from an answer to 1001, 1002, 1003 or 1004, or from a 1008."""

    epoch: int
    members: frozenset[int]


class _Slave:
    """Progress of a slave on its present connection. `connection` is compared by identity."""

    __slots__ = ("caught_up", "connection", "end", "is_learner", "left_alone_until", "mark", "marked_at", "synced")

    def __init__(self, connection: object, is_learner: bool, own_end: int, now: float) -> None:
        self.connection, self.is_learner = connection, is_learner
        self.end = self.synced = -1  # not reported yet
        self.mark, self.marked_at = own_end, now  # the slave lacked this end at this time
        self.caught_up = False  # it has reached a mark
        self.left_alone_until = now

    def report(self, end: int, synced: int, own_end: int, now: float) -> None:
        self.end, self.synced = end, max(synced, self.synced)
        if end >= self.mark:
            self.caught_up = True
            self.mark, self.marked_at = own_end, now


class Confirm:
    """Confirm offset of one master in one leadership term. After another election a member creates a new instance."""

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
        """Start a leadership term.

        `epoch_start` is the end of the log at the promotion. `confirm` is the confirm offset that the member knew then.
        `is_alone`: the broker set has no other member, so that no other member can be elected.
        """
        assert own_id in sync_state_set.members
        assert 0 <= confirm <= own_end and epoch_start <= own_end
        self.rules, self.own_id, self.master_epoch = rules, own_id, master_epoch
        self.epoch_start = epoch_start
        self.is_fenced = False
        # Cached: read for each append and each report, and constant.
        self._waits = rules.waits
        self._is_lonely = rules.replication is ReplicationMode.ASYNC and not is_alone
        self._is_enough = False  # the SSS is large enough for appends
        self._set = sync_state_set
        self._asked: list[frozenset[int]] = []  # requested sets since the present SSS epoch, whose outcome is unknown
        self._courted = 0  # a member's id; 0: none
        self._courted_until = now
        self._counted: tuple[int, ...] = ()  # the slaves that confirm waits for
        self._own_end = own_end
        self._confirm = confirm
        self._archived = 0  # every member that may be elected needs the bytes below, which may be archived
        self._slaves: dict[int, _Slave] = {}
        self._away: dict[int, float] = dict.fromkeys(sync_state_set.members - {own_id}, now)
        self._heard = self._checked = now
        self._recount()

    # -- queries

    @property
    def value(self) -> int:
        """Return the confirm offset. It never decreases."""
        return self._confirm

    @property
    def sync_state_set(self) -> SyncStateSet:
        """Return the SSS that was read last."""
        return self._set

    @property
    def is_altering(self) -> bool:
        """Return whether the outcome of a 1001 is unknown."""
        return bool(self._asked)

    def may_append(self) -> bool:
        """Return whether the SSS allows an append. If not, the client gets SYSTEM_ERROR `in-sync replicas not enough`.

        The caller checks `is_isolated` separately.
        """
        return self._is_enough and not self.is_fenced

    def acknowledged(self, now: float) -> int:
        """Return the offset below which records may be acknowledged; -1: none.

        An `async` master acknowledges nothing while another master may have been elected.
        """
        return -1 if self.is_fenced or self.is_isolated(now) else self._confirm

    def is_isolated(self, now: float) -> bool:
        """Return whether an `async` master has heard no other process for so long that another may be master."""
        return self._is_lonely and now - self._heard > self.rules.isolated_after

    def held(self, now: float) -> tuple[HeldBack, int]:
        """Return why confirm is below the end of the log, and the member that causes it (0: no particular one)."""
        if self.is_fenced:
            return HeldBack.FENCED, 0
        if self.is_isolated(now):
            return HeldBack.CUT_OFF, 0
        if not self.rules.waits or self._confirm == self._own_end:
            return HeldBack.NOTHING, 0
        if not self._is_enough:
            return HeldBack.TOO_FEW, 0
        for member in self._counted:
            slave = self._slaves.get(member)
            if slave is None:
                return HeldBack.AWAY, member
            if slave.end < 0:
                return HeldBack.SILENT, member
        return HeldBack.BEHIND, min(self._counted, key=lambda member: (self._slaves[member].end, member))

    def synced(self, own_synced: int) -> int:
        """Return the least end that is on the disks of the SSS according to their reports; -1: unknown."""
        ends = [own_synced]
        for member in self._counted:
            slave = self._slaves.get(member)
            ends.append(-1 if slave is None else slave.synced)
        return min(ends)

    def archivable(self, own_synced: int) -> int:
        """Return the offset below which bytes are confirmed and on all disks; these may be archived. -1: unknown.

        From this call on, a slave that lacks these bytes can't join the SSS. Without replication that waits for slaves,
        a slave that is behind could join otherwise. If it were elected, it would lack archived bytes.
        """
        end = min(self.synced(own_synced), self._confirm)
        self._archived = max(self._archived, end)
        return end

    def in_sync(self, member: int) -> bool:
        """Return whether a member is in the SSS that was read last."""
        return member in self._set.members

    # -- events

    def appended(self, own_end: int) -> None:
        """Record the new end of the master's log."""
        assert own_end >= self._own_end
        self._own_end = own_end
        if not self._counted or not self._waits:
            self._advance()

    def connected(self, member: int, connection: object, now: float, *, is_learner: bool = False) -> None:
        """Record a new connection of a slave. Its reports on an older connection no longer count."""
        assert member != self.own_id
        self._away.pop(member, None)
        self._slaves[member] = _Slave(connection, is_learner, self._own_end, now)

    def reported(self, member: int, connection: object, end: int, now: float, *, synced: int = -1) -> bool:
        """Record that a slave has the log up to `end`. Return False for a report that doesn't count.

        Reports on older connections don't count. A report below an earlier one or above the master's end is invalid,
        and the caller closes the connection.
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
        """Court a slave outside the SSS that has just reached its mark, if it was at most NEARLY_THERE seconds behind.

        `lag` is the time in seconds since it lacked the bytes below that mark.
        """
        nearly = slave.caught_up and slave.marked_at == now and lag <= NEARLY_THERE and not slave.is_learner
        if nearly and not self._courted and not self._asked and now >= slave.left_alone_until:
            self._courted, self._courted_until = member, now + COURTED_FOR
            slave.left_alone_until = now + LEFT_ALONE_FOR
            self._recount()

    def disconnected(self, member: int, connection: object, now: float) -> None:
        """Record the end of a slave's connection. The end of an older connection is ignored."""
        slave = self._slaves.get(member)
        if slave is not None and slave.connection is connection:
            del self._slaves[member]
            self._away[member] = now
            if member == self._courted:
                self._let_go()

    def controller_answered(self, now: float) -> None:
        """Record that a controller has answered and considers this member the master."""
        self._heard = now

    def asked(self, members: Iterable[int]) -> int:
        """Record that a 1001 for this set is about to be sent. Return the SSS epoch that it is based on.

        From here on the members of both sets count. Call it in the same callback as `wish`: otherwise a slave that is
        behind confirm by then could join.
        """
        wanted = frozenset(members)
        assert self.own_id in wanted and self.allows(wanted)
        self._asked.append(wanted)
        self._courted = 0
        self._recount()
        return self._set.epoch

    def end_of(self, member: int) -> int:
        """Return the end that a slave reported on its present connection; -1: none, or it is not connected."""
        slave = self._slaves.get(member)
        return -1 if slave is None else slave.end

    def refused(self, members: Iterable[int], based_on: int) -> None:
        """Record that one request (1001) for this set was refused and has changed nothing.

        Not for FENCED_SYNC_STATE_SET_EPOCH: the epoch has moved then, perhaps by this very request, and the SSS has to
        be read again.
        """
        wanted = frozenset(members)
        if wanted in self._asked and based_on == self._set.epoch:
            self._asked.remove(wanted)
            self._recount()

    def read(
        self, master_epoch: int, sync_state_set: SyncStateSet, now: float, *, forgets_in_place: bool = False
    ) -> bool:
        """Record an SSS that was read at a controller. Return False if this member is fenced.

        An older SSS comes from a slow answer and changes nothing. A different SSS under the same epoch comes from a
        controller whose state was reset, and fences this member. The exception is `forgets_in_place`: Apache's
        controller removes a member on an operator's request without a new epoch.
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
        self._asked.clear()  # a request based on an older epoch is in force now, or never will be
        for member in sync_state_set.members - {self.own_id}:
            if member not in self._slaves:
                self._away.setdefault(member, now)
        self._recount()
        return True

    def _forgotten(self, sync_state_set: SyncStateSet) -> None:
        """Take a smaller SSS with the same epoch.

        A pending request for exactly this SSS is dropped: the controller refuses it from now on, and its success would
        change nothing.
        """
        self._set = sync_state_set
        self._asked = [asked for asked in self._asked if asked != sync_state_set.members]
        self._recount()

    # -- changes of the SSS

    def wish(self, now: float) -> frozenset[int] | None:
        """Return the SSS to request by a 1001; None: the present one is right, or a change is pending.

        Call it at least every TICK seconds, because it also records which slaves are caught up. If this process was
        suspended between two calls, that time is not counted as silence of the slaves.
        """
        self._check_time(now)
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
        # if not all may leave, those that have been behind for longest leave first
        leaving.sort(key=lambda member: (self._lacks_since(member, now), member))
        wanted = (members - frozenset(leaving[:room])) | joining
        return wanted if wanted != members else None

    def _check_time(self, now: float) -> None:
        stall = max(now - self._checked - TICK, 0.0)
        self._checked = now
        for slave in self._slaves.values():
            slave.marked_at += stall
            if slave.end == self._own_end:
                slave.mark, slave.marked_at = slave.end, now
        for member in self._away:
            self._away[member] += stall

    def allows(self, wanted: frozenset[int]) -> bool:
        """Return whether a 1001 for this set may be requested.

        It may be a repeated request, or the present set, which creates a new epoch.
        """
        joining = wanted - self._set.members
        enough = len(wanted) >= min(self._least, len(self._set.members))
        return enough and all(member in self._slaves and self._may_join(member) for member in joining)

    @property
    def _least(self) -> int:
        return self.rules.min_in_sync if self.rules.replication is ReplicationMode.SYNC else 1

    def _may_join(self, member: int) -> bool:
        slave = self._slaves[member]
        if slave.is_learner or slave.end < max(self.epoch_start, self._archived):
            return False
        # without waiting for slaves confirm is the end of the log, which no slave ever quite reaches
        return slave.end >= self._confirm if self.rules.waits else slave.caught_up

    def _is_overdue(self, member: int, now: float) -> bool:
        slave = self._slaves.get(member)
        if slave is not None and self.rules.waits and 0 <= slave.end < self._confirm:
            return True  # it has lost bytes that it had
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
    """Tokens that wait for confirm. Each is returned once, when confirm reaches it or when its time is up."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._by_end: list[tuple[int, int]] = []
        self._by_age: deque[tuple[float, int]] = deque()
        self._tokens: dict[int, _Token] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, end: int, token: _Token, now: float) -> None:
        """Add a token that waits until confirm is at least `end`."""
        number = self._next
        self._next += 1
        self._tokens[number] = token
        heappush(self._by_end, (end, number))
        self._by_age.append((now + self._timeout, number))

    def reached(self, confirm: int) -> Iterator[_Token]:
        """Yield the tokens that confirm has reached, in the order of their ends."""
        by_end, tokens = self._by_end, self._tokens
        while by_end and by_end[0][0] <= confirm:
            number = heappop(by_end)[1]
            if number in tokens:
                yield tokens.pop(number)
        self._forget()

    def overdue(self, now: float) -> Iterator[_Token]:
        """Yield the tokens whose timeout has passed: their records are stored but not known to be confirmed."""
        by_age, tokens = self._by_age, self._tokens
        while by_age and by_age[0][0] <= now:
            number = by_age.popleft()[1]
            if number in tokens:
                yield tokens.pop(number)
        if not tokens:
            self._by_end.clear()

    def all(self) -> Iterator[_Token]:
        """Yield all tokens, because this member is no longer the master."""
        tokens, self._tokens = self._tokens, {}
        self._by_end.clear()
        self._by_age.clear()
        yield from tokens.values()

    def _forget(self) -> None:
        by_age, tokens = self._by_age, self._tokens
        while by_age and by_age[0][1] not in tokens:
            by_age.popleft()
