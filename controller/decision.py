"""What a controller decides about one broker set: a pure function of the stored value, of what its members report, of
the request and of the time. The caller writes the new value if nobody has changed the old one, and decides anew
otherwise; it answers and notifies after that.

Alive: the member's process, as it registered last, is connected and was heard within its own time-out. What another
process says under the member's id (a copied directory, one that has not registered yet) makes nobody alive.

Who may be elected, in this order:

first      no master ever was: who asks, if the log of every member is empty, and not before everybody who lives has
           beaten: a register that was wiped knows nothing of a set, its brokers do; or whom an operator designates
present    the master is alive, and nobody else is designated: it stays
in sync    alive, in the sync state set or eligible: everything acknowledged is there. Of several the one with the
           highest (epoch of the log's end, end), as they say when asked now; then the lowest priority number
unclean    none of these is left, and each that was and came back unclean is alive: the longest log of the set
forced     an operator designates one that is alive, with enableElectUncleanMaster, and no Apache broker is a member;
           or an operator has had all of the above forgotten (CleanBrokerData) and designates one of the rest

A set is frozen when a member reports epochs above the stored ones: the register was restored from a backup or wiped,
and what it says of who is in sync is not true any more. Nothing is elected or changed until an operator designates a
member that knows the highest epochs; only who is a member is still written down. Such a register may give an id again:
the check code with which an id was taken tells whose it is, and the other one takes a new id.
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
BY_CONTROLLER = -1  # the id in an ElectMaster that no member asked for
DEFAULT_TIMEOUT_MS = 10_000
HIGHEST_BROKER_ID = 2**63 - 2
LOWEST_PRIORITY = 2**31 - 1
UNKNOWN = -1


# ---- what is given


@dataclass(frozen=True, slots=True)
class Rules:
    """What the configuration says, since when this controller listens, and what it has read before."""

    enable_elect_unclean_master: bool = False
    max_members: int = 64
    # Who has only begun to listen, or stood still, has not heard the living: it waits one time-out before it calls a
    # master dead, that of the member if it is known, else until the first of these.
    elects_from_ms: int = 0
    hears_since_ms: int = 0
    elects_first_from_ms: int = 0
    # What the register once had for the set, with higher epochs than it has now: it was set back.
    had: BrokerSet | None = None
    # What was said for the set under an id that is another's: of no member, and yet somebody knows it.
    strangers: tuple[Report, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a candidate said of its log when it was asked for this decision (GET_BROKER_EPOCH_CACHE)."""

    reachable: bool
    epoch: int = UNKNOWN
    max_offset: int = UNKNOWN


@dataclass(frozen=True, slots=True)
class Report:
    """A member's last heartbeat, and whether its connection stands. Times are monotonic milliseconds.

    `epoch` and `max_offset` are those of the log's end. `master_epoch` and `sync_state_set_epoch` are the highest pair
    that the member has seen and keeps on its disk; an Apache broker does not tell.
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
        """The highest pair that it knows of. A log's epoch alone says that there was such a master."""
        epoch = max(self.epoch, self.asked.epoch if self.asked is not None else UNKNOWN)
        if epoch > self.master_epoch:
            return epoch, UNKNOWN
        return self.master_epoch, self.sync_state_set_epoch


Reports = Mapping[int, Report]


@dataclass(frozen=True, slots=True)
class GetNextBrokerId:
    """1012: which id a new member should apply for."""

    cluster: str
    name: str


@dataclass(frozen=True, slots=True)
class ApplyBrokerId:
    """1013: take an id. The check code tells a repeated request from another broker's."""

    cluster: str
    name: str
    broker_id: int
    check_code: str  # address;millis

    @property
    def address(self) -> str:
        return self.check_code.split(";")[0]


@dataclass(frozen=True, slots=True)
class RegisterBroker:
    """1003: a member is there, at this address and with this start of its directory."""

    cluster: str
    name: str
    broker_id: int
    address: str
    incarnation: str = ""
    starts: int = 0
    process: str = ""
    min_in_sync_replicas: int = 1
    check_code: str = ""  # with which the id was taken; an Apache broker does not say


@dataclass(frozen=True, slots=True)
class ElectMaster:
    """1002: by a member for its set, by an operator who designates one, by the controller itself."""

    name: str
    broker_id: int = BY_CONTROLLER
    designate: bool = False
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class AlterSyncStateSet:
    """1001: a master grows or shrinks its sync state set."""

    name: str
    master: int
    master_epoch: int
    sync_state_set: tuple[int, ...]
    sync_state_set_epoch: int  # of the set that this one is based on
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class GetReplicaInfo:
    """1004: who is master, who is in sync."""

    name: str


@dataclass(frozen=True, slots=True)
class GetSyncStateData:
    """1006: the same for people, with who is alive."""

    name: str


@dataclass(frozen=True, slots=True)
class CleanBrokerData:
    """1011: forget members, or the whole set if none is named."""

    name: str
    broker_ids: str = ""  # 1;2
    clean_living: bool = False
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class Scan:
    """Time has passed, or a connection was closed."""

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


# ---- what comes out


@dataclass(frozen=True, slots=True)
class Replica:
    """A member as GetSyncStateData shows it."""

    id: int
    address: str
    alive: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What is told to who asked. A part that is None is not in the answer."""

    code: int = Code.SUCCESS
    remark: str = ""
    master: int | None = None
    master_address: str | None = None
    master_epoch: int | None = None
    sync_state_set: tuple[int, ...] | None = None
    sync_state_set_epoch: int | None = None
    next_broker_id: int | None = None
    cluster: str | None = None
    addresses: Mapping[int, str] | None = None  # of all members: the answer to an election has them
    members: int | None = None  # how many there are, in sync or not
    in_sync: tuple[Replica, ...] | None = None
    not_in_sync: tuple[Replica, ...] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer, and what has to be true before it is given."""

    answer: Answer
    broker_set: BrokerSet | None = None  # to be written; None: nothing changes
    removed: bool = False  # the set is to be forgotten
    notify: tuple[int, ...] = ()  # members to be told of the roles in `broker_set`


@dataclass(frozen=True, slots=True)
class Ask:
    """These have to be asked where their logs end (`Report.asked`) before the request can be decided."""

    candidates: tuple[int, ...]


def decide(
    broker_set: BrokerSet | None, reports: Reports, request: Request, now_ms: int, rules: Rules
) -> Decision | Ask:
    """What the request changes and how it is answered. `reports`: of all who speak for the set, members or not."""
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
    """The stored value and the reports, as the decisions ask for them."""

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
        """The ids, of all members or of these, that are alive."""
        wanted = broker_set.ids if ids is None else ids
        return tuple(broker_id for broker_id in wanted if self.is_alive(broker_set.member(broker_id)))

    def highest_heard(self) -> tuple[int, int]:
        everybody = (*self.reports.values(), *self.strangers)
        return max((report.epochs for report in everybody), default=(UNKNOWN, UNKNOWN))

    def frozen(self) -> Frozen | None:
        """None where the stored value is as new as anything that was ever reported."""
        known = self.stored.frozen if self.stored is not None else None
        epochs = self.stored.epochs if self.stored is not None else (0, 0)
        had = self.rules.had.epochs if self.rules.had is not None else (0, 0)
        heard = max(self.highest_heard(), had)
        if heard <= (known.epochs if known is not None else epochs):
            return known
        knowing = [broker_id for broker_id, report in self.reports.items() if report.epochs == heard]
        knows = "a broker whose id is another's knows" if had < heard else "this controller has read"
        who = f"broker {min(knowing)} knows" if knowing else knows
        why = f"{who} epochs {heard}, the register only {epochs}: it was restored or wiped"
        return Frozen(f"{why}; an operator has to designate the master", *heard)

    def refuse_frozen(self, code: int, frozen: Frozen, remark: str = "") -> Decision:
        """Refused; that the set is frozen is kept."""
        changed = None
        if self.stored is not None and self.stored.frozen != frozen:
            changed = replace(self.stored, frozen=frozen)
        return Decision(Answer(code, f"the broker set is frozen: {frozen.why}{remark}"), changed)


@singledispatch
def _decide(request: Request, case: _Case) -> Decision | Ask:
    raise AssertionError(f"no decision for {request}")


def _refuse(code: int, remark: str) -> Decision:
    return Decision(Answer(code, remark))


# ---- becoming a member


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
        return _refuse(Code.CONTROLLER_BROKER_ID_INVALID, f"brokerId: {broker_id} is no id of a broker")
    joined = stored or BrokerSet(cluster=request.cluster, name=request.name)
    if len(joined.members) >= case.rules.max_members:
        remark = f"broker-set: {request.name} has {len(joined.members)} members, more are refused"
        return _refuse(Code.CONTROLLER_BROKER_ID_INVALID, remark)
    newcomer = Member(id=broker_id, address=request.address, register_check_code=request.check_code)
    # Also while the set is frozen, and where it was wiped: whose id was given to another one needs a new one to be
    # designated under, and so does who is in no register any more.
    now = replace(_with_member(joined, newcomer, case), frozen=frozen)
    return Decision(Answer(), now)


def _next_id(stored: BrokerSet | None, case: _Case) -> int:
    """Above every id that is heard of: a register that was set back does not know who has joined since."""
    heard = (broker_id + 1 for broker_id in case.reports if broker_id <= HIGHEST_BROKER_ID)
    known = (one.next_broker_id for one in (stored, case.rules.had) if one is not None)
    return max((FIRST_BROKER_ID, *known, *heard))


class _Start(Enum):
    """What a registration is to the one before it."""

    SAME = auto()  # the same process, again
    NEXT = auto()  # the next start of the same directory, and it lost nothing
    OTHER = auto()  # nobody can tell what it still has
    SECOND = auto()  # of two directories with one history


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
        # Its log may have been cut back to what it can read: what it writes from here on needs an epoch of its own. An
        # Apache broker registers when it starts; under its old epoch it would say that this one begins at its end now.
        now = _without_master(now)
    now = _settled(_with_member(now, _registered(member, request), case))
    answer = Answer(sync_state_set=now.sync_state_set, sync_state_set_epoch=now.sync_state_set_epoch)
    if now.master is not None and case.is_alive(now.member(now.master)):
        answer = _roles(now)
    told = () if now.epochs == stored.epochs or now.master is None else (now.master,)
    return Decision(answer, _if_changed(stored, now), notify=told)


def _is_anothers(member: Member, request: RegisterBroker) -> bool:
    """A register that was set back gave the id again. Where one of the two is not told, nobody can tell."""
    return bool(request.check_code and member.register_check_code) and request.check_code != member.register_check_code


def _register_frozen(stored: BrokerSet, request: RegisterBroker, case: _Case, frozen: Frozen) -> Decision:
    """Only who it is: who has started since has to be alive for an operator to designate it. No role is told.

    Who is unknown joined after the backup was made, if it knows an id and has an incarnation.
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
    """`alive`: the process that registered before is."""
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
    """Elect where the master is dead, or where there is none and somebody could be."""
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
    nobody = Code.CONTROLLER_MASTER_NOT_AVAILABLE if by_controller else Code.CONTROLLER_ELECT_MASTER_FAILED
    if stored is None or (request.cluster and request.cluster != stored.cluster):
        return _refuse(Code.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED, "Broker hasn't been registered")
    designated = request.designate and not by_controller
    if not (by_controller or designated) and stored.member(asker) is None:
        remark = f"BrokerId: {asker} hasn't been registered in broker-set: {stored.name}"
        return _refuse(Code.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED, remark)
    if designated and asker not in case.living(stored):
        return _refuse(nobody, f"broker {asker} is designated, but it is not alive")
    if frozen := case.frozen():
        return _take_over(stored, asker, case, frozen) if designated else case.refuse_frozen(nobody, frozen)
    if not stored.master_epoch:
        return _elect_first(stored, asker, case, designated=designated, nobody=nobody)
    if case.is_alive(stored.member(stored.master)) and not (designated and asker != stored.master):
        remark = f"The old master {stored.master} is still alive, not need to elect new master for broker {stored.name}"
        return Decision(_roles(stored, Code.CONTROLLER_MASTER_STILL_EXIST, remark))
    if not designated and (waits := _not_heard_yet(stored, case)):
        return _refuse(nobody, waits)
    candidates = _candidates(stored, case)
    if designated:
        in_sync = asker in (*stored.sync_state_set, *stored.eligible)
        if not in_sync and _trusted(stored) and not _may_be_forced(stored, case):
            why = f"broker {asker} is designated, but it may lack what was acknowledged"
            if case.rules.enable_elect_unclean_master:
                stock = [member.id for member in stored.members if member.is_stock]
                why += f"; nobody is forced while {stock} may be Apache's, clean up who is none, or never registered"
            return _refuse(nobody, why)
        candidates = (asker,)
    unasked = _unasked(stored, candidates, case)
    if unasked:
        return Ask(unasked)
    winner = _best(stored, candidates, case)
    if winner is None:
        return _nobody(stored, case, by_controller=by_controller, code=nobody)
    return _elected(stored, winner, case)


def _elect_first(stored: BrokerSet, asker: int, case: _Case, *, designated: bool, nobody: ResponseCode) -> Decision:
    """There is no history to ask: empty logs can't lose anything, of others an operator says which one is the truth."""
    if asker not in case.living(stored):
        return _refuse(nobody, "Failed to elect a new master: the first one asks for itself, and is alive")
    if not designated:
        if case.now_ms < case.rules.elects_first_from_ms:
            return _refuse(nobody, "no first election yet: this controller has just begun, and a broker may know more")
        for broker_id in stored.ids:
            if broker_id not in case.reports:
                return _refuse(nobody, f"no first election before broker {broker_id} has said that its log is empty")
        speakers = [(f"broker {broker_id}", report) for broker_id, report in sorted(case.reports.items())]
        speakers += [("a broker whose id is another's", report) for report in case.strangers]
        for who, report in speakers:
            if report.max_offset != 0:
                return _refuse(
                    nobody,
                    f"no first election: the log of {who} ends at {report.max_offset}; an operator has to designate "
                    "the master",
                )
    return _elected(stored, asker, case)


def _take_over(stored: BrokerSet, asker: int, case: _Case, frozen: Frozen) -> Decision:
    """An operator ends a freeze with a member that has seen all that anybody has seen."""
    if not _knows(case.reports[asker], frozen) and not _may_be_forced(stored, case):
        knowing = sorted(broker_id for broker_id, report in case.reports.items() if _knows(report, frozen))
        behind = f"; broker {asker} is behind, ask for one of {knowing}"
        if not knowing:
            behind = f"; neither broker {asker} nor any other has said yet that it knows them: the next heartbeat tells"
        return case.refuse_frozen(Code.CONTROLLER_ELECT_MASTER_FAILED, frozen, behind)
    above = replace(
        stored,
        frozen=None,
        next_broker_id=_next_id(stored, case),
        master=None,
        master_epoch=max(stored.master_epoch, frozen.master_epoch),
        # One more than an election moves it: by that the member knows that nobody knew what it has.
        sync_state_set_epoch=max(stored.sync_state_set_epoch, frozen.sync_state_set_epoch) + 1,
        eligible=(),
        unclean=(),
        sync_state_set=(),
    )
    return _elected(above, asker, case)


def _knows(report: Report, frozen: Frozen) -> bool:
    """Whether it has seen all that anybody has. An Apache broker tells the epoch of its log, and no other."""
    if report.master_epoch == UNKNOWN:
        return report.epochs[0] >= frozen.master_epoch
    return report.epochs >= frozen.epochs


def _not_heard_yet(stored: BrokerSet, case: _Case) -> str:
    since, missing = case.rules.hears_since_ms, []
    for broker_id in {*stored.sync_state_set, *stored.eligible, *stored.unclean}:
        report = case.reports.get(broker_id)
        until_ms = case.rules.elects_from_ms if report is None else since + report.timeout_ms
        if (report is None or report.heard_ms < since) and case.now_ms < until_ms:
            missing.append(broker_id)
    return f"this controller has not heard of {sorted(missing)} since it began, and waits for them" if missing else ""


def _candidates(stored: BrokerSet, case: _Case) -> tuple[int, ...]:
    """Who is alive and has what was acknowledged, or may have it where nobody is known to."""
    in_sync = (*stored.sync_state_set, *stored.eligible)
    if in_sync:
        return tuple(sorted(case.living(stored, in_sync)))
    living = case.living(stored)
    return living if stored.unclean and set(stored.unclean) <= set(living) else ()


def _trusted(stored: BrokerSet) -> set[int]:
    """Who has what was acknowledged; where nobody is left who surely has, who of all together has most of it."""
    return {*stored.sync_state_set, *stored.eligible} or set(stored.unclean)


def _may_be_forced(stored: BrokerSet, case: _Case) -> bool:
    """Apache's brokers don't cut back what they have above an unclean election: two logs would stay different."""
    return case.rules.enable_elect_unclean_master and not any(member.is_stock for member in stored.members)


def _unasked(stored: BrokerSet, candidates: tuple[int, ...], case: _Case) -> tuple[int, ...]:
    """An only candidate wins whatever it has; but a neve broker says as well whether it is still who registered."""
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
            return None  # perhaps it is the one that has most
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


def _nobody(stored: BrokerSet, case: _Case, *, by_controller: bool, code: ResponseCode) -> Decision:
    """The controller clears a dead master: brokers see that they may ask. A broker's question changes nothing."""
    awaited = sorted(_trusted(stored))
    waits = f"waits for one of {awaited}"
    if not awaited:
        waits = "an operator has to designate one"
    elif not (stored.sync_state_set or stored.eligible):
        waits = f"waits for all of {awaited}, none of which may have all that was acknowledged"
    remark = f"Failed to elect a new master for broker {stored.name}: {waits}"
    if by_controller and stored.master is not None:
        return Decision(Answer(code, remark), _without_master(stored))
    return _refuse(code, remark)


# ---- the sync state set


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
        # With an id it is a neve master that asks: the epoch that this makes settles what became of an older request.
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
            unclean=(),  # the master lives on with all that was acknowledged: nobody has to be waited for
            altered=Altered(request.request_id, epoch) if request.request_id else None,
        )
    )
    return Decision(_altered(now), now)


def _is_repeated(stored: BrokerSet, request: AlterSyncStateSet, wanted: tuple[int, ...]) -> bool:
    """It was carried out, and nothing was changed since: only its answer got lost."""
    return (
        bool(request.request_id)
        and stored.altered == Altered(request.request_id, stored.sync_state_set_epoch)
        and (stored.master, stored.master_epoch) == (request.master, request.master_epoch)
        and stored.sync_state_set == wanted
    )


def _altered(now: BrokerSet) -> Answer:
    return Answer(sync_state_set=now.sync_state_set, sync_state_set_epoch=now.sync_state_set_epoch)


# ---- reading


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
    replicas = [Replica(member.id, member.address, member.id in living) for member in stored.members]
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


# ---- forgetting


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
        remark = f"only {sorted(trusted)} of {request.name} can have all that was acknowledged, clean up failure"
        return _refuse(invalid, remark)
    now = stored
    for broker_id in sorted(ids & set(stored.ids)):
        now = _out_of_sync(now, broker_id)
        now = replace(
            now,
            unclean=tuple(other for other in now.unclean if other != broker_id),
            members=tuple(member for member in now.members if member.id != broker_id),
        )
    told = () if now.master is None or now.epochs == stored.epochs else (now.master,)
    return Decision(Answer(), _if_changed(stored, now), notify=told)


def _ids_in(text: str) -> set[int] | None:
    parts = [part.strip() for part in text.split(";")] if text.strip() else []
    if not all(part.isdecimal() and len(part) < 20 for part in parts):
        return None
    return {int(part) for part in parts}


# ---- changes of a value


def _without_master(stored: BrokerSet) -> BrokerSet:
    return replace(stored, master=None, master_epoch=stored.master_epoch + 1)


def _out_of_sync(stored: BrokerSet, broker_id: int) -> BrokerSet:
    """It can't be trusted to have what was acknowledged.

    Where it is in neither, the epoch moves all the same: the master's change that takes it in may be on its way, for
    what it had before.
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
    """How large the sync state set has to be before its master acknowledges anything, as far as it says so."""
    master = stored.member(stored.master)
    return master.min_in_sync_replicas if master is not None else 1


def _settled(stored: BrokerSet) -> BrokerSet:
    """Where the master may acknowledge with the set that it has, who is outside may soon lack something."""
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
