"""Peeks (200052), notifications (200054) and the number of waiting pops (200055)."""

import asyncio

from access.guard import Guard
from access.permissions import GET, SUB, of_topic_and_group
from broker.config import BrokerConfig
from broker.life import BrokerLife
from broker.long_polling.pop_long_polling import ANY_QUEUE, PopLongPolling, Waiter
from broker.pop.pop_consumer_service import PopConsumerService, PopRequest
from broker.requests.pop_message import pop_response
from broker.requests.pop_request import PopChecks, PopHeader
from broker.requests.route import MASTER, MEMBERS, BrokerRoute, Waits
from broker.tables.topic_config_manager import TopicConfigManager
from infra.clock import Clock
from infra.net.remoting_server import Connection
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_int, parse_header, require_str


class PeekMessageProcessor:
    """Handles peeks and notifications, which change nothing (RocketMQ's PeekMessageProcessor)."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        life: BrokerLife,
        *,
        topics: TopicConfigManager,
        checks: PopChecks,
        service: PopConsumerService,
        polling: PopLongPolling,
        guard: Guard,
    ) -> None:
        self._config, self._clock, self._life, self._topics = config, clock, life, topics
        self._checks, self._service, self._polling, self._guard = checks, service, polling, guard

    @BrokerRoute(Code.PEEK_MESSAGE, of_topic_and_group(SUB), MASTER, Waits.NO, reads=True, hides_topics=True)
    async def peek(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return messages that a pop would get, without marking them as in flight (200052)."""
        header = parse_header(request.ext, PopHeader)
        asked = self._checks.checked(header, header.max_msg_nums)
        result = await self._service.peek(asked)
        code = ResponseCode.SUCCESS if result.buffers else ResponseCode.PULL_NOT_FOUND
        return pop_response(request, asked, result, code)

    @BrokerRoute(Code.NOTIFICATION, of_topic_and_group(SUB), MASTER, Waits.NO, reads=True, hides_topics=True)
    def notification(self, connection: Connection, request: RemotingCommand) -> None:
        """Answer whether there is a message, and wait for one if necessary.

        The queues are checked once more at the deadline: a message wakes one notification of a group, and the others
        report it then. A waiting notification does not count towards a connection's requests in progress.
        """
        header = parse_header(request.ext, PopHeader)
        asked = self._checks.checked(header, 1)
        deadline = self._checks.deadline(header, request)
        connection.resume(request, lambda: self._notify(connection, request, header, asked, deadline))

    async def _notify(
        self, connection: Connection, request: RemotingCommand, header: PopHeader, asked: PopRequest, deadline: float
    ) -> RemotingCommand | None:
        polling, ext = self._polling, {"hasMsg": "false", "pollingFull": "false"}
        timed_out = False
        waiting: list[Waiter] = []  # registered, and no check since
        try:
            while True:
                if polling.count >= self._config.max_pop_polling_size:
                    if await self._service.has_message(asked):
                        ext["hasMsg"] = "true"
                    elif self._clock.monotonic() < deadline and self._life.accepting:
                        ext["pollingFull"] = "true"
                    waiting.clear()
                    break
                waiter = Waiter.of(asked.group, asked.topic, asked.queue_id, takes=False)
                waiting.append(waiter)
                polling.add(waiter)  # before the check, so that a message that arrives during it wakes the waiter
                try:
                    if await self._service.has_message(asked):
                        ext["hasMsg"] = "true"
                        waiting.clear()
                        break
                    del waiting[:-1]
                    left = deadline - self._clock.monotonic()
                    if timed_out or left <= 0 or not self._life.accepting:
                        break
                    async with asyncio.timeout(left):
                        await waiter.future
                except TimeoutError:
                    timed_out = True
                finally:
                    polling.remove(waiter)
                if connection.is_closed:
                    return None
                self._guard.require(connection, request)
                asked = self._checks.checked(header, 1)
        finally:
            for waiter in waiting:
                polling.pass_on(waiter)
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext=ext)

    @BrokerRoute(Code.POLLING_INFO, of_topic_and_group(SUB | GET), MEMBERS, Waits.NO, reads=True, hides_topics=False)
    def polling_info(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return the number of waiting pops of a group (200055)."""
        group, topic = require_str(request.ext, "consumerGroup"), require_str(request.ext, "topic")
        self._topics.require(topic)
        queue = optional_int(request.ext, "queueId", ANY_QUEUE)
        number = self._polling.waiting_for(group, topic, queue)
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={"pollingNum": str(number)})
