"""Answers the requests of brokers to a member of a group.

| code | answer |
|---|---|
| 40 NOTIFY_CONSUMER_IDS_CHANGED | success, and a rebalance |
| 220 RESET_CONSUMER_CLIENT_OFFSET | success, after the member moved to the offsets |
| 221 GET_CONSUMER_STATUS_FROM_CLIENT | GetConsumerStatusBody: the positions in a topic |
| 307 GET_CONSUMER_RUNNING_INFO | ConsumerRunningInfo |
| 309 CONSUME_MESSAGE_DIRECTLY | ConsumeMessageDirectlyResult, after the application settled the message |
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from neve.client.group.member import GroupMember
from neve.client.group.process_queue import ProcessQueue
from neve.client.model import Message, MessageQueue, message_from_record
from neve.client.net.connection import Connection
from neve.client.net.session import Session
from neve.errors import NeveError
from neve.record.codec import iter_records
from neve.remoting.body import ANSWER_NODES, NodeBudget, dumps, dumps_object_keys, lenient_loads
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

_CLIENT_VERSION = "V5_3_3"

Verdict = tuple[str, str | None]  # CR_SUCCESS, CR_LATER or CR_THROW_EXCEPTION, and a remark
#: Delivers a message to the application at once. Raises TimeoutError if it is not settled in time.
GivesDirectly = Callable[[Message], Awaitable[Verdict]]


@dataclass(frozen=True, slots=True)
class RunningState:
    """The state of a consumer in the answer to GET_CONSUMER_RUNNING_INFO."""

    in_order: bool
    queues: Mapping[MessageQueue, ProcessQueue]
    pop_queues: Mapping[MessageQueue, Mapping[str, Any]]
    status: Mapping[str, Mapping[str, float]]


class ManagedConsumer(Protocol):
    """The part of a consumer that brokers and administrators use."""

    def wake(self) -> None:
        """Begin a rebalance."""

    async def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Continue the queues at these offsets."""

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        """Return the positions of the assigned queues of a topic."""

    def running_state(self) -> RunningState:
        """Return the state for GET_CONSUMER_RUNNING_INFO."""


class GroupRequests:
    """The request handler of one member. Without `direct`, messages cannot be delivered on request."""

    def __init__(
        self, session: Session, member: GroupMember, consumer: ManagedConsumer, direct: GivesDirectly | None
    ) -> None:
        self._session = session
        self._member = member
        self._consumer = consumer
        self._direct = direct
        self._started_ms = session.options.now_ms()

    def __call__(self, connection: Connection, request: RemotingCommand) -> bool:
        match request.code:
            case RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
                self._consumer.wake()
                connection.answer(request, ResponseCode.SUCCESS)
            case RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
                self._spawn(connection, request, self._reset(request))
            case RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT:
                table = self._consumer.positions((request.ext or {}).get("topic", ""))
                body = dumps_object_keys({"messageQueueTable": table, "consumerTable": {}})
                connection.answer(request, ResponseCode.SUCCESS, body=body)
            case RequestCode.GET_CONSUMER_RUNNING_INFO:
                with_stacks = (request.ext or {}).get("jstackEnable") == "true"
                connection.answer(request, ResponseCode.SUCCESS, body=self._running_info(with_stacks))
            case RequestCode.CONSUME_MESSAGE_DIRECTLY:
                self._spawn(connection, request, self._consume(request))
            case _:
                return False
        return True

    def _spawn(self, connection: Connection, request: RemotingCommand, work: Coroutine[Any, Any, bytes]) -> None:
        async def answer() -> None:
            try:
                body = await work
            except (NeveError, ValueError) as error:
                connection.answer(request, ResponseCode.SYSTEM_ERROR, str(error))
            except TimeoutError:
                remark = "the application did not settle the message in time"
                connection.answer(request, ResponseCode.CONSUME_MSG_TIMEOUT, remark)
            else:
                connection.answer(request, ResponseCode.SUCCESS, body=body)

        self._session.spawn(answer(), f"answer {request.code} {self._member.group}")

    async def _reset(self, request: RemotingCommand) -> bytes:
        await self._consumer.reset(_offsets(lenient_loads(request.body, NodeBudget(ANSWER_NODES))))
        return b""

    async def _consume(self, request: RemotingCommand) -> bytes:
        began = asyncio.get_running_loop().time()
        record = next(iter(iter_records(request.body)), None)
        if record is None:
            raise ValueError("the request has no message")
        message = message_from_record(record, (request.ext or {}).get("brokerName", ""))
        if self._direct is None:
            raise ValueError("a lite pull consumer takes no messages on request: its application polls")
        result, remark = await self._direct(message)
        spent = int(1000 * (asyncio.get_running_loop().time() - began))
        answer = {
            "order": self._consumer.running_state().in_order,
            "autoCommit": True,
            "consumeResult": result,
            "remark": remark or "",
            "spentTimeMills": spent,
        }
        return dumps(answer)

    def _running_info(self, with_stacks: bool) -> bytes:
        state, now_ms = self._consumer.running_state(), self._session.options.now_ms()
        info: dict[str, Any] = {
            "properties": {
                "PROP_NAMESERVER_ADDR": self._session.name_servers.addresses,
                "PROP_CONSUME_TYPE": self._member.profile.consume_type,
                "PROP_CLIENT_VERSION": _CLIENT_VERSION,
                "PROP_CONSUMEORDERLY": str(state.in_order).lower(),
                "PROP_THREADPOOL_CORE_SIZE": "1",
                "PROP_CONSUMER_START_TIMESTAMP": str(self._started_ms),
            },
            "subscriptionSet": self._member.subscriptions(),
            "mqTable": {
                queue: _process_queue_info(process_queue, now_ms) for queue, process_queue in state.queues.items()
            },
            "mqPopTable": state.pop_queues,
            "statusTable": state.status,
            "userConsumerInfo": {},
        }
        if with_stacks:
            info["jstack"] = _stacks()
        return dumps_object_keys(info)


def _offsets(data: Any) -> dict[MessageQueue, int]:
    """Return the offsets of a ResetOffsetBody: an object with queues as keys, or the list that C++ clients get."""
    table = data.get("offsetTable") if isinstance(data, dict) else None
    if isinstance(table, dict):
        return {queue: int(offset) for queue, offset in table.items() if isinstance(queue, MessageQueue)}
    if isinstance(table, list):
        return {
            MessageQueue(str(item["topic"]), str(item["brokerName"]), int(item["queueId"])): int(item["offset"])
            for item in table
        }
    return {}


def _process_queue_info(process_queue: ProcessQueue, now_ms: int) -> dict[str, Any]:
    """Return the ProcessQueueInfo of a queue."""
    first, last = process_queue.open_offsets
    return {
        "commitOffset": process_queue.committable,
        "cachedMsgMinOffset": first,
        "cachedMsgMaxOffset": last,
        "cachedMsgCount": process_queue.unacked,
        "cachedMsgSizeInMiB": process_queue.delivery.waiting_bytes >> 20,
        "transactionMsgMinOffset": 0,
        "transactionMsgMaxOffset": 0,
        "transactionMsgCount": 0,
        "locked": process_queue.locked_until is not None,
        "tryUnlockTimes": 0,
        "lastLockTimestamp": process_queue.last_lock_ms or now_ms,
        "droped": process_queue.is_dropped,
        "lastPullTimestamp": process_queue.last_pull_ms or now_ms,
        "lastConsumeTimestamp": process_queue.last_consume_ms or now_ms,
    }


def _stacks() -> str:
    """Return the stack of each thread of this process."""
    parts = []
    for thread, frame in sys._current_frames().items():
        parts.append(f"TID: {thread}\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)
