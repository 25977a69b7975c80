"""Transactional messages: a half message that no consumer sees, the sender's own work, then commit or rollback.

    TransactionProducer.begin ──▶ half message (TRAN_MSG, PGROUP; sysFlag TRANSACTION_PREPARED)
    the caller's own transaction
    Transaction.commit / rollback ──▶ END_TRANSACTION
    neither, or it was lost: the broker asks a live producer of the group (CHECK_TRANSACTION_STATE), which answers with
    END_TRANSACTION and fromTransactionCheck=true over the same connection; on "unknown" it asks again later

An error in the caller's work leaves the outcome to the check: only the caller's own records can say whether, say, a
commit to a database took effect before it failed.
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

CHECKS_MAX = 2000  # at once; beyond that a question is dropped, and the broker asks again
_CHECK_ANSWER_S = 3.0


class LocalTransactionState(IntEnum):
    """How the caller's own part ended; the values are the commitOrRollback of END_TRANSACTION."""

    UNKNOWN = 0
    COMMIT = TRANSACTION_COMMIT
    ROLLBACK = TRANSACTION_ROLLBACK


Decision = LocalTransactionState | Awaitable[LocalTransactionState]
#: Asked with the message; tells how its transaction ended, or UNKNOWN to be asked again.
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
    """What became of a transactional send. `sent` tells where the half message is, not what consumers get."""

    state: LocalTransactionState
    sent: SendResult


class Transaction:
    """A half message that waits for its end. `message.msg_id` is the id under which a check will ask for it."""

    def __init__(self, producer: TransactionProducer, message: Message, sent: SendResult) -> None:
        self._producer = producer
        self.message = message
        self.sent = sent
        self.state = LocalTransactionState.UNKNOWN

    @property
    def id(self) -> str:
        return self.message.msg_id

    async def commit(self) -> None:
        """Has the message delivered.

        Raises:
            NeveError: the broker did not confirm it; it will ask the group's check how the transaction ended.
        """
        await self.finish(LocalTransactionState.COMMIT)

    async def rollback(self) -> None:
        """Has the message dropped; errors as of `commit`."""
        await self.finish(LocalTransactionState.ROLLBACK)

    async def finish(self, state: LocalTransactionState) -> None:
        """`commit` or `rollback`, once. UNKNOWN says nothing to the broker: it will ask."""
        if state is LocalTransactionState.UNKNOWN:
            return
        if self.state is not LocalTransactionState.UNKNOWN:
            raise ClientError(f"the transaction has ended with {self.state.name}")
        self.state = state
        await self._producer.end(self, state)


class TransactionProducer:
    """A member of a producer group that also answers the broker's questions; enter it to join.

    A process that only answers, for example after a restart, need not send anything.
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
        """Joins the group at all brokers; from now on checks may come.

        Raises:
            ClientError: this client has a producer of the group already.
        """
        self._checks.join(self)
        try:
            await self._session.membership.introduce_everywhere(self.group)
        except BaseException:
            self._checks.leave(self)
            raise

    async def close(self) -> None:
        """Leaves the group: other members answer for what is still open."""
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
        """Sends the half message. End it with `commit` or `rollback`, or leave it to the check.

        Raises:
            BrokerError: refused, or stored with a reservation (flush, replica) and therefore rolled back.
            UnknownOutcome: it may be stored; then the check will be asked for a transaction that was never begun.
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
        """`async with producer.transaction(topic, body) as transaction:` around the caller's own work.

        Leaving the block commits, unless `rollback` was called in it. An error passes through, and the check decides.
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
        """The half message, then `execute` with the message, then what it decided. Errors of `execute` pass through."""
        transaction = await self.begin(
            topic, body, tags=tags, keys=keys, properties=properties, flag=flag, timeout=timeout
        )
        state = await _decided(execute(transaction.message))
        await transaction.finish(state)
        return TransactionResult(state, transaction.sent)

    async def end(self, transaction: Transaction, state: LocalTransactionState) -> None:
        """END_TRANSACTION for a half message that this producer sent."""
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
    """Takes CHECK_TRANSACTION_STATE from brokers and has the group's producer answer. One per client.

    Every END_TRANSACTION is noted in `traces`, if there are any.
    """

    def __init__(self, session: Session, traces: Traces | None) -> None:
        self._session = session
        self._traces = traces
        self._producers: dict[str, TransactionProducer] = {}
        self._running: set[str] = set()
        session.membership.code_handlers[RequestCode.CHECK_TRANSACTION_STATE] = self._serve

    def join(self, producer: TransactionProducer) -> None:
        if self._producers.setdefault(producer.group, producer) is not producer:
            raise ClientError(f"this client has a transaction producer of {producer.group} already")

    def leave(self, producer: TransactionProducer) -> bool:
        """Whether it was there."""
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
            log.warning("%s asks about a transaction that cannot be read: %s", connection.address, error)
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
            log.info("answer about %s to %s: %s", message.msg_id, connection.address, error)  # it asks again
        finally:
            self._running.discard(message.msg_id)

    def trace_end(
        self, message: Message, fields: Mapping[str, str], state: LocalTransactionState, address: str
    ) -> None:
        """Notes the END_TRANSACTION with these fields."""
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
    """What the check says; an error in it is an "unknown" for the broker and a line in the log for the operator."""

    async def call() -> LocalTransactionState:
        return await _decided(check(message))

    asking = asyncio.ensure_future(call())
    await ended(asking)
    if asking.cancelled():
        return LocalTransactionState.UNKNOWN
    error = asking.exception()
    if error is not None:
        log.error("the check of transaction %s failed: %r", message.msg_id, error, exc_info=error)
        return LocalTransactionState.UNKNOWN
    return asking.result()
