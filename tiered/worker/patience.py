"""How long a worker may be silent before it hangs, as one does whose store is a directory on a server that is gone.

All that it uploads shares one rate, whoever asked for it. So an answer may take some seconds, and as long beyond them
as the rate needs for all that was on its way when the wait began, and all that came since: it may be the last of it.

Not for ever, though, where something always comes: what is on its way shares the rate in turns. When others have ended
with many times as much as was on its way at the beginning, it has had its turns, and what has ended counts no more.

Nor does time count in which it wanted a processor that others had, but for what it got of one: that of a busy machine
is no hanging store's. A worker of the lowest priority may get nothing for minutes, and would be ended again and again
over work that it never could do.
"""

import functools
import math
import threading
from collections.abc import Callable, Iterable, Set
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from infra.process.processor import ProcessorDemand

# What a store takes at least in a second, where no lower rate is set: an upload may take as long as that needs.
_SLOWEST_BYTES = 1 << 20
_LOOK_SECONDS = 2.0  # between two looks at a worker that is silent


class Patience:
    """Of all who wait for one worker. Thread-safe. `seconds`: where it has nothing to upload; `rate` 0: no limit."""

    def __init__(
        self,
        seconds: float,
        uploads: int,
        look: "Callable[[], ProcessorDemand | None]" = lambda: None,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        """`uploads`: how many share the rate at a time. `look`: at the worker, each `look_seconds` of its silence."""
        self.seconds, self.rate = seconds, 0
        self._sharing, self._look, self._look_seconds = uploads, look, look_seconds
        self.starved = 0.0  # seconds of waits that did not count
        self._lock = threading.Lock()
        self._asked = self._ended = 0  # bytes, since the start

    def uploads(self, size: int, answer: "Future[Any]") -> None:
        """So many bytes are on their way until there is an answer."""
        with self._lock:
            self._asked += size
        answer.add_done_callback(functools.partial(self._answered, size))

    def _answered(self, size: int, _: "Future[Any]") -> None:
        with self._lock:
            self._ended += size

    def first_of(
        self, answers: "Iterable[Future[Any]]", starves: "Callable[[], object]" = lambda: None
    ) -> "tuple[Set[Future[Any]], float]":
        """Those that are there as soon as one is, and how long it was waited for; none: the worker hangs.

        `starves` is called now and then while it has no processor.
        """
        waiting, before = self.begin(), None
        while True:
            seconds = waiting.more(self._look_seconds)
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
        """A wait that begins now."""
        with self._lock:
            return Wait(self, self._asked, self._ended)

    def after(self, asked: int, ended: int) -> float:
        """Seconds, for who began to wait when so many bytes had been asked for, and so many had ended."""
        with self._lock:
            since = self._ended - ended
            passed_by = since if since < self._sharing * (asked - ended) else 0
            owed = self._asked - self._ended + passed_by
            return self.seconds + owed / min(self.rate or _SLOWEST_BYTES, _SLOWEST_BYTES)


class Wait:
    """`waited`: seconds that it was given so far."""

    __slots__ = ("_asked", "_ended", "_patience", "waited")

    def __init__(self, patience: Patience, asked: int, ended: int) -> None:
        self._patience, self._asked, self._ended, self.waited = patience, asked, ended, 0.0

    def more(self, at_most: float = math.inf) -> float:
        """Seconds to wait now, and to ask again after them; 0: it hangs."""
        seconds = min(max(self._patience.after(self._asked, self._ended) - self.waited, 0.0), at_most)
        self.waited += seconds
        return seconds


def _starved(before: ProcessorDemand | None, now: ProcessorDemand | None, seconds: float) -> float:
    """How much of so many seconds between two looks it had no processor, and wanted one."""
    if before is None or now is None or before.pid != now.pid or not now.wants_more:
        return 0.0
    return max(seconds - (now.cpu_s - before.cpu_s), 0.0)
