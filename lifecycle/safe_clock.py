"""Time for deletions that is rather late than early.

    wall      The system's wall clock. Anyone may set it, and a machine may boot with a wrong time.
    steady    The wall time that was trusted last, plus the time that the monotonic clock has counted since.
    store's   The Date header of the store's answers; None if the store has no clock of its own.

While wall and steady agree, expiry uses the wall clock. If they disagree, it uses the earlier one, because then both
clocks agree that the time has passed. They disagree after a step of the wall clock by more than TOLERANCE_MS, or after
the broker was off for longer than ABSENCE_MS. No message is lost by that, but messages are kept longer. They agree
again when the store's clock confirms the wall clock, or when an operator does.

    <data directory>/clock    {"version": 1, "trusted_ms": …}, written periodically, for the next start
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import msgspec

from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.disk.versioned_file import VersionedFile
from infra.objects.store import ObjectStore

log = logging.getLogger(__name__)

TOLERANCE_MS = 5 * 60_000
ABSENCE_MS = 60 * 60_000
_SAVE_S = 10 * 60.0
_RENEW_S = 24 * 3600.0  # period after which small deviations are accepted, so that they don't add up to a large one


class ClocksDisagree(Exception):
    """The local clock and the store's are more than five minutes apart: no message expires until they agree."""


class ClockState(msgspec.Struct, frozen=True):
    """The state of the wall clock.

    `behind_ms`: how far the time for expiry is behind it. `since_ms`: when the distrust began, by the wall clock.
    """

    trusted: bool
    jumps: int
    behind_ms: int = 0
    since_ms: int = 0
    why: str = ""


class ClockMark:
    """The last trusted time, stored on disk."""

    class _Content(msgspec.Struct):
        trusted_ms: int
        version: int = 1

    def __init__(self, path: Path, disk: Disk) -> None:
        self._file = VersionedFile(disk, path, self._Content, ValueError)

    def read(self) -> int | None:
        """Return the stored time; None if it is missing or unreadable: the newest message is then the lower bound."""
        try:
            content = self._file.read()
        except ValueError as error:
            log.warning("the trusted time is unknown: %s", error)
            return None
        return content.trusted_ms if content is not None else None

    def write(self, trusted_ms: int) -> None:
        self._file.write(self._Content(trusted_ms))


class SafeClock:
    """Thread-safe. `newest_ms`: the newest store time that the broker knows; 0: none."""

    def __init__(self, clock: Clock, mark: ClockMark | None = None, newest_ms: int = 0) -> None:
        self._clock, self._mark = clock, mark
        self._lock = threading.Lock()
        self.jumps = 0
        self._distrust = ""  # why the wall clock is not trusted now
        self._doubted_at = 0.0
        self._trust(clock.now_ms())
        self._offset = self._offset_now()
        self._saved_at = -_SAVE_S
        last = mark.read() if mark is not None else None
        self._begin(last if last is not None else newest_ms)

    def _begin(self, last_ms: int) -> None:
        """Trust the wall clock at a start only if it continues about where the last run ended."""
        ahead = self._clock.now_ms() - last_ms
        if last_ms and not -TOLERANCE_MS <= ahead <= ABSENCE_MS:
            self._trusted_ms = last_ms
            what = "ahead of" if ahead > 0 else "behind"
            self._begin_distrust(f"at the start the wall clock was {abs(ahead) // 1000} s {what} the last time known")

    # ---- time

    def now_ms(self, store: ObjectStore | None = None) -> int:
        """Return the time for expiry decisions. Raises ClocksDisagree, or the store's error."""
        remote = store.now_ms() if store is not None else None
        with self._lock:
            self._look()
            local = self._clock.now_ms()
            if remote is None:
                return self._surely_ms()
            if abs(local - remote) > TOLERANCE_MS:
                raise ClocksDisagree(f"the local clock is {(local - remote) // 1000} s ahead of the store's")
            self._confirm("the store's clock agrees with it")
            return min(local, remote)

    def look(self) -> None:
        """Detect steps of the wall clock, and store the trusted time; called periodically."""
        with self._lock:
            self._look()
            now = self._clock.monotonic()
            if self._mark is None or now - self._saved_at < _SAVE_S:
                return
            trusted, self._saved_at = self._surely_ms(), now
        self._mark.write(trusted)

    def confirm(self) -> ClockState:
        """Trust the wall clock on an operator's request; returns the state before."""
        with self._lock:
            self._look()
            before = self._state()
            self._confirm("an operator has confirmed it")
            self._saved_at = -_SAVE_S
        self.look()
        return before

    def state(self) -> ClockState:
        with self._lock:
            return self._state()

    # ---- under the lock

    def _state(self) -> ClockState:
        if not self._distrust:
            return ClockState(trusted=True, jumps=self.jumps)
        wall = self._clock.now_ms()
        since = wall - round((self._clock.monotonic() - self._doubted_at) * 1000)
        return ClockState(False, self.jumps, max(0, wall - self._steady_ms()), since, self._distrust)

    def _look(self) -> None:
        wall, offset = self._clock.now_ms(), self._offset_now()
        moved, self._offset = offset - self._offset, offset
        if abs(moved) > TOLERANCE_MS:
            self.jumps += 1
            self._begin_distrust(f"the wall clock was set by {moved / 1000:+.0f} s")
        if abs(wall - self._steady_ms()) > TOLERANCE_MS:
            if not self._distrust:  # an accumulation of small steps
                self._begin_distrust(f"the wall clock has moved by {(wall - self._steady_ms()) / 1000:+.0f} s")
        elif self._distrust:
            self._confirm("it has returned to its former time")
        elif self._clock.monotonic() - self._trusted_at > _RENEW_S:
            self._trust(wall)

    def _begin_distrust(self, why: str) -> None:
        if not self._distrust:
            self._doubted_at = self._clock.monotonic()
        self._distrust = why
        log.error(
            "%s: expiry uses a lower bound of the time, until the store's clock agrees or an operator runs "
            "`neve archive confirm-clock`",
            why,
        )

    def _confirm(self, why: str) -> None:
        if self._distrust:
            log.warning("the wall clock is trusted again: %s", why)
        self._distrust = ""
        self._trust(self._clock.now_ms())

    def _trust(self, wall_ms: int) -> None:
        self._trusted_ms, self._trusted_at = wall_ms, self._clock.monotonic()

    def _surely_ms(self) -> int:
        return min(self._clock.now_ms(), self._steady_ms()) if self._distrust else self._clock.now_ms()

    def _steady_ms(self) -> int:
        return self._trusted_ms + round((self._clock.monotonic() - self._trusted_at) * 1000)

    def _offset_now(self) -> int:
        return self._clock.now_ms() - round(self._clock.monotonic() * 1000)
