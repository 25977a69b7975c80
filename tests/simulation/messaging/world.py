"""One seed is one history of a broker with its clients, its disk and its clocks; `run` plays it to the end.

Clients send, delay, prepare, pop and commit messages, and set timers. The broker's own tasks run meanwhile, interleaved
by the seed: each call of the disk takes its time, and the process may die at any call.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.store.errors import StoreError
from infra.process.startup import StartupError
from tests.kit.store.sim_disk import SimDisk
from tests.simulation.messaging import clients, foreign, promises
from tests.simulation.messaging.faulty_disk import ALLOCATES, MAPS, OPENS, SYNCS, WRITES, Faults, FaultyDisk
from tests.simulation.messaging.loop import KilledHere, SimClock, SimLoop
from tests.simulation.messaging.model import MessageModel
from tests.simulation.messaging.server import PORT, ROOT, BrokerProcess
from tests.simulation.messaging.wire import SimulatedClient
from tests.simulation.world import TOLD_STEPS, BrokenInvariant

TOPICS = ("orders", "jobs")
QUEUES = 2
SEGMENT = 65536
HOUR = 3_600_000
FAULTS = (
    (ALLOCATES, errno.ENOSPC), (OPENS, errno.EMFILE), (SYNCS, errno.EIO), (WRITES, errno.EIO), (MAPS, errno.ENOMEM),
)  # fmt: skip
#: Errors that a start may meet on a failing disk.
DISK_ERRORS = (StartupError, StoreError, OSError, RuntimeError, ExceptionGroup)


class MessagingWorld:
    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.clock = SimClock(1_700_000_000_000 + self.random.randrange(86_400_000))
        self.platter = SimDisk(seed=seed)
        self.faults = Faults()
        self.config = self._make_config()
        self.model = MessageModel()
        self.history: list[str] = []
        self.counts: Counter[str] = Counter()
        self.broken: list[str] = []  # Broken promises found where no exception could be raised at once.
        self.troughs: list[tuple[float, int]] = []  # When the wall clock was set, and its time before.
        self.peaks: list[tuple[float, int]] = []  # When the wall clock was set back, and its time before.
        self.slow = False
        self.slow_syncs = False
        self.disturbed = False  # The disk was slow or failed during the life of this process.
        self.calm_since = 0.0  # No disk failed, no clock was set and no process ended since then.
        self.ended_at = 0.0  # The previous process.
        self.flushed = 0  # By the previous process.
        self.dies_in = -1  # Turns of the loop and calls of the disk.
        self.dies_saved = self.saved = (
            False  # With the next table that it saves, whose prerequisites must be on the disk.
        )
        self.server: BrokerProcess
        self.client: SimulatedClient
        self.tasks: set[str] = set()
        self.foreign = 0  # Times that a foreign master wrote into the log.
        self.laid: dict[tuple[str, int], int] = {}  # Topic and queue to its records there.

    def _make_config(self) -> BrokerConfig:
        pick = self.random.choice
        return BrokerConfig(
            broker_name=clients.BROKER,
            broker_ip1="127.0.0.1",
            bind_address="127.0.0.1",
            listen_port=PORT,
            admin_port=-1,
            store_path_root_dir=ROOT,
            mapped_file_size_commit_log=SEGMENT,
            flush_disk_type=pick(("SYNC_FLUSH", "SYNC_FLUSH", "ASYNC_FLUSH")),
            message_delay_level="1s 2s 5s",
            default_topic_queue_nums=QUEUES,
            flush_consumer_offset_interval=pick((300, 1000, 5000)),
            flush_interval_commit_log=pick((50, 500)),
            transaction_check_interval=pick((2000, 10_000)),
            transaction_time_out=3000,
            transaction_check_max=1000,
            recall_message_enable=True,
            max_message_size=1 << 16,
        )

    # ---- the whole history

    def run(self, steps: int = 120) -> None:
        """Play the whole history; raise Violation."""
        logging.disable(logging.CRITICAL)
        try:
            try:
                self._tell_all(steps)
            finally:
                if hasattr(self, "server"):
                    self.server.die()
        except Exception as error:
            told = "\n  ".join(self.history[-TOLD_STEPS:])
            text = f"messaging seed {self.seed}: {type(error).__name__}: {error}\nthe last steps:\n  {told}"
            raise BrokenInvariant(text) from error
        finally:
            logging.disable(logging.NOTSET)

    def _tell_all(self, steps: int) -> None:
        self._start()
        if self.random.random() < 0.5:
            clients.create_group(self)
        self._rest(1.0)
        for _ in range(steps):
            self._step()
        self._end()

    def _end(self) -> None:
        """Heal everything: pending messages are delivered, and waiting clients are served."""
        self.tell("end: all is well again")
        self._live_on()
        self.faults.heal()
        self.slow = self.slow_syncs = False
        if self.clock.now_ms() < self.clock.highest_ms:
            self.clock.set_wall(self.clock.highest_ms)
            self.calm_since = self.clock.monotonic()
        if self.server.wants_to_end or self.server.controller.store.end.failure is not None:
            self._stop()
        self._rest(max(clients.LEVELS) / 1000 + clients.LONGEST_TIMER_MS / 1000 + 2)
        clients.end_all_halves(self)
        self._rest(2)
        clients.drain(self)
        promises.check(self, at_rest=True)
        self._stop()
        promises.check(self, at_rest=True)
        self.platter.kill()

    # ---- steps

    def _steps(self) -> dict[Callable[[], None], int]:
        """Return the possible steps with their relative frequency."""
        return {
            functools.partial(clients.send_plain, self): 30,
            functools.partial(clients.send_delayed, self): 12,
            functools.partial(clients.send_timer, self): 6,
            functools.partial(clients.recall, self): 2,
            functools.partial(clients.send_half, self): 6,
            functools.partial(clients.end_half, self): 6,
            functools.partial(clients.pop, self): 10,
            functools.partial(clients.ack, self): 10,
            functools.partial(clients.hide, self): 3,
            functools.partial(clients.commit_offset, self): 8,
            functools.partial(clients.pull, self): 5,
            functools.partial(clients.set_back, self): 1,
            functools.partial(clients.send_back, self): 4,
            functools.partial(foreign.lay_records, self): 1,
            functools.partial(foreign.commit_half, self): 1,
            self._long_rest: 12, self._jump: 2, self._slow: 3, self._break: 3, self._mend: 4,
            self._die_soon: 5, self._power_off: 2, self._stop: 2, self._save_slowly: 1,
        }  # fmt: skip

    def _step(self) -> None:
        steps = self._steps()
        step = self.random.choices(list(steps), list(steps.values()))[0]
        self.counts[getattr(step, "func", step).__name__] += 1
        try:
            step()
            self._rest(self.random.choice((0.0, 0.0002, 0.001, 0.004, 0.02, 0.1)))
        except KilledHere as death:
            self.tell(f"  died: {death}")
            self._after_death("power cut" if self.saved else self.random.choice(("kill", "power cut")))
        if self.server.wants_to_end:
            self.tell(f"  the broker ends: {dict(self.faults.met)}")
            others = [met for met in self.faults.met if not met.startswith("EMFILE")]
            assert others, f"the broker ends for nothing worse than {dict(self.faults.met)}"
            self._stop()

    def _rest(self, seconds: float) -> None:
        self.server.loop.run_for(seconds)
        if self.slow or self.slow_syncs or self.faults.shares:
            self.disturbed, self.calm_since = True, self.clock.monotonic()
        promises.check_tasks(self)
        promises.check_lateness(self)
        if self.broken:
            raise AssertionError("; ".join(self.broken))

    def _long_rest(self) -> None:
        seconds = self.random.choice((0.3, 1.0, 1.0, 2.5, 6.0))
        self.tell(f"{seconds} s pass")
        self._rest(seconds)

    def _jump(self) -> None:
        by = self.random.choice((-8 * HOUR, -30_000, -700, 700, 30_000, 8 * HOUR))
        self.tell(f"the wall clock is set by {by} ms")
        if by < 0:
            self.peaks.append((self.clock.monotonic(), self.clock.now_ms()))
        self.clock.set_wall(self.clock.now_ms() + by)
        self.troughs.append((self.clock.monotonic(), self.clock.now_ms()))
        self.calm_since = self.clock.monotonic()

    def highest_since(self, moment: float) -> int:
        """Return the highest time of the wall clock since then."""
        return max([self.clock.now_ms(), *(wall for at, wall in self.peaks if at >= moment)])

    def lowest_between(self, begin: float, end: float) -> float:
        """Return the lowest time to which the wall clock was set in that period."""
        return min((wall for at, wall in self.troughs if begin <= at <= end), default=math.inf)

    def _slow(self) -> None:
        if self.slow or self.slow_syncs:
            self.slow = self.slow_syncs = False
        elif self.random.random() < 0.5:
            self.slow = True
        else:
            self.slow_syncs = True
        self.tell(f"the disk is {'slow' if self.slow else 'slow to sync' if self.slow_syncs else 'quick'}")

    def _break(self) -> None:
        share = self.random.choice((0.02, 0.3, 1.0))
        calls, error = self.random.choice(FAULTS)
        self.faults.set(calls, error, share)
        self.tell(f"{errno.errorcode[error]} at {share:.0%} of {sorted(calls)}")

    def _mend(self) -> None:
        if self.faults.shares:
            self.tell("the disk is well again")
            self.faults.heal()

    def _die_soon(self) -> None:
        if self.dies_in < 0 and not self.dies_saved:
            self.dies_in = self.random.choice((0, 1, 3, 10, 30, 100, 1000)) or -1
            self.dies_saved = self.dies_in < 0
            self.tell("it will die with a table" if self.dies_saved else f"it will die in {self.dies_in}")

    def _save_slowly(self) -> None:
        """Let delayed messages become due while tables wait for their sync, and cut the power at a save."""
        self.tell("syncs are slow, and it will die with a table")
        before, self.slow_syncs, self.dies_in, self.dies_saved = self.slow_syncs, True, -1, True
        try:
            for _ in range(10):
                clients.send_delayed(self)
                self._rest(0.2)
            self._rest(3.0)
        finally:
            self.slow_syncs = before

    def _live_on(self) -> None:
        self.dies_in, self.dies_saved, self.saved = -1, False, False

    def _count_down(self) -> None:
        if self.dies_in > 0:
            self.dies_in -= 1
            if self.dies_in == 0:
                self.dies_in = -1
                raise KilledHere("its time has come")

    def _before_call(self, call: str, path: Path) -> None:
        self._count_down()
        if self.dies_saved and call == "write_atomic" and path.suffix == ".json":
            self.dies_saved, self.saved, self.dies_in = False, True, 1

    def _latency(self) -> float:
        if self.slow:
            return self.random.choice((0.001, 0.02, 0.3, 1.5))
        return self.random.choice((0.0, 0.0, 0.0001, 0.002))

    def _drag(self, call: str) -> float:
        return self.random.choice((0.1, 0.3, 1.0)) if self.slow_syncs and call in SYNCS else 0.0

    # ---- ends and starts

    def _power_off(self) -> None:
        how = self.random.choice(("kill", "power cut"))
        self.tell(how)
        self._after_death(how)

    def die_now(self, how: str) -> None:
        """End the process here."""
        self.tell(how)
        self._after_death(how)

    def _after_death(self, how: str) -> None:
        """Handle the end of a process that died by itself or is killed here."""
        disk = self.server.disk
        self.flushed = self.server.controller.store.visibility.flushed
        self.server.die()
        self.model.process_ended()
        if how == "power cut" or disk.lost_pages:
            self._cut_power()
        self._start()
        promises.check(self)

    def _cut_power(self) -> None:
        self.tell(f"  the power is off, {self.flushed} was flushed")
        self.model.power_ended(self.flushed)
        self.platter = self.platter.power_cut()

    def _stop(self) -> None:
        """Stop the broker as by SIGTERM, or at its own request."""
        self.tell("stop")
        self._live_on()
        store = self.server.controller.store
        self.server.shutdown()
        left = self.server.controller.left_behind
        assert self.slow or self.slow_syncs or not left, f"the stop left behind {left}"
        assert left or not self.platter._locks, f"the stop did not give back {self.platter._locks}"
        clean = store.end.failure is None and not self.faults.shares
        if store.end.failure is not None:
            self._after_death("kill")
            return
        self.flushed = store.visibility.flushed
        self.server.die()
        self.model.process_ended()
        if clean and self.random.random() < 0.5:
            self._cut_power()
        self._start(clean=clean)
        promises.check(self)

    def _start(self, *, clean: bool = False) -> None:
        """Start the broker until it serves."""
        self.ended_at = self.clock.monotonic()
        while True:
            loop = SimLoop(self.clock, self.random)
            disk = FaultyDisk(self.platter, self.faults, self.random)
            server = BrokerProcess(self.config, self.clock, disk, loop)
            loop.set_exception_handler(self._unhandled)
            loop.latency, loop.on_turn, disk.before = self._latency, self._count_down, self._before_call
            disk.drag = self._drag
            try:
                server.start()
            except DISK_ERRORS as error:
                self.tell(f"  no start: {error}")
                assert self.faults.met, f"the start was refused: {error}"
                server.die()
                if disk.lost_pages:
                    self._cut_power()
                if self.random.random() < 0.5:
                    self.faults.heal()
            except KilledHere:
                self.tell("  died in the start")
                server.die()
                if self.random.random() < 0.5:
                    self._cut_power()
            else:
                break
        self.server, self.saved = server, False
        self.faults.met.clear()
        self.tasks = _names(server.controller)
        server.controller.store.visibility.subscribe(lambda shown: promises.appeared(self, shown))
        self.client = SimulatedClient(loop, PORT, functools.partial(clients.asked, self))
        clients.greet(self)
        self.tell(f"started, the log ends at {server.controller.store.max_physical_offset}")
        promises.check_offsets(self, clean=clean)
        self.disturbed, self.calm_since = (
            self.slow or self.slow_syncs or bool(self.faults.shares),
            self.clock.monotonic(),
        )

    def _unhandled(self, loop: asyncio.AbstractEventLoop, what: dict[str, Any]) -> None:
        """Record an unhandled error."""
        if not isinstance(what.get("exception"), KilledHere):
            task = what.get("task") or what.get("future")
            of = getattr(task.get_coro(), "__qualname__", "") if isinstance(task, asyncio.Task) else ""
            self.broken.append(f"unhandled: {what['message']} {of}: {what.get('exception')!r}")

    def tell(self, what: str) -> None:
        self.history.append(f"{self.clock.monotonic():.4f} {what}")


def _names(controller: BrokerController) -> set[str]:
    return {task.get_name() for task in controller.runtime.supervisor._tasks if not task.done()}
