"""Detect when the machine stalled, or let servers wait: other load on the machine must not count as a broken promise.

A periodic callback in the harness's own loop that runs late is a stall. Waits of a server are read from the kernel's
statistics: how long its main thread was runnable without running, while the harness may have had a processor.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.histories.clients import now_ms
from tests.histories.history import Event, Stall, Waited

_BEAT_S = 0.05
_LATE_S = 0.2
_LOOK_S = 1.0
_WAITED_MS = 100  # In the time between two measurements; less is caused by the set itself.


@contextmanager
def stalls_noted(history: list[Event]) -> Iterator[None]:
    """Record stalls of the loop that runs the clients and the links."""

    def noted(late: float) -> None:
        if late > _LATE_S:
            lasted = int(late * 1000)
            history.append(Stall(at=now_ms() - lasted, lasted=lasted))

    with _each(_BEAT_S, noted):
        yield


@contextmanager
def waits_noted(history: list[Event], servers: Callable[[], Mapping[str, Sequence[int]]]) -> Iterator[None]:
    """Record waits of these processes, by the name of the server."""
    known: dict[int, int] = {pid: waited_ms(pid) for pids in servers().values() for pid in pids}

    def noted(_: float) -> None:
        for who, pids in servers().items():
            for pid in pids:
                before, now = known.get(pid, 0), waited_ms(pid)
                known[pid] = now
                if now - before >= _WAITED_MS:
                    history.append(Waited(at=now_ms(), who=who, lasted=now - before))

    with _each(_LOOK_S, noted):
        yield


def waited_ms(process: int, proc: Path = Path("/proc")) -> int:
    """Return how long its main thread has waited so far; 0 if it has ended.

    The kernel's file has the time on a processor and the time waiting for one, both in ns, and a count.
    """
    with suppress(OSError):
        return int((proc / str(process) / "schedstat").read_text().split()[1]) // 1_000_000
    return 0


@contextmanager
def _each(seconds: float, work: Callable[[float], None]) -> Iterator[None]:
    """Call periodically in the running loop, with the lateness of the call."""
    loop = asyncio.get_running_loop()

    def beat(due: float) -> None:
        work(loop.time() - due)
        resume()

    def resume() -> None:
        due = loop.time() + seconds
        beats[:] = [loop.call_at(due, beat, due)]

    beats = list[asyncio.TimerHandle]()
    resume()
    try:
        yield
    finally:
        beats[0].cancel()


#: The shortest time-out between members of these sets: a member that is silent for this long counts as dead.
_STARVED_MS = 1000
#: The share of the time limit for rest that stalls may take: beyond it, their consequences take the rest.
_STARVED_SHARE = 0.1
#: The share of the same time limit for one server.
_WAITING_SHARE = 0.3


def is_starved(stalls: Iterable[Stall], waits: Iterable[Waited], since: int, until: float, within_ms: int) -> bool:
    """Return whether the machine was so busy that a late event proves nothing.

    It stalled for long at once, or often; or it let one of the servers wait.
    """
    lasted = [stall.lasted for stall in stalls if stall.at + stall.lasted > since and stall.at < until]
    waited = Counter[str]()
    for one in waits:
        if since < one.at - one.lasted and one.at <= until:
            waited[one.who] += one.lasted
    return (
        max(lasted, default=0) >= _STARVED_MS
        or sum(lasted) > _STARVED_SHARE * within_ms
        or max(waited.values(), default=0) > _WAITING_SHARE * within_ms
    )


def stood_still_ms(history: list[Event], since: int) -> int:
    """Return the total of stalls from then on."""
    return sum(one.lasted for one in history if isinstance(one, Stall) and one.at >= since)
