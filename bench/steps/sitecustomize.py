"""Watch the event loop of a server that is started with this directory on its path, and record what blocks it.

A timer is due every millisecond. If it is late, the loop was blocked meanwhile: by wall time, and by the CPU time of
the loop's own thread, which does not depend on other load of the machine or on a thread that has the interpreter. Both
are upper bounds for the longest step, because all work in one turn of the loop counts together. The rest of the wall
time has two parts: the thread was ready but other threads and processes had all cores, which the kernel counts for each
thread (`core_ms`); or it waited for the interpreter, a lock or a disk (`blocked_ms`). A signal after every two
milliseconds of the process's CPU time samples the running functions.

Each turn of more than 5 ms is a line of JSON in the file that NEVE_BENCH_STEPS names.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

_PERIOD_NS = 1_000_000
_TOLD_NS = 5_000_000
_LOOKED_AT_NS = 3_000_000
_SAMPLE_S = 0.002
_DEPTH = 4
_ENTRANCES = ("run_and_exit", "up", "broker", "run", "main", "<module>")  # The prefix of every stack.
_OWN = Path(__file__).parents[2]


class Watch:
    """Watches one loop, on the loop's own thread."""

    def __init__(self, path: str) -> None:
        self._out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._seen: list[str] = []
        self._waits = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._at = self._cpu = self._waited = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, _SAMPLE_S, _SAMPLE_S)
        self._begin_turn()
        loop.call_later(_PERIOD_NS / 1e9, self._tick, loop)

    def _begin_turn(self) -> None:
        self._at, self._cpu, self._waited = time.monotonic_ns(), time.thread_time_ns(), self._waited_ns()

    def _waited_ns(self) -> int:
        """Return how long this thread has been ready without a core, in nanoseconds: the file's second number."""
        return int(os.pread(self._waits, 64, 0).split()[1])

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now, cpu = time.monotonic_ns(), time.thread_time_ns()
        held = now - self._at - _PERIOD_NS
        if held > _TOLD_NS:
            where = Counter(self._seen).most_common(1)
            cpu_ns, core_ns = cpu - self._cpu, self._waited_ns() - self._waited
            blocked_ns = max(held - cpu_ns - core_ns, 0)
            row = {"at": now / 1e9, "wall_ms": held / 1e6, "cpu_ms": cpu_ns / 1e6}
            row |= {"core_ms": core_ns / 1e6, "blocked_ms": blocked_ns / 1e6}
            os.write(self._out, json.dumps({**row, "where": where[0][0] if where else ""}).encode() + b"\n")
        self._seen.clear()
        self._begin_turn()
        loop.call_later(_PERIOD_NS / 1e9, self._tick, loop)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        if time.monotonic_ns() - self._at > _LOOKED_AT_NS:
            names: list[str] = []
            while frame is not None and len(names) < _DEPTH:
                if _is_ours(frame.f_code) and frame.f_code.co_name not in _ENTRANCES:
                    names.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
                frame = frame.f_back
            self._seen.append(" < ".join(names))


def _is_ours(code: CodeType) -> bool:
    path = code.co_filename
    return path.startswith(f"{_OWN}/") and "site-packages" not in path and path != __file__


def _watched(make: Callable[[], asyncio.AbstractEventLoop], path: str) -> Callable[[], asyncio.AbstractEventLoop]:
    def new_event_loop() -> asyncio.AbstractEventLoop:
        loop = make()
        loop.call_soon(Watch(path).start, loop)
        return loop

    return new_event_loop


if {"up", "broker"}.intersection(sys.orig_argv) and "NEVE_BENCH_STEPS" in os.environ:
    import uvloop

    watched = _watched(uvloop.new_event_loop, os.environ["NEVE_BENCH_STEPS"])
    setattr(uvloop, "new_event_loop", watched)  # noqa: B010 - for the checker it has another type
