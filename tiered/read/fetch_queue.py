"""Scheduling of fetches: each consumer group has a queue of its own, and the groups are served in turns.

    group a: ▮▮▮▮▮▮▮▮ ─┐
    group b: ▮         ├─ in turns ──▶ threads, within the byte budget           read-ahead: only threads that no
    group c: ▮▮       ─┘                                                         reader needs, at most half of them

A group that replays years never occupies every thread: one remains for the others. Thread-safe; calls no callback while
it holds its lock.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

log = logging.getLogger(__name__)

# Queued fetches of one group; a client that requests more has to retry later.
LINE_MAX = 1024


class QueueFull(Exception):
    """The group has too many queued fetches."""


class Fetch:
    """A fetch; `run` reports its own failure. It may be queued by several groups and runs once."""

    __slots__ = ("lines", "nbytes", "run", "started", "taken_by")

    def __init__(self, nbytes: int, run: Callable[[], None]) -> None:
        self.nbytes, self.run = nbytes, run
        self.lines: list[OrderedDict[Fetch, None]] = []
        self.started = False
        self.taken_by = ("", False)  # the group in whose turn it runs, and whether as read-ahead


Lines = OrderedDict[str, OrderedDict[Fetch, None]]


class FetchQueue:
    """Fetches queued by consumer group, run by the queue's own threads, limited by the bytes in progress."""

    def __init__(self, threads: int, budget: int) -> None:
        """`budget`: wire bytes that may be fetched and decoded concurrently."""
        self._threads, self._budget = threads, budget
        self._pool = ThreadPoolExecutor(threads, "cold-fetch")
        self._lock = threading.Lock()
        self._asked: Lines = OrderedDict()
        self._ahead: Lines = OrderedDict()
        self._running: Counter[tuple[str, bool]] = Counter()
        self._running_bytes = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        with self._lock:
            return len({fetch for lines in (self._asked, self._ahead) for line in lines.values() for fetch in line})

    def put(self, fetch: Fetch, group: str, *, ahead: bool = False) -> None:
        """Queue a fetch for a group; it may be queued for other groups as well. Raises QueueFull."""
        with self._lock:
            if fetch.started:
                return
            lines = self._ahead if ahead else self._asked
            line = lines.setdefault(group, OrderedDict())
            if fetch in line:
                return
            if len(line) >= LINE_MAX or self._closed:
                if not line:
                    del lines[group]
                raise QueueFull(f"{len(line)} cold reads of {group or 'queries'} are queued already")
            line[fetch] = None
            fetch.lines.append(line)
        self._pump()

    def withdraw(self, fetch: Fetch) -> bool:
        """Remove an unwanted fetch from all queues. Returns False if it has started already."""
        with self._lock:
            if not fetch.started:
                self._leave_lines(fetch)
            return not fetch.started

    def close(self) -> None:
        """Discard queued fetches; the caller reports that to their waiters."""
        with self._lock:
            self._closed = True
            self._asked.clear()
            self._ahead.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- turns

    def _pump(self) -> None:
        with self._lock:
            while not self._closed and (fetch := self._next()) is not None:
                self._running[fetch.taken_by] += 1
                self._running_bytes += fetch.nbytes
                self._pool.submit(self._run, fetch).add_done_callback(_log_failure)

    def _run(self, fetch: Fetch) -> None:
        try:
            fetch.run()
        finally:
            self._ended(fetch)

    def _next(self) -> Fetch | None:
        running = sum(self._running.values())
        if running >= self._threads:
            return None
        for group in self._asked:
            if self._running[group, False] < max(self._threads - 1, 1):
                return self._take(self._asked, group, ahead=False)
        running_ahead = sum(count for (_, ahead), count in self._running.items() if ahead)
        if running_ahead >= max(self._threads // 2, 1):
            return None
        return next((self._take(self._ahead, group, ahead=True) for group in self._ahead), None)

    def _take(self, lines: Lines, group: str, *, ahead: bool) -> Fetch | None:
        """Take a group's oldest fetch, and move the group to the end of the round.

        Returns None if the budget is used up; the group keeps its turn.
        """
        line = lines[group]
        fetch = next(iter(line))
        if self._running_bytes and self._running_bytes + fetch.nbytes > self._budget:
            return None
        lines.move_to_end(group)
        self._leave_lines(fetch)
        fetch.started = True
        fetch.taken_by = (group, ahead)
        return fetch

    def _leave_lines(self, fetch: Fetch) -> None:
        for line in fetch.lines:
            line.pop(fetch, None)
        fetch.lines.clear()
        for lines in (self._asked, self._ahead):
            for group in [group for group, line in lines.items() if not line]:
                del lines[group]

    def _ended(self, fetch: Fetch) -> None:
        with self._lock:
            self._running[fetch.taken_by] -= 1
            if not self._running[fetch.taken_by]:
                del self._running[fetch.taken_by]
            self._running_bytes -= fetch.nbytes
        self._pump()


def _log_failure(done: "Future[None]") -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("unexpected error in a cold fetch", exc_info=error)
