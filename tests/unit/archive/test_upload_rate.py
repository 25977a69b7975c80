"""Tests of the upload rate limit: debt is waited for, and a new rate applies at once."""

from __future__ import annotations

import math
import threading

from infra.clock import ManualClock
from tiered.write.upload_rate import UploadRate


class Timed:
    """A rate limit whose waits advance a manual clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.waits: list[float] = []
        self.rate = UploadRate(self.clock, self.wait)

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        self.waits.append(seconds)
        self.clock.advance(math.ceil(seconds * 1000))

    def seconds(self) -> float:
        return self.clock.monotonic()


def test_upload_without_limit_does_not_wait() -> None:
    timed = Timed()
    assert [timed.rate.take(1 << 30) for _ in range(100)] == [0.0] * 100
    assert timed.waits == []


def test_mean_rate_is_the_limit_plus_one_second_in_advance() -> None:
    timed = Timed()
    timed.rate.set(1000)
    waited = sum(timed.rate.take(250) for _ in range(100))
    # Of 25,000 bytes, the first second is free, and the last part starts at the beginning of its time.
    assert 23.0 <= timed.seconds() <= 24.5
    assert math.isclose(waited, timed.seconds())


def test_large_upload_starts_at_once_and_the_next_one_waits() -> None:
    timed = Timed()
    timed.rate.set(1000)
    timed.rate.take(60_000)
    assert timed.seconds() == 0
    timed.rate.take(1)
    assert timed.seconds() == 59


def test_idle_time_gives_no_credit() -> None:
    timed = Timed()
    timed.rate.set(1000)
    timed.clock.advance(3_600_000)
    timed.rate.take(10_000)
    timed.rate.take(1)
    assert timed.seconds() == 3600 + 9


def test_new_rate_applies_to_the_current_debt() -> None:
    timed = Timed()
    timed.rate.set(1000)
    timed.rate.take(60_000)
    timed.rate.set(10_000)
    timed.rate.take(1)
    assert timed.seconds() == 5
    timed.rate.take(1_000_000)
    timed.rate.set(0)
    timed.rate.take(1_000_000)
    assert timed.seconds() < 5.1


def test_removed_limit_wakes_waiting_uploads() -> None:
    rate = UploadRate(ManualClock())  # the clock does not advance, so only the change can end the wait
    rate.set(1)
    rate.take(1000)
    done = threading.Event()

    def wait() -> None:
        rate.take(1)
        done.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert not done.is_set()
    rate.set(0)
    assert done.wait(10)
