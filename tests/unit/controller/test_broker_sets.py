"""Tests of SetRegistry with a register that has concurrent writers, loses answers, or is unavailable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from controller.broker_set import BrokerSet, DamagedBrokerSet, Member
from controller.broker_sets import SetRegistry
from controller.decision import (
    AlterSyncStateSet,
    ApplyBrokerId,
    Asked,
    CleanBrokerData,
    ElectMaster,
    RegisterBroker,
    Report,
    Rules,
    Scan,
)
from controller.liveness import Liveness
from controller.other_controllers import Heard, NoOtherControllers
from controller.register import NEVER, RegisterUnavailable, Revision, StoredSet
from infra.clock import ManualClock
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode as Code
from tests.kit.clock.waiting import until


class MemoryRegister:
    """A register in memory. `before_write` may change it before a write; a write with a lost answer is applied."""

    def __init__(self) -> None:
        self.value: BrokerSet | None = None
        self.revision = 0
        self.had: BrokerSet | None = None
        self.damaged: list[str] = []
        self.before_all: dict[str, StoredSet] = {}
        self.reads = 0
        self.before_write: Callable[[], object] = lambda: None
        self.loses_answers = False
        self.writes = 0

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    @property
    def broken(self) -> str:
        return ""

    def glance(self, name: str) -> BrokerSet | None:
        return self.value

    async def get(self, name: str) -> StoredSet:
        self.reads += 1
        return StoredSet(self.value, Revision(self.revision) if self.value is not None else NEVER, self.had)

    async def put(self, broker_set: BrokerSet, expected: Revision) -> Revision | None:
        self.before_write()
        await asyncio.sleep(0)
        if expected != (await self.get(broker_set.name)).revision:
            return None
        self.value, self.revision, self.writes = broker_set, self.revision + 1, self.writes + 1
        if self.loses_answers:
            raise RegisterUnavailable(None, "the answer is lost")
        return Revision(self.revision)

    async def remove(self, name: str, expected: Revision) -> bool:
        if expected != (await self.get(name)).revision:
            return False
        self.value, self.revision = None, self.revision + 1
        return True

    async def all(self) -> dict[str, StoredSet | DamagedBrokerSet]:
        found: dict[str, StoredSet | DamagedBrokerSet] = {name: DamagedBrokerSet(None, "none") for name in self.damaged}
        found |= self.before_all
        if self.value is not None:
            found["b"] = await self.get("b")
        return dict(sorted(found.items()))


class Calls:
    """Queries and notifications of brokers, recorded."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int | None, int]] = []
        self.ends: dict[int, int] = {}
        self.on_ask: Callable[[], object] = lambda: None

    async def ask(self, name: str, member: Member) -> Asked:
        self.on_ask()
        await asyncio.sleep(0)
        return Asked(True, 1, self.ends.get(member.id, 0))

    async def notify(self, broker_set: BrokerSet, member: Member) -> None:
        self.told.append((member.id, broker_set.master, broker_set.master_epoch))


class Others(NoOtherControllers):
    """Other controllers: the reports that they publish, and the live brokers published to them."""

    def __init__(self) -> None:
        self.reports: dict[int, list[Report]] = {}
        self.told: dict[str, set[int]] = {}
        self.on_say: Callable[[], object] = lambda: None
        self.unreadable = self.unsayable = ""

    async def reports_of(self, name: str) -> Heard:
        await asyncio.sleep(0)
        if name == self.unreadable:
            raise RegisterUnavailable(None, f"a key of {name} can't be read")
        return self.reports

    async def publish(self, name: str, living: Mapping[int, Report]) -> None:
        if name == self.unsayable:
            raise RegisterUnavailable(None, f"{name} is written by other controllers all the time")
        self.told[name] = set(living)
        self.on_say()


class RegisteredSets:
    def __init__(self) -> None:
        self.register, self.calls, self.liveness = MemoryRegister(), Calls(), Liveness(ManualClock())
        self.tasks: list[asyncio.Task[Any]] = []
        self.others = Others()
        self.sets = SetRegistry(
            self.register, self.others, self.liveness, self.calls, rules=Rules, notifies=lambda: True, spawn=self._spawn
        )

    def _spawn(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        self.tasks.append(asyncio.ensure_future(work()))

    async def joined(self, *ids: int) -> None:
        """Add live members, all in sync; the first is master."""
        for broker_id in ids:
            await self.sets.carry_out(ApplyBrokerId("c", "b", broker_id, f"h{broker_id}:1;1"))
            self.liveness.record_heartbeat("b", broker_id, Report(0, max_offset=0), f"connection {broker_id}", None)
        await self.sets.carry_out(ElectMaster("b", ids[0]))
        if len(ids) > 1:
            await self.sets.carry_out(AlterSyncStateSet("b", ids[0], 1, ids, 1))
        await self.settled()
        self.calls.told.clear()

    async def settled(self) -> None:
        while self.tasks:
            await self.tasks.pop()

    @property
    def value(self) -> BrokerSet:
        assert self.register.value is not None
        return self.register.value


async def test_decision_is_repeated_after_a_write_of_another_controller() -> None:
    world = RegisteredSets()
    await world.joined(1, 2)

    def other() -> None:  # another controller elects 2 because 1 is dead
        world.register.before_write = lambda: None
        world.register.value = replace(
            world.value, master=2, master_epoch=2, sync_state_set=(2,), sync_state_set_epoch=3
        )
        world.register.revision += 1

    world.liveness.closed("connection 1")
    world.register.before_write = other
    answer = await world.sets.carry_out(ElectMaster("b"))
    assert (answer.code, answer.master, answer.master_epoch) == (Code.CONTROLLER_MASTER_STILL_EXIST, 2, 2)
    await world.settled()
    assert world.calls.told == []


async def test_permanent_write_conflict_returns_busy_and_notifies_no_broker() -> None:
    world = RegisteredSets()
    await world.joined(1, 2)

    def other() -> None:
        world.register.revision += 1

    world.liveness.closed("connection 1")
    world.register.before_write = other
    with pytest.raises(BrokerError) as refused:
        await world.sets.carry_out(ElectMaster("b"))
    assert refused.value.code == Code.SYSTEM_BUSY
    assert world.value.master == 1
    assert world.calls.told == []


async def test_concurrent_elections_of_one_set_write_once() -> None:
    world = RegisteredSets()
    await world.joined(1, 2)
    writes = world.register.writes
    world.liveness.closed("connection 1")
    answers = await asyncio.gather(*(world.sets.carry_out(ElectMaster("b")) for _ in range(8)))
    assert sorted(answer.code for answer in answers) == [Code.SUCCESS] + [Code.CONTROLLER_MASTER_STILL_EXIST] * 7
    assert world.register.writes == writes + 1


async def test_election_with_lost_write_answer_is_found_by_the_next_request() -> None:
    world = RegisteredSets()
    await world.joined(1, 2)
    world.liveness.closed("connection 1")
    world.register.loses_answers = True
    with pytest.raises(RegisterUnavailable):
        await world.sets.carry_out(Scan("b"))
    await world.settled()
    assert world.calls.told == []
    world.register.loses_answers = False
    answer = await world.sets.carry_out(ElectMaster("b", 2))
    assert (answer.code, answer.master, answer.master_epoch) == (Code.CONTROLLER_MASTER_STILL_EXIST, 2, 2)


async def test_candidate_that_disconnects_during_its_query_is_not_elected() -> None:
    world = RegisteredSets()
    await world.joined(1, 2, 3)
    world.liveness.closed("connection 1")
    world.calls.ends = {2: 10, 3: 99}
    world.calls.on_ask = lambda: world.liveness.closed("connection 3")
    assert (await world.sets.carry_out(Scan("b"))).master == 2
    await world.settled()
    assert world.calls.told == [(2, 2, 2)]


async def test_cleared_master_is_replaced_at_once() -> None:
    world = RegisteredSets()
    await world.joined(1, 2)
    await world.sets.carry_out(RegisterBroker("c", "b", 1, "h1:1", "a new incarnation", 1, "p"))
    await world.settled()
    await world.settled()
    assert (world.value.master, world.value.master_epoch) == (2, 3)
    assert world.calls.told == [(2, 2, 3)]


async def test_master_heard_by_another_controller_is_alive() -> None:
    world = RegisteredSets()
    await world.joined(1, 2)
    world.others.reports = {1: [Report(0)]}
    world.liveness.closed("connection 1")
    await world.sets.lost("b")
    assert world.others.told == {"b": {2}}
    assert world.value.master == 1
    world.others.reports = {}
    await world.sets.scan()
    assert world.value.master == 2


async def test_disconnect_is_published_before_other_reports_are_read() -> None:
    """If two controllers lose a broker, the second to publish it sees no live report, so at least one elects."""

    world = RegisteredSets()
    await world.joined(1, 2)
    world.others.reports = {1: [Report(0)]}
    world.others.on_say = world.others.reports.clear
    world.liveness.closed("connection 1")
    await world.sets.lost("b")
    assert world.value.master == 2


async def test_tell_others_publishes_an_emptied_set_once() -> None:
    world = RegisteredSets()
    await world.joined(1, 2)
    await world.sets.publish_all()
    assert world.others.told == {"b": {1, 2}}
    await world.sets.carry_out(CleanBrokerData("b", clean_living=True))
    assert world.liveness.names() == set()
    await world.sets.publish_all()
    assert world.others.told == {"b": set()}
    world.others.told.clear()
    await world.sets.publish_all()
    assert world.others.told == {}


async def test_register_set_back_freezes_the_set_and_blocks_elections() -> None:
    world = RegisteredSets()
    await world.joined(1, 2)
    world.register.had = replace(world.value, master_epoch=6, sync_state_set_epoch=9)
    world.liveness.closed("connection 1")
    assert (await world.sets.carry_out(Scan("b"))).code == Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert world.value.frozen is not None and world.value.frozen.epochs == (6, 9)
    assert world.value.master == 1


async def test_scan_covers_other_sets_and_raises_for_damaged_value() -> None:
    world = RegisteredSets()
    await world.joined(1, 2)
    world.liveness.closed("connection 1")
    world.register.damaged = ["a", "c"]
    with pytest.raises(DamagedBrokerSet):
        await world.sets.scan()
    assert world.value.master == 2


async def test_scan_reads_the_register_once_if_the_master_is_alive() -> None:
    world = RegisteredSets()
    await world.joined(1, 2)
    world.register.reads = 0
    await world.sets.scan()
    assert world.register.reads == 1, "of all of them together"
    assert world.value.master == 1


async def test_clean_removes_the_reports_of_the_removed_brokers() -> None:
    world = RegisteredSets()
    await world.joined(1, 2)
    await world.sets.carry_out(CleanBrokerData("b", "2", clean_living=True))
    assert set(world.liveness.reports("b", {})) == {1}
    await world.sets.carry_out(CleanBrokerData("b", clean_living=True))
    assert world.register.value is None
    assert world.liveness.reports("b", {}) == {}


async def test_failed_publication_of_one_set_does_not_block_other_sets() -> None:
    world = RegisteredSets()
    names = [f"b{number}" for number in range(5)]
    for name in names:
        world.liveness.record_heartbeat(name, 1, Report(0), f"connection of {name}", None)
    for name in names:  # independent of the iteration order
        world.others.told.clear()
        world.others.unsayable = name
        with pytest.raises(RegisterUnavailable, match=name):
            await world.sets.publish_all()
        assert world.others.told == {other: {1} for other in names if other != name}


async def test_disconnected_master_is_replaced_if_publication_fails() -> None:
    world = RegisteredSets()
    await world.joined(1, 2)
    world.liveness.closed("connection 1")
    world.others.unsayable = "b"
    with pytest.raises(RegisterUnavailable):
        await world.sets.lost("b")
    assert world.value.master == 2


async def test_slow_publication_of_one_set_does_not_delay_other_sets() -> None:
    world = RegisteredSets()
    for name in ("a", "b", "c"):
        world.liveness.record_heartbeat(name, 1, Report(0), f"connection of {name}", None)
    others, gate = world.others, asyncio.Event()
    publish = others.publish

    async def slow(name: str, living: Mapping[int, Report]) -> None:
        if name == next(iter(world.liveness.names())):
            await gate.wait()
        await publish(name, living)

    others.publish = slow  # type: ignore[method-assign]
    telling = asyncio.ensure_future(world.sets.publish_all())
    await until(lambda: len(others.told) == 2, "two of three are told")
    gate.set()
    await telling
    assert len(others.told) == 3


async def test_failed_scan_of_one_set_does_not_block_elections_of_others() -> None:
    world = RegisteredSets()
    await world.joined(1, 2)
    world.liveness.closed("connection 1")
    first = replace(world.value, name="a")
    world.liveness.record_heartbeat("a", 2, Report(0, max_offset=0), "connection of a", None)
    world.register.before_all = {"a": StoredSet(first, Revision(1), None)}
    world.others.unreadable = "a"
    with pytest.raises(RegisterUnavailable, match="of a"):
        await world.sets.scan()
    assert world.value.master == 2
