"""Acknowledgement of appended records, as soon as they are as durable as this broker promises.

Under SYNC_FLUSH the log is flushed first. In a broker set the in-sync replicas then have to confirm the record
(`broker.intake.replication`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from broker.config import BrokerConfig
from broker.intake.flusher import Flusher, WaitingSend
from broker.intake.replication import Replication
from infra.clock import Clock
from infra.net.remoting_server import Connection
from infra.observe.metrics import LATENCIES, Histogram
from neve.remoting.codes import ResponseCode


class Acknowledgement:
    """Answers to sends and to changes."""

    def __init__(self, config: BrokerConfig, clock: Clock, flusher: Flusher, replication: Replication) -> None:
        self._config, self._clock, self._flusher, self._replication = config, clock, flusher, replication
        self._sync_flush = config.sync_flush
        #: Whether sends are answered later than they are stored: under SYNC_FLUSH, or in a broker set.
        self.answers_later = config.sync_flush or replication.waits
        self._wait = flusher.wait if config.sync_flush else replication.wait
        #: Seconds from reading a send to its answer; only successful sends count.
        self.latency = Histogram(LATENCIES)

    def acknowledge(
        self,
        connection: Connection,
        end_offset: int,
        render: Callable[[int], bytes],
        started: float,
        number: int = 1,
        *,
        waits: bool,
    ) -> None:
        """Send `render(code)` once the log is as durable as promised up to `end_offset`; at once if not `waits`.

        `started` is the monotonic time in seconds at which the sends were read. `number` of them are answered.
        """
        render = functools.partial(self._render, render, started, number)
        if waits and self.answers_later:
            deadline = self._clock.monotonic() + self._config.sync_flush_timeout / 1000
            self._wait(WaitingSend(end_offset, connection, deadline, render))
        else:
            connection.send_raw(render(ResponseCode.SUCCESS))

    def _render(self, render: Callable[[int], bytes], started: float, number: int, code: int) -> bytes:
        if code == ResponseCode.SUCCESS:
            self.latency.observe(self._clock.monotonic() - started, number)
        return render(code)

    async def settled(self) -> None:
        """Return when everything stored so far is as durable on this broker's disk as `acknowledge` promises.

        The wait for replicas is elsewhere, around the request handlers (`broker.requests.replicated_answers`).
        """
        if self._sync_flush:
            await self._flusher.flush_now()

    def stop(self) -> None:
        """Answer all waiting sends as stored but not confirmed, because this member is no longer master of its set.

        A change of role calls this first: a confirm offset of a later term proves nothing about records appended
        before.
        """
        self._flusher.answer_all(ResponseCode.FLUSH_SLAVE_TIMEOUT)
        self._replication.answer_all()
