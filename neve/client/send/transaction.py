"""Transactional messages: a half message that consumers do not receive, the caller's work, then commit or rollback.

    TransactionProducer.begin       half message (TRAN_MSG, PGROUP; sysFlag TRANSACTION_PREPARED)
    Transaction.commit / rollback   END_TRANSACTION
    if neither arrives              CHECK_TRANSACTION_STATE from the broker to a live producer of the group, which
                                    answers over the same connection: END_TRANSACTION with fromTransactionCheck=true;
                                    after UNKNOWN the broker asks again later

If the caller's work raises, the check decides: only the caller's own records show whether, for example, a commit to a
database took effect before it failed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Self

from neve.client.model import Message, SendResult, SendStatus, message_from_record
from neve.client.net.connection import Connection
from neve.client.net.session import Session
from neve.client.net.tasks import ended
from neve.client.send.draft import send_request
from neve.client.send.producer import Producer
from neve.client.trace.recorder import Traces
from neve.client.validators import check_group
from neve.errors import BrokerError, ClientError, NeveError
from neve.record.codec import MalformedRecord, decode_record
from neve.record.ids import parse_offset_msg_id
from neve.record.layout import TRANSACTION_COMMIT, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from neve.record.properties import PROPERTY_PRODUCER_GROUP, PROPERTY_TRANSACTION_PREPARED
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

log = logging.getLogger(__name__)

CHECKS_MAX = 2000  # that run at a time; further ones are dropped, and the broker asks again
_CHECK_ANSWER_S = 3.0


class LocalTransactionState(IntEnum):
    """The outcome of the caller's work. Values are those of commitOrRollback in END_TRANSACTION."""

    UNKNOWN = 0
    COMMIT = TRANSACTION_COMMIT
    ROLLBACK = TRANSACTION_ROLLBACK


Decision = LocalTransactionState | Awaitable[LocalTransactionState]
#: Returns the outcome of the transaction of a message; after UNKNOWN the broker asks again.
Check = Callable[[Message], Decision]
_TRACED_AS = {
    LocalTransactionState.UNKNOWN: "UNKNOW",
    LocalTransactionState.COMMIT: "COMMIT_MESSAGE",
    LocalTransactionState.ROLLBACK: "ROLLBACK_MESSAGE",
}
_RESERVATIONS = {
    SendStatus.FLUSH_DISK_TIMEOUT: ResponseCode.FLUSH_DISK_TIMEOUT,
    SendStatus.FLUSH_SLAVE_TIMEOUT: ResponseCode.FLUSH_SLAVE_TIMEOUT,
    SendStatus.SLAVE_NOT_AVAILABLE: ResponseCode.SLAVE_NOT_AVAILABLE,
}


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """The result of a transactional send. `sent` is the result of the half message."""

    state: LocalTransactionState
    sent: SendResult


class Transaction:
    """A transaction that has begun.

    Attributes:
        message: the message; a check identifies the transaction by its `msg_id`.
        sent: the result of the half message.
        state: the outcome; UNKNOWN until the transaction has ended.
    """

    def __init__(self, producer: TransactionProducer, message: Message, sent: SendResult) -> None:
        self._producer = producer
        self.message = message
        self.sent = sent
        self.state = LocalTransactionState.UNKNOWN

    @property
    def id(self) -> str:
        """The id of the message, by which a check identifies the transaction."""
        return self.message.msg_id

    async def commit(self) -> None:
        """Have the message delivered.

        Raises:
            NeveError: the broker did not confirm the commit; it asks the check of the group.
            ClientError: the transaction has ended.
        """
        await self.finish(LocalTransactionState.COMMIT)

    async def rollback(self) -> None:
        """Have the message dropped. Errors are those of `commit`."""
        await self.finish(LocalTransactionState.ROLLBACK)

    async def finish(self, state: LocalTransactionState) -> None:
        """Commit or roll back. UNKNOWN sends nothing: the broker asks the check. Errors are those of `commit`."""
        if state is LocalTransactionState.UNKNOWN:
            return
        if self.state is not LocalTransactionState.UNKNOWN:
            raise ClientError(f"the transaction has ended with {self.state.name}")
        self.state = state
        await self._producer.end(self, state)


class TransactionProducer:
    """A member of a producer group that sends transactional messages and answers checks. `async with` joins the group.

    It answers checks even if it never sends, for example after a restart.
    """

    def __init__(self, session: Session, producer: Producer, checks: Checks, group: str, check: Check) -> None:
        check_group(group)
        self._session, self._producer, self._checks = session, producer, checks
        self.group = group
        self.check = check

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Join the group at all brokers, which may then send checks. `async with` does this.

        Raises:
            ClientError: this client already has a transaction producer of the group.
            NeveError: no name server returned the list of brokers.
        """
        self._checks.join(self)
        try:
            await self._session.membership.introduce_everywhere(self.group)
        except BaseException:
            self._checks.leave(self)
            raise

    async def close(self) -> None:
        """Leave the group: other members answer checks of open transactions."""
        if self._checks.leave(self):
            await self._session.membership.leave_producer_group(self.group)

    async def begin(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        flag: int = 0,
        timeout: float | None = None,
    ) -> Transaction:
        """Send a half message. End the transaction by `commit` or `rollback`, or leave it to the check.

        Arguments are those of `AsyncClient.send`.

        Raises:
            BrokerError: the broker refused the message, or did not flush or replicate it in time: then it is rolled
                back.
            UnknownOutcome: the message may be stored. Then the check is asked for a transaction that has not begun.
            ClientError: the producer is not started, or an argument is invalid.
        """
        if not self._checks.has(self):
            raise ClientError("the transaction producer is not started: use `async with`")
        what = send_request(topic, body, tags=tags, keys=keys, properties=properties, flag=flag, timeout=timeout)
        own = {PROPERTY_TRANSACTION_PREPARED: "true", PROPERTY_PRODUCER_GROUP: self.group}
        draft = self._producer.drafts.single(what.message, own, sys_flag=TRANSACTION_PREPARED)
        sent = await self._producer.deliver(draft, None, what.timeout, group=self.group)
        transaction = Transaction(self, replace(what.message, msg_id=draft.msg_id), sent)
        if sent.status is not SendStatus.SEND_OK:
            await transaction.rollback()
            raise BrokerError(_RESERVATIONS[sent.status], f"the half message got {sent.status} and was rolled back")
        return transaction

    @asynccontextmanager
    async def transaction(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        flag: int = 0,
        timeout: float | None = None,
    ) -> AsyncIterator[Transaction]:
        """Enclose the caller's own work: `async with producer.transaction(topic, body) as transaction:`.

        The end of the block commits, unless the transaction was ended in it. If the block raises, the check decides.
        Arguments and errors are those of `begin`.
        """
        transaction = await self.begin(
            topic, body, tags=tags, keys=keys, properties=properties, flag=flag, timeout=timeout
        )
        yield transaction
        if transaction.state is LocalTransactionState.UNKNOWN:
            await transaction.commit()

    async def send(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        execute: Callable[[Message], Decision],
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        flag: int = 0,
        timeout: float | None = None,
    ) -> TransactionResult:
        """Send a half message, call `execute` with it, and end the transaction as it returns.

        Arguments and errors are those of `begin`. If `execute` raises, the check decides.
        """
        transaction = await self.begin(
            topic, body, tags=tags, keys=keys, properties=properties, flag=flag, timeout=timeout
        )
        state = await _decided(execute(transaction.message))
        await transaction.finish(state)
        return TransactionResult(state, transaction.sent)

    async def end(self, transaction: Transaction, state: LocalTransactionState) -> None:
        """Send END_TRANSACTION for a transaction of this producer."""
        await self._session.requests.within(None, self._end(transaction, state))

    async def _end(self, transaction: Transaction, state: LocalTransactionState) -> None:
        sent = transaction.sent
        ext = {
            "topic": transaction.message.topic,
            "producerGroup": self.group,
            "tranStateTableOffset": str(sent.queue_offset),
            "commitLogOffset": str(parse_offset_msg_id(sent.offset_msg_id)[2]),
            "commitOrRollback": str(int(state)),
            "fromTransactionCheck": "false",
            "msgId": transaction.id,
            "transactionId": sent.transaction_id or "",
            "bname": sent.queue.broker_name,
        }
        self._checks.trace_end(transaction.message, ext, state, self._session.routes.known_master(sent.queue) or "")
        await self._session.requests.ask_master(sent.queue, RequestCode.END_TRANSACTION, ext)


class Checks:
    """Answers the CHECK_TRANSACTION_STATE requests of brokers by the producers of one client.

    Every END_TRANSACTION is recorded in `traces` if it is given.
    """

    def __init__(self, session: Session, traces: Traces | None) -> None:
        self._session = session
        self._traces = traces
        self._producers: dict[str, TransactionProducer] = {}
        self._running: set[str] = set()
        session.membership.code_handlers[RequestCode.CHECK_TRANSACTION_STATE] = self._serve

    def join(self, producer: TransactionProducer) -> None:
        if self._producers.setdefault(producer.group, producer) is not producer:
            raise ClientError(f"this client already has a transaction producer of {producer.group}")

    def leave(self, producer: TransactionProducer) -> bool:
        """Remove the producer; return whether it was there."""
        if not self.has(producer):
            return False
        del self._producers[producer.group]
        return True

    def has(self, producer: TransactionProducer) -> bool:
        return self._producers.get(producer.group) is producer

    async def close(self) -> None:
        for producer in list(self._producers.values()):
            await producer.close()

    def _serve(self, connection: Connection, request: RemotingCommand) -> bool:
        ext = request.ext or {}
        try:
            message = message_from_record(decode_record(request.body), ext.get("bname", ""))
        except (MalformedRecord, ValueError) as error:
            log.warning("invalid transaction check received: address=%s cause=%s", connection.address, error)
            return False
        producer = self._producers.get(message.properties.get(PROPERTY_PRODUCER_GROUP, ""))
        if producer is None or message.msg_id in self._running or len(self._running) >= CHECKS_MAX:
            return producer is not None  # the broker asks again, this client or another of the group
        self._running.add(message.msg_id)
        self._session.spawn(self._answer(connection, producer, message, ext), f"check of {message.msg_id}")
        return True

    async def _answer(
        self, connection: Connection, producer: TransactionProducer, message: Message, ext: Mapping[str, str]
    ) -> None:
        try:
            state = await _asked(producer.check, message)
            fields = {
                "topic": ext.get("topic", ""),
                "producerGroup": producer.group,
                "tranStateTableOffset": ext.get("tranStateTableOffset", ""),
                "commitLogOffset": ext.get("commitLogOffset", ""),
                "commitOrRollback": str(int(state)),
                "fromTransactionCheck": "true",
                "msgId": message.msg_id,
                "transactionId": ext.get("transactionId", ""),
                "bname": ext.get("bname", ""),
            }
            self.trace_end(message, fields, state, connection.address)
            await connection.send_oneway(RequestCode.END_TRANSACTION, fields, b"", _CHECK_ANSWER_S)
        except NeveError as error:
            log.info(
                "answer to transaction check not sent: msg_id=%s address=%s cause=%s",
                message.msg_id,
                connection.address,
                error,
            )
        finally:
            self._running.discard(message.msg_id)

    def trace_end(
        self, message: Message, fields: Mapping[str, str], state: LocalTransactionState, address: str
    ) -> None:
        """Record the END_TRANSACTION with these fields."""
        if self._traces is not None:
            name = _TRACED_AS[state]
            by_check = fields["fromTransactionCheck"] == "true"
            group, transaction_id = fields["producerGroup"], fields["transactionId"]
            self._traces.transaction_ended(
                message, group, address, transaction_id=transaction_id, state=name, by_check=by_check
            )


async def _decided(decision: Decision) -> LocalTransactionState:
    state = await decision if inspect.isawaitable(decision) else decision
    return LocalTransactionState(state)


async def _asked(check: Check, message: Message) -> LocalTransactionState:
    """Return the result of the check. If it raises, log the error and return UNKNOWN."""

    async def call() -> LocalTransactionState:
        return await _decided(check(message))

    asking = asyncio.ensure_future(call())
    await ended(asking)
    if asking.cancelled():
        return LocalTransactionState.UNKNOWN
    error = asking.exception()
    if error is not None:
        log.error("transaction check failed: msg_id=%s error=%r", message.msg_id, error, exc_info=error)
        return LocalTransactionState.UNKNOWN
    return asking.result()
