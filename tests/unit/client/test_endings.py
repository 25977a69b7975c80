"""How calls, handlers and clients end: cancelled, closed, or with an error of the right class."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from neve.client import BatchItem, LocalTransactionState, Message, connect
from neve.client.consumers.consume_loop import HandledConsumer, consume
from neve.client.consumers.open_consumers import OpenConsumers
from neve.client.group.ownership import Owner, PendingWork
from neve.client.group.pop_requests import Popper
from neve.client.group.pop_settle import Acker, Held
from neve.client.model import MessageQueue
from neve.client.net.session import Session
from neve.client.send.transaction import _asked
from neve.errors import BrokerError, ConnectionFailed, NeveError, UnknownOutcome
from neve.remoting.codes import RequestCode
from tests.kit.clock.waiting import until
from tests.kit.cluster.fake_cluster import send_ok, sends, silent

GO_AWAY = 1500


class Endless:
    """A source that repeats one message. The second request raises `error`."""

    def __init__(self, error: NeveError | None = None) -> None:
        self.asked = 0
        self._error = error

    async def receive(self) -> Any:
        self.asked += 1
        if self.asked > 1 and self._error is not None:
            raise self._error
        return SimpleNamespace(msg_id="m")

    async def settle(self, _message: Any, _delay_level: int | None) -> None: ...

    async def failed(self, _message: Any, _error: BaseException, _delay_level: int) -> None: ...


def pending() -> PendingWork:
    return PendingWork(lambda work, name: asyncio.create_task(work, name=name), "g")


async def cancelled_with_cleanup(work: Callable[[Callable[[], Awaitable[None]]], Awaitable[object]]) -> None:
    """Cancel `work` while its handler runs, and check that the handler cleans up before `work` ends."""
    started, is_clean = asyncio.Event(), False

    async def handler() -> None:
        nonlocal is_clean
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            is_clean = True

    running = asyncio.ensure_future(work(handler))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert is_clean


async def test_cancelled_consume_waits_for_its_handlers() -> None:
    await cancelled_with_cleanup(
        lambda handler: consume(cast(HandledConsumer, Endless()), pending(), lambda _: handler(), 1, 0)
    )


async def test_cancelled_transaction_check_waits_for_the_check() -> None:
    async def checked(handler: Callable[[], Awaitable[None]]) -> LocalTransactionState:
        async def check() -> LocalTransactionState:
            await handler()
            return LocalTransactionState.COMMIT

        return await _asked(lambda _: check(), cast(Any, SimpleNamespace(msg_id="m")))

    await cancelled_with_cleanup(checked)


@pytest.mark.parametrize("workers", [1, 3])
async def test_consume_raises_the_error_of_its_source_itself(workers: int) -> None:
    async def handler(_: Any) -> None: ...

    error = BrokerError(16, "no permission")
    with pytest.raises(BrokerError) as caught:
        await consume(cast(HandledConsumer, Endless(error)), pending(), handler, workers, 0)
    assert caught.value is error


async def test_go_away_keeps_other_requests_of_the_connection(fake_cluster: Any) -> None:
    """A stopping broker still answers pending requests. Only new requests need another connection."""

    async with fake_cluster(silent) as cluster, connect(cluster.namesrv.address, send_retries=0) as client:
        server = cluster.brokers[0]
        several = [client.send_async("t", b"%d" % number) for number in range(3)]
        await until(lambda: len(sends(server)) == 3)
        first, second, third = sends(server)
        for request in (first, second):
            server.reply(request, GO_AWAY, {})
        for refused in several[:2]:
            with pytest.raises(BrokerError) as caught:
                await refused
            assert caught.value.code == GO_AWAY
        following = client.send_async("t", b"3")
        await until(lambda: len(sends(server)) == 4)
        assert len(server.writers) == 2, "a new request takes a new connection"
        assert not several[2].done()
        for request in (third, sends(server)[3]):
            server.reply(request, *send_ok(request)[:2])
        assert (await several[2]).queue_offset == (await following).queue_offset == 7
        await until(
            lambda: not client._session.pool._retiring or all(one.is_closed for one in client._session.pool._retiring),
            "the old connection is closed",
        )


async def test_request_that_cannot_be_encoded_leaves_nothing_waiting(fake_cluster: Any) -> None:
    async with fake_cluster(send_ok) as cluster, connect(cluster.namesrv.address) as client:
        connection = await client._session.pool.get(cluster.brokers[0].address)
        with pytest.raises((UnicodeEncodeError, TypeError, ValueError)):
            await connection.invoke(RequestCode.SEND_MESSAGE_V2, {"a": "\ud800"}, b"", 0.01)
        assert not connection.is_waiting


async def test_send_without_a_route_was_not_sent(fake_cluster: Any) -> None:
    options: dict[str, Any] = {"timeout": 1.0, "attempt_timeout": 0.05}
    async with fake_cluster(send_ok) as cluster, connect(cluster.namesrv.address, **options) as client:
        cluster.namesrv.handler = silent
        for call in (client.send("t", b"x"), client.send_oneway("t", b"x"), client.send_batch("t", [b"x"])):
            with pytest.raises(ConnectionFailed, match="no name server answers"):
                await call
        assert not sends(cluster.brokers[0])


async def test_queue_without_a_master_was_not_asked(fake_cluster: Any) -> None:
    async with fake_cluster(send_ok) as cluster, connect(cluster.namesrv.address) as client:
        with pytest.raises(ConnectionFailed, match="no master of another is known"):
            await client._session.routes.master(MessageQueue("t", "another", 0))


class FailingConsumer:
    is_closed = False

    def __init__(self, error: Exception | None) -> None:
        self.error, self.has_ended = error, False

    async def close_for(self, _closer: Owner) -> None:
        if self.error is not None:
            raise self.error
        await asyncio.sleep(0)
        self.has_ended = True


async def test_close_closes_all_consumers_and_the_session_if_one_fails(fake_cluster: Any) -> None:
    async with fake_cluster(send_ok) as cluster:
        client = connect(cluster.namesrv.address)
        await client.start()
        await client.send("t", b"x")
        good = FailingConsumer(None)
        client._consumers = OpenConsumers()
        client._consumers.keep(FailingConsumer(ZeroDivisionError()))
        client._consumers.keep(good)
        with pytest.raises(ZeroDivisionError):
            await client.close()
        assert good.has_ended
        assert not client._session._tasks._running, "the heartbeat has ended"
        assert client._session.pool.open_connection(cluster.brokers[0].address) is None


class Broken:
    """A client whose acks raise an unexpected error or never complete."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    async def ack(self, *_: object) -> None:
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()


@pytest.mark.parametrize("has_begun", [True, False])
@pytest.mark.parametrize("error", [ZeroDivisionError(), None])
async def test_ack_has_an_outcome_for_every_end_of_its_sender(error: Exception | None, has_begun: bool) -> None:
    tasks: list[asyncio.Task[None]] = []

    def spawn(coroutine: Any, name: str) -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(coroutine, name=name))
        return tasks[-1]

    acker = Acker(cast(Session, SimpleNamespace(spawn=spawn)), cast(Popper, Broken(error)))
    receipt = cast(Any, SimpleNamespace(text="r"))
    held = [Held(MessageQueue("t", "b", 0), receipt, cast(Any, None), 0, 0, is_settled=True) for _ in range(2)]
    first = acker.add(held[0])
    if has_begun:
        await asyncio.sleep(0)
    later = acker.add(held[1])
    if error is None:
        tasks[0].cancel()  # as the client does when it closes
    for outcome in (first, later):
        with pytest.raises(UnknownOutcome):
            await asyncio.wait_for(outcome, 30)
    await asyncio.wait_for(acker.flush(), 30)
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("has_begun", [True, False])
async def test_flush_reports_batches_that_the_close_of_the_client_cancelled(fake_cluster: Any, has_begun: bool) -> None:
    async with fake_cluster(silent) as cluster:
        client = connect(cluster.namesrv.address, send_retries=0)
        await client.start()
        sender = client.batch_sender(max_messages=1)
        await sender.put_all([BatchItem(Message("orders", b"1"))])
        if has_begun:
            await until(lambda: bool(sends(cluster.brokers[0])), timeout=30)
        await client._session.close()
        with pytest.raises(UnknownOutcome):
            await sender.flush()
        assert (sender.sent, [message.body for message in sender.not_stored]) == (0, [b"1"])
