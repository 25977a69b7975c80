"""When the machine stood still: a beat that comes late says so. No promise is broken by others' work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
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


def stood_still_ms(history: list[Event], since: int) -> int:
    """How long, from then on."""
    return sum(one.lasted for one in history if isinstance(one, Stall) and one.at >= since)
