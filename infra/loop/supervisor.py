"""Background tasks with a name: what becomes of each is seen, by its owner, in the log, on the health pages.

spawn   one job; it ends by itself, a failure is logged and counted
every   runs again and again; a failure is logged and counted, the next run comes at its time
keep    never ends; should it, by a failure or by itself, it is begun again, after a pause that doubles
vital   never ends; should it, `on_end` is told: the server can't go on without it

A task of the last three kinds is in trouble when its last runs all failed, when one run takes too long, or when it is
gone. `Faults` are the single items (a message, a name, a waiting pull) that were set aside so that a task goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

log = logging.getLogger(__name__)

#: So many failed runs in a row are a trouble; fewer may be a disk or a peer that was away for a moment.
FAILING_RUNS = 3
#: A run that takes longer hangs: each of them is to be short, or to give up by itself.
HANGING_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_STOP_S = 5.0


class Trouble(NamedTuple):
    """What is wrong with a task: `failing` may pass, with the others only a restart of the process helps."""

    task: str
    kind: Literal["failing", "hanging", "ended"]
    text: str


@dataclass(slots=True)
class _Kept:
    """What is known of a task that is meant never to end."""

    name: str
    failed_in_a_row: int = 0
    last_error: str = ""
    # When the present run began, of a task that has runs.
    running_since: float | None = None
    ended: bool = False

    def trouble(self, now: float) -> Trouble | None:
        if self.ended:
            return Trouble(self.name, "ended", self.last_error or "ended by itself")
        if self.running_since is not None and now - self.running_since > HANGING_S:
            return Trouble(self.name, "hanging", f"for {now - self.running_since:.0f} s")
        if self.failed_in_a_row >= FAILING_RUNS:
            return Trouble(self.name, "failing", f"{self.failed_in_a_row} times in a row: {self.last_error}")
        return None


class Faults:
    """Single items that failed and were set aside: counted by kind, logged the first time and at each doubling."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, error: BaseException, item: object = "") -> None:
        """`item` is what was set aside, for who looks into the log."""
        self.counts[kind] += 1
        count = self.counts[kind]
        if not count & (count - 1):
            log.error("%s %s set aside, %d by now: %r", kind, item, count, error, exc_info=error)

    def total(self) -> int:
        return self.counts.total()


class Stop:
    """The steps of a server's stop, each in its time: one that fails or hangs keeps back no other."""

    def __init__(self, name: str, seconds: Mapping[str, float]) -> None:
        self._name, self._seconds = name, seconds
        # Steps that did not end: what they wait for may hold up the end of the process, and its threads.
        self.left_behind: list[str] = []

    async def step(self, name: str, work: Coroutine[Any, Any, object]) -> bool:
        """Whether it was done."""
        seconds = self._seconds[name]
        task = asyncio.get_running_loop().create_task(work, name=f"{self._name}/stop/{name}")
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            task.cancel()
            self.left_behind.append(name)
            log.error("stop of %s: %s does not end within %g s", self._name, name, seconds)
            return False
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            log.error("stop of %s: %s failed", self._name, name, exc_info=error)
        return error is None


class Supervisor:
    """Owns the tasks of one server; `stop` ends them all."""

    def __init__(self, name: str, *, limit: int = 4096) -> None:
        self._name = name
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept: dict[str, _Kept] = {}
        self._stopping = False
        self.failures: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tasks)

    # ---- the four kinds

    def spawn(self, name: str, work: Callable[[], Coroutine[Any, Any, object]]) -> asyncio.Task[None]:
        """Run `work` once in the background."""
        return self._begin(name, self._once(name, work))

    def every(
        self, name: str, period_s: float, work: Callable[[], Awaitable[object] | None], *, first_s: float | None = None
    ) -> asyncio.Task[None]:
        """Run `work` after `first_s` (default: one period) and then `period_s` after each end."""
        kept = self._kept[name] = _Kept(name)
        return self._begin(name, self._loop(kept, period_s, work, period_s if first_s is None else first_s))

    def keep(self, name: str, work: Callable[[], Coroutine[Any, Any, object]]) -> asyncio.Task[None]:
        """Run `work`, which never ends, and begin it again if it does."""
        kept = self._kept[name] = _Kept(name)
        return self._begin(name, self._again(kept, work))

    def vital(
        self,
        name: str,
        work: Callable[[], Coroutine[Any, Any, object]],
        on_end: Callable[[BaseException | None], None],
    ) -> asyncio.Task[None]:
        """Run `work`, whose end is the server's: `on_end` hears of it, but for `stop`."""
        kept = self._kept[name] = _Kept(name)
        return self._begin(name, self._to_the_end(kept, work, on_end))

    # ---- what becomes of them

    def troubles(self) -> list[Trouble]:
        """The tasks with which something is wrong, by name."""
        if not self._kept:
            return []
        now = asyncio.get_running_loop().time()
        found = [kept.trouble(now) for _, kept in sorted(self._kept.items())]
        return [trouble for trouble in found if trouble is not None]

    async def stop(self) -> None:
        """Cancel everything and wait until it has ended; what does not is named and left behind."""
        self._stopping = True
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=_STOP_S)
            for task in left:
                log.error("background task %s does not end", task.get_name())

    # ---- inside

    def _begin(self, name: str, run: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """The work itself is begun by its task: whose task ends before that has nothing that waits to be closed."""
        if len(self._tasks) >= self._limit:
            run.close()
            raise RuntimeError(f"{self._name} has {self._limit} background tasks already")
        task = asyncio.get_running_loop().create_task(run, name=f"{self._name}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _once(self, name: str, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        error = await self._run(work())
        if error is not None:
            self._failed(name, error, 1)

    async def _loop(
        self, kept: _Kept, period_s: float, work: Callable[[], Awaitable[object] | None], first_s: float
    ) -> None:
        await asyncio.sleep(first_s)
        loop = asyncio.get_running_loop()
        while True:
            kept.running_since = loop.time()
            error = await self._run(_call(work))
            kept.running_since = None
            self._note(kept, error)
            await asyncio.sleep(period_s)

    async def _again(self, kept: _Kept, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        loop, pause = asyncio.get_running_loop(), _FIRST_PAUSE_S
        while True:
            begun = loop.time()
            error = await self._run(work())
            if loop.time() - begun > _LONGEST_PAUSE_S:  # it worked for a while
                kept.failed_in_a_row, pause = 0, _FIRST_PAUSE_S
            self._note(kept, error or RuntimeError("it ended by itself"))
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _to_the_end(
        self,
        kept: _Kept,
        work: Callable[[], Coroutine[Any, Any, object]],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        error = await self._run(work())
        kept.ended = True
        if error is not None:
            self._note(kept, error)
        log.critical("background task %s/%s has ended, and %s with it", self._name, kept.name, self._name)
        on_end(error)

    async def _run(self, work: Coroutine[Any, Any, object]) -> BaseException | None:
        """What `work` failed with. A cancellation that nobody asked this task for is a failure as well."""
        try:
            await work
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._stopping or (task is not None and task.cancelling()):
                raise
            return error
        except Exception as error:  # noqa: BLE001 - the supervisor: whatever it is, it is the task's failure
            return error
        return None

    def _note(self, kept: _Kept, error: BaseException | None) -> None:
        if error is None:
            if kept.failed_in_a_row:
                log.info("background task %s/%s works again", self._name, kept.name)
            kept.failed_in_a_row, kept.last_error = 0, ""
            return
        kept.failed_in_a_row += 1
        kept.last_error = f"{type(error).__name__}: {error}"
        self._failed(kept.name, error, kept.failed_in_a_row)

    def _failed(self, name: str, error: BaseException, in_a_row: int) -> None:
        """Said the first time, and when the failures in a row have doubled: a task may run ten times a second."""
        self.failures[name] += 1
        if not in_a_row & (in_a_row - 1):
            again = "" if in_a_row == 1 else f", {in_a_row} times in a row"
            log.error("background task %s/%s failed%s", self._name, name, again, exc_info=error)


async def _call(work: Callable[[], Awaitable[object] | None]) -> None:
    result = work()
    if result is not None:
        await result
