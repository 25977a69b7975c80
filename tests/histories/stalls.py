"""When the machine stood still: a beat that comes late says so. No promise is broken by others' work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.histories.clients import now_ms
from tests.histories.history import Event, Stall

_BEAT_S = 0.05
_LATE_S = 0.2


@contextmanager
def stalls_noted(history: list[Event]) -> Iterator[None]:
    """In the loop that runs the clients and carries what links carry."""
    loop = asyncio.get_running_loop()

    def beat(due: float) -> None:
        late = loop.time() - due
        if late > _LATE_S:
            lasted = int(late * 1000)
            history.append(Stall(at=now_ms() - lasted, lasted=lasted))
        go_on()

    def go_on() -> None:
        due = loop.time() + _BEAT_S
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


def is_starved(stalls: Iterable[Stall], since: int, within_ms: int) -> bool:
    """Whether the machine stood still so long at once, or so often, that what came too late proves nothing."""
    lasted = [stall.lasted for stall in stalls if stall.at + stall.lasted > since]
    return max(lasted, default=0) >= _STARVED_MS or sum(lasted) > _STARVED_SHARE * within_ms


def stood_still_ms(history: list[Event], since: int) -> int:
    """How long, from then on."""
    return sum(one.lasted for one in history if isinstance(one, Stall) and one.at >= since)
