from __future__ import annotations

import logging
import threading

import pytest

from infra.clock import SystemClock
from lifecycle.scheduler import JobScheduler


def test_a_failed_job_is_counted_logged_and_runs_again(caplog: pytest.LogCaptureFixture) -> None:
    again = threading.Event()
    calls: list[int] = []

    def job() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("first time")
        again.set()

    scheduler = JobScheduler(SystemClock())
    scheduler.every("ttl", 0.05, job)
    with caplog.at_level(logging.ERROR, "lifecycle.scheduler"):
        scheduler.start()
        try:
            assert again.wait(10)
        finally:
            scheduler.shutdown()
    assert scheduler.failures["ttl"] == 1
    assert "first time" in caplog.text
    assert scheduler.last_error == {}


def test_run_now() -> None:
    ran = threading.Event()
    scheduler = JobScheduler(SystemClock())
    scheduler.every("sweep", 3600, ran.set)
    scheduler.start()
    try:
        assert not ran.is_set()
        scheduler.run_now("sweep")
        assert ran.wait(10)
        with pytest.raises(KeyError):
            scheduler.run_now("nothing")
    finally:
        scheduler.shutdown()
    assert scheduler.names() == ["sweep"]
