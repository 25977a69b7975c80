"""One seed is one history of a broker set, its controllers, their register, its clients, and their faults."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from broker.ha import epochs, member_record
from broker.ha.confirm import Confirm, ConfirmRules, ReplicationMode
from broker.ha.member import Member, State
from broker.ha.member_events import Alter, Life, SavedMember, Switchover
from broker.ha.member_rules import MemberRules
from controller import decision
from controller.broker_set import BrokerSet
from tests.simulation.replicas.broker import SimulatedBroker
from tests.simulation.replicas.bucket import HOST as BUCKET
from tests.simulation.replicas.bucket import SharedBucket
from tests.simulation.replicas.clients import Reader, SimulatedProducer
from tests.simulation.replicas.controllers import NAME, Controller
from tests.simulation.replicas.log import Disk, Record
from tests.simulation.replicas.machines import Network, Turns
from tests.simulation.replicas.promises import Promises
from tests.simulation.replicas.register import HOST as REGISTER
from tests.simulation.replicas.register import Register
from tests.simulation.world import BrokenInvariant

CONTROLLER_TIMEOUT_MS = 4000
COPY = "x1"
REST = 30.0
TOLD_STEPS = 70


@dataclass
class Machine:
    """A machine on which a member runs, or could run."""

    host: str
    disk: Disk
    broker: SimulatedBroker | None = None

    @property
    def is_up(self) -> bool:
        return self.broker is not None and self.broker.is_alive


class ReplicasWorld:
    """A world with the real rules; a test that breaks one overrides it."""

    send_every, read_every = 0.25, 0.4
    steps = 30
    says_settled = True  # Masters record it for slaves; otherwise the log has only messages.

    def __init__(self, seed: int) -> None:
        self.seed, self.dice = seed, random.Random(seed)
        self.history: list[str] = []
        self.counts: Counter[str] = Counter()
        self.turns = Turns()
        self.network = Network(self.turns, self.dice)
        self._number = 0
        self._slow: dict[str, float] = {}
        self._copies: list[tuple[str, Disk]] = []  # Data directories and their origin.
        self.pace = self.dice.choice((0.0, 0.0, 0.0, 0.1, 0.4))  # Seconds between two frames to a slave.
        self.choose()
        self.promises = Promises(self)
        self.register = Register(self.turns)
        self.network.hosts[REGISTER] = self.register
        self.bucket = SharedBucket(self.turns)
        self.network.hosts[BUCKET] = self.bucket
        self.controllers: dict[str, Controller] = {}
        for number in range(1, self.dice.choice((1, 2, 3)) + 1):
            self._start_controller(f"c{number}")
        self.machines = {host: Machine(host, self.new_disk()) for host in self.hosts}
        for host in self.hosts:
            self._start(host)
        self.producers = [SimulatedProducer(self, f"p{number}") for number in (1, 2)]
        self.readers = [Reader(self, "r1")]

    def choose(self) -> None:
        """Choose the size and mode of the set."""
        dice = self.dice
        size = dice.choice((2, 3, 3, 3))
        self.hosts = [f"b{number}" for number in range(1, size + 1)]
        mode = dice.choice(
            (ReplicationMode.SYNC, ReplicationMode.SYNC, ReplicationMode.SYNC_AVAILABLE, ReplicationMode.ASYNC)
        )
        self.configure(mode, from_memory=dice.random() < 0.7)

    def configure(self, mode: ReplicationMode, *, from_memory: bool) -> None:
        self.confirm_rules = ConfirmRules(mode, 2 if mode is ReplicationMode.SYNC else 1)
        self.member_rules = MemberRules(confirm=self.confirm_rules, acknowledges_from_memory=from_memory)

    @property
    def waits(self) -> bool:
        return self.confirm_rules.waits

    # ---- rules

    def decide(self, value: BrokerSet | None, reports: Any, request: Any, now_ms: int, rules: Any) -> Any:
        return decision.decide(value, reports, request, now_ms, rules)

    confirm_of: Callable[..., Confirm] = Confirm
    member_class: type[Member] = Member

    def member_of(self, rules: MemberRules, **others: Any) -> Member:
        return self.member_class(rules, confirm_of=type(self).confirm_of, **others)

    def begin_life(self, saved: SavedMember, new_incarnation: str, rules: MemberRules, is_copy: bool) -> SavedMember:
        return member_record.begin_life(saved, new_incarnation, rules, is_copy=is_copy)

    def truncation_point(self, *logs: Any, **others: Any) -> int | None:
        return epochs.truncation_point(*logs, **others)

    def new_disk(self) -> Disk:
        return Disk()

    def drop_epochs(self, disk: Disk, point: int) -> None:
        """Drop epochs even if nothing is truncated: an own epoch without a byte is unknown to the master."""
        disk.epochs.truncate(point)

    def archivable(self, broker: SimulatedBroker) -> int:
        """Return up to where a round of this master archives."""
        confirming = broker.member.confirming
        assert confirming is not None
        return confirming.archivable(broker.log.synced)

    def next_queue_offset(self, broker: SimulatedBroker, queue: int) -> int:
        return max(len(broker.log.queues[queue]), broker.disk.raises.goes_on[queue])

    def raised_by(self, record: Record) -> tuple[int, ...]:
        """Return the queues that a slave raises at this record; most records raise none."""
        return record.raises

    def registration(self, life: Life, host: str) -> decision.RegisterBroker:
        return decision.RegisterBroker(
            "cluster",
            NAME,
            life.broker_id,
            host,
            life.incarnation,
            life.starts,
            life.process,
            self.confirm_rules.min_in_sync,
        )

    def alteration(self, alter: Alter, master: int) -> decision.AlterSyncStateSet:
        return decision.AlterSyncStateSet(
            NAME,
            master,
            alter.master_epoch,
            alter.members,
            alter.sync_state_set_epoch,
            alter.request_id,
        )

    # ---- requests of the other parts

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def note(self, text: str) -> None:
        self.history.append(f"{self.turns.now:7.3f} {text}")

    def flush_time(self, host: str) -> float:
        return self.dice.uniform(0.002, 0.03) + self._slow.get(host, 0.0)

    def trusted(self) -> list[Machine]:
        """Return the members that have all acknowledged messages according to the register."""
        values = [value for value in (*self.register.history, self.register.value) if value is not None]
        if not values:
            return []
        value = max(values, key=lambda one: one.epochs)
        ids = {*value.sync_state_set, *value.eligible}
        addresses = {one.address for one in value.members if one.id in ids}
        return [machine for machine in self.machines.values() if machine.host in addresses]

    # ---- the whole history

    def run(self, steps: int | None = None) -> None:
        """Play the whole history; raise Violation."""
        try:
            self.notify(self.steps if steps is None else steps)
        except BrokenInvariant as violation:
            raise BrokenInvariant(self._told(str(violation))) from None
        except Exception as error:
            raise BrokenInvariant(self._told(f"{type(error).__name__}: {error}")) from error

    def notify(self, steps: int) -> None:
        """Inject one fault after another."""
        self.turns.run(3.0)
        for _ in range(steps):
            self._step()
            self.turns.run(self.dice.choice((0.05, 0.3, 0.3, 1.0, 1.0, 3.0, 6.0)))
            if self.dice.random() < 0.03:
                self.rest()
        self.rest()
        self.with_one_less()

    def _told(self, what: str) -> str:
        what_is_acknowledged = "memory" if self.member_rules.acknowledges_from_memory else "disk"
        mode = f"{self.confirm_rules.replication.value} {what_is_acknowledged}"
        told = "\n  ".join(self.history[-TOLD_STEPS:])
        return f"seed {self.seed} ({mode}, {len(self.hosts)} members): {what}\nthe last steps:\n  {told}"

    def _step(self) -> None:
        faults = self.faults()
        fault = self.dice.choices(list(faults), list(faults.values()))[0]
        self.counts[fault.__name__.strip("_")] += 1
        fault()

    def faults(self) -> dict[Callable[[], None], int]:
        """Return the possible faults with their relative frequency."""
        return {
            self._kill: 5,
            self._power_cut: 4,
            self._power_cut_of_all: 1,
            self._start_one: 10,
            self._stop: 2,
            self._freeze: 4,
            self._cut_link: 6,
            self._cut_off: 3,
            self._cut_controllers: 3,
            self._cut_answers: 3,
            self._cut_register: 2,
            self._cut_bucket: 2,
            self._heal_links: 6,
            self._unruly: 2,
            self._restart_controller: 2,
            self._slow_disk: 2,
            self._reset_connections: 3,
            self._hand_over: 3,
            self._quiet: 3,
            self._copy_directory: 2,
            self._restore_directory: 1,
            self._run_copy: 1,
            self._lose_disk: 1,
            self._set_register_back: 1,
        }

    # -- machines

    def _start(self, host: str, *, is_copy: bool = False) -> None:
        machine = self.machines[host]
        assert not machine.is_up
        machine.broker = SimulatedBroker(self, host, machine.disk, is_copy=is_copy)
        self.network.hosts[host] = machine.broker

    def _up(self) -> list[SimulatedBroker]:
        return [machine.broker for machine in self.machines.values() if machine.broker is not None and machine.is_up]

    def _some_up(self) -> SimulatedBroker | None:
        """Return a running member; the master is twice as likely."""
        up = self._up()
        leading = [broker for broker in up if broker.member.confirming is not None]
        return self.dice.choice(up + leading) if up else None

    def _die(self, broker: SimulatedBroker, *, power: bool) -> None:
        broker.die(tells=not power)
        if power:
            self.promises.lost(broker.host, broker.log.lose_unsynced(self.dice))
            return
        process, broker_id = broker.process, broker.member.broker_id
        for host in self.controllers:
            self.network.post(broker, host, lambda controller: controller.closed(broker_id, process))

    def _kill(self) -> None:
        broker = self._some_up()
        if broker is not None:
            self.note(f"kill {broker.host}")
            self._die(broker, power=False)

    def _power_cut(self) -> None:
        broker = self._some_up()
        if broker is not None:
            self._die(broker, power=True)
            self.note(f"power cut of {broker.host}: ends at {broker.log.end}")

    def _power_cut_of_all(self) -> None:
        for broker in self._up():
            self._die(broker, power=True)
            self.note(f"power cut of all: {broker.host} ends at {broker.log.end}")

    def _stop(self) -> None:
        """Stop cleanly: all is synced, and marked as clean."""
        broker = self._some_up()
        if broker is None or broker.is_frozen or broker._is_busy:
            return
        self.note(f"stop {broker.host}")
        broker.log.cut_torn_tail()
        broker.log.synced = broker.log.end
        broker.disk.saved = broker.member.end_life()
        self._die(broker, power=False)

    def _start_one(self) -> None:
        down = [machine.host for machine in self.machines.values() if not machine.is_up]
        if down:
            host = self.dice.choice(down)
            self.note(f"start {host}")
            self._start(host)

    def _freeze(self) -> None:
        broker = self._some_up()
        if broker is None or broker.is_frozen:
            return
        seconds = self.dice.choice((0.5, 2.0, 6.0, 12.0))
        self.note(f"freeze {broker.host} for {seconds} s")
        broker.freeze()

        def wake() -> None:
            if broker.is_alive and broker.is_frozen:
                self.note(f"wake {broker.host}")
                broker.wake()

        self.turns.after(seconds, wake)

    def _slow_disk(self) -> None:
        host = self.dice.choice(list(self.machines))
        seconds = self.dice.choice((0.1, 1.0, 4.0))
        self.note(f"the disk of {host} takes {seconds} s")
        self._slow[host] = seconds
        self.turns.after(self.dice.uniform(1, 8), lambda: self._slow.update({host: 0.0}))

    # -- directories

    def _copy_directory(self) -> None:
        host = self.dice.choice(self.hosts)
        self.note(f"the directory of {host} is copied")
        self._copies = [*self._copies[-3:], (host, self.machines[host].disk.copied())]

    def _restore_directory(self) -> None:
        """Replace a directory with a copy."""
        if not self._register_is_true():
            return
        host, disk = self.dice.choice(self._copies or [("", Disk())])
        if host and not self.machines[host].is_up and self._is_spare(host):
            self._new_disk_in(host, disk.copied())
            self.note(f"{host} is restored from a copy: ends at {disk.log.end}")
            self._start(host, is_copy=True)

    def _run_copy(self) -> None:
        """Run a copy on another machine as an additional member, whether or not the original runs."""
        host, disk = self.dice.choice(self._copies or [("", Disk())])
        if not host or COPY in self.machines or not disk.saved.broker_id:
            return
        self.note(f"a copy of {host} runs as {COPY}")
        self.machines[COPY] = Machine(COPY, disk.copied())
        self._start(COPY, is_copy=True)

    def _lose_disk(self) -> None:
        """Restart a stopped machine with an empty disk and a new id. Other members must have its messages."""
        down = [host for host in self.hosts if not self.machines[host].is_up]
        host = self.dice.choice(down or [""])
        if host and self._is_spare(host) and self._register_is_true():
            self.note(f"{host} has a new disk")
            self._new_disk_in(host, self.new_disk())

    def _is_spare(self, host: str) -> bool:
        """Return whether enough other members have all acknowledged messages to continue."""
        others = [machine for machine in self.trusted() if machine.host != host and machine.is_up]
        return len(others) >= self.confirm_rules.min_in_sync

    def _register_is_true(self) -> bool:
        """Return whether the register is not rolled back; otherwise only this member may have newer information."""
        value = self.register.value
        return value is not None and value.frozen is None

    def _new_disk_in(self, host: str, disk: Disk) -> None:
        machine = self.machines[host]
        there = {*disk.log.records, *disk.diverged}
        before = [*machine.disk.log.records, *machine.disk.diverged]
        machine.disk = disk
        self.promises.lost(host, [record for record in before if record not in there], with_disk=True)

    # -- links

    def _cut_for_a_while(self, links: set[tuple[str, str]]) -> None:
        self.note("cut " + ", ".join(f"{source}>{target}" for source, target in sorted(links)))
        self.network.cut |= links
        if self.dice.random() < 0.5:
            self.turns.after(self.dice.choice((1.0, 4.0, 9.0)), lambda: self.network.cut.difference_update(links))

    def _cut_link(self) -> None:
        if len(self.machines) < 2:
            return
        one, other = self.dice.sample(list(self.machines), 2)
        self._cut_for_a_while(self.dice.choice(({(one, other)}, {(one, other), (other, one)})))

    def _cut_off(self) -> None:
        """Cut one member off from all others, with or without the clients."""
        host = self.dice.choice(list(self.machines))
        others = [*self.machines, *self.controllers, *self.dice.choice(([], ["p1", "p2", "r1"]))]
        links = {(host, other) for other in others if other != host}
        ways = self.dice.choice((1, 2, 2, 3))
        back = {(target, source) for source, target in links}
        self._cut_for_a_while(links if ways == 1 else back if ways == 3 else links | back)

    def _cut_controllers(self) -> None:
        """Cut controllers off from one member."""
        host = self.dice.choice(list(self.machines))
        some = self.dice.sample(list(self.controllers), self.dice.randint(1, len(self.controllers)))
        ways = self.dice.choice((1, 2, 3))
        links = {(host, one) for one in some}
        back = {(one, host) for one in some}
        self._cut_for_a_while(links if ways == 1 else back if ways == 3 else links | back)

    def _cut_answers(self) -> None:
        """Lose the controller's answers to a current or former master; its requests still take effect."""
        broker = self._some_up()
        if broker is not None:
            self._cut_for_a_while({(one, broker.host) for one in self.controllers})

    def _cut_register(self) -> None:
        """Cut a controller off from the register, both ways, or lose only the answers."""
        one = self.dice.choice(list(self.controllers))
        self._cut_for_a_while({(REGISTER, one), *self.dice.choice(([], [(one, REGISTER)]))})

    def _cut_bucket(self) -> None:
        """Cut a member off from the bucket, both ways, or lose only the answers."""
        host = self.dice.choice(list(self.machines))
        self._cut_for_a_while({(BUCKET, host), *self.dice.choice(([], [(host, BUCKET)]))})

    def _heal_links(self) -> None:
        self.note("links heal")
        self.network.heal()

    def _unruly(self) -> None:
        self.network.late = self.dice.choice((0.02, 0.2))
        self.network.loss = self.dice.choice((0.0, 0.05, 0.3))
        self.note(f"late {self.network.late}, lost {self.network.loss}")

    def _reset_connections(self) -> None:
        broker = self._some_up()
        if broker is not None and broker.connections and not broker.is_frozen:
            connection = self.dice.choice(broker.connections)
            self.note(f"{broker.host} loses a connection")
            closed = connection.closed.get(broker)
            connection.close(broker)
            if closed is not None:
                closed()

    # -- controllers

    def _start_controller(self, host: str) -> None:
        base = self.dice.uniform(0, 3600)
        controller = Controller(self.turns, self.network, host, base, self.decide, CONTROLLER_TIMEOUT_MS)
        self.controllers[host] = controller
        self.network.hosts[host] = controller

    def _restart_controller(self) -> None:
        host = self.dice.choice(list(self.controllers))
        self.note(f"{host} starts again")
        self.controllers[host].die(tells=True)
        self._start_controller(host)

    def _set_register_back(self) -> None:
        """Restore a backup of the register, or wipe it, while a reachable member knows more."""
        value = self.register.value
        known = max((broker.member.record.view.pair for broker in self._up() if not broker.is_frozen), default=(0, 0))
        if value is None or value.frozen is not None or known < value.epochs:
            return
        self.network.heal()
        self.turns.run(2.5)
        value = self.register.value
        older = [one for one in self.register.history[-8:] if value is not None and one.epochs < value.epochs]
        known = max((broker.member.record.view.pair for broker in self._up() if not broker.is_frozen), default=(0, 0))
        if value is None or not older or known < value.epochs:
            return
        backup = None if self.dice.random() < 0.2 else self.dice.choice(older)
        self.note("the register is " + ("wiped" if backup is None else f"set back to {backup.epochs}"))
        self.register.set_back(backup)
        self.turns.run(2.0)

    # ---- operators

    def _hand_over(self) -> None:
        up = [broker for broker in self._up() if not broker.is_frozen]
        leading = [broker for broker in up if broker.member.state is State.MASTER]
        if leading and len(up) > 1:
            broker = self.dice.choice(leading)
            target = self.dice.choice([other.member.broker_id for other in up if other is not broker])
            self.note(f"{broker.host} hands over to {target}")
            broker.happens(Switchover(target))

    def _quiet(self) -> None:
        """Stop sending for a while, so that elections occur without a write in between."""
        for producer in self.producers:
            producer.is_quiet = not producer.is_quiet

    # ---- healing

    def rest(self) -> None:
        """Heal everything: within REST seconds one member leads, all have caught up, and a message is acknowledged."""
        self.note("all is healed")
        self.network.heal()
        self._slow.clear()
        for producer in self.producers:
            producer.is_quiet = False
        for broker in self._up():
            if broker.is_frozen:
                broker.wake()
        for machine in self.machines.values():
            if not machine.is_up:
                self._start(machine.host)
        since = self.turns.now
        pace, self.pace = self.pace, 0.0  # The time limit is for decisions, however much data must be copied.
        self._settle(since, list(self.machines))
        self.pace = pace
        self.note("at rest")

    def with_one_less(self) -> None:
        """Check that any one of three members may die and writes continue."""
        if len(self.machines) < 3:
            return
        host = self.dice.choice(list(self.machines))
        broker = self.machines[host].broker
        assert broker is not None
        self.note(f"only {host} dies")
        self._die(broker, power=self.dice.random() < 0.5)
        self._settle(self.turns.now + 1.0, [other for other in self.machines if other != host])

    def _settle(self, since: float, hosts: list[str]) -> None:
        why = "nothing ran"
        while self.turns.now < since + REST:
            self.turns.run(0.5)
            self._operator()
            why = self._unrest(since, hosts)
            if not why:
                break
        if why:
            self.promises.fail(f"rest: {REST} s after all was healed {why}")
        for producer in self.producers:
            producer.is_quiet = True
        self.turns.run(3.0)
        master = next(broker for broker in self._up() if broker.member.state is State.MASTER)
        while any(broker.log.records != master.log.records for broker in self._up()):
            if self.turns.now > since + 2 * REST:
                self.promises.fail(f"rest: the logs of {[broker.host for broker in self._up()]} differ")
            self.turns.run(1.0)
        self.promises.at_rest(master)
        for producer in self.producers:
            producer.is_quiet = False

    def _operator(self) -> None:
        """Repair a register that was rolled back, and a member that would have to truncate confirmed messages.

        If power cuts took these messages from all others, that member starts as a new one.
        """
        self._repair_register()
        for broker in self._up():
            if broker.member.state is State.REFUSED and broker.told and self.promises.excused:
                self.note(f"an operator has {broker.host} begin anew")
                self._die(broker, power=False)
                self._new_disk_in(broker.host, self.new_disk())
                self._start(broker.host)

    def _repair_register(self) -> None:
        """Restore the newest backup; then designate the member with the longest log, by its last epoch and end."""
        value = self.register.value
        if value is None and self.register.history:
            self.note("an operator restores the newest backup")
            self.register.set_back(self.register.history[-1])
            return
        if value is None:
            return
        ids = {machine.disk.saved.broker_id for machine in self.machines.values()}
        gone = [broker_id for broker_id in value.ids if broker_id not in ids]
        # The disk of each is gone, so waiting is useless. One by one, because another one may have to stay.
        for broker_id in gone:
            clean = decision.CleanBrokerData(NAME, str(broker_id))
            self.dice.choice(list(self.controllers.values())).handle(clean, lambda answer: None)
        trusted = {*value.sync_state_set, *value.eligible} or set(value.unclean)
        if value.frozen is None and not (trusted and trusted <= set(gone)):
            return
        up = [broker for broker in self._up() if broker.member.broker_id]
        if not all(broker.member.is_readable for broker in up):
            return  # It waits for all of them.
        best = max(up, key=lambda one: one.epoch_cache()[1:])
        self.note(f"an operator designates {best.host}")
        request = decision.ElectMaster(NAME, best.member.broker_id, designate=True)
        controller = self.dice.choice(list(self.controllers.values()))
        # It may not know the highest epochs itself, and the member that does may be gone.
        controller.rules = dataclasses.replace(controller.rules, enable_elect_unclean_master=True)
        controller.handle(request, lambda answer: None)
        self.turns.run(0.5)
        controller.rules = dataclasses.replace(controller.rules, enable_elect_unclean_master=False)

    def _unrest(self, since: float, hosts: list[str]) -> str:
        brokers = [broker for host in hosts if (broker := self.machines[host].broker) is not None]
        masters = [broker for broker in brokers if broker.member.state is State.MASTER]
        members = [(broker.host, broker.member) for broker in brokers]
        states = ", ".join(f"{host} {member.state.value} {member.record.view.pair}" for host, member in members)
        if len(masters) != 1:
            return f"there are {len(masters)} masters: {states}"
        confirming = masters[0].member.confirming
        assert confirming is not None
        if len(confirming.sync_state_set.members) != len(hosts):
            held = confirming.held(masters[0].now())
            return f"the set is {confirming.sync_state_set}, {held}: {states}; {self.register.value}"
        if not all(broker is masters[0] or broker.is_attached for broker in brokers):
            return f"not all follow: {states}"
        if all(producer.answered_at <= since for producer in self.producers):
            return f"nothing is acknowledged: {confirming.held(masters[0].now())}; {states}"
        return ""
