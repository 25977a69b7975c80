"""Virtual time, processes that freeze and die, and the network: single messages, and connections.

A message takes a short time, sometimes a long one, and may be lost; two messages may be reordered. A connection
delivers in order and completely: while the link is cut its data wait, like in TCP's retransmission. The peer of a
closed end or of a killed process is notified after all sent data; a power failure causes no notification.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

Call = Callable[[], None]

AGAIN = 0.2  # TCP retransmits.


class Turns:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[tuple[float, int, Call]] = []
        self._count = 0
        self.done = 0

    def after(self, seconds: float, call: Call) -> None:
        self._count += 1
        heapq.heappush(self._coming, (self.now + seconds, self._count, call))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        coming = self._coming
        while coming and coming[0][0] <= until:
            self.now, _, call = heapq.heappop(coming)
            self.done += 1
            call()
        self.now = until


class SimulatedProcess:
    """One life of a program on a machine. Data for a frozen process wait; data for a dead one are lost."""

    def __init__(self, turns: Turns, host: str, clock_base: float) -> None:
        self.turns, self.host, self.clock_base = turns, host, clock_base
        self.is_alive, self.is_frozen = True, False
        self.connections: list[Connection] = []
        self._backlog: deque[Call] = deque()

    def now(self) -> float:
        """Return the machine's monotonic clock."""
        return self.turns.now + self.clock_base

    def deliver(self, call: Call) -> None:
        if self.is_frozen:
            self._backlog.append(call)
        elif self.is_alive:
            call()

    def after(self, seconds: float, call: Call) -> None:
        self.turns.after(seconds, lambda: self.deliver(call))

    def accept(self, connection: Connection) -> None:
        """Accept a connection with its first data."""
        connection.close(self)

    def freeze(self) -> None:
        self.is_frozen = True

    def wake(self) -> None:
        self.is_frozen = False
        while self._backlog and self.is_alive and not self.is_frozen:
            self._backlog.popleft()()

    def die(self, *, tells: bool) -> None:
        """End the process; if `tells`, its machine keeps running and closes the connections."""
        self.is_alive = self.is_frozen = False
        self._backlog.clear()
        for connection in tuple(self.connections):
            if tells:
                connection.close(self)
            else:
                connection.vanish(self)


class Network:
    def __init__(self, turns: Turns, dice: random.Random) -> None:
        self.turns, self._dice = turns, dice
        self.hosts: dict[str, SimulatedProcess] = {}  # The process that listens there now.
        self.cut: set[tuple[str, str]] = set()  # (source, target) of the cut directions.
        self.loss = 0.0
        self.late = 0.0  # The probability that a message takes long.

    def delay(self) -> float:
        if self.late and self._dice.random() < self.late:
            return self._dice.uniform(0.05, 3.0)
        return self._dice.uniform(0.0002, 0.004)

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cut

    def heal(self) -> None:
        self.cut.clear()
        self.loss = self.late = 0.0

    def post(self, source: SimulatedProcess, target: str, call: Callable[[Any], None]) -> None:
        """Send a message: `call` gets the process that listens at the target when it arrives."""
        host = source.host
        if self.is_cut(host, target) or (self.loss and self._dice.random() < self.loss):
            return

        def arrive() -> None:
            process = self.hosts.get(target)
            if process is not None and process.is_alive and not self.is_cut(host, target):
                process.deliver(lambda: call(process) if process.is_alive else None)

        self.turns.after(self.delay(), arrive)

    def ask(
        self,
        source: SimulatedProcess,
        target: str,
        question: Callable[[Any, Callable[[Any], None]], None],
        heard: Callable[[Any], None],
    ) -> None:
        """Send a request: `question` gets the process there and a function for its answer. An answer may be lost."""

        def asked(there: SimulatedProcess) -> None:
            def answer(value: Any) -> None:
                def back(_: Any) -> None:
                    if source.is_alive:
                        heard(value)

                if there.is_alive:
                    self._post_to(there, source, back)

            question(there, answer)

        self.post(source, target, asked)

    def _post_to(self, source: SimulatedProcess, target: SimulatedProcess, call: Callable[[Any], None]) -> None:
        if self.is_cut(source.host, target.host) or (self.loss and self._dice.random() < self.loss):
            return

        def arrive() -> None:
            if not self.is_cut(source.host, target.host):
                target.deliver(lambda: call(target))

        self.turns.after(self.delay(), arrive)

    def connect(self, source: SimulatedProcess, target: str) -> Connection | None:
        """Connect, or return None if no process listens there. A connection over a cut link carries nothing."""
        there = self.hosts.get(target)
        return Connection(self, source, there) if there is not None and there.is_alive else None


class Connection:
    """Two ends. Each side sets `received` and `closed`."""

    def __init__(self, network: Network, client: SimulatedProcess, server: SimulatedProcess) -> None:
        self.network, self.client, self.server = network, client, server
        self.received: dict[SimulatedProcess, Callable[[Any], None]] = {}
        self.closed: dict[SimulatedProcess, Call] = {}
        self._open = {client: True, server: True}
        self._under_way: dict[SimulatedProcess, deque[tuple[float, Any]]] = {
            client: deque(),
            server: deque(),
        }  # By receiver.
        client.connections.append(self)
        server.connections.append(self)

    def other(self, end: SimulatedProcess) -> SimulatedProcess:
        return self.server if end is self.client else self.client

    def is_open(self, end: SimulatedProcess) -> bool:
        return self._open[end]

    def send(self, by: SimulatedProcess, message: Any) -> None:
        if not self._open[by]:
            return
        self._put(self.other(by), message)

    def _put(self, target: SimulatedProcess, message: Any) -> None:
        queue = self._under_way[target]
        at = self.network.turns.now + self.network.delay()
        if queue and queue[-1][0] > at:
            at = queue[-1][0]
        queue.append((at, message))
        if len(queue) == 1:
            self._pump_at(target, at)

    def _pump_at(self, target: SimulatedProcess, at: float) -> None:
        self.network.turns.after(max(at - self.network.turns.now, 0.0), lambda: self._pump(target))

    def _pump(self, target: SimulatedProcess) -> None:
        queue = self._under_way[target]
        if not queue:
            return
        if self.network.is_cut(self.other(target).host, target.host):
            self._pump_at(target, self.network.turns.now + AGAIN)
            return
        _, message = queue.popleft()
        if queue:
            self._pump_at(target, queue[0][0])
        if not target.is_alive:
            self._reset_by(target)
        elif message is _END:
            target.deliver(lambda: self._ended(target))
        else:
            target.deliver(lambda: self._arrived(target, message))

    def _arrived(self, target: SimulatedProcess, message: Any) -> None:
        if not self._open[target]:
            return
        if target is self.server and target not in self.received:
            target.accept(self)
        if target in self.received and self._open[target]:
            self.received[target](message)

    def _ended(self, target: SimulatedProcess) -> None:
        if self._open[target]:
            self._open[target] = False
            self._forget(target)
            if target in self.closed:
                self.closed[target]()

    def _reset_by(self, target: SimulatedProcess) -> None:
        """Reset the connection of a sender to a dead process, if the machine of that process runs again."""
        present = self.network.hosts.get(target.host)
        if present is not None and present is not target:
            self._put(self.other(target), _END)

    def close(self, by: SimulatedProcess) -> None:
        """Close one end: it receives nothing any longer, and the other is notified after all sent data."""
        if not self._open[by]:
            return
        self._open[by] = False
        self._forget(by)
        self._put(self.other(by), _END)

    def vanish(self, by: SimulatedProcess) -> None:
        """Cut the power of an end: it sends nothing any longer."""
        self._open[by] = False
        self._under_way[self.other(by)].clear()
        self._forget(by)

    def _forget(self, end: SimulatedProcess) -> None:
        if self in end.connections:
            end.connections.remove(self)


_END = object()
