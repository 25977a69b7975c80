"""Health of the broker's own tasks: those that fail repeatedly, hang, or have ended."""

from __future__ import annotations

from broker.intake.flusher import Flusher
from infra.clock import Clock
from infra.loop.supervisor import HANGING_S, Supervisor, Trouble

# A checkpoint fsyncs each queue that was written to: tens of thousands of files on a slow disk.
_HANGING_UPKEEP_S = 600.0


class Health:
    """Health by the supervisor's tasks and by the duration of fsyncs."""

    def __init__(self, clock: Clock, supervisor: Supervisor, flusher: Flusher) -> None:
        self._clock, self._supervisor, self._flusher = clock, supervisor, flusher

    def troubles(self) -> list[Trouble]:
        """Return the troubles; empty if all is well."""
        found, now = self._supervisor.troubles(), self._clock.monotonic()
        for name, since, most in (
            ("flush", self._flusher.syncing_since, HANGING_S),
            ("upkeep", self._flusher.upkeep_since, _HANGING_UPKEEP_S),
        ):
            if since is not None and now - since > most:
                found.append(Trouble(name, "hanging", f"for {now - since:.0f} s"))
        return found

    def is_dead(self) -> bool:
        """Return whether only a restart helps."""
        return self._flusher.failed or any(each.kind != "failing" for each in self.troubles())

    def failures(self) -> int:
        """Return the number of failed runs of all tasks."""
        return self._supervisor.failures.total()
