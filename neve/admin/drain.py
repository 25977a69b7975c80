"""Waits until a broker without producers holds no message that is still to be delivered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.admin.admin import ClusterAdmin
from neve.admin.errors import AdminError
from neve.admin.lag import total_lag
from neve.remoting.names import is_system_group

if TYPE_CHECKING:
    from typing_extensions import override
else:

    def override(method: Any) -> Any:
        return method


_POLL_S = 1.0
_DELAY_LEVEL = "scheduleMessageOffset_"


class Remaining(NamedTuple):
    """Undelivered messages of a broker. `timers` and `transactions` are None for Apache's, which do not report them."""

    groups: Mapping[str, int]  # lag by group
    delayed: int
    timers: int | None
    transactions: int | None

    @property
    def is_empty(self) -> bool:
        """Whether the broker reports no undelivered message."""
        return not (any(self.groups.values()) or self.delayed or self.timers or self.transactions)

    @override
    def __str__(self) -> str:
        pending = [(self.delayed, "delayed"), (self.timers, "timers"), (self.transactions, "half messages")]
        parts = [f"{count} {what}" for count, what in pending if count]
        return ", ".join([*(f"{name} {lag} to read" for name, lag in self.groups.items() if lag), *parts])


async def remaining_at(admin: ClusterAdmin, broker: str, ignored: frozenset[str]) -> Remaining:
    """Return the undelivered messages of a broker, without those of the ignored groups."""
    groups = admin.groups_at(broker)
    lags = {}
    for name in await groups.settings():
        if is_system_group(name) or name in ignored:
            continue
        connections, progress = await asyncio.gather(groups.connections(name), groups.progress(name))
        here = [one for one in progress if one.queue.broker_name == broker]
        lags[name] = 0 if connections.is_broadcasting else total_lag(here)
    runtime = await admin.brokers.runtime(broker)
    levels = [value.split(",") for key, value in runtime.items() if key.startswith(_DELAY_LEVEL)]
    delayed = sum(max(int(end) - int(delivered), 0) for delivered, end in levels)
    timers, transactions = (
        None if text is None else int(text) for text in map(runtime.get, ("timersWaiting", "transactionsWaiting"))
    )
    return Remaining(lags, delayed, timers, transactions)


async def wait_until_drained(
    admin: ClusterAdmin, broker: str, *, ignored: frozenset[str], seconds: float, report: Callable[[Remaining], None]
) -> Remaining:
    """Return when no message is undelivered; `report` is called with each change before that.

    Raises:
        AdminError: messages remain after `seconds`.
    """
    last: Remaining | None = None
    now = asyncio.get_running_loop().time
    deadline = now() + seconds
    while True:
        remaining = await remaining_at(admin, broker, ignored)
        if remaining.is_empty:
            return remaining
        if remaining != last:
            report(remaining)
        last = remaining
        if now() + _POLL_S > deadline:
            raise AdminError(
                f"broker {broker} still holds undelivered messages after {seconds:.0f} s: {remaining}. Producers do "
                "not send to it; repeat the command to wait longer"
            )
        await asyncio.sleep(_POLL_S)
