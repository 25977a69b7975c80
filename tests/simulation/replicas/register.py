"""What keeps the broker sets: one value, changed by compare-and-swap. It can be set back to what it was, and wiped."""

from __future__ import annotations

from controller.broker_set import BrokerSet
from tests.simulation.replicas.machines import Process, Turns

HOST = "register"


class Register(Process):
    """A process that has no memory but its value; who asks, asks through the network."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(turns, HOST, 0.0)
        self.value: BrokerSet | None = None
        self.revision = 0
        self.history: list[BrokerSet] = []

    def get(self) -> tuple[BrokerSet | None, int]:
        return self.value, self.revision

    def put(self, value: BrokerSet, expected: tuple[BrokerSet | None, int]) -> bool:
        """Compares the value as well: a register that was set back gives revisions twice."""
        if (self.value, self.revision) != expected:
            return False
        self.revision += 1
        if self.value is not None:
            self.history.append(self.value)
        self.value = value
        return True

    def set_back(self, value: BrokerSet | None) -> None:
        """A backup is restored; None: the register is wiped."""
        if self.value is not None:
            self.history.append(self.value)
        self.value = value
        self.revision = self.revision // 2
