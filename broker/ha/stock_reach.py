"""How far the log of an Apache master may be archived by the slave that copies it. Pure.

Such a master confirms nothing. After a power cut it goes on from what its disk has kept and gives the offsets above
that again, and where somebody makes a slave of it the next master, from what that one has. What is archived must be
what nobody gives again. So a range may be archived once, in one life of the master and by what was heard in it,

    it lies in files of the log that are full, and have been for longer than a flush takes that leaves nothing out
    it lies below what the master says that it has flushed
    it lies below the acknowledgements of all its slaves that are in sync
    the life before it is on the disk: what a killed process had written the kernel alone brings there

What is not known is not archived.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

#: Linux writes what is 30 s old, and looks each 5 s.
WRITTEN_BACK_S = 60.0
UNKNOWN = -1

_FLUSHES = ("flushCommitLogThoroughInterval", "flushIntervalCommitLog")  # ms: a thorough one is due, and is begun


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What a master says of its log at one instant, all in one life of it."""

    begin: int
    end: int
    flushed: int  # below it, it is on its disk
    in_sync: tuple[int, ...]  # the ends of the slaves that are in sync


def flush_takes_s(settings: Mapping[str, str]) -> float | None:
    """By the master's configuration. None: it does not say."""
    try:
        return sum(int(settings[name]) for name in _FLUSHES) / 1000
    except (KeyError, ValueError):
        return None


class StockReach:
    """`offset`: below it the log may be archived, by all that was heard; UNKNOWN: nothing is known yet."""

    def __init__(self, file_size: int) -> None:
        self._file_size = file_size
        self.offset = UNKNOWN
        self._boot_ms = -1
        self._flush_takes_s: float | None = None
        self._trusted_from = 0.0
        self._full: list[tuple[int, float]] = []  # where full files end, and since when they are known to be: rising

    def attached(self, boot_ms: int, end_at_start: int, flush_takes_s: float | None, now: float) -> None:
        """The slave follows this life of its master; it may have done so before."""
        self._flush_takes_s = flush_takes_s
        if boot_ms != self._boot_ms:
            self.forget()
            self._boot_ms = boot_ms
            self._trusted_from = now + WRITTEN_BACK_S if end_at_start else now

    def forget(self) -> None:
        """What was heard is of a life that is over."""
        self.offset, self._boot_ms = UNKNOWN, -1
        self._full.clear()

    def heard(self, look: Look, now: float) -> None:
        """Of the life that is followed."""
        assert self._boot_ms >= 0, "of which life?"
        full = self._border(look.end)
        if not self._full or full > self._full[-1][0]:
            self._full.append((full, now))
        if self._flush_takes_s is None or now < self._trusted_from:
            return
        aged = [border for border, since in self._full if now - since >= self._flush_takes_s]
        if aged:
            self._full = [(border, since) for border, since in self._full if border >= aged[-1]]
            self.offset = self._border(min(aged[-1], look.flushed, *look.in_sync))

    def _border(self, offset: int) -> int:
        return offset - offset % self._file_size
