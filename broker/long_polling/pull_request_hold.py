"""Pull requests that found no message and wait for one that matches their tags, or for their deadline.

RocketMQ's PullRequestHoldService. Three indexes:

    topic ─▶ queue ─▶ pulls without a tag filter; tag code ─▶ pulls with that tag
    connection ─▶ its pulls
    tenth of a second ─▶ pulls with that deadline

The cost of a message depends only on the pulls that it matches. Resumed pulls run in slices, between which the event
loop serves other work.
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

# Up to 100,000 pulls may wait. A request whose filter expression makes it larger than this is answered at once.
MAX_HELD_SIZE = 16 * 1024
# Pulls that are resumed before the event loop runs other work.
SLICE = 32
_TENTHS = 10
K = TypeVar("K")


@dataclass(slots=True, eq=False)
class HeldPull:
    """One waiting pull.

    `codes` are the tag codes that it accepts; None accepts all. `deadline` is in seconds of the monotonic clock.
    `resume` is called at most once, and not at all if the connection closes first.
    """

    connection: Connection
    topic: str
    queue_id: int
    offset: int
    deadline: float
    codes: frozenset[int] | None
    # Runs the pull again and answers it, also with a failure. If the argument is True, it answers even without a
    # message; otherwise the pull may wait again.
    resume: Callable[[bool], None]

    @property
    def tenth(self) -> int:
        return math.ceil(self.deadline * _TENTHS)


_Pulls = dict[HeldPull, None]


@dataclass(slots=True, eq=False)
class _Line:
    """Pulls that wait for one queue."""

    all: _Pulls = field(default_factory=dict)
    untagged: _Pulls = field(default_factory=dict)
    tagged: dict[int, _Pulls] = field(default_factory=dict)
    highest: int = 0  # highest offset at which a pull waits

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
        # The queue restarted below the offset of some pull. That pull has to be answered whatever its tags, with the
        # new range of the queue.
        return [pull for pull in self.all if pull.codes is None or code in pull.codes or offset < pull.offset]


class PullRequestHold:
    """Index of waiting pulls; each is resumed once, by a message or its deadline, or dropped with its connection."""

    def __init__(self, clock: Clock, limit: int, faults: Faults) -> None:
        self._clock, self._limit, self._faults = clock, limit, faults
        self._lines: dict[str, dict[int, _Line]] = {}
        self._of: dict[Connection, _Pulls] = {}
        self._due: dict[int, _Pulls] = {}
        self._watched: set[Connection] = set()
        # Pulls that left the index and are still to run, each with the argument for `resume`.
        self._ready: deque[tuple[HeldPull, bool]] = deque()
        self.count = 0
        self.wake_scheduled = False

    @property
    def full(self) -> bool:
        return self.count >= self._limit

    def watch(self, connection: Connection) -> None:
        """Drop the connection's pulls when it closes."""
        if connection not in self._watched:
            self._watched.add(connection)
            connection.on_close(self.connection_closed)

    def hold(self, pull: HeldPull) -> None:
        self._lines.setdefault(pull.topic, {}).setdefault(pull.queue_id, _Line()).add(pull)
        self._of.setdefault(pull.connection, {})[pull] = None
        self._due.setdefault(pull.tenth, {})[pull] = None
        self.count += 1

    def arrived(self, topic: str, queue_id: int, queue_offset: int, tag_code: int) -> bool:
        """Schedule the pulls that match a visible message; they run at `wake`, after the whole batch.

        Returns whether any pull is scheduled, by this message or an earlier one.
        """
        line = self._lines.get(topic, {}).get(queue_id)
        if line is None:
            return False
        self._make_ready(line.fitting(queue_offset, tag_code), last=False)
        return bool(self._ready)

    def wake(self) -> None:
        """Run one slice of the scheduled pulls; the next slice runs in the next turn of the event loop."""
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
        """Answer all pulls of the topic with its new state, after it was deleted or its offset range changed."""
        for line in tuple(self._lines.get(topic, {}).values()):
            self._make_ready(list(line.all), last=True)
        self._wake_once()

    def check_all(self) -> None:
        """Run all pulls again, in slices. A pull that finds nothing waits again."""
        for pulls in tuple(self._due.values()):
            self._make_ready(tuple(pulls), last=False)
        self._wake_once()

    def release_all(self) -> None:
        """Answer all pulls at once, without slices, at shutdown."""
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
        """Run up to `count` scheduled pulls; a pull that waits again is back in the index, not in `_ready`."""
        for _ in range(min(count, len(self._ready))):
            pull, last = self._ready.popleft()
            try:
                pull.resume(last)
            except Exception as error:  # noqa: BLE001 - one failed pull must not stop the others that are due
                self._faults.add("a waiting pull", error, f"of {pull.topic}, queue {pull.queue_id}")


def _leave(table: dict[K, _Pulls], key: K, pull: HeldPull) -> None:
    pulls = table[key]
    del pulls[pull]
    if not pulls:
        del table[key]
