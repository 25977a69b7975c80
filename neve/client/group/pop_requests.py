"""The requests of pop consumption: pop messages, acknowledge them, or change their invisible time.

A popped message is invisible to the rest of its group until `pop time + invisible time`. Its receipt is the property
POP_CK, with eight fields separated by blanks:

    start offset  pop time (ms)  invisible time (ms)  revive queue  retry  broker name  queue id  offset

`start offset` is the first offset of the same pop in that queue. `retry` is 0 for the topic itself, 1 and 2 for the
group's pop retry topic under its two names. Acknowledgements name the topic that stores the message.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from neve.client.group.pull import Subscription
from neve.client.model import Message, MessageQueue, stored_message
from neve.client.net.answers import ext_int, parse_body
from neve.client.net.session import Session
from neve.errors import BrokerError, ClientError, ProtocolError
from neve.record.codec import iter_records
from neve.record.properties import PROPERTY_POP_CK
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.names import NORMAL, RETRY_V1, RETRY_V2, real_topic

ANY_QUEUE = -1  # pop from any queue of the broker
POP_BATCH_MAX = 32
_PATIENCE_S = 1.0  # beyond the wait of the broker; then the master is looked up
_ANSWER_MARGIN_S = 10.0  # the time limit of a pop beyond the wait of the broker
_NOTHING = (ResponseCode.POLLING_TIMEOUT, ResponseCode.POLLING_FULL, ResponseCode.PULL_NOT_FOUND)


@dataclass(frozen=True, slots=True)
class Receipt:
    """A POP_CK property. Times are in ms."""

    start_offset: int
    pop_time: int
    invisible_time: int
    revive_queue: int
    retry: str
    broker_name: str
    queue_id: int
    offset: int

    @classmethod
    def parse(cls, text: str) -> Receipt:
        """Decode a receipt.

        Raises:
            ProtocolError: the text is no receipt.
        """
        try:
            start, popped, invisible, revive, retry, broker_name, queue_id, offset = text.split(" ")
            return cls(
                int(start), int(popped), int(invisible), int(revive), retry, broker_name, int(queue_id), int(offset)
            )
        except ValueError as error:
            raise ProtocolError(f"invalid receipt of a pop: {text!r}") from error

    @property
    def text(self) -> str:
        """The encoded receipt."""
        times = f"{self.start_offset} {self.pop_time} {self.invisible_time} {self.revive_queue}"
        return f"{times} {self.retry} {self.broker_name} {self.queue_id} {self.offset}"

    @property
    def visible_at(self) -> int:
        """The end of the invisible time, on the broker's clock."""
        return self.pop_time + self.invisible_time

    def real_topic(self, topic: str, group: str) -> str:
        """Return the topic that stores the message; `topic` is the one that was popped."""
        return real_topic(topic, group, self.retry if self.retry in (RETRY_V1, RETRY_V2) else NORMAL)


class Popped(NamedTuple):
    """A message and its receipt."""

    message: Message
    receipt: Receipt


class Assignment(NamedTuple):
    """A queue that a broker assigned to this member, and the mode PULL or POP. Queue id -1 means all queues."""

    queue: MessageQueue
    mode: str


class _OnePop(NamedTuple):
    """The fields of a BatchAck, by their names in requests."""

    t: str  # topic
    r: str  # retry
    so: int  # start offset
    q: int  # queue id
    rq: int  # revive queue
    pt: int  # pop time, ms
    it: int  # invisible time, ms


class Popper:
    """The pop requests of one group."""

    def __init__(self, session: Session, group: str) -> None:
        self._session = session
        self._group = group
        # Pops wait at brokers. An abandoned pop would still receive messages, which would be invisible to the group
        # for a while. Brokers discard the pops of a closed connection, so this group has its own connections.
        self._pool = session.another_pool()

    async def close(self) -> None:
        """End the pops that wait at brokers."""
        await self._pool.close()

    async def assignments(self, topic: str, allocation: str = "AVG") -> list[Assignment] | None:
        """Return the queues that a broker assigns to this member, or None if it does not know them yet.

        Raises:
            NeveError: the broker refused or is unreachable.
        """
        route = await self._session.routes.get(topic)
        address = next((a for name in sorted(route.brokers) if (a := route.address(name))), None)
        if address is None:
            raise ClientError(f"{topic} has no broker")
        body = {
            "topic": topic,
            "consumerGroup": self._group,
            "clientId": self._session.client_id,
            "strategyName": allocation,
            "messageModel": "CLUSTERING",
        }
        answer = parse_body(
            await self._session.requests.ask(address, RequestCode.QUERY_ASSIGNMENT, {}, body=dumps(body))
        )
        given = answer.get("messageQueueAssignments")
        return None if given is None else [_assignment(item) for item in given]

    async def pop(
        self,
        queue: MessageQueue,
        *,
        subscription: Subscription,
        max_count: int = POP_BATCH_MAX,
        invisible: float = 60.0,
        wait: float = 15.0,
        from_first: bool = False,
        in_order: bool = False,
        attempt_id: str = "",
    ) -> list[Popped]:
        """Pop messages, with compressed bodies.

        The broker selects by the hash of a tag, so some messages may not match the subscription.

        Args:
            queue: the queue, or with `ANY_QUEUE` all queues of its broker.
            subscription: the filter.
            max_count: the largest number of messages.
            invisible: the invisible time in seconds.
            wait: the time in seconds that the broker waits if there is no message.
            from_first: whether a group that has never popped this queue begins at the first message.
            in_order: pop nothing more from a queue until all messages that were popped from it are settled.
            attempt_id: identifies a repeated pop in order.
        """
        ext = {
            "consumerGroup": self._group,
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "maxMsgNums": str(max_count),
            "invisibleTime": str(int(invisible * 1000)),
            "pollTime": str(int(wait * 1000)),
            "bornTime": "0",  # the broker uses its own clock, which may differ from ours
            "initMode": "0" if from_first else "1",
            "expType": subscription.kind,
            "exp": subscription.expression,
            "order": str(in_order).lower(),
            "bname": queue.broker_name,
        }
        if attempt_id:
            ext["attemptId"] = attempt_id
        address = await self._session.routes.master(queue)
        answer = await self._session.requests.ask_watched(
            queue,
            address,
            RequestCode.POP_MESSAGE,
            ext,
            timeout=wait + _ANSWER_MARGIN_S,
            patience=wait + _PATIENCE_S,
            pool=self._pool,
        )
        if answer.code in _NOTHING:
            return []
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(answer.code, answer.remark or "")
        return _popped(answer, queue)

    async def ack(self, queue: MessageQueue, receipt: Receipt) -> None:
        """Acknowledge a message; `queue` is the one that was popped."""
        ext = self._ext(queue, receipt)
        await self._session.requests.ask_master(queue, RequestCode.ACK_MESSAGE, ext, may_repeat=True)

    async def ack_batch(self, queue: MessageQueue, receipts: Iterable[tuple[str, Receipt]]) -> None:
        """Acknowledge messages of several topics of the broker of `queue` in one request."""
        acks: dict[_OnePop, int] = defaultdict(int)  # bit sets of offsets, by what the messages of a pop share
        for topic, r in receipts:
            key = _OnePop(topic, r.retry, r.start_offset, r.queue_id, r.revive_queue, r.pop_time, r.invisible_time)
            acks[key] |= 1 << (r.offset - r.start_offset)
        body = {"brokerName": queue.broker_name, "acks": [self._batch_ack(key, bits) for key, bits in acks.items()]}
        await self._session.requests.ask_master(
            queue, RequestCode.BATCH_ACK_MESSAGE, {}, body=dumps(body), may_repeat=True
        )

    async def change_invisible(self, queue: MessageQueue, receipt: Receipt, seconds: float) -> Receipt:
        """Make a message visible in `seconds`; return its new receipt."""
        ext = {**self._ext(queue, receipt), "invisibleTime": str(int(seconds * 1000))}
        answer = await self._session.requests.ask_master(queue, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext)
        return replace(
            receipt,
            start_offset=receipt.offset,
            pop_time=ext_int(answer, "popTime"),
            invisible_time=ext_int(answer, "invisibleTime"),
            revive_queue=ext_int(answer, "reviveQid"),
        )

    def _ext(self, queue: MessageQueue, receipt: Receipt) -> dict[str, str]:
        return {
            "consumerGroup": self._group,
            "topic": receipt.real_topic(queue.topic, self._group),
            "queueId": str(receipt.queue_id),
            "extraInfo": receipt.text,
            "offset": str(receipt.offset),
            "bname": queue.broker_name,
        }

    def _batch_ack(self, key: _OnePop, bits: int) -> dict[str, Any]:
        bit_set = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
        return {"c": self._group, **key._asdict(), "b": base64.b64encode(bit_set).decode()}


def _assignment(item: Any) -> Assignment:
    try:
        queue = item["messageQueue"]
        target = MessageQueue(str(queue["topic"]), str(queue["brokerName"]), int(queue["queueId"]))
        return Assignment(target, str(item.get("mode") or "PULL"))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"invalid assignment: {item}") from error


def _popped(answer: RemotingCommand, queue: MessageQueue) -> list[Popped]:
    """Return the messages of an answer. Those of a retry topic have their receipts; the others get theirs here."""
    popped, invisible = ext_int(answer, "popTime"), ext_int(answer, "invisibleTime")
    revive = ext_int(answer, "reviveQid")
    ext = answer.ext or {}
    starts = _table(ext.get("startOffsetInfo"))
    counts = _table(ext.get("orderCountInfo"))
    result: list[Popped] = []
    try:
        for record in iter_records(answer.body):
            message = stored_message(record, queue.broker_name)
            text = message.properties.get(PROPERTY_POP_CK)
            if text is not None:
                result.append(Popped(message, Receipt.parse(text)))
                continue
            start = starts.setdefault(("0", str(record.queue_id)), record.queue_offset)
            receipt = Receipt(
                start, popped, invisible, revive, "0", queue.broker_name, record.queue_id, record.queue_offset
            )
            times = counts.get(("0", f"qo{record.queue_id}%{record.queue_offset}"))
            times = counts.get(("0", str(record.queue_id)), 0) if times is None else times
            result.append(Popped(replace(message, reconsume_times=times) if times else message, receipt))
    except ValueError as error:
        raise ProtocolError(f"{queue}: {error}") from error
    return result


def _table(text: str | None) -> dict[tuple[str, str], int]:
    """Decode `r key number;…` into numbers by (r, key)."""
    try:
        return {
            (r, key): int(number) for r, key, number in (part.split(" ") for part in (text or "").split(";") if part)
        }
    except ValueError as error:
        raise ProtocolError(f"invalid offsets of a pop: {text!r}") from error


async def set_request_mode(session: Session, group: str, topic: str, mode: str, share_queues: int) -> None:
    """Set how brokers divide a topic among a group: `AsyncClient.set_request_mode`."""
    if mode not in ("PULL", "POP"):
        raise ClientError(f"mode must be PULL or POP, got {mode!r}")
    body = {"topic": topic, "consumerGroup": group, "mode": mode, "popShareQueueNum": share_queues}
    route = await session.routes.get(topic)
    for name in route.brokers:
        if address := route.master(name):
            await session.requests.ask(address, RequestCode.SET_MESSAGE_REQUEST_MODE, {}, body=dumps(body))
