"""Sends the client's traces in the background: twenty in a message, or what there is after five seconds."""

from __future__ import annotations

import asyncio
import logging

from neve.client.model import Message
from neve.client.net.session import Session
from neve.client.send.producer import Producer
from neve.client.trace.format import TRACE_TOPIC, Trace
from neve.client.trace.recorder import Traces
from neve.errors import NeveError

log = logging.getLogger(__name__)

_FLUSH_S = 5.0
_CLOSE_S = 5.0
_GROUP_PREFIX = "_INNER_TRACE_PRODUCER"


class TraceSender:
    """A message of traces is sent as any other, with its retries; if that fails they are lost, and counted."""

    def __init__(self, session: Session, producer: Producer, traces: Traces) -> None:
        self._session = session
        self._producer = producer
        self._traces = traces
        self._group = f"{_GROUP_PREFIX}-{session.options.producer_group}"
        self._told = 0
        self._sending = asyncio.Lock()

    async def forever(self) -> None:
        while True:
            await self._traces.wait(_FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Returns when all that was noted before has been sent, or was dropped."""
        async with self._sending:
            while batch := self._traces.take():
                await self._send(batch)
            if self._traces.dropped > self._told:
                log.warning("%d traces were dropped", self._traces.dropped - self._told)
                self._told = self._traces.dropped

    async def close(self) -> None:
        """Sends what there is, for five seconds at most."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.flush()
        except TimeoutError:
            while batch := self._traces.take():
                self._traces.dropped += len(batch)
            log.warning("the client closed before all traces were sent")

    async def _send(self, batch: list[Trace]) -> None:
        words = dict.fromkeys(word for trace in batch for word in trace.words)
        body = "".join(trace.line for trace in batch).encode()
        is_sent = False
        try:
            draft = self._producer.drafts.single(Message(TRACE_TOPIC, body, keys=tuple(words)))
            await self._producer.deliver(draft, None, None, group=self._group)
            is_sent = True
        except NeveError as error:
            log.info("%d traces: %s", len(batch), error)
        finally:  # or the client closes
            self._traces.dropped += 0 if is_sent else len(batch)
