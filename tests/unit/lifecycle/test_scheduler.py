from __future__ import annotations

import logging
import threading

import pytest

from infra.clock import SystemClock
from infra.object_store import StoreUnavailable
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
    assert "in job" in caplog.text  # the line of its code: not a failure that operators know
    assert scheduler.last_error == {}


def test_a_store_that_is_away_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """A line without traceback at first, then each time that the failures have doubled, and one when it is over."""
    over = threading.Event()
    calls: list[int] = []

    def job() -> None:
        calls.append(1)
        if len(calls) <= 5:
            raise StoreUnavailable("nobody there")
        if len(calls) > 6:
            over.set()

    scheduler = JobScheduler(SystemClock())
    scheduler.every("offload", 0.02, job)
    with caplog.at_level(logging.INFO, "lifecycle.scheduler"):
        scheduler.start()
        try:
            assert over.wait(10)
        finally:
            scheduler.shutdown()
    assert scheduler.failures["offload"] == 5
    assert [record.getMessage() for record in caplog.records if record.name == "lifecycle.scheduler"] == [
        "job offload failed: nobody there",
        "job offload failed, 2 times in a row: nobody there",
        "job offload failed, 4 times in a row: nobody there",
        "job offload works again after 5 failures",
    ]


def test_a_job_runs_by_hand_before_its_time() -> None:
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
