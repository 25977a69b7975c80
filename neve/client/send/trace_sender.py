"""Sends the traces of a client in the background, in messages of 20, or after 5 s."""

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
    """Sends traces with the retries of any message; if that fails, they are dropped and counted."""

    def __init__(self, session: Session, producer: Producer, traces: Traces) -> None:
        self._session = session
        self._producer = producer
        self._traces = traces
        self._group = f"{_GROUP_PREFIX}-{session.options.producer_group}"
        self._logged = 0
        self._sending = asyncio.Lock()

    async def forever(self) -> None:
        while True:
            await self._traces.wait(_FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Wait until all recorded traces are sent or dropped."""
        async with self._sending:
            while batch := self._traces.take():
                await self._send(batch)
            if self._traces.dropped > self._logged:
                log.warning("traces dropped: count=%d", self._traces.dropped - self._logged)
                self._logged = self._traces.dropped

    async def close(self) -> None:
        """Send the remaining traces, for at most 5 s."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.flush()
        except TimeoutError:
            while batch := self._traces.take():
                self._traces.dropped += len(batch)
            log.warning("traces dropped: the client was closed before they were sent")

    async def _send(self, batch: list[Trace]) -> None:
        words = dict.fromkeys(word for trace in batch for word in trace.words)
        body = "".join(trace.line for trace in batch).encode()
        is_sent = False
        try:
            draft = self._producer.drafts.single(Message(TRACE_TOPIC, body, keys=tuple(words)))
            await self._producer.deliver(draft, None, None, group=self._group)
            is_sent = True
        except NeveError as error:
            log.info("traces not sent: count=%d cause=%s", len(batch), error)
        finally:  # also after a cancellation
            self._traces.dropped += 0 if is_sent else len(batch)
