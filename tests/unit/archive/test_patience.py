"""How long a worker may be silent: a rate is shared by all that is under way, and who hangs is found out."""

from concurrent.futures import Future
from typing import Any

import pytest

from tiered.worker.patience import Patience

RATE, SHARING = 1000, 4


def patience_at(rate: int) -> Patience:
    patience = Patience(300.0, SHARING)
    patience.rate = rate
    return patience


def test_what_came_before_a_wait_and_since_counts_and_what_had_ended_does_not() -> None:
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


def test_one_that_hangs_is_found_out_while_others_come_and_end() -> None:
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


def test_who_died_owes_nothing() -> None:
    patience = patience_at(RATE)
    answer = Future[Any]()
    patience.uploads(5 * RATE, answer)
    answer.set_exception(ConnectionError("the tier worker ended"))
    assert patience.begin().more() == 300.0


@pytest.mark.parametrize(("rate", "seconds"), [(0, 2.0), (1 << 30, 2.0), (1 << 19, 4.0)])
def test_a_store_may_be_slower_than_a_high_rate(rate: int, seconds: float) -> None:
    patience = patience_at(rate)
    patience.uploads(2 << 20, Future[Any]())
    assert patience.begin().more() == 300.0 + seconds


def test_a_lower_rate_holds_for_a_wait_that_has_begun_and_a_higher_one_takes_nothing_back() -> None:
    patience = patience_at(RATE)
    patience.uploads(10 * RATE, Future[Any]())
    waiting = patience.begin()
    assert waiting.more() == 310.0
    patience.rate = RATE // 2
    assert waiting.more() == 10.0
    patience.rate = 2 * RATE
    assert waiting.more() == 0.0
