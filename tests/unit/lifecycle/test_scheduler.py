from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import threading
from collections.abc import Iterator
from datetime import datetime

import pytest

from infra.clock import ManualClock, SystemClock
from infra.objects.store import StoreUnavailable
from lifecycle.scheduler import JobScheduler
from tests.kit.clock.waiting import wait_until
from tests.simulation.messaging.loop import SimClock, SimLoop, SimThreads


def test_failed_job_is_counted_and_logged_and_runs_again(caplog: pytest.LogCaptureFixture) -> None:
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
    assert "in job" in caplog.text  # with traceback, because it is not a known operational failure
    assert scheduler.failing() == {}


class Panic(BaseException):
    """A BaseException like PanicException of PyO3, which Rust libraries raise."""


def test_job_runs_again_after_a_base_exception() -> None:
    again = threading.Event()
    calls: list[int] = []

    def job() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise Panic("index out of bounds")
        again.set()

    scheduler = JobScheduler(SystemClock())
    scheduler.every("ttl", 0.05, job)
    scheduler.start()
    try:
        assert again.wait(10)
    finally:
        assert scheduler.shutdown(10) == []
    assert scheduler.failures["ttl"] == 1


def test_unavailable_store_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Lines without traceback: at the first failure, each time the failures double, and at recovery."""
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
        "job offload recovered after 5 failures",
    ]


def test_run_now_runs_a_job_before_its_time() -> None:
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


def test_jobs_do_not_use_the_wall_clock() -> None:
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


def test_jobs_follow_the_monotonic_clock_when_the_wall_is_set() -> None:
    """The job runs by simulated monotonic time; no wall clock would make it due."""
    clock = SimClock(1_700_000_000_000)
    scheduler, ran = JobScheduler(clock, SimThreads()), list[float]()
    scheduler.every("ttl", 60, lambda: ran.append(clock.monotonic()))
    with running(scheduler, clock) as loop:
        loop.run_for(30)
        for hours in (0, -8, 8, 24 * 400):
            clock.set_wall(clock.now_ms() + hours * 3_600_000)
            before = len(ran)
            loop.run_for(600)
            assert len(ran) - before == 10, f"the wall clock was set by {hours} h"
        gaps = {round(later - earlier) for earlier, later in itertools.pairwise(ran)}
    assert gaps == {60}, "seconds between two runs"


@pytest.mark.parametrize("set_by_s", [0, 3600, -3600])
def test_job_with_a_time_of_day_runs_on_the_hour(set_by_s: int) -> None:
    noon = int(datetime(2026, 3, 3, 12, 0, 0).timestamp())  # noqa: DTZ001 - a day in local time
    clock = SimClock((noon - 25) * 1000 - set_by_s * 1000)
    scheduler, ran = JobScheduler(clock, SimThreads()), list[int]()
    scheduler.every("retention", 10, lambda: ran.append(clock.now_ms() // 1000 - noon), at_hours={4, 12})
    with running(scheduler, clock) as loop:
        clock.set_wall(clock.now_ms() + set_by_s * 1000)
        loop.run_for(60)
    assert ran == [-15, -5, 0, 10, 20, 30]


@contextlib.contextmanager
def running(scheduler: JobScheduler, clock: SimClock) -> Iterator[SimLoop]:
    loop = SimLoop(clock, random.Random(1))

    async def start() -> None:
        scheduler.start()

    loop.run(start(), 60)
    yield loop
    assert loop.run(asyncio.to_thread(scheduler.shutdown, 10), 60) == []
    loop.abandon()


def test_job_longer_than_its_period_does_not_overlap() -> None:
    running_now, most, over = threading.Semaphore(1), threading.Event(), threading.Semaphore(0)

    def work() -> None:
        if not running_now.acquire(blocking=False):
            most.set()
        threading.Event().wait(0.05)  # five periods
        running_now.release()
        over.release()

    scheduler = JobScheduler(SystemClock())
    scheduler.every("offload", 0.01, work)
    scheduler.start()
    try:
        for _ in range(4):
            assert over.acquire(timeout=10)
    finally:
        assert scheduler.shutdown(10) == []
    assert not most.is_set()


def test_run_now_of_a_running_job_runs_it_once_more() -> None:
    began, may_end = threading.Semaphore(0), threading.Semaphore(0)

    def work() -> None:
        began.release()
        assert may_end.acquire(timeout=10)

    scheduler = JobScheduler(SystemClock())
    scheduler.every("checkpoint", 3600, work)
    scheduler.start()
    try:
        scheduler.run_now("checkpoint")
        assert began.acquire(timeout=10)
        due = scheduler._scheduler.get_job("checkpoint").next_run_time
        scheduler.run_now("checkpoint")
        scheduler.run_now("checkpoint")  # one run answers both
        assert scheduler._scheduler.get_job("checkpoint").next_run_time == due, "the run in progress has to end first"
        may_end.release()
        assert began.acquire(timeout=10)
        may_end.release()
        wait_until(lambda: scheduler.runs["checkpoint"] == 2)
        assert scheduler.running() == {}
    finally:
        may_end.release()
        assert scheduler.shutdown(10) == []
    assert scheduler.runs["checkpoint"] == 2
    scheduler.run_now("checkpoint")  # after the end: no effect


def test_failing_job_reports_start_of_failure_in_current_wall_time() -> None:
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
            wait_until(lambda: scheduler.runs["ttl"] == times)  # noqa: B023 - met before the next iteration
            clock.set_wall(clock.now_ms() + 86_400_000)
            clock.advance(1000)
        told = "StoreUnavailable: nobody there"
        assert scheduler.failing()["ttl"] == (2, right + 2 * 86_400_000, told, StoreUnavailable)
    finally:
        assert scheduler.shutdown(10) == []


def test_hanging_job_does_not_block_process_exit() -> None:
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
