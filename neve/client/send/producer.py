"""Sends messages: selects a queue, asks its master, and tries another broker after a failure."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from neve.client.model import Message, MessageQueue, SendResult, SendStatus
from neve.client.net.answers import ext_int
from neve.client.net.connection import NOT_MASTER
from neve.client.net.route import DEFAULT_TOPIC_QUEUES, TopicRoute
from neve.client.net.session import Session
from neve.client.send.draft import Draft, Drafts, SendRequest
from neve.client.send.latency import FaultTable
from neve.client.send.queue_selector import Queue
from neve.client.trace.recorder import Traces
from neve.client.validators import check_timeout, check_topic
from neve.errors import BrokerError, ClientError, ConnectionFailed, NeveError, UnknownOutcome
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import send_v2_fields

log = logging.getLogger(__name__)

#: Error codes after which a send tries another broker. For `send_async` every code is final, as in Java's client.
RETRYABLE = frozenset({1, 2, 14, 16, 17, 204, 205, 1500})
_STATUS = {
    0: SendStatus.SEND_OK,
    10: SendStatus.FLUSH_DISK_TIMEOUT,
    11: SendStatus.SLAVE_NOT_AVAILABLE,
    12: SendStatus.FLUSH_SLAVE_TIMEOUT,
}


_PATIENCE_S = 1.0  # without an answer; then the master is looked up
_ELECTION_PAUSES_S = (0.05, 0.1, 0.2)


@dataclass(slots=True)
class Repeats:
    """Counts requests of a draft that followed one without an answer, so that its messages may be stored twice."""

    cause: UnknownOutcome | None = None  # of the latest request without an answer
    count: int = 0

    def record(self, draft: Draft) -> None:
        """Record that a request was sent. `cause` is still that of an earlier request."""
        if self.cause is not None:
            self.count += 1
            first = draft.msg_id.partition(",")[0]
            log.warning("sent again, may be stored twice: topic=%s msg_id=%s cause=%s", draft.topic, first, self.cause)


class Producer:
    """Sends the messages of one client, and records stored messages in `traces` if it is given."""

    def __init__(self, session: Session, traces: Traces | None) -> None:
        self._session = session
        self._traces = traces
        self._faults = FaultTable(lambda: int(asyncio.get_running_loop().time() * 1000))
        self._turn: dict[str, int] = {}
        self.drafts = Drafts(session.options, session.next_unique_key)

    async def send(self, what: SendRequest, *, retry_on: Collection[int] = RETRYABLE) -> SendResult:
        draft = self.drafts.single(what.message, what.timing)
        return await self.deliver(draft, what.queue, what.timeout, retry_on=retry_on)

    async def send_batch(
        self,
        topic: str,
        messages: Iterable[bytes | str | Message],
        *,
        queue: Queue | None = None,
        timeout: float | None = None,
    ) -> SendResult:
        check_timeout(timeout)
        return await self.deliver(self.drafts.batch(topic, messages), queue, timeout)

    async def send_oneway(self, what: SendRequest) -> None:
        group = self._session.options.producer_group
        self._session.membership.produces(group)
        draft = self.drafts.single(what.message, what.timing)
        route = await self._session.routes.to_publish(draft.topic)
        target = self._choose(draft, route, what.queue, ())
        await self._session.pool.send_oneway(
            route.require_master(target.broker_name),
            RequestCode.SEND_MESSAGE_V2,
            self._header(draft, target, group),
            body=draft.body,
            timeout=what.timeout or self._session.options.timeout,
        )

    async def recall(self, topic: str, handle: str, *, timeout: float | None = None) -> str:
        """Cancel a delayed message and return its id: `AsyncClient.recall`."""
        check_topic(topic)
        broker_name = _broker_of(handle)
        route = await self._session.routes.to_publish(topic)
        ext = {
            "producerGroup": self._session.options.producer_group,
            "topic": topic,
            "recallHandle": handle,
            "bname": broker_name,
        }
        address = route.require_master(broker_name)
        answer = await self._session.requests.ask(address, RequestCode.RECALL_MESSAGE, ext, timeout=timeout)
        return (answer.ext or {}).get("msgId", "")

    # ---- delivery

    async def deliver(
        self,
        draft: Draft,
        queue: Queue | None,
        timeout: float | None,
        *,
        group: str | None = None,
        retry_on: Collection[int] = RETRYABLE,
        attempt_timeout: float | None = None,
        repeats: Repeats | None = None,
    ) -> SendResult:
        """Send a draft, with up to 1 + `send_retries` attempts within `timeout` seconds.

        An attempt that failed because a broker with replicas has no master, or is not the master, does not count: a
        master may be elected soon.

        Args:
            draft: the encoded message.
            queue: the target queue, or None for the next in turn.
            timeout: the time limit in seconds; None for that of the options.
            group: the producer group; by default that of the options.
            retry_on: the error codes after which another broker is tried.
            attempt_timeout: the time limit of one attempt in seconds; by default that of the options.
            repeats: the record of earlier calls with this draft.

        Raises:
            BrokerError: a broker refused the message, and no other accepted it.
            UnknownOutcome: no attempt succeeded, and at least one may have been executed.
            ConnectionFailed: no broker was reachable.
        """
        options = self._session.options
        group = group or options.producer_group
        self._session.membership.produces(group)
        now = asyncio.get_running_loop().time
        deadline = now() + (options.timeout if timeout is None else timeout)
        tried: list[str] = []
        reserved: SendResult | None = None
        repeats = repeats or Repeats()
        problem: NeveError | None = None
        limit = attempt_timeout or options.attempt_timeout
        attempts = waits = 0
        while attempts <= options.send_retries and (remaining := deadline - now()) > 0:
            try:
                async with asyncio.timeout(remaining):
                    route = await self._session.routes.to_publish(draft.topic)
            except TimeoutError:
                break
            target = self._choose(draft, route, queue, tried)
            tried.append(target.broker_name)
            may_be_elected = False
            try:
                result = await self._attempt(draft, target, route, min(deadline, now() + limit), group)
            except BrokerError as error:
                if error.code not in retry_on:
                    raise
                problem = error
                may_be_elected = error.code in NOT_MASTER and route.is_set(target.broker_name)
            except UnknownOutcome as error:
                repeats.record(draft)
                problem = repeats.cause = error
            except ConnectionFailed as error:
                problem = error
                may_be_elected = route.is_set(target.broker_name)
            else:
                repeats.record(draft)
                if result.status is SendStatus.SEND_OK or not options.retry_when_not_stored_ok:
                    return result
                reserved = result  # stored, but not flushed or replicated in time
                attempts += 1
                continue
            attempts, waits = attempts + (not may_be_elected), waits + may_be_elected
            self._session.routes.forget(draft.topic)
            if attempts <= options.send_retries and len(set(tried)) < len(
                tried
            ):  # the same broker again, after a pause
                pause = 0.05 * 2 ** (attempts - 1)
                if may_be_elected:
                    pause = _ELECTION_PAUSES_S[min(waits, len(_ELECTION_PAUSES_S)) - 1]
                await asyncio.sleep(min(pause, max(deadline - now(), 0)))
        if reserved is not None:
            return reserved
        raise repeats.cause or problem or ConnectionFailed(f"no route to {draft.topic} was found in time")

    async def _attempt(
        self, draft: Draft, target: MessageQueue, route: TopicRoute, deadline: float, group: str
    ) -> SendResult:
        """Send one request, to be answered before `deadline`, and record the outcome for its broker."""
        now = asyncio.get_running_loop().time
        began = now()
        code = RequestCode.SEND_BATCH_MESSAGE if draft.is_batch else RequestCode.SEND_MESSAGE_V2
        code = RequestCode.SEND_REPLY_MESSAGE_V2 if draft.is_reply else code
        limit = max(deadline - began, 0.001)
        header = self._header(draft, target, group)
        try:
            address = route.require_master(target.broker_name)
            answer = await self._session.requests.ask_watched(
                target, address, code, header, body=draft.body, timeout=limit, patience=_PATIENCE_S
            )
            result = _result(answer, draft, target)
        except BrokerError:
            self._faults.refused(target.broker_name)
            raise
        except (UnknownOutcome, ConnectionFailed):
            self._faults.failed(target.broker_name)
            raise
        cost_ms = (now() - began) * 1000
        self._faults.answered(target.broker_name, cost_ms)
        if self._traces is not None:
            self._traces.sent(draft, group, address, answer.ext or {}, result, cost=int(cost_ms))
        return result

    def _header(self, draft: Draft, target: MessageQueue, group: str) -> dict[str, str]:
        return send_v2_fields(
            group=group,
            topic=draft.topic,
            default_topic_queues=DEFAULT_TOPIC_QUEUES,
            broker_name=target.broker_name,
            queue_id=target.queue_id,
            sys_flag=draft.sys_flag,
            born_timestamp=self._session.options.now_ms(),
            flag=draft.flag,
            properties=draft.properties,
            is_batch=draft.is_batch,
        )

    def _choose(self, draft: Draft, route: TopicRoute, queue: Queue | None, tried: Sequence[str]) -> MessageQueue:
        """Return the chosen queue, or the next in turn of a broker that was not tried and is available or reachable."""
        if isinstance(queue, MessageQueue):
            return queue
        topic = draft.topic
        candidates = [q for q in route.write_queues if not isinstance(queue, int) or q.queue_id == queue]
        if not candidates and route.without_master is not None:
            return MessageQueue(topic, route.without_master, 0)  # it may get a master soon
        if not candidates:
            which = "queue" if queue is None else f"queue {queue}"
            raise ClientError(f"{topic} has no {which} to write to", ResponseCode.TOPIC_NOT_EXIST)
        if queue is not None and not isinstance(queue, int):
            return queue(candidates, draft.message)
        turn = self._turn.get(topic, -1) + 1
        self._turn[topic] = turn
        count = len(candidates)
        in_turn = candidates if count == 1 else [candidates[(turn + i) % count] for i in range(count)]
        fresh = [candidate for candidate in in_turn if candidate.broker_name not in tried]
        for is_well in (self._faults.is_available, self._faults.is_reachable):
            for candidate in fresh:
                if is_well(candidate.broker_name):
                    return candidate
        return fresh[0] if fresh else in_turn[0]


def _broker_of(handle: str) -> str:
    """Return the broker of a recall handle: base64 of `v1 topic broker deliver-ms key`."""
    try:
        parts = base64.urlsafe_b64decode(handle).decode().split(" ")
    except (binascii.Error, ValueError) as error:
        raise ClientError("the recall handle is invalid") from error
    if len(parts) < 5 or parts[0] != "v1":
        raise ClientError("the recall handle is invalid")
    return parts[2]


def _result(answer: RemotingCommand, draft: Draft, target: MessageQueue) -> SendResult:
    status = _STATUS.get(answer.code)
    if status is None:
        raise BrokerError(answer.code, answer.remark or "")
    ext = answer.ext or {}
    return SendResult(
        status,
        draft.msg_id,
        ext.get("msgId", ""),
        target._replace(queue_id=ext_int(answer, "queueId")),
        ext_int(answer, "queueOffset"),
        ext.get("transactionId"),
        ext.get("recallHandle"),
    )
