"""The time that deletion goes by: late rather than early.

    wall      may be set by anyone, and a machine may boot with a wrong one
    steady    the wall time that was trusted last, and what the monotonic clock has counted since
    store's   the Date of its answers; None where it has no clock of its own

While wall and steady agree, what expires goes by the wall clock; else by the earlier of the two, for then two clocks
agree that its time has passed. They part when the wall clock is set by more than TOLERANCE_MS, and over a time in which
the broker was off, if that was longer than ABSENCE_MS: nothing is lost by that, it is kept so much longer. They come
together when the store's clock agrees with the wall clock, or when an operator says that it is right.

    <data directory>/clock    {"version": 1, "trusted_ms": …}, written now and then: where a start goes on
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
_RENEW_S = 24 * 3600.0  # small differences are taken over so often, lest many of them look like one that is large


class ClocksDisagree(Exception):
    """The local clock and the store's are more than five minutes apart: nothing expires until they agree."""


class ClockState(msgspec.Struct, frozen=True):
    """`behind_ms`: how far the time that expiries go by is behind the wall clock; `since_ms`: by the wall clock."""

    trusted: bool
    jumps: int
    behind_ms: int = 0
    since_ms: int = 0
    why: str = ""


class ClockMark:
    """The trusted time on the disk."""

    class _Content(msgspec.Struct):
        trusted_ms: int
        version: int = 1

    def __init__(self, path: Path, disk: Disk) -> None:
        self._file = VersionedFile(disk, path, self._Content, ValueError)

    def read(self) -> int | None:
        """Return the stored time; None if there is no readable one: the newest message is then the lower bound."""
        try:
            content = self._file.read()
        except ValueError as error:
            log.warning("the trusted time is unknown: %s", error)
            return None
        return content.trusted_ms if content is not None else None

    def write(self, trusted_ms: int) -> None:
        self._file.write(self._Content(trusted_ms))


class SafeClock:
    """Thread-safe. `newest_ms` is the newest store time that the broker knows; 0: none."""

    def __init__(self, clock: Clock, mark: ClockMark | None = None, newest_ms: int = 0) -> None:
        self._clock, self._mark = clock, mark
        self._lock = threading.Lock()
        self.jumps = 0
        self._doubt = ""  # why the wall clock is not trusted now
        self._doubted_at = 0.0
        self._trust(clock.now_ms())
        self._offset = self._offset_now()
        self._saved_at = -_SAVE_S
        last = mark.read() if mark is not None else None
        self._begin(last if last is not None else newest_ms)

    def _begin(self, last_ms: int) -> None:
        """A start: the wall clock is taken if it goes on about where the last one ended."""
        ahead = self._clock.now_ms() - last_ms
        if last_ms and not -TOLERANCE_MS <= ahead <= ABSENCE_MS:
            self._trusted_ms = last_ms
            what = "ahead of" if ahead > 0 else "behind"
            self._begin_doubt(f"at the start the wall clock was {abs(ahead) // 1000} s {what} the last time known")

    # ---- what time it is

    def now_ms(self, store: ObjectStore | None = None) -> int:
        """What has expired by this time has expired. Raises ClocksDisagree, or the store's error."""
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
        """Now and then: notices that the clock was set, and writes down how late it is."""
        with self._lock:
            self._look()
            now = self._clock.monotonic()
            if self._mark is None or now - self._saved_at < _SAVE_S:
                return
            trusted, self._saved_at = self._surely_ms(), now
        self._mark.write(trusted)

    def confirm(self) -> ClockState:
        """An operator says that the wall clock is right; returns what was thought of it."""
        with self._lock:
            self._look()
            before = self._state()
            self._confirm("an operator says that it is right")
            self._saved_at = -_SAVE_S
        self.look()
        return before

    def state(self) -> ClockState:
        with self._lock:
            return self._state()

    # ---- under the lock

    def _state(self) -> ClockState:
        if not self._doubt:
            return ClockState(trusted=True, jumps=self.jumps)
        wall = self._clock.now_ms()
        since = wall - round((self._clock.monotonic() - self._doubted_at) * 1000)
        return ClockState(False, self.jumps, max(0, wall - self._steady_ms()), since, self._doubt)

    def _look(self) -> None:
        wall, offset = self._clock.now_ms(), self._offset_now()
        moved, self._offset = offset - self._offset, offset
        if abs(moved) > TOLERANCE_MS:
            self.jumps += 1
            self._begin_doubt(f"the wall clock was set by {moved / 1000:+.0f} s")
        if abs(wall - self._steady_ms()) > TOLERANCE_MS:
            if not self._doubt:  # small steps that have added up
                self._begin_doubt(f"the wall clock has moved by {(wall - self._steady_ms()) / 1000:+.0f} s")
        elif self._doubt:
            self._confirm("it is where it was before")
        elif self._clock.monotonic() - self._trusted_at > _RENEW_S:
            self._trust(wall)

    def _begin_doubt(self, why: str) -> None:
        if not self._doubt:
            self._doubted_at = self._clock.monotonic()
        self._doubt = why
        log.error(
            "%s: what expires goes by the time that has surely passed, until the store's clock agrees or `neve archive "
            "confirm-clock` says that it is right",
            why,
        )

    def _confirm(self, why: str) -> None:
        if self._doubt:
            log.warning("the wall clock is trusted again: %s", why)
        self._doubt = ""
        self._trust(self._clock.now_ms())

    def _trust(self, wall_ms: int) -> None:
        self._trusted_ms, self._trusted_at = wall_ms, self._clock.monotonic()

    def _surely_ms(self) -> int:
        return min(self._clock.now_ms(), self._steady_ms()) if self._doubt else self._clock.now_ms()

    def _steady_ms(self) -> int:
        return self._trusted_ms + round((self._clock.monotonic() - self._trusted_at) * 1000)

    def _offset_now(self) -> int:
        return self._clock.now_ms() - round(self._clock.monotonic() * 1000)
