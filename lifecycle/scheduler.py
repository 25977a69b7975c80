"""Jobs by the clock: one scheduler thread pool for the whole lifecycle.

A job never overlaps itself, runs once after a pause of any length, and a failure is logged with its traceback and
counted; the job comes again at its next time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_MISSED, JobExecutionEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler

from infra.clock import Clock

_log = logging.getLogger(__name__)
_THREADS = 8  # jobs wait for one another; one that does not must still find a thread


class JobScheduler:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.runs: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.last_error: dict[str, str] = {}
        self._jobs: dict[str, Callable[[], object]] = {}
        self._scheduler: Any = BackgroundScheduler(
            timezone=UTC,
            executors={"default": ThreadPoolExecutor(_THREADS)},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        )
        self._scheduler.add_listener(self._on_event, EVENT_JOB_ERROR | EVENT_JOB_EXECUTED | EVENT_JOB_MISSED)

    def every(self, name: str, seconds: float, job: Callable[[], object]) -> None:
        self._jobs[name] = job
        self._scheduler.add_job(job, "interval", seconds=seconds, id=name, name=name)

    def run_now(self, name: str) -> None:
        """Bring a job's next time forward; raises KeyError for an unknown name."""
        if name not in self._jobs:
            raise KeyError(name)
        self._scheduler.modify_job(name, next_run_time=datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC))

    def names(self) -> list[str]:
        return sorted(self._jobs)

    def start(self) -> None:
        self._scheduler.start()

    def shutdown(self) -> None:
        """Wait for the running jobs; start no further ones."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=True)

    def _on_event(self, event: JobExecutionEvent) -> None:
        if event.code == EVENT_JOB_MISSED:
            _log.warning("job %s missed its time", event.job_id)
            return
        self.runs[event.job_id] += 1
        if event.exception is not None:
            self.failures[event.job_id] += 1
            self.last_error[event.job_id] = f"{type(event.exception).__name__}: {event.exception}"
            _log.error("job %s failed: %s\n%s", event.job_id, event.exception, event.traceback)
        else:
            self.last_error.pop(event.job_id, None)
