"""Pops (200050): answered with the messages of `pop_consumer_service`, or held until there are some.

A pop that finds nothing registers as a waiter, checks again for messages that arrived in between, and only then waits.
Each message that becomes visible wakes one waiter. A woken pop that ends without checking again, because it fails, is
refused or has lost its connection, wakes the next waiter.
"""

import asyncio
from collections.abc import Callable

from access.guard import Guard
from access.permissions import SUB, of_topic_and_group
from broker.config import BrokerConfig
from broker.intake.replication import Replication
from broker.life import BrokerLife
from broker.long_polling.pop_long_polling import PopLongPolling, Waiter
from broker.pop.extra_info import ORDER_QUEUE, REVIVE_QUEUE
from broker.pop.pop_consumer_service import PopConsumerService, PopRequest, PopResult
from broker.requests.pop_request import PopChecks, PopHeader
from broker.requests.route import MASTER, BrokerRoute, Waits
from infra.clock import Clock
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import parse_header


class PopMessageProcessor:
    """Hands out messages for an invisible time (RocketMQ's PopMessageProcessor).

    The pop book and the log have the event before the answer is sent. In a broker set, the event is replicated as well,
    because a new master would otherwise hand out the same messages.
    """

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        life: BrokerLife,
        *,
        checks: PopChecks,
        service: PopConsumerService,
        polling: PopLongPolling,
        guard: Guard,
        replication: Replication,
        log_end: Callable[[], int],
    ) -> None:
        self._replication, self._log_end = replication, log_end
        self._config, self._clock, self._life = config, clock, life
        self._checks, self._service, self._polling, self._guard = checks, service, polling, guard

    @BrokerRoute(Code.POP_MESSAGE, of_topic_and_group(SUB), MASTER, Waits.IN_HANDLER, reads=False, hides_topics=True)
    def pop(self, connection: Connection, request: RemotingCommand) -> None:
        """Handle a pop; waiting ones do not count as a connection's requests in progress: there may be thousands."""
        header = parse_header(request.ext, PopHeader)
        asked = self._checks.checked(header, header.max_msg_nums)
        deadline = self._checks.deadline(header, request)
        connection.resume(request, lambda: self._pop(connection, request, header, asked, deadline))

    async def _pop(
        self, connection: Connection, request: RemotingCommand, header: PopHeader, asked: PopRequest, deadline: float
    ) -> RemotingCommand | None:
        woken: Waiter | None = None  # has been woken and has not checked since
        try:
            while True:
                term = self._replication.term
                result, code = await self._service.pop(asked), None
                woken = None
                if not result.buffers:
                    woken = Waiter.of(asked.group, asked.topic, asked.queue_id, takes=True)
                    result, code = await self._wait(woken, asked, result, deadline)
                if connection.is_closed:
                    return None
                if result.buffers:
                    break
                if code == ResponseCode.POLLING_TIMEOUT and result.failure is not None:
                    raise BrokerError(ResponseCode.SYSTEM_BUSY, result.failure)
                if code is not None:
                    return pop_response(request, asked, result, code)
                self._guard.require(connection, request)  # permissions may have changed during the wait
                asked = self._checks.checked(header, asked.max_count)
        finally:
            if woken is not None:
                self._polling.pass_on(woken)
        if self._replication.waits:
            await self._replicated(term)
        return pop_response(request, asked, result, ResponseCode.SUCCESS)

    async def _replicated(self, term: int) -> None:
        """Wait for the set; without its confirmation the messages are not handed out and become visible later."""
        try:
            await self._replication.replicated(self._log_end(), term)
        except BrokerError as error:
            raise BrokerError(ResponseCode.SYSTEM_BUSY, f"popped, but not returned: {error.remark}") from error

    async def _wait(
        self, waiter: Waiter, asked: PopRequest, result: PopResult, deadline: float
    ) -> tuple[PopResult, ResponseCode | None]:
        """Wait for a message; return no code if there may be one, otherwise the code of the answer."""
        clock, polling, service = self._clock, self._polling, self._service
        if clock.monotonic() >= deadline or not self._life.accepting:
            return result, ResponseCode.POLLING_TIMEOUT
        if polling.count >= self._config.max_pop_polling_size:
            return result, ResponseCode.POLLING_FULL
        polling.add(waiter)
        try:
            if await service.has_message(asked):  # it arrived during the previous check
                result = await service.pop(asked)
            if not result.buffers:
                result.failure = result.failure or await service.unreadable(asked)
                left = deadline - clock.monotonic()
                async with asyncio.timeout(left if result.failure is None else min(left, service.unreadable_seconds)):
                    await waiter.future
        except TimeoutError:
            # Another request of the same attempt may have received the attempt's batch, which wakes no waiter.
            found = clock.monotonic() < deadline or await service.has_message(asked) or waiter.future.done()
            return result, None if found else ResponseCode.POLLING_TIMEOUT
        finally:
            polling.remove(waiter)
        return result, None


def pop_response(request: RemotingCommand, asked: PopRequest, result: PopResult, code: int) -> RemotingCommand:
    """Encode a result as RocketMQ's PopMessageResponseHeader."""
    ext = {
        "popTime": str(result.pop_time),
        "invisibleTime": str(asked.invisible_time),
        "reviveQid": str(ORDER_QUEUE if asked.in_order else REVIVE_QUEUE),
        "restNum": str(result.rest),
        "startOffsetInfo": ";".join(result.start_offsets),
        "msgOffsetInfo": ";".join(result.message_offsets),
    }
    if result.order_counts:
        ext["orderCountInfo"] = ";".join(result.order_counts)
    remark = "FOUND" if code == ResponseCode.SUCCESS else None
    return RemotingCommand.response(request, code, remark, ext, parts=result.buffers or None)
