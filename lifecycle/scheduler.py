"""Jobs by the clock: one scheduler thread pool for the whole lifecycle.

A job never overlaps itself, runs once after a pause of any length, and a failure is counted and logged, with its
traceback unless it is one that operators know; the job comes again at its next time.
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
from infra.object_store import ObjectStoreError
from lifecycle.safe_clock import ClocksDisagree
from neve.archive.journal import NewerFormat
from tiered.journal import Fenced

_log = logging.getLogger(__name__)
_THREADS = 8  # jobs wait for one another; one that does not must still find a thread
#: What a store, a clock or another owner does to a job: an operator needs no traceback for it.
KNOWN_FAILURES = (ObjectStoreError, Fenced, ClocksDisagree, NewerFormat)


class JobScheduler:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.runs: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.last_error: dict[str, str] = {}
        self._in_a_row: dict[str, tuple[int, type[BaseException] | None]] = {}
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
            self._failed(event.job_id, event.exception)
            return
        self.last_error.pop(event.job_id, None)
        failed, _ = self._in_a_row.pop(event.job_id, (0, None))
        if failed:
            _log.info("job %s works again after %d failures", event.job_id, failed)

    def _failed(self, name: str, error: BaseException) -> None:
        """Said the first time, and when the failures in a row have doubled: a store may be away for hours."""
        self.failures[name] += 1
        self.last_error[name] = f"{type(error).__name__}: {error}"
        before, kind = self._in_a_row.get(name, (0, None))
        failed = before + 1 if kind is type(error) else 1
        self._in_a_row[name] = failed, type(error)
        if failed & (failed - 1):
            return
        again = "" if failed == 1 else f", {failed} times in a row"
        if isinstance(error, KNOWN_FAILURES):
            _log.error("job %s failed%s: %s", name, again, error)
        else:
            _log.error("job %s failed%s: %s", name, again, error, exc_info=error)
