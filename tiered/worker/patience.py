"""Time limit for the answers of a worker, after which it counts as hung: its store may be on a dead file server.

All uploads of a worker share one rate, also those of different callers. So an answer may take a fixed time, plus the
time that the rate needs for all bytes in progress at the start of the wait and requested since: it may be the last one.

The wait is limited even if new requests always arrive, because uploads share the rate in turns. When other uploads
have ended with many times the bytes in progress at the start, each has had its turns. Bytes that ended then no longer
extend the limit.

Time in which the worker wanted a processor and had none is not counted: a busy machine is not a hung store. A worker
of the lowest priority may get no processor for minutes. It would otherwise be killed again and again without being
able to do its work.
"""

import functools
import math
import threading
from collections.abc import Callable, Iterable, Set
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from infra.process.processor import ProcessorDemand

# Assumed lowest throughput of a store in bytes per second, unless a lower rate is set.
_SLOWEST_BYTES = 1 << 20
_CHECK_SECONDS = 2.0  # between two checks of a silent worker


class Patience:
    """The time limit for all waits for one worker. Thread-safe.

    `seconds`: the limit without uploads. `rate`: the upload rate in bytes per second; 0: no limit.
    """

    def __init__(
        self,
        seconds: float,
        uploads: int,
        look: "Callable[[], ProcessorDemand | None]" = lambda: None,
        check_seconds: float = _CHECK_SECONDS,
    ) -> None:
        """`uploads`: uploads that share the rate. `look`: checks the worker each `check_seconds` of its silence."""
        self.seconds, self.rate = seconds, 0
        self._sharing, self._look, self._check_seconds = uploads, look, check_seconds
        self.starved = 0.0  # seconds that were not counted
        self._lock = threading.Lock()
        self._asked = self._ended = 0  # bytes since the start

    def uploads(self, size: int, answer: "Future[Any]") -> None:
        """Count `size` bytes as in progress until the answer."""
        with self._lock:
            self._asked += size
        answer.add_done_callback(functools.partial(self._answered, size))

    def _answered(self, size: int, _: "Future[Any]") -> None:
        with self._lock:
            self._ended += size

    def first_of(
        self, answers: "Iterable[Future[Any]]", starves: "Callable[[], object]" = lambda: None
    ) -> "tuple[Set[Future[Any]], float]":
        """Return the answers that are complete as soon as one is, and the seconds waited; none: the worker hangs.

        `starves` is called repeatedly while the worker has no processor.
        """
        waiting, before = self.begin(), None
        while True:
            seconds = waiting.more(self._check_seconds)
            ended = wait(answers, seconds, FIRST_COMPLETED).done
            if ended or not seconds:
                return ended, waiting.waited
            now = self._look()
            starved = _starved(before, now, seconds)
            before = now
            if starved:
                waiting.waited -= starved
                with self._lock:
                    self.starved += starved
                starves()

    def begin(self) -> "Wait":
        """Begin a wait."""
        with self._lock:
            return Wait(self, self._asked, self._ended)

    def after(self, asked: int, ended: int) -> float:
        """Return the limit in seconds of a wait that began when these numbers of bytes were requested and ended."""
        with self._lock:
            since = self._ended - ended
            passed_by = since if since < self._sharing * (asked - ended) else 0
            outstanding = self._asked - self._ended + passed_by
            return self.seconds + outstanding / min(self.rate or _SLOWEST_BYTES, _SLOWEST_BYTES)


class Wait:
    """One wait. `waited`: seconds granted so far."""

    __slots__ = ("_asked", "_ended", "_patience", "waited")

    def __init__(self, patience: Patience, asked: int, ended: int) -> None:
        self._patience, self._asked, self._ended, self.waited = patience, asked, ended, 0.0

    def more(self, at_most: float = math.inf) -> float:
        """Return the seconds to wait before the next call; 0: the worker hangs."""
        seconds = min(max(self._patience.after(self._asked, self._ended) - self.waited, 0.0), at_most)
        self.waited += seconds
        return seconds


def _starved(before: ProcessorDemand | None, now: ProcessorDemand | None, seconds: float) -> float:
    """Return the seconds between two checks in which the worker wanted a processor and had none."""
    if before is None or now is None or before.pid != now.pid or not now.wants_more:
        return 0.0
    return max(seconds - (now.cpu_s - before.cpu_s), 0.0)
