"""When the machine stood still, or let servers wait: no promise is broken by others' work.

A beat in the harness's own loop that comes late is a stall. A server is told by the kernel's account of how long its
main thread was ready to run and did not: its harness may have its share of the machine meanwhile.
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
_WAITED_MS = 100  # in the time between two looks; less is what a set on one machine does to itself


@contextmanager
def stalls_noted(history: list[Event]) -> Iterator[None]:
    """In the loop that runs the clients and carries what links carry."""

    def noted(late: float) -> None:
        if late > _LATE_S:
            lasted = int(late * 1000)
            history.append(Stall(at=now_ms() - lasted, lasted=lasted))

    with _each(_BEAT_S, noted):
        yield


@contextmanager
def waits_noted(history: list[Event], servers: Callable[[], Mapping[str, Sequence[int]]]) -> Iterator[None]:
    """Of these processes, by the name of the server."""
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
    """Its main thread, so far; 0 of one that is gone. Time on a processor, waiting for one (both ns), and how often."""
    with suppress(OSError):
        return int((proc / str(process) / "schedstat").read_text().split()[1]) // 1_000_000
    return 0


@contextmanager
def _each(seconds: float, work: Callable[[float], None]) -> Iterator[None]:
    """In the running loop; told by how much it is late."""
    loop = asyncio.get_running_loop()

    def beat(due: float) -> None:
        work(loop.time() - due)
        go_on()

    def go_on() -> None:
        due = loop.time() + seconds
        beats[:] = [loop.call_at(due, beat, due)]

    beats = list[asyncio.TimerHandle]()
    go_on()
    try:
        yield
    finally:
        beats[0].cancel()


#: As long as the shortest time that members of these sets wait for one another: who is silent for it is given up.
_STARVED_MS = 1000
#: Of the time within which a set has to be at rest: more than this is lost with what the stalls undid.
_STARVED_SHARE = 0.1
#: Of the same time, of one server.
_WAITING_SHARE = 0.3


def is_starved(stalls: Iterable[Stall], waits: Iterable[Waited], since: int, until: float, within_ms: int) -> bool:
    """Whether the machine ran others so much that what came too late then proves nothing.

    It stood still long at once, or often; or it let one of the servers wait.
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
    """How long, from then on."""
    return sum(one.lasted for one in history if isinstance(one, Stall) and one.at >= since)
