"""What a pop consumer holds, and how it lets go: acks in batches, invisibility renewed while a message is in work."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import defaultdict
from dataclasses import dataclass, field

from neve.client.group.delivery import DeliveryQueue
from neve.client.group.in_work import Asker
from neve.client.group.pop_requests import Popper, Receipt
from neve.client.model import MessageQueue
from neve.client.net.session import Session
from neve.errors import NeveError, UnknownOutcome

log = logging.getLogger(__name__)

_ACKS_PER_REQUEST = 512
_RENEWALS_AT_ONCE = 32


@dataclass(slots=True)
class Held:
    """A popped message that is not settled. Times are on the loop's clock, in seconds."""

    queue: MessageQueue  # the one that was popped
    receipt: Receipt
    delivery: DeliveryQueue
    popped_at: float
    expires_at: float
    handed_over_at: float = 0.0
    asker: Asker | None = None  # who has it; nobody while it waits here
    is_settled: bool = False
    renewing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def settled_receipt(self) -> Receipt:
        """The receipt to settle it by: a renewal under way has to end first, it changes the receipt."""
        assert self.is_settled
        async with self.renewing:
            return self.receipt


class Acker:
    """Acks to each broker: one goes alone, those that come while it is under way go together after it."""

    def __init__(self, session: Session, popper: Popper) -> None:
        self._session = session
        self._popper = popper
        self._pending: dict[str, list[tuple[Held, asyncio.Future[None]]]] = defaultdict(list)
        self._senders: dict[str, asyncio.Task[None]] = {}

    def add(self, held: Held) -> asyncio.Future[None]:
        """The outcome, for who wants to wait for it: a failed ack means that the message comes again."""
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(_looked_at)
        broker = held.queue.broker_name
        self._pending[broker].append((held, outcome))
        if broker not in self._senders:
            self._senders[broker] = sender = self._session.spawn(self._send(broker), f"acks to {broker}")
            sender.add_done_callback(functools.partial(self._forget, broker))
        return outcome

    async def flush(self) -> None:
        """Returns when no ack is under way."""
        while self._senders:
            await asyncio.gather(*self._senders.values(), return_exceptions=True)

    async def _send(self, broker: str) -> None:
        try:
            while batch := self._pending[broker][:_ACKS_PER_REQUEST]:
                await self._send_batch(batch)
                del self._pending[broker][: len(batch)]
        finally:
            self._ended(broker)

    def _forget(self, broker: str, sender: asyncio.Task[None]) -> None:
        """End a sender that was cancelled before its first step, so that its `finally` did not run."""
        if self._senders.get(broker) is sender:
            self._ended(broker)

    def _ended(self, broker: str) -> None:
        del self._senders[broker]
        for _, outcome in self._pending.pop(broker):  # none, unless the sender ended early: nothing may wait for ever
            if not outcome.done():
                outcome.set_exception(UnknownOutcome(f"the client ended while an ack to {broker} was on its way"))

    async def _send_batch(self, batch: list[tuple[Held, asyncio.Future[None]]]) -> None:
        first = batch[0][0]
        try:
            if len(batch) == 1:
                await self._popper.ack(first.queue, await first.settled_receipt())
            else:
                receipts = [(held.queue.topic, await held.settled_receipt()) for held, _ in batch]
                await self._popper.ack_batch(first.queue, receipts)
        except NeveError as error:
            log.warning("%d messages of %s were not acknowledged, they come again: %s", len(batch), first.queue, error)
            for _, outcome in batch:
                if not outcome.done():
                    outcome.set_exception(error)
            return
        for _, outcome in batch:
            if not outcome.done():
                outcome.set_result(None)


def _looked_at(outcome: asyncio.Future[None]) -> None:
    """The failure was logged; nobody has to wait for it."""
    if not outcome.cancelled():
        outcome.exception()


class Renewer:
    """Keeps what is held invisible, up to `hold_limit` seconds from its pop."""

    def __init__(self, popper: Popper, invisible: float, hold_limit: float) -> None:
        self._popper = popper
        self._invisible = invisible
        self._hold_limit = hold_limit
        self._held: dict[int, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def askers(self) -> list[Asker]:
        """Who has messages that are not settled, once for each."""
        return [held.asker for held in self._held.values() if held.asker is not None]

    def hold(self, held: Held) -> None:
        self._held[id(held)] = held

    def release(self, held: Held) -> bool:
        """Whether it was held: settling twice counts once."""
        if held.is_settled:
            return False
        held.is_settled = True
        return self._held.pop(id(held), None) is not None

    async def forever(self) -> None:
        while True:
            await asyncio.sleep(self._invisible / 6)
            await self.renew_due(asyncio.get_running_loop().time())

    async def renew_due(self, now: float) -> None:
        """Renews what has less than half of its time left."""
        due = [held for held in self._held.values() if held.expires_at - now < self._invisible / 2]
        for start in range(0, len(due), _RENEWALS_AT_ONCE):
            await asyncio.gather(*(self._renew(held, now) for held in due[start : start + _RENEWALS_AT_ONCE]))

    async def _renew(self, held: Held, now: float) -> None:
        async with held.renewing:
            if held.is_settled or now - held.popped_at > self._hold_limit:
                return
            try:
                held.receipt = await self._popper.change_invisible(held.queue, held.receipt, self._invisible)
            except NeveError as error:
                log.warning("%s of %s may come again: %s", held.receipt.text, held.queue, error)
            else:
                held.expires_at = now + self._invisible
