"""An event loop with virtual time and threads that take turns: the order of events follows from a seed alone.

The loop is asyncio's own, with another clock and another selector: where the real one would sleep, this one advances
the time to the next timer. Work that the broker moves to a thread runs in a greenlet. The greenlet yields at each call
of the disk, for a time that the seed determines; meanwhile the loop runs, as it does beside a thread.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar, cast

import greenlet

from infra.loop import locks, threads

P = ParamSpec("P")
T = TypeVar("T")
Factory = Callable[[], asyncio.Protocol]


class KilledHere(SystemExit):
    """The process is killed at this line. It is a SystemExit, because asyncio propagates that at once."""


class Stuck(AssertionError):
    """Everything waits, and no event will ever occur."""


class SimClock:
    """Both clocks of the machine; the wall clock may be set, the monotonic clock only advances."""

    def __init__(self, now_ms: int) -> None:
        self._wall_ms = float(now_ms)
        self._monotonic = 0.0
        self.highest_ms = now_ms  # The highest time that the wall clock ever showed.

    def now_ms(self) -> int:
        return int(self._wall_ms)

    def monotonic(self) -> float:
        return self._monotonic

    def thread_seconds(self) -> float:
        return 0.0  # Work takes no time here.

    def pass_time(self, seconds: float) -> None:
        self._monotonic += seconds
        self.set_wall(self._wall_ms + seconds * 1000)

    def set_wall(self, now_ms: float) -> None:
        self._wall_ms = now_ms
        self.highest_ms = max(self.highest_ms, int(now_ms))


class SimLoop(asyncio.BaseEventLoop):
    """The simulated loop; `on_turn` is called before each turn and may raise `Killed`."""

    def __init__(self, clock: SimClock, chance: random.Random) -> None:
        super().__init__()
        self._sim_clock, self._chance = clock, chance
        self._selector = _Selector(self)
        self.on_turn: Callable[[], None] = lambda: None
        #: The duration of a disk call in a thread.
        self.latency: Callable[[], float] = lambda: 0.0
        self._jobs: dict[int, deque[SimThread]] = {}
        self.threads: dict[SimThread, None] = {}
        self.ports: dict[int, Factory] = {}

    # ---- time

    def time(self) -> float:
        return self._sim_clock.monotonic()

    def pass_time(self, seconds: float) -> None:
        """Advance the time; no timer is due earlier."""
        self._sim_clock.pass_time(seconds)

    def after(self, seconds: float) -> asyncio.Future[None]:
        """Return a future that completes after this much of the loop's time."""
        future: asyncio.Future[None] = self.create_future()
        self.call_later(seconds, lambda: None if future.done() else future.set_result(None))
        return future

    def run_for(self, seconds: float) -> None:
        """Run all events within this time."""
        end = self.call_later(seconds, self.stop)
        try:
            self.run_forever()
        finally:
            end.cancel()

    def run(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Run `work` to its end within a time limit; other work of the loop runs meanwhile."""
        task = self.create_task(work)
        task.add_done_callback(lambda _: self.stop())
        end = self.call_later(limit_s, self.stop)
        self.run_forever()
        end.cancel()
        if not task.done():
            raise Stuck(f"{getattr(work, '__qualname__', work)} has not ended in {limit_s} s")
        return task.result()

    def ask(self, question: Callable[[], T]) -> T:
        """Call a function that must run on the loop; no time passes."""
        asyncio._set_running_loop(self)
        try:
            return question()
        finally:
            asyncio._set_running_loop(None)

    def abandon(self) -> None:
        """End the dead process: its tasks and threads end where they are, without further effect."""
        self.set_exception_handler(lambda loop, what: None)  # Its callbacks belong to the dead process as well.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # Callbacks of the next turn are never run.
            for task in asyncio.all_tasks(self):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with suppress(Exception, KilledHere):
                    cast("Coroutine[Any, Any, Any]", task.get_coro()).close()
        for thread in tuple(self.threads):
            with suppress(Exception, KilledHere):
                thread.throw(greenlet.GreenletExit)
        self._ready.clear()  # type: ignore[attr-defined]
        self._scheduled.clear()  # type: ignore[attr-defined]
        self.close()

    # ---- threads

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Like the real method: a pool of one thread runs its work sequentially."""
        future: asyncio.Future[T] = self.create_future()
        thread = SimThread(self, lambda: func(*args), future)
        if getattr(executor, "_max_workers", 0) == 1:
            line = self._jobs.setdefault(id(executor), deque())
            line.append(thread)
            thread.ended = lambda: self._next_in(line)
            if len(line) > 1:
                return future
        self.start_thread(thread)
        return future

    def start_thread(self, thread: SimThread) -> None:
        self.call_later(self._chance.choice((0.0, 0.0, 0.0002, 0.003)), thread.resume)

    def _next_in(self, line: deque[SimThread]) -> None:
        line.popleft()
        if line:
            self.start_thread(line[0])

    # ---- sockets

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Open a port that only clients of this simulation know."""
        self.ports[port] = protocol_factory
        return _Listening(self, host, port)

    # ---- methods that asyncio's own parts call

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: clients are in this process, so there are no events."""

    def _write_to_self(self) -> None:
        """Do nothing: the loop never sleeps."""


class _Selector:
    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Stuck("no timer is set and nothing is ready")
        if timeout > 0:
            self._loop.pass_time(timeout)
        self._loop.on_turn()
        return []

    def close(self) -> None:
        """Do nothing: no file is open."""


class _Listening:
    def __init__(self, loop: SimLoop, host: str, port: int) -> None:
        self._loop, self._name = loop, (host, port)
        self.sockets = [self]

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def close(self) -> None:
        self._loop.ports.pop(self._name[1], None)


class SimThread(greenlet.greenlet):  # type: ignore[misc]  # it ships no types
    """A piece of work beside the loop; it runs until it yields."""

    def __init__(self, loop: SimLoop, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        super().__init__(self._run)
        self._loop, self._work, self._future = loop, work, future
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self.in_a_hurry = False
        self.ended: Callable[[], None] = lambda: None

    def _run(self) -> None:
        self._loop.threads[self] = None
        try:
            result = self._work()
        except greenlet.GreenletExit:
            return
        except Exception as error:  # noqa: BLE001 - as an executor: it is the waiting one's
            self._settle(self._future.set_exception, error)
        else:
            self._settle(self._future.set_result, result)
        finally:
            self._loop.threads.pop(self, None)

    def _settle(self, tell: Callable[[Any], None], what: Any) -> None:
        self._loop.call_soon(lambda: None if self._future.done() else tell(what))
        self._loop.call_soon(self.ended)

    def resume(self) -> None:
        """Resume the thread; called by the loop, or by a waiter for this thread's lock."""
        self._timer = None
        if not self.dead:
            self.parent = greenlet.getcurrent()
            self.switch()

    def give_way(self, seconds: float) -> None:
        """Yield from the thread for this time."""
        if not self.in_a_hurry:
            self._timer = self._loop.call_later(seconds, self.resume)
            assert self.parent is not None
            self.parent.switch()

    def hurry(self) -> None:
        """Run on, because a caller that cannot yield waits for a lock of this thread."""
        if self._timer is not None:
            self._timer.cancel()
        self.in_a_hurry = True
        self.resume()

    def hurried(self) -> None:
        """Return to the caller that waited for the lock, which is free now."""
        self.in_a_hurry = False
        self._timer = self._loop.call_soon(self.resume)
        assert self.parent is not None
        self.parent.switch()

    def wait_for(self, future: asyncio.Future[T]) -> T:
        """Wait in the thread until the loop has completed the future."""
        assert not self.in_a_hurry, "the loop waits for a thread that waits for the loop"
        while not future.done():
            future.add_done_callback(lambda _: self._loop.call_soon(self.resume))
            assert self.parent is not None
            self.parent.switch()
        return future.result()


class SimLock:
    """A `threading.Lock` for greenlets: a waiter on the loop lets the holder run until the lock is free.

    A holder that dies does not release it: its exception propagates to the loop, which ends where it waits.
    """

    def __init__(self) -> None:
        self._holder: greenlet.greenlet | None = None
        self._wanted = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        here = greenlet.getcurrent()
        while self._holder is not None:
            if not blocking:
                return False
            assert self._holder is not here, "a lock is taken twice by the same thread"
            if isinstance(here, SimThread) and not here.in_a_hurry:
                here.give_way(0.0005)
            else:
                assert isinstance(self._holder, SimThread), "a thread's lock is held by the loop while it waits"
                self._wanted = True
                self._holder.hurry()
        self._holder = here
        return True

    def release(self) -> None:
        holder, self._holder = self._holder, None
        if self._wanted:
            self._wanted = False
            assert isinstance(holder, SimThread)
            if not isinstance(sys.exception(), KilledHere):
                holder.hurried()

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Event:
    """A `threading.Event` with the loop's time."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[asyncio.Future[None]] = []

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            here, loop = greenlet.getcurrent(), cast("SimLoop", asyncio.get_running_loop())
            assert isinstance(here, SimThread), "the loop waits"
            passed = loop.create_future() if timeout is None else loop.after(timeout)
            self._waiting.append(passed)
            here.wait_for(passed)
        return self._is_set


class Thread:
    """A `threading.Thread` on the running loop."""

    def __init__(self, *, target: Callable[..., object], args: tuple[Any, ...], name: str, daemon: bool) -> None:
        self.name, self.daemon = name, daemon
        self._work = lambda: target(*args)
        self._thread: SimThread | None = None

    def start(self) -> None:
        loop = cast("SimLoop", asyncio.get_running_loop())
        self._thread = SimThread(loop, self._work, loop.create_future())
        loop.start_thread(self._thread)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.dead

    def join(self, timeout: float | None = None) -> None:
        here, loop = greenlet.getcurrent(), asyncio.get_running_loop()
        assert isinstance(here, SimThread), "the loop waits"
        end = loop.time() + timeout if timeout is not None else math.inf
        while self.is_alive() and loop.time() < end:
            here.give_way(0.001)


class SimThreads:
    """The threads of a broker (`infra.loop.threads`), run by the simulated loop."""

    def lock(self) -> locks.Lock:
        return SimLock()

    def event(self) -> locks.Event:
        return Event()

    def start(self, name: str, work: Callable[[], object]) -> threads.Thread:
        thread = Thread(target=work, args=(), name=name, daemon=True)
        thread.start()
        return thread

    async def run(self, work: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs) -> T:
        return await asyncio.to_thread(work, *arguments, **keywords)

    def in_line(self, name: str) -> threads.RunInThread:
        return self.run
