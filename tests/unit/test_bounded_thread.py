from __future__ import annotations

import asyncio
import threading

import pytest

from infra.loop.bounded_thread import run_bounded


def test_a_call_that_hangs_is_left_behind() -> None:
    over = threading.Event()
    with pytest.raises(TimeoutError, match="no answer"):
        asyncio.run(run_bounded(lambda: over.wait(60), 0.01))
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "bounded")
    over.set()


def test_what_it_returns_and_what_it_raises_is_handed_over() -> None:
    def fail() -> None:
        raise ValueError("no")

    assert asyncio.run(run_bounded(lambda: 7, 10)) == 7
    with pytest.raises(ValueError, match="no"):
        asyncio.run(run_bounded(fail, 10))
