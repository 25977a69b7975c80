"""Clients of the set: producers that try the next broker when one does not answer, and readers that use any broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.replicas.log import QUEUES, Record
from tests.simulation.replicas.machines import SimulatedProcess

if TYPE_CHECKING:
    from tests.simulation.replicas.world import ReplicasWorld

SIZES = (100, 100, 100, 100, 160)


class SimulatedProducer(SimulatedProcess):
    """Sends messages one after another; after an ambiguous answer the next send is a new message."""

    def __init__(self, world: ReplicasWorld, host: str) -> None:
        super().__init__(world.turns, host, 0.0)
        self.world = world
        self.is_quiet = False
        self.answered_at = -1.0  # The last acknowledgement.
        self._target = world.dice.choice(world.hosts)
        self._sent = 0
        self.after(0.1, self._send)

    def _send(self) -> None:
        world, dice = self.world, self.world.dice
        self.after(dice.uniform(0.5, 1.5) * world.send_every, self._send)
        if self.is_quiet:
            return
        uid = world.next_number()
        target = self._target
        is_answered = False

        def heard(status: str) -> None:
            nonlocal is_answered
            is_answered = True
            if status == "ok":
                self.answered_at = self.turns.now
            elif status == "refused":
                self._turn_from(target)

        def waited() -> None:
            if not is_answered:
                self._turn_from(target)

        queue, size = dice.randrange(QUEUES), dice.choice(SIZES)
        world.network.ask(self, target, lambda broker, reply: broker.send(uid, queue, size, reply), heard)
        self.after(1.0, waited)

    def _turn_from(self, target: str) -> None:
        if self._target == target:
            hosts = list(self.world.machines)
            self._target = hosts[(hosts.index(target) + 1) % len(hosts)]


class Reader(SimulatedProcess):
    """Reads a queue in order, and already read parts again, from any broker; commits its offset."""

    def __init__(self, world: ReplicasWorld, host: str) -> None:
        super().__init__(world.turns, host, 0.0)
        self.world = world
        self._next = [0] * QUEUES
        self.after(0.3, self._read)

    def _read(self) -> None:
        world, dice = self.world, self.world.dice
        self.after(dice.uniform(0.5, 1.5) * world.read_every, self._read)
        queue, target = dice.randrange(QUEUES), dice.choice(list(world.machines))
        offset = self._next[queue] if dice.random() < 0.6 else dice.randint(0, self._next[queue])

        def heard(found: list[Record] | None) -> None:
            if found and offset <= self._next[queue] < offset + len(found):
                self._next[queue] = offset + len(found)
                world.network.post(self, target, lambda broker: broker.commit_offset(queue, offset + len(found)))

        world.network.ask(self, target, lambda broker, reply: broker.pull(queue, offset, reply), heard)
