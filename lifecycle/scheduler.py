"""Jobs at their periods: a thread for each, waiting by the monotonic clock. A wall clock that is set moves no job.

A job never overlaps itself: its period begins when it has ended. A failure is counted and logged, with its traceback
unless it is one that operators know; the job comes again at its next time.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from infra.clock import Clock
from infra.locks import Event
from infra.object_store.protocol import ObjectStoreError
from infra.threads import SYSTEM_THREADS, Thread, Threads
from lifecycle.safe_clock import ClocksDisagree
from neve.archive.journal import NewerFormat
from tiered.journal.errors import Fenced

log = logging.getLogger(__name__)
#: What a store, a clock or another owner does to a job: an operator needs no traceback for it.
KNOWN_FAILURES = (ObjectStoreError, Fenced, ClocksDisagree, NewerFormat)


class Failing(NamedTuple):
    """A job whose last runs have failed: how often in a row, since when, and how the last one."""

    times: int
    since_ms: int
    error: str
    kind: type[BaseException]


class _Job:
    def __init__(self, name: str, seconds: float, work: Callable[[], object], wanted: Event) -> None:
        self.name, self.seconds, self.work = name, seconds, work
        self.wanted = wanted
        self.thread: Thread | None = None
        self.began: float | None = None  # of the run under way
        self.failed = 0  # in a row, with the same kind of error
        self.failing_since = 0.0
        self.error: BaseException | None = None


class JobScheduler:
    """The jobs of one broker, their threads and what became of their runs. A job never overlaps itself."""

    def __init__(self, clock: Clock, threads: Threads = SYSTEM_THREADS) -> None:
        self._clock, self._threads = clock, threads
        self.runs: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._jobs: dict[str, _Job] = {}
        self._stopping = False

    def every(self, name: str, seconds: float, work: Callable[[], object]) -> None:
        """First after one period."""
        self._jobs[name] = _Job(name, seconds, work, self._threads.event())

    def run_now(self, name: str) -> None:
        """Once more as soon as it can; raises KeyError for an unknown name."""
        self._jobs[name].wanted.set()

    def names(self) -> list[str]:
        return sorted(self._jobs)

    def start(self) -> None:
        for job in self._jobs.values():
            # A call into a store that hangs must not keep the process from ending.
            job.thread = self._threads.start(f"job-{job.name}", functools.partial(self._serve, job))

    def shutdown(self, timeout_s: float) -> list[str]:
        """Start no further ones and wait for those that run; returns the names of those that did not end in time."""
        self._stopping = True
        for job in self._jobs.values():
            job.wanted.set()
        deadline = self._clock.monotonic() + timeout_s
        hanging = []
        for job in self._jobs.values():
            if job.thread is not None:
                job.thread.join(max(0.0, deadline - self._clock.monotonic()))
                if job.thread.is_alive():
                    hanging.append(job.name)
        return hanging

    def failing(self) -> dict[str, Failing]:
        now, now_ms = self._clock.monotonic(), self._clock.now_ms()
        found = {}
        for job in self._jobs.values():
            if (error := job.error) is not None:
                since_ms = now_ms - int((now - job.failing_since) * 1000)
                found[job.name] = Failing(job.failed, since_ms, _told(error), type(error))
        return found

    def running(self) -> dict[str, float]:
        """Seconds since the runs that are under way began."""
        now = self._clock.monotonic()
        begun = {job.name: job.began for job in self._jobs.values()}
        return {name: now - began for name, began in begun.items() if began is not None}

    def _serve(self, job: _Job) -> None:
        while not self._stopping:
            job.wanted.wait(job.seconds)
            job.wanted.clear()
            if not self._stopping:
                self._run(job)

    def _run(self, job: _Job) -> None:
        job.began = self._clock.monotonic()
        try:
            job.work()
        except Exception as error:  # noqa: BLE001 - this is where a job's errors end: told, and the job lives on
            self._failed(job, error)
        else:
            self._worked(job)
        finally:
            job.began = None
            self.runs[job.name] += 1

    def _worked(self, job: _Job) -> None:
        failed, job.failed, job.error = job.failed, 0, None
        if failed:
            log.info("job %s works again after %d failures", job.name, failed)

    def _failed(self, job: _Job, error: BaseException) -> None:
        """Said the first time, and when the failures in a row have doubled: a store may be away for hours."""
        self.failures[job.name] += 1
        if job.error is None:
            job.failing_since = self._clock.monotonic()
        job.failed = job.failed + 1 if type(error) is type(job.error) else 1
        if not job.failed & (job.failed - 1):
            again = "" if job.failed == 1 else f", {job.failed} times in a row"
            where = None if isinstance(error, KNOWN_FAILURES) else error
            log.error("job %s failed%s: %s", job.name, again, error, exc_info=where)
        job.error = error.with_traceback(None)  # its frames would keep what they hold


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
