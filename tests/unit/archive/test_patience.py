"""Tests of the worker timeout: concurrent uploads share a rate, and hanging workers are detected."""

import subprocess
import sys
from concurrent.futures import Future
from typing import Any

import pytest

from infra.process.processor import ProcessorDemand, processor_demand
from tests.kit.clock.waiting import wait_until
from tiered.worker.patience import Patience

RATE, SHARING = 1000, 4


def patience_at(rate: int) -> Patience:
    patience = Patience(300.0, SHARING)
    patience.rate = rate
    return patience


def test_patience_counts_bytes_of_unfinished_uploads() -> None:
    patience = patience_at(RATE)
    first, second, third = Future[Any](), Future[Any](), Future[Any]()
    patience.uploads(5 * RATE, first)
    first.set_result(None)
    patience.uploads(7 * RATE, second)
    waiting = patience.begin()
    assert waiting.more() == 307.0
    patience.uploads(11 * RATE, third)
    second.set_result(None)
    assert waiting.more() == 11.0, "it may be that the worker had the last one's parts before this one's"
    assert (waiting.more(), waiting.waited) == (0.0, 318.0)
    assert patience.begin().more() == 311.0


def test_hanging_request_is_detected_while_others_complete() -> None:
    patience = patience_at(RATE)
    patience.uploads(10 * RATE, Future[Any]())
    waiting = patience.begin()
    waited = waiting.more()
    for _ in range(1000):
        other = Future[Any]()
        patience.uploads(RATE, other)
        other.set_result(None)
        waited += (more := waiting.more())
        if not more:
            break
    assert waited == waiting.waited == 300.0 + (1 + SHARING) * 10 - 1, "what its turns took"


def test_patience_ignores_uploads_of_a_dead_worker() -> None:
    patience = patience_at(RATE)
    answer = Future[Any]()
    patience.uploads(5 * RATE, answer)
    answer.set_exception(ConnectionError("the tier worker ended"))
    assert patience.begin().more() == 300.0


@pytest.mark.parametrize(("rate", "seconds"), [(0, 2.0), (1 << 30, 2.0), (1 << 19, 4.0)])
def test_timeout_allows_a_store_slower_than_a_high_rate(rate: int, seconds: float) -> None:
    patience = patience_at(rate)
    patience.uploads(2 << 20, Future[Any]())
    assert patience.begin().more() == 300.0 + seconds


def test_patience_applies_a_lower_rate_to_a_started_wait() -> None:
    patience = patience_at(RATE)
    patience.uploads(10 * RATE, Future[Any]())
    waiting = patience.begin()
    assert waiting.more() == 310.0
    patience.rate = RATE // 2
    assert waiting.more() == 10.0
    patience.rate = 2 * RATE
    assert waiting.more() == 0.0


# ---- starved workers


class Looked:
    """A worker in the view of periodic checks. It answers after a number of checks."""

    def __init__(self, answers_at: int, *, wants_more: bool, share: float) -> None:
        self.answer = Future[Any]()
        self._answers_at, self._wants_more, self._share = answers_at, wants_more, share
        self.looks = 0

    def __call__(self) -> ProcessorDemand | None:
        self.looks += 1
        if self.looks == self._answers_at:
            self.answer.set_result(None)
        return ProcessorDemand(1, self.looks * self._share * LOOK_S, self._wants_more)


LOOK_S = 0.005
PATIENCE_S = 20 * LOOK_S


def waited_for(worker: Looked) -> tuple[bool, Patience]:
    patience = Patience(PATIENCE_S, SHARING, worker, LOOK_S)
    ended, waited = patience.first_of([worker.answer])
    assert waited <= PATIENCE_S + 1e-9
    return bool(ended), patience


def test_starved_worker_is_not_regarded_as_hanging() -> None:
    """It survives ten times its timeout. Time is counted in checks, so the test is independent of real time."""
    ended, patience = waited_for(Looked(200, wants_more=True, share=0.0))
    assert ended
    assert patience.starved == pytest.approx(199 * LOOK_S), "the first look has none before it"


def test_processor_time_of_a_starved_worker_counts() -> None:
    worker = Looked(10_000, wants_more=True, share=0.25)
    assert not waited_for(worker)[0]
    assert 4 * 19 <= worker.looks <= 4 * 20 + 2


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_patience_ends_for_blocked_and_for_running_workers(share: float) -> None:
    worker = Looked(10_000, wants_more=share > 0, share=share)
    ended, patience = waited_for(worker)
    assert not ended
    assert worker.looks in {20, 21}, "the last slice may be what rounding left"
    assert patience.starved == pytest.approx(0.0)


def test_patience_counts_all_time_without_process_data() -> None:
    patience = Patience(PATIENCE_S, SHARING, lambda: None, LOOK_S)
    ended, waited = patience.first_of([Future[Any]()])
    assert not ended
    assert waited == pytest.approx(PATIENCE_S)


def test_patience_reports_starvation_of_one_process_only() -> None:
    worker, told = Looked(30, wants_more=True, share=0.0), 0

    def tell() -> None:
        nonlocal told
        told += 1

    patience = Patience(PATIENCE_S, SHARING, worker, LOOK_S)
    patience.first_of([worker.answer], tell)
    assert told == 29
    pids = iter(range(1, 100))
    changing = Patience(PATIENCE_S, SHARING, lambda: ProcessorDemand(next(pids), 0.0, True), LOOK_S)
    changing.first_of([Future[Any]()], tell)
    assert (told, changing.starved) == (29, 0.0)


def test_process_standing_of_running_and_sleeping_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as working:
        try:
            wait_until(lambda: _says(working.pid, wants_more=True, at_least_s=0.05), "it works")
        finally:
            working.kill()
    assert processor_demand(working.pid) is None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as sleeping:
        wait_until(lambda: _says(sleeping.pid, wants_more=False, at_least_s=0.0), "it waits")
        assert sleeping.stdin is not None
        sleeping.stdin.write(b"\n")


def _says(pid: int, *, wants_more: bool, at_least_s: float) -> bool:
    said = processor_demand(pid)
    return said is not None and said.wants_more == wants_more and said.cpu_s >= at_least_s
