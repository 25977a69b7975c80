"""Periodic jobs, run by APScheduler with the injected clock and threads.

APScheduler asks `datetime` for the present in the scheduler's time zone, and Python asks the time zone. The time zone
here is `_SteadyTime`, which counts the injected monotonic clock. So a step of the wall clock does not move interval
jobs, and in a simulation jobs run by simulated time.

A job never overlaps itself (`max_instances=1`): a run that comes due while the job runs is skipped. Runs that came due
while the scheduler could not start them are one run (`coalesce`), however late (`misfire_grace_time=None`). A failure
is counted and logged, with its traceback unless its kind is in `KNOWN_FAILURES`; the job runs again at its next time.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, NamedTuple

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, JobExecutionEvent
from apscheduler.executors.base import BaseExecutor
from apscheduler.jobstores.base import JobLookupError
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.base import STATE_STOPPED, BaseScheduler
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger
from typing_extensions import override

from infra.clock import Clock
from infra.loop.threads import SYSTEM_THREADS, Thread, Threads
from infra.objects.store import ObjectStoreError
from lifecycle.safe_clock import ClocksDisagree
from neve.archive.format.journal import NewerFormat
from tiered.journal.errors import Fenced

log = logging.getLogger(__name__)
#: Failures caused by a store, a clock or another owner: their traceback does not help an operator.
KNOWN_FAILURES = (ObjectStoreError, Fenced, ClocksDisagree, NewerFormat)
_STEADY_START = datetime(2000, 1, 1, tzinfo=UTC)
_STEP = timedelta(microseconds=1)
_STORE = "default"  # name of APScheduler's job store


class Failing(NamedTuple):
    """A job whose last runs failed: the number of failures in a row, the time of the first, and the last error."""

    times: int
    since_ms: int
    error: str
    kind: type[BaseException]


class _Job:
    def __init__(self, name: str) -> None:
        self.name = name
        self.requested = False  # by `run_now`, and not started yet
        self.began: float | None = None  # monotonic seconds, of the run in progress
        self.failed = 0  # failures in a row, with the same kind of error
        self.failing_since = 0.0
        self.error: BaseException | None = None


class JobScheduler:
    """The jobs of one broker and the outcome of their runs."""

    def __init__(self, clock: Clock, threads: Threads = SYSTEM_THREADS) -> None:
        self._clock = clock
        self.runs: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._jobs: dict[str, _Job] = {}
        self._executor = _ThreadForEachJob(clock, threads)
        self._scheduler = _Scheduler(clock, threads, self._executor)
        self._scheduler.add_listener(self._ended, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)

    def every(self, name: str, seconds: float, work: Callable[[], object], at_hours: Collection[int] = ()) -> None:
        """Run `work` each `seconds`, first after one period, and on the hour at `at_hours` of the machine's day."""
        job = self._jobs[name] = _Job(name)
        start = self._scheduler.now().astimezone(UTC) + timedelta(seconds=seconds)
        trigger = IntervalTrigger(seconds=seconds, start_date=start, timezone=UTC)
        if at_hours:
            trigger = OrTrigger([trigger, _OnTheHour(at_hours, self._clock)])
        self._scheduler.add_job(functools.partial(self._run, job, work), trigger, id=name, name=name)

    def run_now(self, name: str) -> None:
        """Run a job as soon as possible, once more if it is running; raises KeyError for an unknown name."""
        job = self._jobs[name]
        job.requested = True
        if job.began is None:  # else the end of the run in progress brings the next one forward, once
            self._bring_forward(job)

    def names(self) -> list[str]:
        return sorted(self._jobs)

    def start(self) -> None:
        self._scheduler.start()

    def shutdown(self, timeout_s: float) -> list[str]:
        """Start no further runs and wait for those in progress; returns the names of jobs that did not end in time."""
        self._scheduler.shutdown(wait=False)
        return self._executor.join(timeout_s)

    def failing(self) -> dict[str, Failing]:
        now, now_ms = self._clock.monotonic(), self._clock.now_ms()
        found = {}
        for job in self._jobs.values():
            if (error := job.error) is not None:
                since_ms = now_ms - int((now - job.failing_since) * 1000)
                found[job.name] = Failing(job.failed, since_ms, f"{type(error).__name__}: {error}", type(error))
        return found

    def running(self) -> dict[str, float]:
        """Seconds since the runs in progress began."""
        now = self._clock.monotonic()
        start_times = {job.name: job.began for job in self._jobs.values()}
        return {name: now - began for name, began in start_times.items() if began is not None}

    def _run(self, job: _Job, work: Callable[[], object]) -> None:
        job.requested = False
        job.began = self._clock.monotonic()
        try:
            work()
        finally:
            job.began = None

    def _bring_forward(self, job: _Job) -> None:
        with suppress(JobLookupError):  # the scheduler was shut down
            self._scheduler.modify_job(job.name, next_run_time=self._scheduler.now())

    def _ended(self, event: JobExecutionEvent) -> None:
        """Listen to the end of each run."""
        job = self._jobs[event.job_id]
        if event.exception is None:
            self._succeeded(job)
        else:
            self._failed(job, event.exception)
        self.runs[job.name] += 1
        if job.requested:
            self._bring_forward(job)

    def _succeeded(self, job: _Job) -> None:
        failed, job.failed, job.error = job.failed, 0, None
        if failed:
            log.info("job %s recovered after %d failures", job.name, failed)

    def _failed(self, job: _Job, error: BaseException) -> None:
        """Log the first failure, and later ones when the failures in a row have doubled."""
        self.failures[job.name] += 1
        if job.error is None:
            job.failing_since = self._clock.monotonic()
        job.failed = job.failed + 1 if type(error) is type(job.error) else 1
        if not job.failed & (job.failed - 1):
            again = "" if job.failed == 1 else f", {job.failed} times in a row"
            where = None if isinstance(error, KNOWN_FAILURES) else error
            log.error("job %s failed%s: %s", job.name, again, error, exc_info=where)
        job.error = error.with_traceback(None)  # the traceback's frames would keep their objects in memory


class _SteadyTime(tzinfo):
    """A time zone whose present is counted by the monotonic clock, from an arbitrary start.

    Only APScheduler's look at the present uses it: triggers have UTC as their time zone.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now(self) -> datetime:
        return (_STEADY_START + timedelta(seconds=self._clock.monotonic())).replace(tzinfo=self)

    @override
    def fromutc(self, _: datetime) -> datetime:
        return self.now()

    @override
    def utcoffset(self, _: datetime | None) -> timedelta:
        return timedelta(0)

    @override
    def dst(self, _: datetime | None) -> timedelta:
        return timedelta(0)

    @override
    def tzname(self, _: datetime | None) -> str:
        return "steady"


class _OnTheHour(BaseTrigger):  # type: ignore[misc]  # APScheduler ships no types
    """A cron trigger at hours of the machine's day, for a scheduler whose time is not the wall clock.

    The time to the next hour is computed again after each run: a wall clock that was set, or daylight saving, counts
    from the next run on.
    """

    def __init__(self, hours: Collection[int], clock: Clock) -> None:
        self._clock = clock
        # Local times are passed as if they were UTC, so that the C library's time zone applies, as for `deleteWhen`.
        self._cron = CronTrigger(hour=",".join(map(str, sorted(hours))), minute=0, second=0, timezone=UTC)

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime | None:
        local = datetime.fromtimestamp(self._clock.now_ms() / 1000).replace(tzinfo=UTC)  # noqa: DTZ006
        due = self._cron.get_next_fire_time(None, local + _STEP)
        return None if due is None else now.astimezone(UTC) + (due - local)


class _Scheduler(BaseScheduler):  # type: ignore[misc]  # APScheduler ships no types
    """APScheduler in a thread of the injected kind."""

    def __init__(self, clock: Clock, threads: Threads, executor: BaseExecutor) -> None:
        self._threads, self._woken = threads, threads.event()
        self._time, self._store = _SteadyTime(clock), MemoryJobStore()
        super().__init__(
            timezone=self._time,
            jobstores={_STORE: self._store},
            executors={"default": executor},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        )

    def now(self) -> datetime:
        return self._time.now()

    def start(self, paused: bool = False) -> None:
        super().start(paused)
        self._threads.start("scheduler", self._serve)

    def shutdown(self, wait: bool = True) -> None:
        """End the thread, too, as soon as it has started the current job. A second call has no effect."""
        if self.state != STATE_STOPPED:
            super().shutdown(wait)
            self.wakeup()

    def wakeup(self) -> None:
        self._woken.set()

    def _serve(self) -> None:
        while self.state != STATE_STOPPED:
            self._process_jobs()  # it returns the time to wait, but converted between time zones
            self._woken.wait(self._next_in_s())
            self._woken.clear()

    def _next_in_s(self) -> float | None:
        with self._jobstores_lock:
            due = self._store.get_next_run_time()
        return None if due is None else max(0.0, (due - self._time.now()).total_seconds())


class _ThreadForEachJob(BaseExecutor):  # type: ignore[misc]  # APScheduler ships no types
    """At most one thread for each job, because a job does not overlap itself.

    A job that waits for its turn or for its store therefore blocks no other job. The threads do not keep the process
    from ending, unlike those of APScheduler's pools.
    """

    def __init__(self, clock: Clock, threads: Threads) -> None:
        super().__init__()
        self._clock, self._threads = clock, threads
        self._started: dict[str, Thread] = {}

    def join(self, timeout_s: float) -> list[str]:
        """Wait for the runs in progress after a shutdown; returns the names of jobs that did not end in time."""
        deadline = self._clock.monotonic() + timeout_s
        started = sorted(self._started.items())
        for _, thread in started:
            thread.join(max(0.0, deadline - self._clock.monotonic()))
        return [name for name, thread in started if thread.is_alive()]

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:
        run = functools.partial(self._run, job, run_times[-1])
        self._started[job.id] = self._threads.start(f"job-{job.id}", run)

    def _run(self, job: Any, due: datetime) -> None:
        try:
            job.func()
        except BaseException as error:  # noqa: BLE001 - the listener counts and logs it, and the job runs again
            # A panic in obstore or another library in Rust is no Exception. APScheduler must get an end of each run.
            ended = JobExecutionEvent(EVENT_JOB_ERROR, job.id, _STORE, due, exception=error)
        else:
            ended = JobExecutionEvent(EVENT_JOB_EXECUTED, job.id, _STORE, due)
        self._run_job_success(job.id, [ended])
