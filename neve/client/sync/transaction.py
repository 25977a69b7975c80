"""The transaction producer of the synchronous client. Work runs in the caller's thread, checks in other threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from neve.client.model import Message, SendResult
from neve.client.send import transaction as asynchronous
from neve.client.send.transaction import Check, LocalTransactionState, TransactionResult
from neve.client.sync.loop import Wrapper, waiting, wrapping

SyncCheck = Callable[[Message], LocalTransactionState]


def in_thread(check: SyncCheck) -> Check:
    """Return the check as a coroutine function that runs it in a thread."""

    async def run(message: Message) -> LocalTransactionState:
        return await asyncio.to_thread(check, message)

    return run


class Transaction(Wrapper):
    """A half message: see `neve.client.Transaction`."""

    commit = waiting(asynchronous.Transaction.commit)
    rollback = waiting(asynchronous.Transaction.rollback)
    finish = waiting(asynchronous.Transaction.finish)

    _inner: asynchronous.Transaction

    @property
    def id(self) -> str:
        """The id of the message, by which a check identifies the transaction."""
        return self._inner.id

    @property
    def message(self) -> Message:
        """The message."""
        return self._inner.message

    @property
    def sent(self) -> SendResult:
        """The result of sending the half message."""
        return self._inner.sent

    @property
    def state(self) -> LocalTransactionState:
        """The outcome; UNKNOWN until the transaction has ended."""
        return self._inner.state


class TransactionProducer(Wrapper):
    """A producer of transactional messages: see `neve.client.TransactionProducer`."""

    start = waiting(asynchronous.TransactionProducer.start)
    close = waiting(asynchronous.TransactionProducer.close)
    begin = wrapping(asynchronous.TransactionProducer.begin, Transaction)

    _inner: asynchronous.TransactionProducer

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def group(self) -> str:
        """The name of the producer group."""
        return self._inner.group

    @contextmanager
    def transaction(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        flag: int = 0,
        timeout: float | None = None,
    ) -> Iterator[Transaction]:
        """Enclose the caller's own work: `with producer.transaction(topic, body) as transaction:`.

        The end of the block commits, unless the transaction was ended in it. If the block raises, the check decides.
        """
        transaction = self.begin(topic, body, tags=tags, keys=keys, properties=properties, flag=flag, timeout=timeout)
        yield transaction
        if transaction.state is LocalTransactionState.UNKNOWN:
            transaction.commit()

    def send(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        execute: SyncCheck,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        flag: int = 0,
        timeout: float | None = None,
    ) -> TransactionResult:
        """Send a half message, call `execute` with it in this thread, and end the transaction as it returns."""
        transaction = self.begin(topic, body, tags=tags, keys=keys, properties=properties, flag=flag, timeout=timeout)
        state = LocalTransactionState(execute(transaction.message))
        transaction.finish(state)
        return TransactionResult(state, transaction.sent)
