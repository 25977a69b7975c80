"""The register of broker sets: one value, changed by compare-and-swap. It can be rolled back and wiped."""

from __future__ import annotations

from controller.broker_set import BrokerSet
from tests.simulation.replicas.machines import SimulatedProcess, Turns

HOST = "register"


class Register(SimulatedProcess):
    """A process whose only state is its value; it is accessed through the network."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(turns, HOST, 0.0)
        self.value: BrokerSet | None = None
        self.revision = 0
        self.history: list[BrokerSet] = []

    def get(self) -> tuple[BrokerSet | None, int]:
        return self.value, self.revision

    def put(self, value: BrokerSet, expected: tuple[BrokerSet | None, int]) -> bool:
        """Write with compare-and-swap on the value as well, because a rolled back register repeats revisions."""
        if (self.value, self.revision) != expected:
            return False
        self.revision += 1
        if self.value is not None:
            self.history.append(self.value)
        self.value = value
        return True

    def set_back(self, value: BrokerSet | None) -> None:
        """Restore a backup, or wipe the register if it is None."""
        if self.value is not None:
            self.history.append(self.value)
        self.value = value
        self.revision = self.revision // 2
