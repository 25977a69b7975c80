from __future__ import annotations

import asyncio
import threading

import pytest

from infra.loop.bounded_thread import run_bounded


def test_hanging_call_is_abandoned_after_its_time_limit() -> None:
    over = threading.Event()
    with pytest.raises(TimeoutError, match="no answer"):
        asyncio.run(run_bounded(lambda: over.wait(60), 0.01))
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "bounded")
    over.set()


def test_result_and_error_of_a_call_are_passed_on() -> None:
    def fail() -> None:
        raise ValueError("no")

    assert asyncio.run(run_bounded(lambda: 7, 10)) == 7
    with pytest.raises(ValueError, match="no"):
        asyncio.run(run_bounded(fail, 10))
