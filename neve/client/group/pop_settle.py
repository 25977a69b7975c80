"""Acknowledges popped messages in batches, and renews their invisible time while the application owns them."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import defaultdict
from dataclasses import dataclass, field

from neve.client.group.delivery import DeliveryQueue
from neve.client.group.ownership import Owner
from neve.client.group.pop_requests import Popper, Receipt
from neve.client.model import MessageQueue
from neve.client.net.session import Session
from neve.errors import NeveError, UnknownOutcome

log = logging.getLogger(__name__)

_ACKS_PER_REQUEST = 512
_RENEWALS_AT_ONCE = 32


@dataclass(slots=True)
class Held:
    """A popped message that is not settled. Times are the loop's, in seconds."""

    queue: MessageQueue  # the one that was popped
    receipt: Receipt
    delivery: DeliveryQueue
    popped_at: float
    expires_at: float
    delivered_at: float = 0.0
    owner: Owner | None = None  # None while the message is buffered
    is_settled: bool = False
    renewing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def settled_receipt(self) -> Receipt:
        """Wait for the end of a renewal, which changes the receipt, and return the receipt to settle by."""
        assert self.is_settled
        async with self.renewing:
            return self.receipt


class Acker:
    """Sends acks to each broker: one alone, then those that arrive during its request together."""

    def __init__(self, session: Session, popper: Popper) -> None:
        self._session = session
        self._popper = popper
        self._pending: dict[str, list[tuple[Held, asyncio.Future[None]]]] = defaultdict(list)
        self._senders: dict[str, asyncio.Task[None]] = {}

    def add(self, held: Held) -> asyncio.Future[None]:
        """Send an ack; return its outcome. If the ack fails, the message is redelivered."""
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(_retrieve)
        broker = held.queue.broker_name
        self._pending[broker].append((held, outcome))
        if broker not in self._senders:
            self._senders[broker] = sender = self._session.spawn(self._send(broker), f"acks to {broker}")
            sender.add_done_callback(functools.partial(self._forget, broker))
        return outcome

    async def flush(self) -> None:
        """Wait until all acks have their answers."""
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
        for _, outcome in self._pending.pop(broker):  # empty unless the sender ended early
            if not outcome.done():
                outcome.set_exception(UnknownOutcome(f"the client was closed during an ack to {broker}"))

    async def _send_batch(self, batch: list[tuple[Held, asyncio.Future[None]]]) -> None:
        first = batch[0][0]
        try:
            if len(batch) == 1:
                await self._popper.ack(first.queue, await first.settled_receipt())
            else:
                receipts = [(held.queue.topic, await held.settled_receipt()) for held, _ in batch]
                await self._popper.ack_batch(first.queue, receipts)
        except NeveError as error:
            log.warning("ack failed, redelivered: count=%d queue=%s cause=%s", len(batch), first.queue, error)
            for _, outcome in batch:
                if not outcome.done():
                    outcome.set_exception(error)
            return
        for _, outcome in batch:
            if not outcome.done():
                outcome.set_result(None)


def _retrieve(outcome: asyncio.Future[None]) -> None:
    """Mark the exception as retrieved: it was logged, and asyncio shall not log it again."""
    if not outcome.cancelled():
        outcome.exception()


class Renewer:
    """Renews the invisible time of held messages, up to `hold_limit` seconds from their pop."""

    def __init__(self, popper: Popper, invisible: float, hold_limit: float) -> None:
        self._popper = popper
        self._invisible = invisible
        self._hold_limit = hold_limit
        self._held: dict[int, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def owners(self) -> list[Owner]:
        """The owners of messages that are not settled, once for each message."""
        return [held.owner for held in self._held.values() if held.owner is not None]

    def hold(self, held: Held) -> None:
        self._held[id(held)] = held

    def release(self, held: Held) -> bool:
        """Stop renewing the message; return False if it was settled before."""
        if held.is_settled:
            return False
        held.is_settled = True
        return self._held.pop(id(held), None) is not None

    async def forever(self) -> None:
        while True:
            await asyncio.sleep(self._invisible / 6)
            await self.renew_due(asyncio.get_running_loop().time())

    async def renew_due(self, now: float) -> None:
        """Renew messages with less than half of their invisible time left."""
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
                log.warning("renewal failed: queue=%s receipt=%s cause=%s", held.queue, held.receipt.text, error)
            else:
                held.expires_at = now + self._invisible
