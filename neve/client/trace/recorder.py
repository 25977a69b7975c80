"""What became of messages, noted for the trace topic. Noting costs microseconds, never waits and never fails.

A note goes into a bounded buffer, which the client's `TraceSender` empties; what finds it full is dropped and counted.
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
    """What was sent: a message, or a batch, whose `msg_id` is that of each with commas between."""

    @property
    def topic(self) -> str: ...
    @property
    def msg_id(self) -> str: ...
    @property
    def message(self) -> Message: ...
    @property
    def kind(self) -> MessageType: ...


class Traces:
    """The buffer of one client. Times in ms; `next_id` makes a name for each time that a message is consumed."""

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
        """Until there is enough for a message, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._enough.wait()
        self._enough.clear()

    def take(self) -> list[Trace]:
        """As many as go into one message."""
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
        """A broker answered that it stored the message, or each of a batch."""
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
        """Commit, rollback or "unknown" is about to be said to the broker."""
        at = self.now_ms()
        self.add(
            end_transaction(
                message, group, address, transaction_id=transaction_id, state=state, at=at, by_check=by_check
            )
        )


class _Begun(NamedTuple):
    request_id: str
    at: int


class ConsumeTraces:
    """What the application did with the messages of one consumer. Without `traces` nothing is noted."""

    def __init__(self, traces: Traces | None, group: str) -> None:
        self._traces = traces
        self._group = group
        self._begun: OrderedDict[tuple[MessageQueue | None, int], _Begun] = OrderedDict()

    def begun(self, message: Message) -> None:
        """The application gets the message."""
        if self._traces is None or message.properties.get(PROPERTY_TRACE_SWITCH) == "false":
            return
        begun = _Begun(self._traces.next_id(), self._traces.now_ms())
        self._begun[message.queue, message.queue_offset] = begun
        if len(self._begun) > BUFFER_MAX:  # how the oldest ends will not be known
            self._begun.popitem(last=False)
            self._traces.dropped += 1
        self._traces.add(sub_before(message, self._group, begun.request_id, begun.at))

    def ended(self, message: Message, how: Ended) -> None:
        """The application is done with it; of several pending the first counts."""
        if self._traces is None:
            return
        begun = self._begun.pop((message.queue, message.queue_offset), None)
        if begun is not None:
            now = self._traces.now_ms()
            self._traces.add(sub_after(message, self._group, begun.request_id, at=now, cost=now - begun.at, ended=how))
