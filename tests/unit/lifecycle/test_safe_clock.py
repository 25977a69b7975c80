"""Tests of the clock that expiry uses: it does not follow jumps of the wall clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.clock import ManualClock
from lifecycle.safe_clock import ABSENCE_MS, TOLERANCE_MS, ClockMark, ClocksDisagree, ClockState, SafeClock
from tests.kit.store.memory_store import MemoryStore
from tests.kit.store.sim_disk import SimDisk

HOUR = 3_600_000
DAY = 24 * HOUR


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def mark() -> ClockMark:
    disk = SimDisk()
    disk.make_dirs(Path("/data"))
    return ClockMark(Path("/data/clock"), disk)


def test_steady_clock_is_trusted(clock: ManualClock) -> None:
    safe = SafeClock(clock)
    for _ in range(100):
        clock.advance(DAY)
        assert safe.now_ms() == clock.now_ms()
    assert safe.state() == ClockState(trusted=True, jumps=0)


def test_small_steps_are_not_a_jump(clock: ManualClock) -> None:
    safe = SafeClock(clock)
    for _ in range(1000):
        clock.advance(DAY)
        clock.set_wall(clock.now_ms() + 2000)
        safe.look()
    assert safe.state().trusted
    assert safe.now_ms() == clock.now_ms()


def test_forward_jump_is_reported_and_not_followed(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    safe, right = SafeClock(clock), clock.now_ms()
    clock.set_wall(right + DAY)
    clock.advance(60_000)
    assert safe.now_ms() == right + 60_000
    state = safe.state()
    assert (state.trusted, state.jumps, state.behind_ms) == (False, 1, DAY)
    assert "set by +86400 s" in state.why
    assert "neve archive confirm-clock" in caplog.text
    clock.advance(HOUR)
    state = safe.state()
    assert clock.now_ms() - state.since_ms == HOUR
    assert safe.state().jumps == 1


def test_backward_jump_is_detected_and_followed(clock: ManualClock) -> None:
    safe, right = SafeClock(clock), clock.now_ms()
    clock.set_wall(right - 8 * HOUR)
    assert safe.now_ms() == right - 8 * HOUR
    assert safe.state().jumps == 1
    assert not safe.state().trusted


def test_clock_set_back_to_its_old_time_is_trusted_again(clock: ManualClock) -> None:
    safe, right = SafeClock(clock), clock.now_ms()
    clock.set_wall(right + DAY)
    safe.look()
    clock.set_wall(right)
    clock.advance(1000)
    assert safe.now_ms() == right + 1000
    assert safe.state().trusted
    assert safe.state().jumps == 2


def test_agreeing_store_clock_restores_trust(clock: ManualClock) -> None:
    safe, store = SafeClock(clock), MemoryStore(clock)
    clock.set_wall(clock.now_ms() + DAY)
    safe.look()
    assert not safe.state().trusted
    store.clock_offset_ms = -60_000
    assert safe.now_ms(store) == clock.now_ms() - 60_000
    assert safe.state().trusted
    assert safe.now_ms() == clock.now_ms()


def test_disagreeing_store_clock_stops_expiry(clock: ManualClock) -> None:
    safe, store = SafeClock(clock), MemoryStore(clock)
    store.clock_offset_ms = -TOLERANCE_MS - 1
    with pytest.raises(ClocksDisagree):
        safe.now_ms(store)


def test_operator_confirmation_restores_trust(clock: ManualClock, mark: ClockMark) -> None:
    safe = SafeClock(clock, mark)
    clock.set_wall(clock.now_ms() + DAY)
    assert safe.confirm().behind_ms == DAY
    assert safe.now_ms() == clock.now_ms()
    assert mark.read() == clock.now_ms()
    assert SafeClock(clock, mark).state().trusted


@pytest.mark.parametrize(
    ("away", "trusted"),
    [(ABSENCE_MS, True), (ABSENCE_MS + 1, False), (365 * DAY, False), (-TOLERANCE_MS, True), (-DAY, False)],
)
def test_start_resumes_from_the_saved_time(clock: ManualClock, mark: ClockMark, away: int, trusted: bool) -> None:
    SafeClock(clock, mark).look()
    known = clock.now_ms()
    clock.set_wall(known + away)
    safe = SafeClock(clock, mark)
    assert safe.state().trusted is trusted
    clock.advance(1000)
    assert safe.now_ms() == (clock.now_ms() if trusted else min(clock.now_ms(), known + 1000))


def test_only_trusted_time_is_saved_periodically(clock: ManualClock, mark: ClockMark) -> None:
    safe, right = SafeClock(clock, mark), clock.now_ms()
    safe.look()
    clock.advance(60_000)
    safe.look()
    assert mark.read() == right
    clock.set_wall(right + 365 * DAY)
    clock.advance(10 * 60_000)
    safe.look()
    assert mark.read() == right + 11 * 60_000


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"trusted_ms":"x"}'])
def test_start_without_saved_time_uses_the_newest_message(content: bytes, clock: ManualClock) -> None:
    disk = SimDisk()
    disk.make_dirs(Path("/data"))
    if content:
        disk.write_atomic(Path("/data/clock"), content)
    mark = ClockMark(Path("/data/clock"), disk)
    newest = clock.now_ms()
    clock.set_wall(newest + 365 * DAY)
    safe = SafeClock(clock, mark, newest)
    assert safe.now_ms() == newest
    assert not safe.state().trusted
    assert SafeClock(clock, mark).state().trusted, "nothing is known of an empty broker"
