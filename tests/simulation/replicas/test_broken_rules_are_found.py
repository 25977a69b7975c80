"""Each rule that guards an interleaving is broken here, one at a time, and some seeds find it.

Each world below has one wrong rule and, if the interleaving is rare, fewer kinds of faults. The first test checks that
the same seeds with the correct rules break nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from broker.ha.confirm import Confirm, ReplicationMode, SyncStateSet
from broker.ha.epochs import EpochCache
from broker.ha.member import Member, State
from broker.ha.member_events import Action, SavedMember, StopFollowing, Switchover, View
from broker.ha.member_record import MemberRecord
from broker.ha.member_rules import MemberRules
from controller.broker_set import BrokerSet
from controller.decision import AlterSyncStateSet, Answer, Ask, Asked, Decision, RegisterBroker
from neve.remoting.codes import ResponseCode
from tests.simulation.replicas.broker import SimulatedBroker
from tests.simulation.replicas.bucket import HOST as BUCKET
from tests.simulation.replicas.bucket import Entry, SharedBucket
from tests.simulation.replicas.log import Disk, Raises, Record
from tests.simulation.replicas.world import ReplicasWorld
from tests.simulation.world import BrokenInvariant

SEEDS = range(150)


class Sync(ReplicasWorld):
    """Three synchronous members that acknowledge from memory."""

    mode = ReplicationMode.SYNC
    size = 3
    from_memory = True

    def choose(self) -> None:
        super().choose()
        self.hosts = [f"b{number}" for number in range(1, self.size + 1)]
        self.configure(self.mode, from_memory=self.from_memory)


class Available(Sync):
    mode = ReplicationMode.SYNC_AVAILABLE


class LosesAnswers(Available):
    """Answers of controllers are lost or late, and masters die."""

    def faults(self) -> dict[Callable[[], None], int]:
        return {
            self._cut_answers: 6,
            self._unruly: 2,
            self._cut_link: 5,
            self._cut_off: 3,
            self._kill: 5,
            self._start_one: 10,
            self._reset_connections: 4,
            self._heal_links: 4,
        }


class LosesPower(Sync):
    """Only power cuts, of one member or of all at once."""

    def faults(self) -> dict[Callable[[], None], int]:
        return {self._power_cut_of_all: 3, self._power_cut: 4, self._start_one: 10, self._slow_disk: 2}


class Repeats(Sync):
    """One story that is repeated, with rest in between."""

    def choose(self) -> None:
        super().choose()
        self.pace = 0.3

    def notify(self, steps: int) -> None:
        self.turns.run(5.0)
        for _ in range(5):
            slaves = [broker for broker in self._up() if broker.is_attached]
            masters = [broker for broker in self._up() if broker.member.confirming is not None]
            if slaves and len(masters) == 1:
                self.befalls(masters[0], self.dice.choice(slaves))
            self.rest()

    def befalls(self, master: SimulatedBroker, slave: SimulatedBroker) -> None:
        raise NotImplementedError

    def goes_on(self, least: float, most: float) -> None:
        self.turns.run(self.dice.uniform(least, most))

    def present(self, broker: SimulatedBroker) -> SimulatedBroker:
        """Return the process that runs now in place of this one."""
        now = self.machines[broker.host].broker
        assert now is not None
        return now


class JoinsUnheard(Repeats):
    """A slave joins the in-sync replicas, but the master is not informed, stops sending to it, and dies."""

    mode = ReplicationMode.SYNC_AVAILABLE
    size = 2

    def befalls(self, master: SimulatedBroker, slave: SimulatedBroker) -> None:
        self._die(slave, power=False)
        self.turns.run(5.0)
        self._start(slave.host)
        self.goes_on(0.0, 0.6)
        self.network.cut |= {(host, master.host) for host in self.controllers}
        self.goes_on(0.0, 0.3)
        self.network.cut.add((master.host, slave.host))
        self.goes_on(0.5, 2.0)
        self._die(master, power=False)
        self.goes_on(3.0, 6.0)


def _found(world: type[ReplicasWorld], known: int) -> str:
    """Return the first broken promise, with the seed known to find it, or with any seed if histories have changed."""
    for seed in (known, *SEEDS):
        try:
            world(seed).run()
        except BrokenInvariant as violation:
            return str(violation)
    return "nothing is found"


# ---- the confirmed offset


class _CountsConfiguration(Confirm):
    """During a requested change only the current members count, and the change is dropped if its answer is late."""

    def asked(self, members: Any) -> int:
        based_on = super().asked(members)
        self._asked.clear()
        self._recount()
        return based_on


class CountsConfiguration(JoinsUnheard):
    confirm_of = _CountsConfiguration


class _Anticipates(Confirm):
    """A change takes effect when it is requested."""

    def asked(self, members: Any) -> int:
        based_on = super().asked(members)
        self._asked.clear()
        self._set = SyncStateSet(self._set.epoch, frozenset(members))
        self._recount()
        return based_on


class Anticipates(LosesAnswers):
    confirm_of = _Anticipates


class _SecondOfThree(Confirm):
    """Two of three members suffice."""

    def _advance(self) -> None:
        ends = sorted([self._own_end, *(self.end_of(member) for member in self._counted)], reverse=True)
        if not self.is_fenced and len(ends) > 1:
            self._confirm = max(self._confirm, ends[1])

    def _is_overdue(self, member: int, now: float) -> bool:
        return now - self._lacks_since(member, now) > self.rules.shrink_after


class LastsWithOne(Repeats):
    """One slave receives nothing any longer, the other one dies, then the master."""

    def befalls(self, master: SimulatedBroker, slave: SimulatedBroker) -> None:
        self.network.cut.add((master.host, slave.host))
        self.goes_on(0.5, 2.0)
        for other in self._up():
            if other is not master and other is not slave:
                self._die(other, power=False)
        self.goes_on(0.0, 1.0)
        self._die(master, power=False)
        self.goes_on(5.0, 6.0)


class SecondOfThree(LastsWithOne):
    confirm_of = _SecondOfThree


class _Remembers(Confirm):
    """A slave's report on a closed connection still counts."""

    def disconnected(self, member: int, connection: object, now: float) -> None:
        pass

    def connected(self, member: int, connection: object, now: float, *, is_learner: bool = False) -> None:
        before = self.end_of(member)
        super().connected(member, connection, now, is_learner=is_learner)
        if before >= 0:
            super().reported(member, connection, before, now)

    def reported(self, member: int, connection: object, end: int, now: float, *, synced: int = -1) -> bool:
        return super().reported(member, connection, max(end, self.end_of(member)), now, synced=synced)


class LosesItsTail(Repeats):
    """A slave with a slow disk loses its power, and its master dies before it has caught up."""

    size = 2

    def befalls(self, master: SimulatedBroker, slave: SimulatedBroker) -> None:
        self._slow[slave.host] = 5.0
        self.goes_on(1.0, 4.0)
        self._die(slave, power=True)
        self.goes_on(0.0, 1.0)
        self._start(slave.host)
        self.goes_on(0.1, 6.0)
        self._die(master, power=False)
        self.goes_on(0.1, 6.0)


class Remembers(LosesItsTail):
    confirm_of = _Remembers


class _ShrinksBelow(Confirm):
    """`sync` shrinks to the master alone, which acknowledges."""

    @property
    def _least(self) -> int:
        return 1

    def _has_enough(self) -> bool:
        return True


class ShrinksBelow(Sync):
    confirm_of = _ShrinksBelow

    def registration(self, life: Any, host: str) -> RegisterBroker:
        return dataclasses.replace(super().registration(life, host), min_in_sync_replicas=1)


class _ConfirmsItsOwn(Member):
    """A slave exposes all of its log to readers."""

    @property
    def confirm(self) -> int:
        return super().confirm if self.confirming is not None else self._end


class ShowsAll(Sync):
    member_class = _ConfirmsItsOwn


# ---- incarnations


class KeepsItsIncarnation(LosesItsTail):
    """A member that lost messages it acknowledged from memory keeps its identity."""

    def begin_life(self, saved: SavedMember, new_incarnation: str, rules: MemberRules, is_copy: bool) -> SavedMember:
        return super().begin_life(msgspec.structs.replace(saved, clean=True), new_incarnation, rules, is_copy)


class _NeverRegistersAgain(Member):
    def happens(self, event: Any, now: float) -> list[Action]:
        if self.state not in (State.NAMELESS, State.UNREGISTERED):
            self._requests.registered(now)
        return super().happens(event, now)


class NeverRegistersAgain(ReplicasWorld):
    """A late registration of a former life remains valid."""

    member_class = _NeverRegistersAgain

    def faults(self) -> dict[Callable[[], None], int]:
        return {self._stop: 4, self._kill: 2, self._start_one: 6, self._unruly: 4, self._heal_links: 2}


# ---- roles and logs


class _KeepsFollowing(Member):
    """A member that becomes master keeps its connection to the former master."""

    def happens(self, event: Any, now: float) -> list[Action]:
        actions = super().happens(event, now)
        if any(type(action).__name__ == "BeginEpoch" for action in actions):
            return [action for action in actions if not isinstance(action, StopFollowing)]
        return actions


class KeepsFollowing(Sync):
    member_class = _KeepsFollowing


class CountsQueuesByConfirm(Sync):
    """The next offset of a queue follows the confirmed offset instead of the log end."""

    def next_queue_offset(self, broker: SimulatedBroker, queue: int) -> int:
        return sum(end <= broker.member.confirm for _, end in broker.log.queues[queue])


class _KeepsTheFormerEpoch(EpochCache):
    """An epoch with the same start as the last one is rejected: the master continues under the former epoch."""

    def assign(self, epoch: int, start: int) -> bool:
        return False if len(self) and start == self.last_start else super().assign(epoch, start)


class ElectsInSilence(Repeats):
    """Two elections without a write in between, where the first of the two masters alone has some bytes."""

    says_settled = False  # That is a write.

    def befalls(self, master: SimulatedBroker, slave: SimulatedBroker) -> None:
        self._quiet()
        self.turns.run(2.0)
        master.happens(Switchover(slave.member.broker_id))
        self.goes_on(1.0, 2.0)
        others = [host for host in (*self.hosts, *self.controllers) if host != slave.host]
        self.network.cut |= {(slave.host, other) for other in others} | {(other, slave.host) for other in others}
        self._quiet()
        self.goes_on(6.0, 9.0)
        self.network.heal()


class KeepsTheFormerEpoch(ElectsInSilence):
    def new_disk(self) -> Disk:
        return Disk(epochs=_KeepsTheFormerEpoch())

    def truncation_point(self, *logs: Any, **others: Any) -> int | None:
        return super().truncation_point(*logs, **{**others, "followed_epoch": others["master_epoch"]})


class KeepsEmptyEpochs(ReplicasWorld):
    """An epoch without a byte is kept if nothing is truncated."""

    def drop_epochs(self, disk: Disk, point: int) -> None:
        pass


class ReconnectsSlowly(Repeats):
    """A slave loses its connection, and its master dies before the slave has caught up."""

    mode = ReplicationMode.SYNC_AVAILABLE
    size = 2
    send_every = 0.1

    def befalls(self, master: SimulatedBroker, slave: SimulatedBroker) -> None:
        slave.lose_upstream()
        self.goes_on(0.2, 0.8)
        self._die(master, power=False)
        self.goes_on(3.0, 6.0)


class CutsToItsConfirm(ReconnectsSlowly):
    """A slave truncates to its own confirmed offset, which is lower than what it has acknowledged."""

    def truncation_point(self, *logs: Any, **others: Any) -> int | None:
        point = super().truncation_point(*logs, **others)
        return None if point is None else min(point, others["last_confirm"])


# ---- decisions of a controller


def _with(decided: Decision | Ask, **changes: Any) -> Decision | Ask:
    if isinstance(decided, Ask) or decided.broker_set is None:
        return decided
    return dataclasses.replace(decided, broker_set=msgspec.structs.replace(decided.broker_set, **changes))


class NobodyIsUnclean(LosesPower):
    """A member that returns without acknowledged messages keeps its eligibility."""

    def decide(self, value: BrokerSet | None, reports: Any, request: Any, now_ms: int, rules: Any) -> Any:
        if isinstance(request, RegisterBroker) and value is not None:
            before = value.member(request.broker_id)
            if before is not None and before.incarnation:
                renamed = msgspec.structs.replace(before, incarnation=request.incarnation)
                members = tuple(renamed if member is before else member for member in value.members)
                value = msgspec.structs.replace(value, members=members)
        return super().decide(value, reports, request, now_ms, rules)


class ElectsTheFirstThatIsBack(LosesPower):
    """All members return unclean, and the first one becomes master."""

    def decide(self, value: BrokerSet | None, reports: Any, request: Any, now_ms: int, rules: Any) -> Any:
        if value is not None and len(value.unclean) > 1 and not (value.sync_state_set or value.eligible):
            living = tuple(
                broker_id
                for broker_id in value.unclean
                if broker_id in reports
                and (member := value.member(broker_id)) is not None
                and reports[broker_id].process == member.process
            )
            value = msgspec.structs.replace(value, unclean=living[:1])
        return super().decide(value, reports, request, now_ms, rules)


class EligibleForEver(Available):
    """A former in-sync replica stays eligible for ever."""

    def decide(self, value: BrokerSet | None, reports: Any, request: Any, now_ms: int, rules: Any) -> Any:
        decided = super().decide(value, reports, request, now_ms, rules)
        if value is None or isinstance(decided, Ask) or decided.broker_set is None:
            return decided
        after = decided.broker_set
        once = {*value.eligible, *value.sync_state_set} - {*after.sync_state_set, *after.unclean}
        return _with(decided, eligible=tuple(sorted(once)))


class GoesAsItJoins(Repeats):
    """A slave returns, the request to join it is lost, and it disappears for good: the others must continue."""

    def befalls(self, master: SimulatedBroker, slave: SimulatedBroker) -> None:
        self._die(slave, power=False)
        self.turns.run(5.0)
        self._start(slave.host)
        self.network.cut |= {(master.host, host) for host in self.controllers}
        confirming = master.member.confirming
        for _ in range(2000):
            if confirming is None or confirming.is_altering:
                break
            self.turns.run(0.002)
        self.goes_on(0.1, 1.0)
        self._die(self.present(slave), power=False)
        self.turns.run(1.0)
        self.network.heal()
        self._settle(self.turns.now + 1.0, [host for host in self.hosts if host != slave.host])


class NeverSettles(GoesAsItJoins):
    """The current set is not a change, even for a master that does not know the outcome of its last one."""

    def decide(self, value: BrokerSet | None, reports: Any, request: Any, now_ms: int, rules: Any) -> Any:
        if isinstance(request, AlterSyncStateSet):
            request = dataclasses.replace(request, request_id="")
        return super().decide(value, reports, request, now_ms, rules)


class ElectsByHeartbeats(LosesPower):
    """Candidates are not asked: their heartbeats of a second ago count, also those of members that returned unclean."""

    def decide(self, value: BrokerSet | None, reports: Any, request: Any, now_ms: int, rules: Any) -> Any:
        told = {
            broker_id: dataclasses.replace(report, asked=Asked(True, report.epoch, 0))
            for broker_id, report in reports.items()
        }
        return super().decide(value, told, request, now_ms, rules)


class ForgetsTheRegister(Sync):
    """The register is rolled back repeatedly, and members die."""

    def faults(self) -> dict[Callable[[], None], int]:
        return {
            self._set_register_back: 6,
            self._kill: 5,
            self._power_cut: 2,
            self._start_one: 8,
            self._cut_off: 3,
            self._heal_links: 4,
            self._lose_disk: 2,
        }


class TrustsARestoredRegister(ForgetsTheRegister):
    """The epochs that members know are ignored."""

    def decide(self, value: BrokerSet | None, reports: Any, request: Any, now_ms: int, rules: Any) -> Any:
        blind = {
            broker_id: dataclasses.replace(report, master_epoch=-1, sync_state_set_epoch=-1, epoch=-1)
            for broker_id, report in reports.items()
        }
        return super().decide(value, blind, request, now_ms, rules)


class RegistersNobodyWhileFrozen(ForgetsTheRegister):
    """A member that starts while the set is frozen is not registered, so an operator cannot designate it."""

    def decide(self, value: BrokerSet | None, reports: Any, request: Any, now_ms: int, rules: Any) -> Any:
        if isinstance(request, RegisterBroker) and value is not None and value.frozen is not None:
            return Decision(Answer(ResponseCode.CONTROLLER_INVALID_REQUEST))
        return super().decide(value, reports, request, now_ms, rules)


class RestoresDirectories(Available):
    """Directories are restored from copies made while they were in use; acknowledged messages are on disks."""

    from_memory = False

    def faults(self) -> dict[Callable[[], None], int]:
        return {
            self._copy_directory: 5,
            self._kill: 6,
            self._restore_directory: 6,
            self._start_one: 6,
        }

    def _is_spare(self, host: str) -> bool:
        return any(machine.host != host for machine in self.trusted())


class TakesACopyForTheOriginal(RestoresDirectories):
    """A directory restored from a copy keeps its identity."""

    def begin_life(self, saved: SavedMember, new_incarnation: str, rules: MemberRules, is_copy: bool) -> SavedMember:
        return super().begin_life(saved, new_incarnation, rules, False)


# ---- the archive


class SyncsSlowly(LosesPower):
    """Messages acknowledged from memory are synced seconds later."""

    def flush_time(self, host: str) -> float:
        return super().flush_time(host) + 3.0


class ArchivesConfirmed(SyncsSlowly):
    """A round archives messages acknowledged from memory; then all members lose their power."""

    def archivable(self, broker: SimulatedBroker) -> int:
        return broker.member.confirm


class LosesArchived(Repeats):
    """A master that runs alone archives its messages, and is lost with its disk.

    An operator designates a member that lacks them while the bucket is unreachable. That member adds another one, and
    dies before the bucket is reachable, or soon after.
    """

    mode = ReplicationMode.SYNC_AVAILABLE

    def befalls(self, master: SimulatedBroker, slave: SimulatedBroker) -> None:
        others = [broker.host for broker in self._up() if broker is not master]
        for host in others:
            broker = self.machines[host].broker
            assert broker is not None
            self._die(broker, power=False)
        self.goes_on(6.0, 8.0)
        for producer in self.producers:
            producer.is_quiet = self.dice.random() < 0.5
        self._die(master, power=False)
        self._new_disk_in(master.host, self.new_disk())
        away = {pair for host in others for pair in ((BUCKET, host), (host, BUCKET))}
        self.network.cut |= away
        for host in others:
            self._start(host)
        elected = self._elected(others)
        if elected is None:
            return
        self.goes_on(0.5, 6.0)
        if self.dice.random() < 0.6:
            self.network.cut -= away
            self.goes_on(0.1, 2.0)
            self.settled(others)
        self._die(elected, power=self.dice.random() < 0.3)
        self.goes_on(1.0, 6.0)
        self.network.cut -= away
        self.goes_on(1.0, 6.0)

    def settled(self, others: list[str]) -> None:
        """Act once the bucket is reachable again; the default is to do nothing."""

    def _elected(self, hosts: list[str]) -> SimulatedBroker | None:
        for _ in range(40):
            self.turns.run(0.5)
            self._operator()
            for host in hosts:
                broker = self.machines[host].broker
                if broker is not None and broker.member.confirming is not None:
                    return broker
        return None


class LosesArchivedToo(LosesArchived):
    mode = ReplicationMode.ASYNC


class RestartsFollowers(LosesArchived):
    """A slave dies after the queues are raised, and returns before its master dies; no messages are sent."""

    def settled(self, others: list[str]) -> None:
        for producer in self.producers:
            producer.is_quiet = True
        self.goes_on(3.0, 6.0)
        for host in others:
            broker = self.machines[host].broker
            if broker is not None and broker.is_attached:
                self._die(broker, power=self.dice.random() < 0.3)
                self.goes_on(0.1, 1.0)
                self._start(host)
        self.goes_on(6.0, 9.0)


class _TrustsItsMaster(MemberRecord):
    def take_view(self, view: View) -> None:
        self.saved = msgspec.structs.replace(self.saved, settled_in=view.master_epoch)
        super().take_view(view)


class _TrustingMember(Member):
    """An in-sync replica counts as having all archived messages."""

    def begin(self, saved: SavedMember, check_code: str) -> None:
        super().begin(saved, check_code)
        self.record = _TrustsItsMaster(self.record.saved, self.record.process)


class TrustsItsMaster(LosesArchived):
    member_class = _TrustingMember


class RaisesInItsOwnFilesAlone(LosesArchived):
    """The log has no record of the raise for slaves, but they learn that the master has settled."""

    def raised_by(self, record: Record) -> tuple[int, ...]:
        return ()


class _KeepsNoRaise(Raises):
    """A slave ignores the raises recorded in its log."""

    def resume_log(self, ends: tuple[int, ...], record_end: int | None = None) -> None:
        super().resume_log(ends)


class NotesNoRaise(RestartsFollowers):
    def new_disk(self) -> Disk:
        return Disk(raises=_KeepsNoRaise())


class _Careless(SharedBucket):
    """Appends do not compare."""

    def append(self, index: int, entry: Entry) -> bool:
        return super().append(len(self.entries), entry)


class ArchivesWithoutCompare(ReplicasWorld):
    """Answers of the bucket are late: two masters, or two rounds of one master, append."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.bucket = _Careless(self.turns)
        self.network.hosts[self.bucket.host] = self.bucket

    def faults(self) -> dict[Callable[[], None], int]:
        return {self._unruly: 6, self._freeze: 3, self._hand_over: 3, self._cut_controllers: 2, self._heal_links: 1}


# ---- tests


ANY = "kept|once|order|one|rest|groups"
RIGHT = (
    LastsWithOne,
    JoinsUnheard,
    LosesItsTail,
    GoesAsItJoins,
    ReconnectsSlowly,
    ElectsInSilence,
    LosesAnswers,
    LosesPower,
    ForgetsTheRegister,
    RestoresDirectories,
    SyncsSlowly,
    LosesArchived,
    LosesArchivedToo,
    RestartsFollowers,
)


@pytest.mark.parametrize("world", RIGHT)
def test_worlds_with_correct_rules_break_no_promise(world: type[ReplicasWorld]) -> None:
    for seed in range(10):
        world(seed).run()


@pytest.mark.parametrize(
    ("world", "promise", "known"),
    [
        (CountsConfiguration, ANY, 0),
        (Anticipates, ANY, 0),
        (SecondOfThree, ANY, 0),
        (Remembers, ANY, 6),
        (ShrinksBelow, "copies", 0),
        (ShowsAll, ANY, 2),
        (KeepsItsIncarnation, ANY, 0),
        (NeverRegistersAgain, "rest", 1),
        (KeepsFollowing, ANY, 52),
        (CountsQueuesByConfirm, ANY, 1),
        (KeepsTheFormerEpoch, ANY, 0),
        (KeepsEmptyEpochs, "rest", 303),
        (CutsToItsConfirm, ANY, 4),
        (NobodyIsUnclean, ANY, 0),
        (ElectsTheFirstThatIsBack, ANY, 15),
        (EligibleForEver, ANY, 2),
        (NeverSettles, "rest", 0),
        (ElectsByHeartbeats, ANY, 0),
        (TrustsARestoredRegister, ANY, 0),
        (RegistersNobodyWhileFrozen, "rest", 1),
        (TakesACopyForTheOriginal, ANY, 1),
        (ArchivesConfirmed, "archive", 0),
        (ArchivesWithoutCompare, "archive", 0),
        (TrustsItsMaster, "archive", 0),
        (RaisesInItsOwnFilesAlone, "archive", 0),
        (NotesNoRaise, "archive", 0),
    ],
)
def test_simulation_finds_a_broken_rule(world: type[ReplicasWorld], promise: str, known: int) -> None:
    assert re.search(rf"members\): ({promise}): ", _found(world, known))
