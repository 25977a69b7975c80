"""Requests to brokers: with time limits, to the master of a queue, and across a failover."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from neve.client.model import MessageQueue
from neve.client.net.answers import require_success
from neve.client.net.connection import NOT_MASTER, Connection, ConnectionPool
from neve.client.net.routes import Routes
from neve.client.net.tasks import Tasks
from neve.client.options import ClientOptions
from neve.client.validators import check_timeout
from neve.errors import (
    BrokerError,
    ClientError,
    ConnectionFailed,
    NeveError,
    RequestTimeout,
    UnknownOutcome,
    seconds_text,
)
from neve.remoting.command import RemotingCommand

log = logging.getLogger(__name__)

T = TypeVar("T")
_ELECTION_PAUSE_S = 0.1
_WATCH_S = 0.25  # between two questions for the master of a silent connection


class BrokerRequests:
    """Sends the requests of one client to brokers."""

    def __init__(self, pool: ConnectionPool, routes: Routes, tasks: Tasks, options: ClientOptions) -> None:
        self._pool = pool
        self._routes = routes
        self._tasks = tasks
        self._options = options
        self._watched: set[Connection] = set()  # connections to silent masters

    async def within(
        self,
        timeout: float | None,
        work: Coroutine[Any, Any, T],
        *,
        too_late: type[RequestTimeout | ConnectionFailed] = RequestTimeout,
    ) -> T:
        """Return the result of `work` if it ends within `timeout` seconds, by default those of the options.

        Raises:
            RequestTimeout: `work` did not end in time; its requests may have been executed. Instead of this error
                `too_late` is raised, for work that sends its only request in its last step.
            ClientError: `timeout` is not positive.
        """
        try:
            check_timeout(timeout)
        except ClientError:
            work.close()
            raise
        limit = timeout or self._options.timeout
        try:
            async with asyncio.timeout(limit):
                return await work
        except NeveError:  # may be a TimeoutError, of a single request
            raise
        except TimeoutError:
            raise too_late(f"not done within {seconds_text(limit)}") from None

    async def ask(
        self, address: str, code: int, ext: Mapping[str, str], *, body: bytes = b"", timeout: float | None = None
    ) -> RemotingCommand:
        """Return the successful answer of a broker.

        Raises:
            BrokerError: the broker answered with an error.
            NeveError: the broker is unreachable or did not answer.
        """
        check_timeout(timeout)
        limit = timeout or self._options.attempt_timeout
        return require_success(await self._pool.invoke(address, code, ext, body=body, timeout=limit))

    async def ask_watched(
        self,
        queue: MessageQueue,
        address: str,
        code: int,
        ext: Mapping[str, str],
        *,
        body: bytes = b"",
        timeout: float,
        patience: float,
        pool: ConnectionPool | None = None,
    ) -> RemotingCommand:
        """Return the answer of the queue's master, whatever its code.

        A master that is frozen or disconnected cannot report that there is another one. Therefore, if the broker has
        replicas, the name servers are asked for its master after `patience` seconds without an answer.

        Raises:
            UnknownOutcome: no answer arrived in time, or there is another master.
        """
        pool = pool or self._pool
        if not self._routes.has_replicas(queue):
            return await pool.invoke(address, code, ext, body=body, timeout=timeout)
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer  # again later: the connection may not be open yet, or fall silent after this look
            timer = loop.call_later(max(patience, _WATCH_S), look)
            self._watch(queue, pool, address)

        timer = loop.call_later(patience, look)
        try:
            return await pool.invoke(address, code, ext, body=body, timeout=timeout)
        finally:
            timer.cancel()

    async def ask_master(
        self,
        queue: MessageQueue,
        code: int,
        ext: Mapping[str, str],
        *,
        body: bytes = b"",
        may_repeat: bool = False,
        find: Callable[[MessageQueue], Awaitable[str]] | None = None,
    ) -> RemotingCommand:
        """Return the successful answer of the queue's master. If the broker has replicas, survive a failover.

        Args:
            may_repeat: whether the request may be sent again after an unknown outcome.
            find: returns the address to ask instead of the master's.

        Raises:
            NeveError: the error of the last attempt.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + self._options.timeout
        find = find or self._routes.master
        while True:
            try:
                address = await find(queue)
                limit = max(min(self._options.attempt_timeout, deadline - now()), 0.001)
                return await self.ask(address, code, ext, body=body, timeout=limit)
            except UnknownOutcome as error:
                problem: NeveError = error
                is_final = not may_repeat
            except BrokerError as error:
                problem, is_final = error, error.code not in NOT_MASTER
            except ConnectionFailed as error:
                problem, is_final = error, False
            if is_final or not self._routes.has_replicas(queue) or now() >= deadline:
                raise problem
            self._pool.check_usable()
            self._routes.forget(queue.topic)
            await asyncio.sleep(min(_ELECTION_PAUSE_S, deadline - now()))

    def connection_to_master(self, queue: MessageQueue) -> Connection | None:
        """Return the open connection to the known master of a queue.

        Commits that were sent over another connection may be lost, or unknown to a new master.
        """
        address = self._routes.known_master(queue)
        return None if address is None else self._pool.open_connection(address)

    def _watch(self, queue: MessageQueue, pool: ConnectionPool, address: str) -> None:
        connection = pool.open_connection(address)
        if connection is not None and connection not in self._watched and not self._tasks.are_closing:
            self._watched.add(connection)
            self._tasks.spawn(self._watch_silent(queue, connection), f"watch {address}")

    async def _watch_silent(self, queue: MessageQueue, connection: Connection) -> None:
        """Abort the connection if another broker is master, until it receives data or no request waits on it."""
        address, received = connection.address, connection.received
        try:
            while not connection.is_closed and connection.is_waiting and connection.received == received:
                try:
                    master = (await self._routes.read_now(queue.topic)).master(queue.broker_name)
                except NeveError as error:
                    log.info("master and name servers silent: address=%s cause=%s", address, error)
                    master = None
                if master not in (None, address):
                    log.warning(
                        "silent master replaced, connection aborted: broker=%s former=%s master=%s",
                        queue.broker_name, address, master,
                    )  # fmt: skip
                    connection.abort()
                    return
                await asyncio.sleep(_WATCH_S)
        finally:
            self._watched.discard(connection)
