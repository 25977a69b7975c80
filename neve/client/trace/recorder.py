"""Records message traces in a bounded buffer, which the client's `TraceSender` empties.

Recording takes microseconds, never waits and never fails. If the buffer is full, traces are dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from neve.client.model import Message, MessageQueue, SendResult, SendStatus
from neve.client.trace.format import (
    DEFAULT_REGION,
    TRACE_TOPIC,
    Ended,
    MessageType,
    Sent,
    Trace,
    end_transaction,
    pub,
    sub_after,
    sub_before,
)
from neve.record.properties import PROPERTY_MSG_REGION, PROPERTY_TRACE_SWITCH

BUFFER_MAX = 2048
BATCH = 20  # traces in a message
_WORDS_MAX = 16_000  # characters of keys: all properties of a message have to fit into 32 KiB
_LINES_MAX = 128_000


class Traceable(Protocol):
    """A sent message or batch; the `msg_id` of a batch has the ids joined by commas."""

    @property
    def topic(self) -> str: ...
    @property
    def msg_id(self) -> str: ...
    @property
    def message(self) -> Message: ...
    @property
    def kind(self) -> MessageType: ...


class Traces:
    """The traces of one client. Times are in ms; `next_id` returns an id for each delivery."""

    def __init__(self, next_id: Callable[[], str], now_ms: Callable[[], int]) -> None:
        self.next_id = next_id
        self.now_ms = now_ms
        self.dropped = 0
        self._buffer: deque[Trace] = deque()
        self._enough = asyncio.Event()

    def __len__(self) -> int:
        return len(self._buffer)

    def add(self, trace: Trace) -> None:
        if len(self._buffer) >= BUFFER_MAX:
            self.dropped += 1
            return
        self._buffer.append(trace)
        if len(self._buffer) >= BATCH:
            self._enough.set()

    async def wait(self, seconds: float) -> None:
        """Wait until there are enough traces for a message, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._enough.wait()
        self._enough.clear()

    def take(self) -> list[Trace]:
        """Remove and return the traces of one message."""
        taken: list[Trace] = []
        words = lines = 0
        while self._buffer and len(taken) < BATCH and words < _WORDS_MAX and lines < _LINES_MAX:
            trace = self._buffer.popleft()
            taken.append(trace)
            words += sum(map(len, trace.words))
            lines += len(trace.line)
        return taken

    # ---- by producers

    def sent(
        self, what: Traceable, group: str, address: str, answer: Mapping[str, str], result: SendResult, *, cost: int
    ) -> None:
        """Record that a broker stored a message or a batch."""
        if what.topic == TRACE_TOPIC or answer.get(PROPERTY_TRACE_SWITCH) == "false":
            return
        kind = what.kind
        at = self.now_ms() - cost
        region = answer.get(PROPERTY_MSG_REGION) or DEFAULT_REGION
        is_success = result.status is SendStatus.SEND_OK
        ids = what.msg_id.split(",")
        offset_ids = result.offset_msg_id.split(",")
        for number, msg_id in enumerate(ids):
            offset_id = offset_ids[number] if len(offset_ids) == len(ids) else result.offset_msg_id
            self.add(pub(Sent(at, cost, region, group, what.message, msg_id, offset_id, address, kind, is_success)))

    def transaction_ended(
        self, message: Message, group: str, address: str, *, transaction_id: str, state: str, by_check: bool
    ) -> None:
        """Record the end of a transaction, before it is sent to the broker."""
        at = self.now_ms()
        self.add(
            end_transaction(
                message, group, address, transaction_id=transaction_id, state=state, at=at, by_check=by_check
            )
        )


class _Consumption(NamedTuple):
    request_id: str
    at: int


class ConsumeTraces:
    """Records the deliveries of one consumer; without `traces` it records nothing."""

    def __init__(self, traces: Traces | None, group: str) -> None:
        self._traces = traces
        self._group = group
        self._running: OrderedDict[tuple[MessageQueue | None, int], _Consumption] = OrderedDict()

    def consumption_started(self, message: Message) -> None:
        """Record that the application receives the message."""
        if self._traces is None or message.properties.get(PROPERTY_TRACE_SWITCH) == "false":
            return
        consumption = _Consumption(self._traces.next_id(), self._traces.now_ms())
        self._running[message.queue, message.queue_offset] = consumption
        if len(self._running) > BUFFER_MAX:  # drop the oldest delivery, whose outcome will not be recorded
            self._running.popitem(last=False)
            self._traces.dropped += 1
        self._traces.add(sub_before(message, self._group, consumption.request_id, consumption.at))

    def ended(self, message: Message, how: Ended) -> None:
        """Record the outcome of a delivery; only the first one counts."""
        if self._traces is None:
            return
        consumption = self._running.pop((message.queue, message.queue_offset), None)
        if consumption is not None:
            now = self._traces.now_ms()
            cost = now - consumption.at
            self._traces.add(sub_after(message, self._group, consumption.request_id, at=now, cost=cost, ended=how))
