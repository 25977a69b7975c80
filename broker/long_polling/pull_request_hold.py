"""Pulls that found nothing wait here: answered by the next message with a fitting tag, or when their time is up.

    topic ─▶ queue ─▶ who takes every message; tag ─▶ who takes that one
    connection ─▶ its pulls          tenth of a second ─▶ whose time is up

A message costs those who take it, however many wait for others, and they have their turn in slices.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from infra.clock import Clock
from infra.loop.supervisor import Faults
from infra.net.remoting_server import Connection

# A hundred thousand may wait: a request that a long expression makes larger than this is answered at once.
MAX_HELD_SIZE = 16 * 1024
# Pulls that run before other requests get their turn.
SLICE = 32
_TENTHS = 10
K = TypeVar("K")


@dataclass(slots=True, eq=False)
class HeldPull:
    """One pull that waits for a message: `codes` are the tags it takes (None: all), `deadline` is monotonic seconds.

    `resume` is called once: True when something arrived, False when the time is up.
    """

    connection: Connection
    topic: str
    queue_id: int
    offset: int
    deadline: float
    codes: frozenset[int] | None
    # Runs the pull again and answers it, a failure too; True as its argument: answer whatever comes.
    resume: Callable[[bool], None]

    @property
    def tenth(self) -> int:
        return math.ceil(self.deadline * _TENTHS)


_Pulls = dict[HeldPull, None]


@dataclass(slots=True, eq=False)
class _Line:
    """Who waits for one queue."""

    all: _Pulls = field(default_factory=dict)
    untagged: _Pulls = field(default_factory=dict)
    tagged: dict[int, _Pulls] = field(default_factory=dict)
    highest: int = 0  # offset that somebody waits at

    def add(self, pull: HeldPull) -> None:
        self.all[pull] = None
        self.highest = max(self.highest, pull.offset)
        if pull.codes is None:
            self.untagged[pull] = None
        for code in pull.codes or ():
            self.tagged.setdefault(code, {})[pull] = None

    def remove(self, pull: HeldPull) -> None:
        del self.all[pull]
        self.untagged.pop(pull, None)
        for code in pull.codes or ():
            pulls = self.tagged[code]
            del pulls[pull]
            if not pulls:
                del self.tagged[code]

    def fitting(self, offset: int, code: int) -> list[HeldPull]:
        if offset >= self.highest:
            return [*self.untagged, *self.tagged.get(code, ())]
        # The queue begins again below somebody: he has to hear of it.
        return [pull for pull in self.all if pull.codes is None or code in pull.codes or offset < pull.offset]


class PullRequestHold:
    """One wake-up for each pull, whoever comes first: message, deadline, or the connection's end."""

    def __init__(self, clock: Clock, limit: int, faults: Faults) -> None:
        self._clock, self._limit, self._faults = clock, limit, faults
        self._lines: dict[str, dict[int, _Line]] = {}
        self._of: dict[Connection, _Pulls] = {}
        self._due: dict[int, _Pulls] = {}
        self._watched: set[Connection] = set()
        # Out of line, still to run; True: its time is up.
        self._ready: deque[tuple[HeldPull, bool]] = deque()
        self.count = 0
        self.wake_scheduled = False

    @property
    def full(self) -> bool:
        return self.count >= self._limit

    def watch(self, connection: Connection) -> None:
        """Forget its pulls when it is gone."""
        if connection not in self._watched:
            self._watched.add(connection)
            connection.on_close(self.connection_closed)

    def hold(self, pull: HeldPull) -> None:
        self._lines.setdefault(pull.topic, {}).setdefault(pull.queue_id, _Line()).add(pull)
        self._of.setdefault(pull.connection, {})[pull] = None
        self._due.setdefault(pull.tenth, {})[pull] = None
        self.count += 1

    def arrived(self, topic: str, queue_id: int, queue_offset: int, tag_code: int) -> bool:
        """A message is visible; True if somebody waits for it. The pulls run at `wake`, after the whole batch."""
        line = self._lines.get(topic, {}).get(queue_id)
        if line is None:
            return False
        self._make_ready(line.fitting(queue_offset, tag_code), last=False)
        return bool(self._ready)

    def wake(self) -> None:
        """A slice of those who are ready; the others after what else the loop has to do."""
        self.wake_scheduled = False
        self._run(SLICE)
        if self._ready and not self.wake_scheduled:
            self.wake_scheduled = True
            asyncio.get_running_loop().call_soon(self.wake)

    def check_deadlines(self) -> None:
        now = self._clock.monotonic() * _TENTHS
        for tenth in [tenth for tenth in self._due if tenth <= now]:
            self._make_ready(list(self._due[tenth]), last=True)
        self._wake_once()

    def connection_closed(self, connection: Connection) -> None:
        self._watched.discard(connection)
        for pull in tuple(self._of.get(connection, ())):
            self._take_out(pull)

    def release_topic(self, topic: str) -> None:
        """The topic is gone or its range moved: everybody asks again and hears the new state."""
        for line in tuple(self._lines.get(topic, {}).values()):
            self._make_ready(list(line.all), last=True)
        self._wake_once()

    def look_again(self) -> None:
        """Everybody, in slices; who finds nothing waits on."""
        for pulls in tuple(self._due.values()):
            self._make_ready(tuple(pulls), last=False)
        self._wake_once()

    def release_all(self) -> None:
        """At the end: nobody waits for a slice."""
        for topic in tuple(self._lines):
            for line in tuple(self._lines[topic].values()):
                self._make_ready(list(line.all), last=True)
        self._run(len(self._ready))

    # ---- inside

    def _make_ready(self, pulls: Iterable[HeldPull], *, last: bool) -> None:
        for pull in pulls:
            self._take_out(pull)
            self._ready.append((pull, last))

    def _take_out(self, pull: HeldPull) -> None:
        queues = self._lines[pull.topic]
        line = queues[pull.queue_id]
        line.remove(pull)
        if not line.all:
            del queues[pull.queue_id]
        if not queues:
            del self._lines[pull.topic]
        _leave(self._of, pull.connection, pull)
        _leave(self._due, pull.tenth, pull)
        self.count -= 1

    def _wake_once(self) -> None:
        if self._ready and not self.wake_scheduled:
            self.wake()

    def _run(self, count: int) -> None:
        """Those who wait again meanwhile are in line, not ready."""
        for _ in range(min(count, len(self._ready))):
            pull, last = self._ready.popleft()
            try:
                pull.resume(last)
            except Exception as error:  # noqa: BLE001 - one pull; the others that are due have their turn
                self._faults.add("a waiting pull", error, f"of {pull.topic}, queue {pull.queue_id}")


def _leave(table: dict[K, _Pulls], key: K, pull: HeldPull) -> None:
    pulls = table[key]
    del pulls[pull]
    if not pulls:
        del table[key]
