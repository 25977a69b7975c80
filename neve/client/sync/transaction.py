"""Transactions without asyncio: the caller's work runs in the caller's thread, checks in threads of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from neve.client.model import Message, SendResult
from neve.client.send import transaction as asynchronous
from neve.client.send.transaction import Check, LocalTransactionState, TransactionResult
from neve.client.sync.loop import Wrapper, waiting

SyncCheck = Callable[[Message], LocalTransactionState]


def in_thread(check: SyncCheck) -> Check:
    """The check as the loop can await it."""

    async def asked(message: Message) -> LocalTransactionState:
        return await asyncio.to_thread(check, message)

    return asked


class Transaction(Wrapper):
    """See `neve.client.Transaction`."""

    commit = waiting(asynchronous.Transaction.commit)
    rollback = waiting(asynchronous.Transaction.rollback)
    finish = waiting(asynchronous.Transaction.finish)

    _inner: asynchronous.Transaction

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def message(self) -> Message:
        return self._inner.message

    @property
    def sent(self) -> SendResult:
        return self._inner.sent

    @property
    def state(self) -> LocalTransactionState:
        return self._inner.state


class TransactionProducer(Wrapper):
    """See `neve.client.TransactionProducer`."""

    start = waiting(asynchronous.TransactionProducer.start)
    close = waiting(asynchronous.TransactionProducer.close)

    _inner: asynchronous.TransactionProducer

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def group(self) -> str:
        return self._inner.group

    def begin(self, topic: str, body: bytes | str, **arguments: Any) -> Transaction:
        """Sends the half message; arguments as of the asynchronous `begin`."""
        return Transaction(self._loop, self._loop.call(self._inner.begin(topic, body, **arguments)))

    @contextmanager
    def transaction(self, topic: str, body: bytes | str, **arguments: Any) -> Iterator[Transaction]:
        """`with producer.transaction(topic, body):` around the caller's own work; see the asynchronous one."""
        transaction = self.begin(topic, body, **arguments)
        yield transaction
        if transaction.state is LocalTransactionState.UNKNOWN:
            transaction.commit()

    def send(self, topic: str, body: bytes | str, execute: SyncCheck, **arguments: Any) -> TransactionResult:
        """The half message, then `execute` with the message in this thread, then what it decided."""
        transaction = self.begin(topic, body, **arguments)
        state = LocalTransactionState(execute(transaction.message))
        transaction.finish(state)
        return TransactionResult(state, transaction.sent)
