"""Archivable limit of an Apache master's log, for the slave that copies and archives it. Pure.

Such a master confirms nothing. After a power cut it continues from the durable part of its log, and assigns the offsets
above it again. If a slave is made master, it continues from the end of its own log. Archived offsets must never be
assigned again. A range may therefore be archived once all of this was observed in one life of the master:

    it is in full files of the log, which have been full for longer than a complete flush takes
    it is below the offset that the master reports as flushed
    it is below the acknowledged offsets of all slaves that are in sync
    the bytes of the life before are durable: after a kill of the process, only the kernel writes them to the disk

Without this knowledge nothing is archived.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

#: Linux writes back pages that are 30 s old, and checks every 5 s.
WRITTEN_BACK_S = 60.0
UNKNOWN = -1

# ms: interval of complete flushes, and of the thread that starts them
_FLUSHES = ("flushCommitLogThoroughInterval", "flushIntervalCommitLog")


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """State of a master's log at one instant, from one life of the master."""

    begin: int
    end: int
    flushed: int  # end of the durable part
    in_sync: tuple[int, ...]  # the ends of the logs of the slaves that are in sync


def flush_takes_s(settings: Mapping[str, str]) -> float | None:
    """Return the duration in seconds of a complete flush by the master's configuration; None: unknown."""
    try:
        return sum(int(settings[name]) for name in _FLUSHES) / 1000
    except (KeyError, ValueError):
        return None


class StockArchivableLimit:
    """Archivable limit. `offset`: the log may be archived below it; UNKNOWN: nothing is known yet."""

    def __init__(self, file_size: int) -> None:
        self._file_size = file_size
        self.offset = UNKNOWN
        self._boot_ms = -1
        self._flush_takes_s: float | None = None
        self._trusted_from = 0.0
        # end of each full file, and the time since when it is known to be full: ascending
        self._full: list[tuple[int, float]] = []

    def attached(self, boot_ms: int, end_at_start: int, flush_takes_s: float | None, now: float) -> None:
        """Record that the slave follows this life of its master. It may have done so before."""
        self._flush_takes_s = flush_takes_s
        if boot_ms != self._boot_ms:
            self.forget()
            self._boot_ms = boot_ms
            self._trusted_from = now + WRITTEN_BACK_S if end_at_start else now

    def forget(self) -> None:
        """Forget everything, because the life of the master is over."""
        self.offset, self._boot_ms = UNKNOWN, -1
        self._full.clear()

    def observe(self, observation: Observation, now: float) -> None:
        """Take a state of the log, of the life that is followed."""
        assert self._boot_ms >= 0, "the followed life is unknown"
        full = self._border(observation.end)
        if not self._full or full > self._full[-1][0]:
            self._full.append((full, now))
        if self._flush_takes_s is None or now < self._trusted_from:
            return
        aged = [border for border, since in self._full if now - since >= self._flush_takes_s]
        if aged:
            self._full = [(border, since) for border, since in self._full if border >= aged[-1]]
            self.offset = self._border(min(aged[-1], observation.flushed, *observation.in_sync))

    def _border(self, offset: int) -> int:
        return offset - offset % self._file_size
