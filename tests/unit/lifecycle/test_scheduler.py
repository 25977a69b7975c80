from __future__ import annotations

import logging
import threading

import pytest

from infra.clock import ManualClock, SystemClock
from infra.object_store.protocol import StoreUnavailable
from lifecycle.scheduler import JobScheduler
from tests.waiting import wait_until


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
            assert scheduler.shutdown(10) == []
    assert scheduler.failures["ttl"] == 1
    assert "first time" in caplog.text
    assert "in job" in caplog.text  # the line of its code: not a failure that operators know
    assert scheduler.failing() == {}


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
            assert scheduler.shutdown(10) == []
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
        assert scheduler.shutdown(10) == []
    assert scheduler.names() == ["sweep"]


class _NoWallClock(SystemClock):
    def now_ms(self) -> int:
        raise AssertionError("no job goes by the wall clock: it may be set back by hours")


def test_no_job_goes_by_the_wall_clock() -> None:
    often, by_hand = threading.Semaphore(0), threading.Event()
    scheduler = JobScheduler(_NoWallClock())
    scheduler.every("often", 0.01, often.release)
    scheduler.every("seldom", 3600, by_hand.set)
    scheduler.start()
    try:
        for _ in range(3):
            assert often.acquire(timeout=10)
        scheduler.run_now("seldom")
        assert by_hand.wait(10)
    finally:
        assert scheduler.shutdown(10) == []


def test_it_is_told_since_when_a_job_fails_though_the_clock_was_set_meanwhile() -> None:
    clock, ran = ManualClock(), threading.Semaphore(0)
    right = clock.now_ms()

    def job() -> None:
        ran.release()
        raise StoreUnavailable("nobody there")

    scheduler = JobScheduler(clock)
    scheduler.every("ttl", 3600, job)
    scheduler.start()
    try:
        for times in (1, 2):
            scheduler.run_now("ttl")
            assert ran.acquire(timeout=10)
            wait_until(lambda: scheduler.runs["ttl"] == times)  # noqa: B023 - it is over before the next
            clock.set_wall(clock.now_ms() + 86_400_000)
            clock.advance(1000)
        told = "StoreUnavailable: nobody there"
        assert scheduler.failing()["ttl"] == (2, right + 2 * 86_400_000, told, StoreUnavailable)
    finally:
        assert scheduler.shutdown(10) == []


def test_a_job_that_hangs_does_not_keep_the_process_from_ending() -> None:
    began, over = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        over.wait(60)

    scheduler = JobScheduler(SystemClock())
    scheduler.every("offload", 0.01, hang)
    scheduler.every("ttl", 3600, lambda: None)
    scheduler.start()
    assert began.wait(10)
    assert list(scheduler.running()) == ["offload"]
    assert "offload" in scheduler.shutdown(0)
    over.set()
    assert scheduler.shutdown(10) == []
