"""What a broker still has for others when nobody sends to it any more: what groups have not read, what waits for its
time or its producer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.cli.failures import FAILED, Failure
from neve.cli.lag import total_lag
from neve.remoting.names import is_system_group

if TYPE_CHECKING:
    from typing_extensions import override

    from neve.cli.brokers import Brokers
    from neve.cli.consumer_groups import ConsumerGroups
else:

    def override(method: Any) -> Any:
        return method


_POLL_S = 1.0
_DELAY_LEVEL = "scheduleMessageOffset_"
_BROADCASTING = "broadcasting"


class Left(NamedTuple):
    """Of one broker. `timers` and `transactions` are None where it doesn't tell, as Apache's."""

    groups: Mapping[str, int]  # what each has still to read
    delayed: int
    timers: int | None
    transactions: int | None

    @property
    def is_nothing(self) -> bool:
        return not (any(self.groups.values()) or self.delayed or self.timers or self.transactions)

    @override
    def __str__(self) -> str:
        waiting = [(self.delayed, "delayed"), (self.timers, "timers"), (self.transactions, "half messages")]
        told = [f"{count} {what}" for count, what in waiting if count]
        return ", ".join([*(f"{name} {lag} to read" for name, lag in self.groups.items() if lag), *told])


async def look(asked: Brokers, groups: ConsumerGroups, name: str, ignored: frozenset[str]) -> Left:
    """What is left now."""
    names = [one for one in await groups.settings() if not is_system_group(one) and one not in ignored]
    lags = {}
    for one in names:
        connected, standings = await asyncio.gather(groups.connected(one), groups.standings(one))
        here = [standing for standing in standings if standing.queue.broker_name == name]
        # of those who read everything, each for itself, no broker knows where they are
        lags[one] = 0 if connected.model == _BROADCASTING else total_lag(here)
    told = await asked.runtime(name)
    levels = [value.split(",") for key, value in told.items() if key.startswith(_DELAY_LEVEL)]
    delayed = sum(max(int(end) - int(done), 0) for done, end in levels)
    timers, transactions = (
        None if text is None else int(text) for text in map(told.get, ("timersWaiting", "transactionsWaiting"))
    )
    return Left(lags, delayed, timers, transactions)


async def until_nothing_is_left(  # noqa: PLR0917
    asked: Brokers,
    groups: ConsumerGroups,
    name: str,
    ignored: frozenset[str],
    seconds: float,
    tell: Callable[[Left], None],
) -> Left:
    """Told each time that it has changed.

    Raises:
        Failure: something is left after `seconds`.
    """
    left: Left | None = None
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        now = await look(asked, groups, name, ignored)
        if now.is_nothing:
            return now
        if now != left:
            tell(now)
        left = now
        if asyncio.get_running_loop().time() + _POLL_S > deadline:
            raise Failure(
                FAILED, f"still at {name}: {left}; it stays out of producers' routes: the same command goes on"
            )
        await asyncio.sleep(_POLL_S)
