"""Supervised background tasks: the outcome of each is in the log, in the metrics and on the health pages.

spawn   one run; a failure is logged and counted
every   periodic runs; a failure is logged and counted, and the next run starts on schedule
keep    a run without an end; if it fails or returns, it is restarted after a pause that doubles each time
vital   a run without an end; if it fails or returns, `on_end` is called: the server cannot continue without it

A task of the last three kinds has a `Trouble` if its latest runs all failed, if one run takes too long, or if it has
ended. `Faults` counts single items (a message, a name, a waiting pull) that a task skipped after an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

log = logging.getLogger(__name__)

#: Consecutive failed runs that are a trouble; fewer may be a short outage of a disk or a peer.
FAILING_RUNS = 3
#: A run that takes longer counts as hanging: every run has to be short or to have a timeout.
HANGING_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_STOP_S = 5.0


class Trouble(NamedTuple):
    """A fault of a task: `failing` may pass by itself, the other kinds need a restart of the process."""

    task: str
    kind: Literal["failing", "hanging", "ended"]
    text: str


@dataclass(slots=True)
class _Kept:
    """The state of a task that is meant never to end."""

    name: str
    failed_in_a_row: int = 0
    last_error: str = ""
    # The start of the current run of a periodic task.
    running_since: float | None = None
    ended: bool = False

    def trouble(self, now: float) -> Trouble | None:
        if self.ended:
            return Trouble(self.name, "ended", self.last_error or "returned")
        if self.running_since is not None and now - self.running_since > HANGING_S:
            return Trouble(self.name, "hanging", f"for {now - self.running_since:.0f} s")
        if self.failed_in_a_row >= FAILING_RUNS:
            return Trouble(self.name, "failing", f"{self.failed_in_a_row} times in a row: {self.last_error}")
        return None


class Faults:
    """Skipped items, counted by kind; the first one is logged, and each one that doubles the count."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, error: BaseException, item: object = "") -> None:
        """Count a skipped item. `item` identifies it in the log."""
        self.counts[kind] += 1
        count = self.counts[kind]
        if not count & (count - 1):
            log.error("skipped %s %s: %r total=%d", kind, item, error, count, exc_info=error)

    def total(self) -> int:
        return self.counts.total()


class Stop:
    """The steps of a server's stop, each with a timeout: a step that fails or hangs does not delay the others."""

    def __init__(self, name: str, seconds: Mapping[str, float]) -> None:
        self._name, self._seconds = name, seconds
        # Steps that did not end: their threads may keep the process from ending.
        self.left_behind: list[str] = []

    async def step(self, name: str, work: Coroutine[Any, Any, object]) -> bool:
        """Run a step; return whether it succeeded in time."""
        seconds = self._seconds[name]
        task = asyncio.get_running_loop().create_task(work, name=f"{self._name}/stop/{name}")
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            task.cancel()
            self.left_behind.append(name)
            log.error("stop of %s: step %s does not end within %g s", self._name, name, seconds)
            return False
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            log.error("stop of %s: step %s failed", self._name, name, exc_info=error)
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
        """Run `work`, which should never end, and restart it if it does."""
        kept = self._kept[name] = _Kept(name)
        return self._begin(name, self._again(kept, work))

    def vital(
        self,
        name: str,
        work: Callable[[], Coroutine[Any, Any, object]],
        on_end: Callable[[BaseException | None], None],
    ) -> asyncio.Task[None]:
        """Run `work`, without which the server has to end; call `on_end` if it ends before `stop`."""
        kept = self._kept[name] = _Kept(name)
        return self._begin(name, self._to_the_end(kept, work, on_end))

    # ---- their state

    def troubles(self) -> list[Trouble]:
        """Return the faults of all tasks, sorted by task."""
        if not self._kept:
            return []
        now = asyncio.get_running_loop().time()
        found = [kept.trouble(now) for _, kept in sorted(self._kept.items())]
        return [trouble for trouble in found if trouble is not None]

    async def stop(self) -> None:
        """Cancel all tasks and wait for them; a task that does not end in time is logged and abandoned."""
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
        """Start a task, which calls `work` itself: a task that is cancelled first leaves no unawaited coroutine."""
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
            started = loop.time()
            error = await self._run(work())
            if loop.time() - started > _LONGEST_PAUSE_S:  # it ran long enough to count as recovered
                kept.failed_in_a_row, pause = 0, _FIRST_PAUSE_S
            self._note(kept, error or RuntimeError("the task returned"))
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
        log.critical("background task %s/%s ended: the server %s ends, too", self._name, kept.name, self._name)
        on_end(error)

    async def _run(self, work: Coroutine[Any, Any, object]) -> BaseException | None:
        """Return the error of `work`, if any. A cancellation from inside `work` is an error as well."""
        try:
            await work
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._stopping or (task is not None and task.cancelling()):
                raise
            return error
        except Exception as error:  # noqa: BLE001 - the supervisor: any exception is a failure of the task
            return error
        return None

    def _note(self, kept: _Kept, error: BaseException | None) -> None:
        if error is None:
            if kept.failed_in_a_row:
                log.info("background task %s/%s recovered", self._name, kept.name)
            kept.failed_in_a_row, kept.last_error = 0, ""
            return
        kept.failed_in_a_row += 1
        kept.last_error = f"{type(error).__name__}: {error}"
        self._failed(kept.name, error, kept.failed_in_a_row)

    def _failed(self, name: str, error: BaseException, in_a_row: int) -> None:
        """Log the first failure and each one that doubles the count in a row: a task may run ten times a second."""
        self.failures[name] += 1
        if not in_a_row & (in_a_row - 1):
            again = "" if in_a_row == 1 else f" {in_a_row} times in a row"
            log.error("background task %s/%s failed%s", self._name, name, again, exc_info=error)


async def _call(work: Callable[[], Awaitable[object] | None]) -> None:
    result = work()
    if result is not None:
        await result
