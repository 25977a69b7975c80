"""Dozens of histories of the messaging side, and tests of the simulation itself; `make simulate` runs more."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import functools
import gc
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from broker.intake.flusher import Flusher
from broker.intake.intake import Intake
from broker.intake.internal_records import InternalRecords
from broker.intake.log_writer import LogWriter
from broker.intake.message import NewMessage
from broker.tables.state_file import StateFile
from broker.waiting import delivery
from broker.waiting.schedule_message import ScheduleMessage
from broker.waiting.timer_message import TimerMessages
from infra.loop.supervisor import Supervisor
from neve.remoting.names import DLQ_PREFIX, RETRY_PREFIX
from tests.kit.store.sim_disk import SimDisk
from tests.simulation import run
from tests.simulation.messaging import clients, foreign, promises
from tests.simulation.messaging.clients import POPPED
from tests.simulation.messaging.faulty_disk import SYNCS, Faults, FaultyDisk
from tests.simulation.messaging.loop import KilledHere, SimClock, SimLock, SimLoop, Stuck
from tests.simulation.messaging.model import PLAIN
from tests.simulation.messaging.promises import RETRY
from tests.simulation.messaging.world import MessagingWorld
from tests.simulation.world import BrokenInvariant


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_histories_keep_all_promises(first: int) -> None:
    for seed in range(first, first + 10):
        MessagingWorld(seed).run()


def test_seed_determines_the_history() -> None:
    for seed in (3, 8):
        told = []
        for _ in range(2):
            world = MessagingWorld(seed)
            world.run()
            told.append(world.history)
        assert told[0] == told[1]


# ---- injected defects are found


def _first_violation(seeds: range, world: type[MessagingWorld] = MessagingWorld, steps: int = 120) -> str:
    for seed in seeds:
        try:
            world(seed).run(steps)
        except BrokenInvariant as violation:
            return str(violation)
    return ""


class SavesSlowly(MessagingWorld):
    """A world of delayed messages, slow syncs and power cuts only."""

    def _steps(self) -> dict[Callable[[], None], int]:
        return {self._save_slowly: 3, self._long_rest: 1}


def test_simulation_finds_positions_captured_after_their_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sync_then_capture(self: StateFile) -> None:
        wanted = self._changes
        async with self._lock:
            if self._saved >= wanted:
                return
            if self._sync_log is not None:
                await self._sync_log()
            captured, position = self._changes, self._journal.position
            data = self._encode(self._snapshot_now(), position)
            await asyncio.to_thread(self._write, captured, position, data)

    seeds = range(20)
    assert not _first_violation(seeds, SavesSlowly, steps=10)
    monkeypatch.setattr(StateFile, "save", sync_then_capture)
    # The log's records of these positions would repair it.
    monkeypatch.setattr(ScheduleMessage, "follow", lambda self: None)
    assert "passed over" in _first_violation(seeds, SavesSlowly, steps=10)


class ClockGoesBack(MessagingWorld):
    """A world of timers, with a wall clock that is set."""

    def _steps(self) -> dict[Callable[[], None], int]:
        return {functools.partial(clients.send_timer, self): 5, self._long_rest: 3, self._jump: 1}


class SendsBack(MessagingWorld):
    """A world of messages that a consumer sends back."""

    def _steps(self) -> dict[Callable[[], None], int]:
        send, back = functools.partial(clients.send_plain, self), functools.partial(clients.send_back, self)
        return {send: 3, back: 3, self._long_rest: 1}


class FollowsForeignMasters(MessagingWorld):
    """A world of pending messages, beside records that a foreign master left."""

    def _steps(self) -> dict[Callable[[], None], int]:
        return {
            functools.partial(clients.send_delayed, self): 3,
            functools.partial(clients.send_timer, self): 3,
            functools.partial(foreign.lay_records, self): 3,
            functools.partial(foreign.commit_half, self): 3,
            self._long_rest: 3,
        }


def test_simulation_finds_executed_foreign_records(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _first_violation(range(5), FollowsForeignMasters, steps=20)
    monkeypatch.setattr(InternalRecords, "is_own", lambda self, record: True)
    assert _first_violation(range(5), FollowsForeignMasters, steps=20)


def test_simulation_finds_deliveries_to_internal_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogWriter, "check_topic", lambda self, topic: None)
    monkeypatch.setattr(delivery, "is_internal", lambda topic: False)
    found = _first_violation(range(5), FollowsForeignMasters, steps=20)
    symptoms = (
        "were delivered into",
        "committed to an internal topic",
        "the start was refused: invalid literal for int()",
    )
    assert any(symptom in found for symptom in symptoms), found


def test_simulation_finds_timers_delayed_by_a_clock_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _first_violation(range(20), ClockGoesBack, steps=20)
    monkeypatch.setattr(TimerMessages, "_rewind", lambda self, now: None)
    assert "late" in _first_violation(range(20), ClockGoesBack, steps=20)


def test_simulation_finds_a_skipped_delayed_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect advances a level's position although a delivery failed, so that the message is skipped."""
    deliver = ScheduleMessage._deliver

    def forget(self: ScheduleMessage, record: object) -> None:
        if random.Random(repr(record)).random() < 0.5:
            deliver(self, record)  # type: ignore[arg-type]

    monkeypatch.setattr(ScheduleMessage, "_deliver", forget)
    found = _first_violation(range(10))
    assert any(what in found for what in ("passed over", "never delivered", " s late: "))


def test_simulation_finds_a_flusher_that_ends_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    async def end_soon(self: Flusher) -> None:
        await cast("SimLoop", asyncio.get_running_loop()).after(0.2)

    monkeypatch.setattr(Flusher, "run", end_soon)
    monkeypatch.setattr(Supervisor, "vital", lambda self, name, work, on_end: self.spawn(name, work))
    assert "broker/flush" in _first_violation(range(3))


def test_simulation_finds_an_answer_before_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect answers a send at once under SYNC_FLUSH, so that a power cut takes a promised message."""
    monkeypatch.setattr(Flusher, "wait", lambda self, send: send.connection.send_raw(send.render(0)))
    assert "no sync has covered it" in _first_violation(range(20))


@pytest.mark.parametrize(("is_dead", "told"), [(True, "level -1, promised: True"), (False, "level 3, promised: True")])
def test_simulation_finds_a_lost_message_that_was_sent_back(
    monkeypatch: pytest.MonkeyPatch, is_dead: bool, told: str
) -> None:
    door, prefix = ("put_now", DLQ_PREFIX) if is_dead else ("put", RETRY_PREFIX)
    put = getattr(Intake, door)

    def forget(self: Intake, message: NewMessage, properties: Mapping[str, str]) -> Any:
        return None if message.topic.startswith(prefix) else put(self, message, properties)

    monkeypatch.setattr(Intake, door, forget)
    assert f"was sent back, {told}" in _first_violation(range(5), SendsBack, steps=40)


def test_drain_waits_for_redelivered_messages_that_are_not_yet_visible() -> None:
    """At the end of a history, an empty pop during this time is not the last one."""
    world = _under_sync_flush()
    while not any(sent.topic == POPPED for sent in world.model.of(PLAIN)):
        clients.send_plain(world)
    world._rest(0.1)
    clients.pop(world, invisible=500)
    world._rest(0.1)
    world.slow_syncs = True
    out = len(world.model.popped)
    assert out and {place[0] for place in world.model.popped} == {POPPED}
    pops, store = world.server.controller.pops, world.server.controller.store
    while any(queue.flights for queue in pops.queues.values()):
        world._rest(0.01)
    assert store.visibility.confirmed < store.max_physical_offset, "it came back, and nobody sees it yet"
    clients.drain(world)
    assert Counter(place[0] for place in world.model.popped)[RETRY] == out
    promises.check(world, at_rest=True)
    world.server.die()
    world.platter.kill()


@pytest.mark.parametrize("what", ["delayed", "timer", "popped"])
def test_sync_flush_makes_due_messages_visible_before_the_next_interval(what: str) -> None:
    """Without sends for a minute, each of these messages must get its own sync."""
    world = _under_sync_flush(interval_ms=60_000)
    store, seen = world.server.controller.store, list[str]()
    store.visibility.subscribe(lambda shown: seen.extend(queue.topic for queue, _, _ in shown))
    send = {"delayed": clients.send_delayed, "timer": clients.send_timer, "popped": clients.send_plain}[what]
    while not any(sent.topic == POPPED for sent in world.model.sent.values()):
        send(world)
    world._rest(0.1)
    if what == "popped":
        clients.pop(world, invisible=500)
    before = seen.count(POPPED)
    world._rest(max(*clients.LEVELS, clients.LONGEST_TIMER_MS) / 1000 + 1)
    assert (seen.count(RETRY) if what == "popped" else seen.count(POPPED) - before) >= 1
    world.server.die()
    world.platter.kill()


def _under_sync_flush(interval_ms: int = 500) -> MessagingWorld:
    """Return a started world whose tables are saved each minute, because a save syncs the log as well."""
    world = MessagingWorld(1)
    world.config = dataclasses.replace(
        world.config,
        flush_disk_type="SYNC_FLUSH",
        flush_interval_commit_log=interval_ms,
        flush_consumer_offset_interval=60_000,
    )
    world._start()
    world._rest(1.0)
    return world


# ---- the loop, its threads and its disk


def _loop() -> SimLoop:
    return SimLoop(SimClock(1_000_000), random.Random(1))


def test_time_advances_only_when_nothing_is_ready() -> None:
    loop = _loop()

    async def wait() -> float:
        await loop.after(3600)
        return loop.time()

    assert loop.run(wait(), 4000) == pytest.approx(3600)
    loop.close()


def test_loop_abandoned_at_task_creation_leaves_no_unawaited_coroutine() -> None:
    loop, begun = _loop(), list[object]()

    async def work() -> None:
        begun.append("a turn too late")

    def be_born() -> None:
        supervisor = Supervisor("dead")
        supervisor.vital("vital", work, begun.append)
        supervisor.spawn("spawned", work)

    loop.ask(be_born)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        loop.abandon()
        gc.collect()
    assert (begun, [str(one.message) for one in told if one.category is RuntimeWarning]) == ([], [])


def test_loop_runs_while_a_thread_waits_for_the_disk() -> None:
    loop, told = _loop(), list[str]()
    disk = FaultyDisk(SimDisk(), Faults(), random.Random(1))
    loop.latency = lambda: 1.0

    def write() -> None:
        told.append("thread begins")
        disk.write_atomic(Path("/a"), b"x")
        told.append("thread ends")

    async def main() -> None:
        loop.call_later(0.5, told.append, "loop")
        await asyncio.to_thread(write)

    loop.run(main(), 10)
    assert told == ["thread begins", "loop", "thread ends"]
    loop.close()


def test_lock_wanted_by_the_loop_resumes_its_holder() -> None:
    loop, told, lock = _loop(), list[str](), SimLock()
    disk = FaultyDisk(SimDisk(), Faults(), random.Random(1))
    loop.latency = lambda: 1.0

    def write() -> None:
        with lock:
            disk.write_atomic(Path("/a"), b"x")
            told.append("thread")

    async def main() -> None:
        work = asyncio.create_task(asyncio.to_thread(write))
        await loop.after(0.5)
        with lock:
            told.append("loop")
        await work

    loop.run(main(), 10)
    assert told == ["thread", "loop"]
    loop.close()


def test_lock_of_a_dying_thread_is_not_released_to_the_loop() -> None:
    """Otherwise the loop would continue while the file that the thread had begun to write is incomplete."""
    loop, told, lock = _loop(), list[str](), SimLock()
    disk = FaultyDisk(SimDisk(), Faults(), random.Random(1))
    loop.latency = lambda: 1.0

    def die(call: str, path: Path) -> None:
        raise KilledHere(call)

    def write() -> None:
        with lock:
            disk.write_atomic(Path("/a"), b"x")

    async def main() -> None:
        disk.before = die
        loop.call_later(0.5, ask_for_the_lock)
        await asyncio.to_thread(write)

    def ask_for_the_lock() -> None:
        with lock:
            told.append("loop")

    with pytest.raises(KilledHere, match="write_atomic"):
        loop.run(main(), 10)
    assert not told
    loop.abandon()


def test_deadlocked_work_raises_stuck() -> None:
    loop = _loop()

    async def wait() -> None:
        await loop.create_future()

    with pytest.raises(Stuck):
        loop.run(wait(), 5)
    loop.abandon()


def test_dead_process_does_not_change_the_disk() -> None:
    disk = FaultyDisk(SimDisk(), Faults(), random.Random(1))
    disk.write_atomic(Path("/a"), b"x")
    disk.dead = True
    with pytest.raises(KilledHere):
        disk.write_atomic(Path("/a"), b"y")
    assert disk.platter.read(Path("/a")) == b"x"


def test_process_has_no_effect_from_the_call_that_kills_it() -> None:
    """Its thread unwinds through handlers and `finally` clauses, which must change nothing any longer."""
    disk = FaultyDisk(SimDisk(), Faults(), random.Random(1))
    disk.write_atomic(Path("/a"), b"x")

    def die(call: str, path: Path) -> None:
        disk.before = lambda call, path: None
        raise KilledHere(call)

    disk.before = die
    with pytest.raises(KilledHere):
        try:
            disk.write_atomic(Path("/b"), b"y")
        finally:
            disk.remove(Path("/a"))
    assert disk.platter.read(Path("/a")) == b"x"


def test_fault_applies_to_each_named_call() -> None:
    faults = Faults()
    disk = FaultyDisk(SimDisk(), faults, random.Random(1))
    disk.append(Path("/a"), b"x")
    faults.set(SYNCS, errno.EIO, 1.0)
    with pytest.raises(OSError) as caught:
        disk.fdatasync(Path("/a"))
    assert caught.value.errno == errno.EIO
    assert disk.lost_pages
    faults.heal()
    disk.fdatasync(Path("/a"))


def test_summary_resumes_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []

    def tell(world: str, first: int, end: int) -> tuple[dict[str, int], dict[int, str]]:
        told.append((world, first, end))
        return {"_step": end - first}, {first: "broken"} if first == 20 else {}

    monkeypatch.setattr(run, "tell", tell)
    summary = ["--summary", str(tmp_path / "summary.json"), "--world", "messaging"]
    monkeypatch.setattr(sys, "argv", ["run", "30", *summary])
    assert run.main() == 1
    monkeypatch.setattr(sys, "argv", ["run", "50", *summary])
    assert run.main() == 1
    assert told == [("messaging", 0, 20), ("messaging", 20, 30), ("messaging", 20, 40), ("messaging", 40, 50)]
    kept = run._read(tmp_path / "summary.json")["messaging"]
    assert (kept.seeds, kept.broken) == (50, {20: "broken"})
