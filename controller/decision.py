"""Decisions of a controller about one broker set.

`decide` is a pure function of the stored value, the members' reports, the request and the time. The caller writes the
new value if the stored one is unchanged, and repeats the decision otherwise. It answers and notifies after the write.

A member is alive if its connection is open and its last heartbeat is not older than the time-out that it sent. Only
the process that registered last counts. A heartbeat of another process under the same id, as from a copied directory
or before its registration, makes no member alive.

Candidates for an election, in this order:

first      No master was ever elected: the member that asks, if the log of every member is empty. It waits until all
           live brokers have sent a heartbeat, because brokers may know more about a set than a wiped register. An
           operator may designate a member instead.
present    The master is alive, and no other member is designated: it remains.
in sync    A live member of the SyncStateSet or an eligible one: it has all acknowledged records. Of several, the one
           with the highest (epoch of the log's end, log end offset) in its answer now, then the lowest priority.
unclean    None of these is left, and every member that came back unclean is alive: the longest log of the set.
forced     An operator designates a live member, with enableElectUncleanMaster and without Apache brokers in the set.
           Or an operator has removed all of the above (CleanBrokerData) and designates one of the rest.

A set is frozen when a member reports epochs above the stored ones: the register was restored from a backup or wiped,
and its SyncStateSet may be wrong. A frozen set has no elections and no changes, except that members still register.
The freeze ends when an operator designates a member with the highest known epochs. A restored register may assign an
id again. The check code of the id identifies its owner, and the other broker takes a new id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import singledispatch

from msgspec.structs import replace

from controller.broker_set import FIRST_BROKER_ID, Altered, BrokerSet, Frozen, Member
from neve.remoting.codes import ResponseCode

Code = ResponseCode
BY_CONTROLLER = -1  # broker id of an ElectMaster request by the controller itself
DEFAULT_TIMEOUT_MS = 10_000
HIGHEST_BROKER_ID = 2**63 - 2
LOWEST_PRIORITY = 2**31 - 1
UNKNOWN = -1


# ---- input


@dataclass(frozen=True, slots=True)
class Rules:
    """Configuration, and the controller's knowledge beyond the reports."""

    enable_elect_unclean_master: bool = False
    max_members: int = 64
    # After a start or a suspension, a controller has not heard from live members yet. Before it regards a master as
    # dead, it waits for the member's time-out from `listening_since_ms`, or until `elects_from_ms` if that is unknown.
    elects_from_ms: int = 0
    listening_since_ms: int = 0
    elects_first_from_ms: int = 0
    # A value that the register had before, with higher epochs than now: the register was restored or wiped.
    had: BrokerSet | None = None
    # Reports under an id that another live process owns: their senders are not members, but may have higher epochs.
    strangers: tuple[Report, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """A candidate's answer to GET_BROKER_EPOCH_CACHE for this decision: the epoch and offset of its log's end."""

    reachable: bool
    epoch: int = UNKNOWN
    max_offset: int = UNKNOWN


@dataclass(frozen=True, slots=True)
class Report:
    """A member's last heartbeat, and whether its connection is open. Times are monotonic milliseconds.

    `epoch` and `max_offset` are those of the log's end. `master_epoch` and `sync_state_set_epoch` are the highest pair
    that the member has seen and stored on its disk; an Apache broker does not send them.
    """

    heard_ms: int
    connected: bool = True
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    address: str = ""
    cluster: str = ""
    epoch: int = UNKNOWN
    max_offset: int = UNKNOWN
    confirm_offset: int = UNKNOWN
    priority: int = LOWEST_PRIORITY
    incarnation: str = ""
    starts: int = 0
    process: str = ""
    master_epoch: int = UNKNOWN
    sync_state_set_epoch: int = UNKNOWN
    asked: Asked | None = None

    @property
    def epochs(self) -> tuple[int, int]:
        """The highest pair that the member knows. If its log has a higher epoch, only that master's epoch is known."""
        epoch = max(self.epoch, self.asked.epoch if self.asked is not None else UNKNOWN)
        if epoch > self.master_epoch:
            return epoch, UNKNOWN
        return self.master_epoch, self.sync_state_set_epoch


Reports = Mapping[int, Report]


@dataclass(frozen=True, slots=True)
class GetNextBrokerId:
    """1012: get the id that a new member should apply for."""

    cluster: str
    name: str


@dataclass(frozen=True, slots=True)
class ApplyBrokerId:
    """1013: take an id. The check code distinguishes a repeated request from another broker's."""

    cluster: str
    name: str
    broker_id: int
    check_code: str  # address;millis

    @property
    def address(self) -> str:
        return self.check_code.split(";")[0]


@dataclass(frozen=True, slots=True)
class RegisterBroker:
    """1003: register a member at this address, with this start of its directory."""

    cluster: str
    name: str
    broker_id: int
    address: str
    incarnation: str = ""
    starts: int = 0
    process: str = ""
    min_in_sync_replicas: int = 1
    check_code: str = ""  # the one with which the id was taken; an Apache broker does not send it


@dataclass(frozen=True, slots=True)
class ElectMaster:
    """1002: elect a master, for a member, for an operator who designates one, or for the controller itself."""

    name: str
    broker_id: int = BY_CONTROLLER
    designate: bool = False
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class AlterSyncStateSet:
    """1001: a master extends or reduces its SyncStateSet."""

    name: str
    master: int
    master_epoch: int
    sync_state_set: tuple[int, ...]
    sync_state_set_epoch: int  # of the set that this one is based on
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class GetReplicaInfo:
    """1004: get the master and the SyncStateSet."""

    name: str


@dataclass(frozen=True, slots=True)
class GetSyncStateData:
    """1006: get the same for an operator, and which members are alive."""

    name: str


@dataclass(frozen=True, slots=True)
class CleanBrokerData:
    """1011: remove members, or the whole set if none is named."""

    name: str
    broker_ids: str = ""  # 1;2
    clean_living: bool = False
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class Scan:
    """Check a set, because time has passed or a connection was closed."""

    name: str


Request = (
    GetNextBrokerId
    | ApplyBrokerId
    | RegisterBroker
    | ElectMaster
    | AlterSyncStateSet
    | GetReplicaInfo
    | GetSyncStateData
    | CleanBrokerData
    | Scan
)


# ---- output


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A member in the answer to GetSyncStateData."""

    id: int
    address: str
    alive: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request. Fields that are None are left out."""

    code: int = Code.SUCCESS
    remark: str = ""
    master: int | None = None
    master_address: str | None = None
    master_epoch: int | None = None
    sync_state_set: tuple[int, ...] | None = None
    sync_state_set_epoch: int | None = None
    next_broker_id: int | None = None
    cluster: str | None = None
    addresses: Mapping[int, str] | None = None  # of all members, in the answer to an election
    members: int | None = None  # number of members, in sync or not
    in_sync: tuple[ReplicaInfo, ...] | None = None
    not_in_sync: tuple[ReplicaInfo, ...] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer, and the change that must be written before it is sent."""

    answer: Answer
    broker_set: BrokerSet | None = None  # the value to write; None: no change
    removed: bool = False  # whether to remove the set
    notify: tuple[int, ...] = ()  # members to notify of the roles in `broker_set`


@dataclass(frozen=True, slots=True)
class Ask:
    """Candidates whose log ends are needed (`Report.asked`) before the request can be decided."""

    candidates: tuple[int, ...]


def decide(
    broker_set: BrokerSet | None, reports: Reports, request: Request, now_ms: int, rules: Rules
) -> Decision | Ask:
    """Decide a request. `reports` has the reports under all ids of the set, of members or not."""
    assert broker_set is None or broker_set.name == request.name
    cluster = broker_set.cluster if broker_set is not None else getattr(request, "cluster", "")
    own = {id: report for id, report in reports.items() if not cluster or report.cluster in ("", cluster)}
    strangers = tuple(report for report in rules.strangers if not cluster or report.cluster in ("", cluster))
    case = _Case(broker_set, own, strangers, now_ms, rules)
    decision = _decide(request, case)
    if isinstance(decision, Decision) and decision.broker_set is not None:
        _assert_follows(broker_set, decision.broker_set)
    return decision


def _assert_follows(old: BrokerSet | None, new: BrokerSet) -> None:
    if old is None:
        assert new.epochs == (0, 0)
        return
    assert new != old and (new.cluster, new.name) == (old.cluster, old.name)
    assert new.next_broker_id >= old.next_broker_id
    assert new.master_epoch > old.master_epoch or (new.master_epoch, new.master) == (old.master_epoch, old.master)
    changed = new.sync_state_set != old.sync_state_set
    assert new.sync_state_set_epoch > old.sync_state_set_epoch or (
        not changed and new.sync_state_set_epoch == old.sync_state_set_epoch
    )


class _Case:
    """The stored value and the reports, with the queries of the decisions."""

    def __init__(
        self, broker_set: BrokerSet | None, reports: Reports, strangers: Sequence[Report], now_ms: int, rules: Rules
    ) -> None:
        self.stored, self.reports, self.strangers = broker_set, reports, strangers
        self.now_ms, self.rules = now_ms, rules

    def is_alive(self, member: Member | None) -> bool:
        report = self.reports.get(member.id) if member is not None else None
        return (
            member is not None
            and report is not None
            and report.connected
            and self.now_ms - report.heard_ms <= report.timeout_ms
            and (report.incarnation, report.starts, report.process)
            == (member.incarnation, member.starts, member.process)
        )

    def living(self, broker_set: BrokerSet, ids: Iterable[int] | None = None) -> tuple[int, ...]:
        """Return the ids that are alive, of all members or of `ids`."""
        wanted = broker_set.ids if ids is None else ids
        return tuple(broker_id for broker_id in wanted if self.is_alive(broker_set.member(broker_id)))

    def highest_reported(self) -> tuple[int, int]:
        everybody = (*self.reports.values(), *self.strangers)
        return max((report.epochs for report in everybody), default=(UNKNOWN, UNKNOWN))

    def frozen(self) -> Frozen | None:
        """Return why the set is frozen; None if no reported epochs are above the stored ones."""
        known = self.stored.frozen if self.stored is not None else None
        epochs = self.stored.epochs if self.stored is not None else (0, 0)
        had = self.rules.had.epochs if self.rules.had is not None else (0, 0)
        heard = max(self.highest_reported(), had)
        if heard <= (known.epochs if known is not None else epochs):
            return known
        knowing = [broker_id for broker_id, report in self.reports.items() if report.epochs == heard]
        knows = "a broker whose id is another's knows" if had < heard else "this controller has read"
        who = f"broker {min(knowing)} knows" if knowing else knows
        why = f"{who} epochs {heard}, the register only {epochs}: it was restored or wiped"
        return Frozen(f"{why}; an operator has to designate the master", *heard)

    def refuse_frozen(self, code: int, frozen: Frozen, remark: str = "") -> Decision:
        """Refuse a request and store that the set is frozen."""
        changed = None
        if self.stored is not None and self.stored.frozen != frozen:
            changed = replace(self.stored, frozen=frozen)
        return Decision(Answer(code, f"the broker set is frozen: {frozen.why}{remark}"), changed)


@singledispatch
def _decide(request: Request, case: _Case) -> Decision | Ask:
    raise AssertionError(f"no decision for {request}")


def _refuse(code: int, remark: str) -> Decision:
    return Decision(Answer(code, remark))


# ---- registration of members


@_decide.register
def _(request: GetNextBrokerId, case: _Case) -> Decision:
    stored = case.stored
    return Decision(Answer(next_broker_id=_next_id(stored, case)))


@_decide.register
def _(request: ApplyBrokerId, case: _Case) -> Decision:
    stored, broker_id = case.stored, request.broker_id
    if stored is not None and stored.cluster != request.cluster:
        remark = f"Broker-set: {request.name} belongs to cluster {stored.cluster}, not {request.cluster}"
        return _refuse(Code.CONTROLLER_BROKER_ID_INVALID, remark)
    holder = stored.member(broker_id) if stored is not None else None
    if holder is not None:
        if holder.register_check_code == request.check_code:
            return Decision(Answer())
        remark = f"Fail to apply brokerId: {broker_id} in broker-set: {request.name}"
        return _refuse(Code.CONTROLLER_BROKER_ID_INVALID, remark)
    frozen = case.frozen()
    if stored is None and not frozen and broker_id != FIRST_BROKER_ID:
        remark = (
            f"Broker-set: {request.name} hasn't been registered in controller, "
            f"but broker try to apply brokerId: {broker_id}"
        )
        return _refuse(Code.CONTROLLER_BROKER_ID_INVALID, remark)
    if not FIRST_BROKER_ID <= broker_id <= HIGHEST_BROKER_ID:
        return _refuse(Code.CONTROLLER_BROKER_ID_INVALID, f"brokerId: {broker_id} is not an id of a broker")
    joined = stored or BrokerSet(cluster=request.cluster, name=request.name)
    if len(joined.members) >= case.rules.max_members:
        remark = f"broker-set: {request.name} has {len(joined.members)} members, more are refused"
        return _refuse(Code.CONTROLLER_BROKER_ID_INVALID, remark)
    newcomer = Member(id=broker_id, address=request.address, register_check_code=request.check_code)
    # Allowed also while the set is frozen or was wiped: a broker whose id was assigned again, or that the register
    # does not have, needs an id before an operator can designate it.
    now = replace(_with_member(joined, newcomer, case), frozen=frozen)
    return Decision(Answer(), now)


def _next_id(stored: BrokerSet | None, case: _Case) -> int:
    """Return an id above all reported ones: a restored register lacks the members that joined after the backup."""
    heard = (broker_id + 1 for broker_id in case.reports if broker_id <= HIGHEST_BROKER_ID)
    known = (one.next_broker_id for one in (stored, case.rules.had) if one is not None)
    return max((FIRST_BROKER_ID, *known, *heard))


class _Start(Enum):
    """Relation of a registration to the one before it."""

    SAME = auto()  # the same process, repeated
    NEXT = auto()  # the next start of the same directory, which has lost nothing
    OTHER = auto()  # any other: it may have lost acknowledged records
    SECOND = auto()  # a second process with the same history, as of a copied directory


@_decide.register
def _(request: RegisterBroker, case: _Case) -> Decision:
    stored = case.stored
    if stored is None or stored.cluster != request.cluster:
        remark = f"Broker-set: {request.name} hasn't been registered in controller"
        return _refuse(Code.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED, remark)
    member = stored.member(request.broker_id)
    if member is not None and _is_anothers(member, request):
        remark = f"BrokerId: {member.id} in broker-set: {stored.name} was taken with another check code"
        return _refuse(Code.CONTROLLER_BROKER_ID_INVALID, remark)
    if frozen := case.frozen():
        return _register_frozen(stored, request, case, frozen)
    if member is None:
        remark = f"BrokerId: {request.broker_id} hasn't been registered in broker-set: {request.name}"
        return _refuse(Code.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED, remark)
    start = _start_of(member, request, alive=case.is_alive(member))
    if start is _Start.SECOND:
        remark = (
            f"brokerId: {member.id} in broker-set: {stored.name} is another process with start {member.starts} of the "
            "same data directory: one of the two is a copy, or the other still runs"
        )
        return _refuse(Code.CONTROLLER_INVALID_REQUEST, remark)
    now = stored
    if start is _Start.OTHER:
        now = _out_of_sync(now, member.id)
    elif now.master == member.id and (start is _Start.NEXT or member.is_stock):
        # Recovery may have truncated its log, so its new records need a new epoch. An Apache broker registers at
        # its start. Under its old epoch it would report that this epoch begins at its present log end.
        now = _without_master(now)
    now = _settled(_with_member(now, _registered(member, request), case))
    answer = Answer(sync_state_set=now.sync_state_set, sync_state_set_epoch=now.sync_state_set_epoch)
    if now.master is not None and case.is_alive(now.member(now.master)):
        answer = _roles(now)
    notified = () if now.epochs == stored.epochs or now.master is None else (now.master,)
    return Decision(answer, _if_changed(stored, now), notify=notified)


def _is_anothers(member: Member, request: RegisterBroker) -> bool:
    """Whether another broker owns the id: a restored register assigned it twice. Needs the check codes of both."""
    return bool(request.check_code and member.register_check_code) and request.check_code != member.register_check_code


def _register_frozen(stored: BrokerSet, request: RegisterBroker, case: _Case, frozen: Frozen) -> Decision:
    """Store the registration in a frozen set, so that an operator can designate a restarted member. Returns no role.

    An unknown member with an id and an incarnation is added: it joined after the backup was made.
    """
    member = stored.member(request.broker_id)
    if member is None and (not request.incarnation or not FIRST_BROKER_ID <= request.broker_id <= HIGHEST_BROKER_ID):
        remark = f"BrokerId: {request.broker_id} hasn't been registered in broker-set: {request.name}"
        return _refuse(Code.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED, remark)
    known = _registered(member or Member(id=request.broker_id, address=request.address), request)
    now = replace(_with_member(stored, known, case), frozen=frozen)
    return Decision(Answer(remark=f"the broker set is frozen: {frozen.why}"), _if_changed(stored, now))


def _registered(member: Member, request: RegisterBroker) -> Member:
    return replace(
        member,
        address=request.address,
        incarnation=request.incarnation,
        starts=request.starts,
        process=request.process,
        min_in_sync_replicas=request.min_in_sync_replicas if request.incarnation else 1,
        register_check_code=member.register_check_code or request.check_code,
    )


def _with_member(stored: BrokerSet, member: Member, case: _Case) -> BrokerSet:
    others = (other for other in stored.members if other.id != member.id)
    members = tuple(sorted((*others, member), key=lambda one: one.id))
    joins = len(members) > len(stored.members)
    next_id = max(_next_id(stored, case), member.id + 1) if joins else stored.next_broker_id
    return replace(stored, members=members, next_broker_id=next_id)


def _start_of(member: Member, request: RegisterBroker, *, alive: bool) -> _Start:
    """Compare a registration with the last one. `alive`: whether the process that registered last is alive."""
    if member.incarnation != request.incarnation:
        return _Start.OTHER
    if member.starts == request.starts:
        return _Start.SAME if member.process == request.process else _Start.SECOND
    if member.starts + 1 == request.starts:
        return _Start.SECOND if alive else _Start.NEXT
    return _Start.OTHER


# ---- elections


@_decide.register
def _(request: ElectMaster, case: _Case) -> Decision | Ask:
    return _elect(request, case)


@_decide.register
def _(request: Scan, case: _Case) -> Decision | Ask:
    """Elect a master if the current one is dead, or if there is none and a member is alive."""
    stored = case.stored
    if stored is None:
        return _refuse(Code.CONTROLLER_BROKER_METADATA_NOT_EXIST, "Broker metadata is not existed")
    if frozen := case.frozen():
        return case.refuse_frozen(Code.CONTROLLER_MASTER_NOT_AVAILABLE, frozen)
    if not stored.master_epoch or case.is_alive(stored.member(stored.master)) or not case.living(stored):
        return Decision(Answer())
    return _elect(ElectMaster(stored.name), case)


def _elect(request: ElectMaster, case: _Case) -> Decision | Ask:
    stored, asker = case.stored, request.broker_id
    by_controller = asker == BY_CONTROLLER
    no_candidate = Code.CONTROLLER_MASTER_NOT_AVAILABLE if by_controller else Code.CONTROLLER_ELECT_MASTER_FAILED
    if stored is None or (request.cluster and request.cluster != stored.cluster):
        return _refuse(Code.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED, "Broker hasn't been registered")
    designated = request.designate and not by_controller
    if not (by_controller or designated) and stored.member(asker) is None:
        remark = f"BrokerId: {asker} hasn't been registered in broker-set: {stored.name}"
        return _refuse(Code.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED, remark)
    if designated and asker not in case.living(stored):
        return _refuse(no_candidate, f"broker {asker} is designated, but it is not alive")
    if frozen := case.frozen():
        return _take_over(stored, asker, case, frozen) if designated else case.refuse_frozen(no_candidate, frozen)
    if not stored.master_epoch:
        return _elect_first(stored, asker, case, designated=designated, no_candidate=no_candidate)
    if case.is_alive(stored.member(stored.master)) and not (designated and asker != stored.master):
        remark = f"The old master {stored.master} is still alive, not need to elect new master for broker {stored.name}"
        return Decision(_roles(stored, Code.CONTROLLER_MASTER_STILL_EXIST, remark))
    if not designated and (waits := _not_reported_yet(stored, case)):
        return _refuse(no_candidate, waits)
    candidates = _candidates(stored, case)
    if designated:
        in_sync = asker in (*stored.sync_state_set, *stored.eligible)
        if not in_sync and _trusted(stored) and not _may_be_forced(stored, case):
            why = f"broker {asker} is designated, but it may lack acknowledged messages"
            if case.rules.enable_elect_unclean_master:
                stock = [member.id for member in stored.members if member.is_stock]
                why += (
                    f"; not forced while {stock} may be Apache's: clean up those that are not, or that never registered"
                )
            return _refuse(no_candidate, why)
        candidates = (asker,)
    unasked = _unasked(stored, candidates, case)
    if unasked:
        return Ask(unasked)
    winner = _best(stored, candidates, case)
    if winner is None:
        return _no_candidate(stored, case, by_controller=by_controller, code=no_candidate)
    return _elected(stored, winner, case)


def _elect_first(
    stored: BrokerSet, asker: int, case: _Case, *, designated: bool, no_candidate: ResponseCode
) -> Decision:
    """Elect the first master. Empty logs lose nothing; if a log is not empty, an operator has to choose."""
    if asker not in case.living(stored):
        return _refuse(no_candidate, "Failed to elect a new master: the first one asks for itself, and is alive")
    if not designated:
        if case.now_ms < case.rules.elects_first_from_ms:
            return _refuse(
                no_candidate,
                "no first election yet: this controller has just started, and a broker may have a longer log",
            )
        for broker_id in stored.ids:
            if broker_id not in case.reports:
                return _refuse(no_candidate, f"no first election before broker {broker_id} has reported an empty log")
        speakers = [(f"broker {broker_id}", report) for broker_id, report in sorted(case.reports.items())]
        speakers += [("a broker whose id is another's", report) for report in case.strangers]
        for who, report in speakers:
            if report.max_offset != 0:
                return _refuse(
                    no_candidate,
                    f"no first election: the log of {who} ends at {report.max_offset}; an operator has to designate "
                    "the master",
                )
    return _elected(stored, asker, case)


def _take_over(stored: BrokerSet, asker: int, case: _Case, frozen: Frozen) -> Decision:
    """End a freeze: an operator designates a member with the highest known epochs."""
    if not _knows(case.reports[asker], frozen) and not _may_be_forced(stored, case):
        knowing = sorted(broker_id for broker_id, report in case.reports.items() if _knows(report, frozen))
        behind = f"; broker {asker} is behind, designate one of {knowing}"
        if not knowing:
            behind = f"; neither broker {asker} nor any other has reported them yet: wait for the next heartbeat"
        return case.refuse_frozen(Code.CONTROLLER_ELECT_MASTER_FAILED, frozen, behind)
    above = replace(
        stored,
        frozen=None,
        next_broker_id=_next_id(stored, case),
        master=None,
        master_epoch=max(stored.master_epoch, frozen.master_epoch),
        # An election adds one to this epoch. One more shows the winner that its SyncStateSet was not known here, so
        # that it does not count as continuously in sync.
        sync_state_set_epoch=max(stored.sync_state_set_epoch, frozen.sync_state_set_epoch) + 1,
        eligible=(),
        unclean=(),
        sync_state_set=(),
    )
    return _elected(above, asker, case)


def _knows(report: Report, frozen: Frozen) -> bool:
    """Whether a member has seen the highest known epochs. An Apache broker reports only the epoch of its log."""
    if report.master_epoch == UNKNOWN:
        return report.epochs[0] >= frozen.master_epoch
    return report.epochs >= frozen.epochs


def _not_reported_yet(stored: BrokerSet, case: _Case) -> str:
    since, missing = case.rules.listening_since_ms, []
    for broker_id in {*stored.sync_state_set, *stored.eligible, *stored.unclean}:
        report = case.reports.get(broker_id)
        until_ms = case.rules.elects_from_ms if report is None else since + report.timeout_ms
        if (report is None or report.heard_ms < since) and case.now_ms < until_ms:
            missing.append(broker_id)
    return (
        f"this controller has had no heartbeat of {sorted(missing)} since its start, and waits for them"
        if missing
        else ""
    )


def _candidates(stored: BrokerSet, case: _Case) -> tuple[int, ...]:
    """Return the live members with all acknowledged records.

    If no member is known to have them, return all live members as soon as all unclean ones are alive.
    """
    in_sync = (*stored.sync_state_set, *stored.eligible)
    if in_sync:
        return tuple(sorted(case.living(stored, in_sync)))
    living = case.living(stored)
    return living if stored.unclean and set(stored.unclean) <= set(living) else ()


def _trusted(stored: BrokerSet) -> set[int]:
    """Return the members with all acknowledged records; if none is left, those that together have most of them."""
    return {*stored.sync_state_set, *stored.eligible} or set(stored.unclean)


def _may_be_forced(stored: BrokerSet, case: _Case) -> bool:
    """Whether a forced election is allowed. Apache brokers don't truncate a diverged tail, so logs would differ."""
    return case.rules.enable_elect_unclean_master and not any(member.is_stock for member in stored.members)


def _unasked(stored: BrokerSet, candidates: tuple[int, ...], case: _Case) -> tuple[int, ...]:
    """Return the candidates to ask. A single Apache candidate wins anyway; a neve broker also confirms its process."""
    if len(candidates) == 1 and stored.members[stored.ids.index(candidates[0])].is_stock:
        return ()
    return tuple(broker_id for broker_id in candidates if case.reports[broker_id].asked is None)


def _best(stored: BrokerSet, candidates: tuple[int, ...], case: _Case) -> int | None:
    ranked = []
    for broker_id in candidates:
        report = case.reports[broker_id]
        asked = report.asked or Asked(reachable=True)
        if asked.reachable:
            ranked.append((-asked.epoch, -asked.max_offset, report.priority, broker_id))
        elif broker_id in stored.unclean:
            return None  # it may be the one with the longest log
    return min(ranked)[-1] if ranked else None


def _elected(stored: BrokerSet, winner: int, case: _Case) -> Decision:
    now = _settled(
        replace(
            stored,
            master=winner,
            master_epoch=stored.master_epoch + 1,
            sync_state_set=(winner,),
            sync_state_set_epoch=stored.sync_state_set_epoch + 1,
            eligible=tuple(sorted({*stored.sync_state_set, *stored.eligible} - {winner})),
            unclean=(),
        )
    )
    return Decision(_roles(now, addresses=now.addresses()), now, notify=case.living(now))


def _no_candidate(stored: BrokerSet, case: _Case, *, by_controller: bool, code: ResponseCode) -> Decision:
    """Report that no member can be elected. The controller also clears a dead master, so that brokers ask again."""
    awaited = sorted(_trusted(stored))
    waits = f"waits for one of {awaited}"
    if not awaited:
        waits = "an operator has to designate one"
    elif not (stored.sync_state_set or stored.eligible):
        waits = f"waits for all of {awaited}, as each of them may lack acknowledged messages"
    remark = f"Failed to elect a new master for broker {stored.name}: {waits}"
    if by_controller and stored.master is not None:
        return Decision(Answer(code, remark), _without_master(stored))
    return _refuse(code, remark)


# ---- SyncStateSet


@_decide.register
def _(request: AlterSyncStateSet, case: _Case) -> Decision:
    stored, wanted = case.stored, tuple(sorted(set(request.sync_state_set)))
    if stored is None:
        return _refuse(Code.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED, "Broker metadata is not existed")
    if frozen := case.frozen():
        return case.refuse_frozen(Code.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED, frozen)
    if _is_repeated(stored, request, wanted):
        return Decision(_altered(stored))
    if wanted == stored.sync_state_set and not request.request_id:
        # A request with an id is a neve master's. The new epoch settles the outcome of its older request.
        remark = "The newSyncStateSet is equal with oldSyncStateSet, no needed to update syncStateSet"
        return _refuse(Code.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED, remark)
    rejecting = "Rejecting alter syncStateSet request because"
    if stored.master is None or stored.master != request.master:
        remark = f"{rejecting} the current leader is:{{{stored.master}}}, not {{{request.master}}}"
        return _refuse(Code.CONTROLLER_INVALID_MASTER, remark)
    if stored.master_epoch != request.master_epoch:
        remark = f"{rejecting} the current master epoch is:{{{stored.master_epoch}}}, not {{{request.master_epoch}}}"
        return _refuse(Code.CONTROLLER_FENCED_MASTER_EPOCH, remark)
    if stored.sync_state_set_epoch != request.sync_state_set_epoch:
        epoch = stored.sync_state_set_epoch
        remark = f"{rejecting} the current syncStateSet epoch is:{{{epoch}}}, not {{{request.sync_state_set_epoch}}}"
        return _refuse(Code.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH, remark)
    for broker_id in wanted:
        member = stored.member(broker_id)
        if member is None:
            return _refuse(Code.CONTROLLER_INVALID_REPLICAS, f"{rejecting} the replicas {{{broker_id}}} don't exist")
        if wanted != stored.sync_state_set and not case.is_alive(member):
            return _refuse(Code.CONTROLLER_BROKER_NOT_ALIVE, f"{rejecting} the replicas {{{broker_id}}} don't alive")
    if stored.master not in wanted:
        remark = f"{rejecting} the newSyncStateSet don't contains origin leader {{{stored.master}}}"
        return _refuse(Code.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED, remark)
    least = _least_in_sync(stored)
    if len(wanted) < min(least, len(stored.sync_state_set)):
        remark = f"{rejecting} the newSyncStateSet has {len(wanted)} members, and its master needs {least}"
        return _refuse(Code.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED, remark)
    epoch = stored.sync_state_set_epoch + 1
    now = _settled(
        replace(
            stored,
            sync_state_set=wanted,
            sync_state_set_epoch=epoch,
            eligible=tuple(broker_id for broker_id in stored.eligible if broker_id not in wanted),
            unclean=(),  # the master is alive and has all acknowledged records, so no unclean member is needed
            altered=Altered(request.request_id, epoch) if request.request_id else None,
        )
    )
    return Decision(_altered(now), now)


def _is_repeated(stored: BrokerSet, request: AlterSyncStateSet, wanted: tuple[int, ...]) -> bool:
    """Whether the request was carried out before and the set is unchanged since: only the answer was lost."""
    return (
        bool(request.request_id)
        and stored.altered == Altered(request.request_id, stored.sync_state_set_epoch)
        and (stored.master, stored.master_epoch) == (request.master, request.master_epoch)
        and stored.sync_state_set == wanted
    )


def _altered(now: BrokerSet) -> Answer:
    return Answer(sync_state_set=now.sync_state_set, sync_state_set_epoch=now.sync_state_set_epoch)


# ---- queries


@_decide.register
def _(request: GetReplicaInfo, case: _Case) -> Decision:
    if case.stored is None:
        return _refuse(Code.CONTROLLER_BROKER_METADATA_NOT_EXIST, "Broker metadata is not existed")
    return Decision(dataclasses.replace(_roles(case.stored), members=len(case.stored.members)))


@_decide.register
def _(request: GetSyncStateData, case: _Case) -> Decision:
    stored = case.stored
    if stored is None:
        return _refuse(Code.CONTROLLER_BROKER_METADATA_NOT_EXIST, "Broker metadata is not existed")
    living = case.living(stored)
    replicas = [ReplicaInfo(member.id, member.address, member.id in living) for member in stored.members]
    roles = _roles(stored)
    return Decision(
        Answer(
            master=roles.master,
            master_address=roles.master_address,
            master_epoch=roles.master_epoch,
            sync_state_set_epoch=roles.sync_state_set_epoch,
            in_sync=tuple(replica for replica in replicas if replica.id in stored.sync_state_set),
            not_in_sync=tuple(replica for replica in replicas if replica.id not in stored.sync_state_set),
        )
    )


# ---- removal of members


@_decide.register
def _(request: CleanBrokerData, case: _Case) -> Decision:
    stored = case.stored
    invalid = Code.CONTROLLER_INVALID_CLEAN_BROKER_METADATA
    ids = _ids_in(request.broker_ids)
    if ids is None:
        remark = "Please set the option <brokerControllerIdsToClean> according to the format, ids with ; between them"
        return _refuse(invalid, remark)
    if stored is None or (request.cluster and request.cluster != stored.cluster):
        return _refuse(invalid, f"Broker {request.name} is not existed,clean broker data failure.")
    if not request.clean_living:
        if not ids and stored.master is not None:  # a recorded master counts as living, as in RocketMQ
            return _refuse(invalid, f"Broker {request.name} is still alive, clean up failure")
        for broker_id in sorted(ids):
            if case.is_alive(stored.member(broker_id)):
                return _refuse(invalid, f"Broker [{request.name},  {broker_id}] is still alive, clean up failure")
    rest = tuple(member for member in stored.members if ids and member.id not in ids)
    if not rest:
        return Decision(Answer(), removed=True)
    trusted = _trusted(stored)
    if trusted and trusted <= ids and not request.clean_living:
        remark = f"only {sorted(trusted)} of {request.name} can have all acknowledged messages, clean up failure"
        return _refuse(invalid, remark)
    now = stored
    for broker_id in sorted(ids & set(stored.ids)):
        now = _out_of_sync(now, broker_id)
        now = replace(
            now,
            unclean=tuple(other for other in now.unclean if other != broker_id),
            members=tuple(member for member in now.members if member.id != broker_id),
        )
    notified = () if now.master is None or now.epochs == stored.epochs else (now.master,)
    return Decision(Answer(), _if_changed(stored, now), notify=notified)


def _ids_in(text: str) -> set[int] | None:
    parts = [part.strip() for part in text.split(";")] if text.strip() else []
    if not all(part.isdecimal() and len(part) < 20 for part in parts):
        return None
    return {int(part) for part in parts}


# ---- changes of a value


def _without_master(stored: BrokerSet) -> BrokerSet:
    return replace(stored, master=None, master_epoch=stored.master_epoch + 1)


def _out_of_sync(stored: BrokerSet, broker_id: int) -> BrokerSet:
    """Mark a member as one that may have lost acknowledged records.

    The epoch increases even if the member is in neither group. Otherwise a pending request of the master could add the
    member for records that it has lost.
    """
    if broker_id not in (*stored.sync_state_set, *stored.eligible):
        if stored.master is None:
            return stored
        return replace(stored, sync_state_set_epoch=stored.sync_state_set_epoch + 1)
    without = _without_master(stored) if stored.master == broker_id else stored
    return replace(
        without,
        sync_state_set=tuple(other for other in stored.sync_state_set if other != broker_id),
        sync_state_set_epoch=stored.sync_state_set_epoch + 1,
        eligible=tuple(other for other in stored.eligible if other != broker_id),
        unclean=tuple(sorted((*stored.unclean, broker_id))),
    )


def _least_in_sync(stored: BrokerSet) -> int:
    """Return the SyncStateSet size from which the master acknowledges; 1 if there is no master or it reports none."""
    master = stored.member(stored.master)
    return master.min_in_sync_replicas if master is not None else 1


def _settled(stored: BrokerSet) -> BrokerSet:
    """Clear `eligible` if the master may acknowledge with its SyncStateSet: other members may soon lack records."""
    if stored.master is None or len(stored.sync_state_set) < _least_in_sync(stored) or not stored.eligible:
        return stored
    return replace(stored, eligible=())


def _if_changed(old: BrokerSet, new: BrokerSet) -> BrokerSet | None:
    return new if new != old else None


# ---- answers


def _roles(
    stored: BrokerSet, code: ResponseCode = Code.SUCCESS, remark: str = "", addresses: Mapping[int, str] | None = None
) -> Answer:
    master = stored.member(stored.master)
    return Answer(
        code,
        remark,
        master=stored.master,
        master_address=master.address if master is not None else None,
        master_epoch=stored.master_epoch,
        sync_state_set=stored.sync_state_set,
        sync_state_set_epoch=stored.sync_state_set_epoch,
        cluster=stored.cluster,
        addresses=addresses,
    )
