"""Owned messages at the close of a consumer, abandoned settlements, and automatic acknowledgements.

The broker runs in the event loop of the test. Every wait is for an event, none for time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from neve.client import AsyncClient, Consumer, PopConsumer, Received, connect, sync
from neve.client.model import MessageQueue
from neve.errors import ClientError, NeveError
from tests.kit.clock.waiting import until
from tests.kit.cluster.fake_cluster import DEADLINE_S, run
from tests.kit.cluster.group_broker import GroupBroker
from tests.kit.cluster.pop_broker import ACK, CHANGE, PopBroker

COMMIT, HEARTBEAT, UNREGISTER, SEND_BACK, UNLOCK, SEND = 15, 34, 35, 36, 42, 310
LIMIT_S = 5


async def first_of(consumer: Consumer | PopConsumer) -> Received:
    message = await consumer.receive(LIMIT_S)
    assert message is not None
    return message


def the_queue(message: Received) -> MessageQueue:
    assert message.queue is not None
    return message.queue


class Handler:
    """Processes a message until `resume` is set."""

    def __init__(self) -> None:
        self.started, self.resume = asyncio.Event(), asyncio.Event()
        self.offsets: list[int] = []

    async def __call__(self, message: Received) -> None:
        self.offsets.append(message.queue_offset)
        self.started.set()
        await self.resume.wait()


# ---- closing


@pytest.mark.parametrize("in_order", [False, True])
async def test_close_waits_for_the_handler_and_commits_before_it_leaves(fake_cluster: Any, in_order: bool) -> None:
    broker, handler = GroupBroker(5), Handler()
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        consumer = client.consumer("g", "t", start="earliest", in_order=in_order)
        await consumer.start()
        running = asyncio.create_task(consumer.run(handler))
        await handler.started.wait()
        closing = asyncio.create_task(consumer.close())
        await until(lambda: consumer.is_closed)
        await client.send("t", b"a round trip")
        codes = cluster.brokers[0].codes()
        assert UNLOCK not in codes
        assert UNREGISTER not in codes
        handler.resume.set()
        await asyncio.gather(closing, running)
        assert (handler.offsets, broker.offsets["t"]) == ([0], 1)
        end = [code for code in cluster.brokers[0].codes() if code in (COMMIT, UNLOCK, UNREGISTER)]
        assert end[-2:] == ([UNLOCK, UNREGISTER] if in_order else [COMMIT, UNREGISTER])
        assert COMMIT in end[:-1]


async def test_handler_that_closes_its_consumer_gets_its_message_acknowledged(fake_cluster: Any) -> None:
    broker = GroupBroker(5)
    seen: list[int] = []
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        consumer = client.consumer("g", "t", start="earliest")

        async def charge(message: Received) -> None:
            seen.append(message.queue_offset)
            await consumer.close()

        async with consumer:
            await consumer.run(charge)
            assert broker.offsets["t"] == 1  # before the block ends: `run` has waited for the close
        assert (seen, broker.offsets["t"]) == ([0], 1)


async def test_message_owned_after_the_close_timeout_keeps_its_queue_locked(fake_cluster: Any) -> None:
    broker, handler = GroupBroker(5), Handler()
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        consumer = client.consumer("g", "t", start="earliest", in_order=True, close_timeout=0.02)
        await consumer.start()
        running = asyncio.create_task(consumer.run(handler))
        await handler.started.wait()
        await consumer.close()
        assert broker.offsets.get("t", 0) == 0
        assert [queue["topic"] for queue in broker.unlocked] == ["%RETRY%g"]
        handler.resume.set()
        await running
        assert broker.offsets.get("t", 0) == 0


async def test_close_does_not_wait_for_messages_of_the_closer(fake_cluster: Any) -> None:
    broker = GroupBroker(5)
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        with pytest.raises(ZeroDivisionError):
            async with client.consumer("g", "t", start="earliest", in_order=True, close_timeout=1e9) as consumer:
                await first_of(consumer)
                raise ZeroDivisionError
        assert sorted(queue["topic"] for queue in broker.unlocked) == ["%RETRY%g", "t"]
        async with client.consumer("g", "t", start="earliest", close_timeout=1e9) as consumer:
            await first_of(consumer)


async def test_cancelled_caller_of_close_does_not_stop_it(fake_cluster: Any) -> None:
    broker, handler = GroupBroker(5), Handler()
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        consumer = client.consumer("g", "t", start="earliest")
        await consumer.start()
        running = asyncio.create_task(consumer.run(handler))
        await handler.started.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await consumer.close()
        handler.resume.set()
        await running
        assert broker.offsets["t"] == 1
        assert UNREGISTER in cluster.brokers[0].codes()


async def test_waiting_receive_ends_at_close(fake_cluster: Any) -> None:
    handler = Handler()
    async with fake_cluster(GroupBroker(1)) as cluster, connect(cluster.namesrv.address) as client:
        consumer = client.consumer("g", "t", start="earliest")
        await consumer.start()
        running = asyncio.create_task(consumer.run(handler))
        await handler.started.wait()
        waiting = asyncio.create_task(consumer.receive())
        await client.send("t", b"a round trip")
        closing = asyncio.create_task(consumer.close())
        assert await waiting is None
        assert not closing.done()
        handler.resume.set()
        await asyncio.gather(running, closing)


async def test_close_of_a_pop_consumer_waits_for_handlers_and_returns_the_rest(fake_cluster: Any) -> None:
    broker, handler = PopBroker(3), Handler()
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        consumer = client.pop_consumer("g", "t", start="earliest")
        await consumer.start()
        running = asyncio.create_task(consumer.run(handler))
        await handler.started.wait()
        closing = asyncio.create_task(consumer.close())
        await until(lambda: len(broker.let_go) == 2)
        assert UNREGISTER not in cluster.brokers[0].codes()
        handler.resume.set()
        await asyncio.gather(closing, running)
        assert (broker.acked, broker.let_go) == ([0], [(1, 1000), (2, 1000)])
        assert cluster.brokers[0].codes()[-1] == UNREGISTER


async def by_consumer(client: AsyncClient) -> None:
    async with client.consumer("g", "t", start="earliest"):
        pass


async def by_pop_consumer(client: AsyncClient) -> None:
    async with client.pop_consumer("g", "t", start="earliest"):
        pass


async def by_lite_pull_consumer(client: AsyncClient) -> None:
    async with client.lite_pull_consumer("g", start="earliest"):
        pass


@pytest.mark.parametrize(
    ("enter", "silence"), [(by_consumer, 14), (by_pop_consumer, 400), (by_lite_pull_consumer, HEARTBEAT)]
)
async def test_cancelled_join_leaves_the_group(
    fake_cluster: Any, enter: Callable[[AsyncClient], Coroutine[Any, Any, None]], silence: int
) -> None:
    broker = PopBroker(0)
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        await client.admin.topic_route("t")
        broker.silent = {silence}
        joining = asyncio.create_task(enter(client))
        await until(lambda: silence in cluster.brokers[0].codes())
        joining.cancel()
        await asyncio.wait({joining})
        assert joining.cancelled()
        assert cluster.brokers[0].codes()[-1] == UNREGISTER
        broker.silent.clear()
        await enter(client)


# ---- cancelled nacks


async def test_cancelled_nack_is_completed_once(fake_cluster: Any) -> None:
    broker = GroupBroker(2)
    broker.silent = {SEND_BACK}
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest") as consumer,
    ):
        server = cluster.brokers[0]
        message = await first_of(consumer)
        nacking = asyncio.create_task(message.nack(1))
        await until(lambda: SEND_BACK in server.codes())
        nacking.cancel()
        await asyncio.wait({nacking})
        await message.ack()  # too late: the message is being sent back
        await message.nack(1)
        await (await first_of(consumer)).ack()
        assert consumer.position(the_queue(message)) == 0
        server.reply(next(one for one in server.requests if one.code == SEND_BACK), 0, {})
        await until(lambda: consumer.position(the_queue(message)) == 2)
        assert server.codes().count(SEND_BACK) == 1


async def test_cancelled_dead_letter_nack_in_order_releases_the_queue(fake_cluster: Any) -> None:
    broker = GroupBroker(2)
    broker.silent = {SEND}
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest", in_order=True, max_redeliveries=0) as consumer,
    ):
        server = cluster.brokers[0]
        nacking = asyncio.create_task((await first_of(consumer)).nack())
        await until(lambda: SEND in server.codes())
        nacking.cancel()
        await asyncio.wait({nacking})
        sent = next(one for one in server.requests if one.code == SEND)
        server.reply(sent, 0, {"msgId": "ID", "queueId": "0", "queueOffset": "7"})
        assert (await first_of(consumer)).queue_offset == 1


async def test_cancelled_nack_of_a_pop_in_order_returns_all_that_follow(fake_cluster: Any) -> None:
    broker = PopBroker(3)
    broker.silent = {CHANGE}
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.pop_consumer("g", "t", start="earliest", in_order=True) as consumer,
    ):
        server = cluster.brokers[0]
        nacking = asyncio.create_task((await first_of(consumer)).nack(1))
        await until(lambda: CHANGE in server.codes())
        nacking.cancel()
        await asyncio.wait({nacking})
        broker.silent.clear()
        answer = {"popTime": "1", "invisibleTime": "10000", "reviveQid": "0"}
        server.reply(next(one for one in server.requests if one.code == CHANGE), 0, answer)
        await until(lambda: [offset for offset, _ in broker.let_go] == [1, 2])


# ---- failed acks, automatic acks


async def test_failed_ack_does_not_end_the_run_of_a_pop_consumer(fake_cluster: Any) -> None:
    broker = PopBroker(3)
    broker.refused = {ACK}
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        consumer = client.pop_consumer("g", "t", start="earliest")
        seen: list[int] = []

        async def handler(message: Received) -> None:
            seen.append(message.queue_offset)
            if len(seen) == 2:
                broker.refused.clear()
            if len(seen) == 3:
                await consumer.close()

        async with consumer:
            await consumer.run(handler)
        assert (seen, broker.acked) == ([0, 1, 2], [1, 2])


async def test_iteration_acknowledges_only_messages_of_the_same_task(fake_cluster: Any) -> None:
    async with (
        fake_cluster(GroupBroker(4)) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest") as consumer,
    ):
        started, resume = asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            assert (await anext(consumer)).queue_offset == 0
            started.set()
            await resume.wait()
            assert (await anext(consumer)).queue_offset == 3

        slowly = asyncio.create_task(slow())
        await started.wait()
        (queue,) = consumer.assigned
        assert (await anext(consumer)).queue_offset == 1
        assert (await anext(consumer)).queue_offset == 2
        assert consumer.position(queue) == 0
        resume.set()
        await slowly
        assert consumer.position(queue) == 2


async def by_wait_for(consumer: Consumer) -> Received:
    return await asyncio.wait_for(consumer.__anext__(), LIMIT_S)


async def by_a_task(consumer: Consumer) -> Received:
    return await asyncio.create_task(consumer.__anext__())


async def by_a_task_that_iterates(consumer: Consumer) -> Received:
    async def ask() -> Received:
        return await anext(consumer)

    return await asyncio.create_task(ask())


async def by_iteration(consumer: Consumer) -> Received:
    return await anext(consumer)


@pytest.mark.parametrize("ask", [by_wait_for, by_a_task, by_a_task_that_iterates, by_iteration])
async def test_iteration_through_a_task_acknowledges(
    fake_cluster: Any, ask: Callable[[Consumer], Awaitable[Received]]
) -> None:
    broker = GroupBroker(3)
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        async with client.consumer("g", "t", start="earliest") as consumer:
            (queue,) = consumer.assigned
            for _ in range(3):
                await ask(consumer)
            assert consumer.position(queue) == 2
        assert broker.offsets["t"] == 3


# ---- receive


@pytest.mark.parametrize("kind", ["consumer", "pop_consumer"])
async def test_receive_acknowledges_nothing(fake_cluster: Any, kind: str) -> None:
    broker = PopBroker(3) if kind == "pop_consumer" else GroupBroker(3)
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        async with getattr(client, kind)("g", "t", start="earliest", close_timeout=0) as consumer:
            for offset in range(3):
                assert (await first_of(consumer)).queue_offset == offset
        assert broker.offsets.get("t", 0) == 0
        assert getattr(broker, "acked", []) == []


@pytest.mark.parametrize("kind", ["consumer", "pop_consumer"])
async def test_message_block_acknowledges_or_gives_back(fake_cluster: Any, kind: str) -> None:
    broker = PopBroker(2) if kind == "pop_consumer" else GroupBroker(2)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        getattr(client, kind)("g", "t", start="earliest") as consumer,
    ):
        async with await first_of(consumer) as message:
            assert message.queue_offset == 0
        with pytest.raises(ZeroDivisionError):
            async with await first_of(consumer):
                raise ZeroDivisionError
        if isinstance(broker, PopBroker):
            assert (broker.acked, broker.let_go) == ([0], [(1, 10_000)])
        else:
            assert [sent["offset"] for sent in broker.sent_back] == ["100"]
            assert consumer.position(the_queue(message)) == 2


async def test_message_block_that_is_cancelled_gives_back(fake_cluster: Any) -> None:
    broker = GroupBroker(1)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest") as consumer,
    ):
        message = await first_of(consumer)
        with pytest.raises(TimeoutError):
            async with message, asyncio.timeout(0.01):
                await asyncio.Event().wait()
        await until(lambda: len(broker.sent_back) == 1)


async def test_message_block_raises_its_own_error_if_giving_back_fails(
    fake_cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        async def settle(self, _message: Received, _delay_level: int | None) -> None:
            raise ClientError("closed")

        async def redeliver(self, _message: Received, _seconds: float) -> None: ...

    with pytest.raises(ZeroDivisionError):
        async with Received("t", b"x", msg_id="ID", consumer=Failing()):
            raise ZeroDivisionError
    (record,) = caplog.records
    assert record.getMessage() == "nack failed, the message is redelivered later: msg_id=ID cause=closed"


async def test_delay_in_seconds_is_for_pop_consumers(fake_cluster: Any) -> None:
    async with (
        fake_cluster(GroupBroker(1)) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest") as consumer,
    ):
        message = await first_of(consumer)
        with pytest.raises(ClientError, match="only messages of pop consumers take a delay in seconds"):
            await message.nack(delay=1)
        with pytest.raises(ClientError, match="exclude each other"):
            await message.nack(3, delay=1)
        await message.ack()


async def test_message_of_a_failed_task_is_not_acknowledged(fake_cluster: Any) -> None:
    broker = GroupBroker(3)
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        async with client.consumer("g", "t", start="earliest") as consumer:

            async def fail() -> None:
                await anext(consumer)
                raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await asyncio.create_task(fail())
            await anext(consumer)
            await anext(consumer)
        assert broker.offsets.get("t", 0) == 0


# ---- synchronous client


def in_a_thread(fake_cluster: Any, broker: GroupBroker, use: Callable[[sync.Client], None]) -> None:
    """Run `use(client)` in a thread with a client of the broker, and wait for the thread."""

    async def work() -> None:
        async with fake_cluster(broker) as cluster:

            def inside() -> None:
                with sync.connect(cluster.namesrv.address) as client:
                    use(client)

            await asyncio.to_thread(inside)

    run(work)


def test_handler_in_a_thread_can_close_its_consumer(fake_cluster: Any) -> None:
    broker = GroupBroker(5)

    def use(client: sync.Client) -> None:
        with client.consumer("g", "t", start="earliest") as consumer:
            consumer.run(lambda _: consumer.close(), workers=2)

    in_a_thread(fake_cluster, broker, use)
    assert 1 <= broker.offsets["t"] <= 2


def test_iteration_in_a_thread_acknowledges_only_its_own_messages(fake_cluster: Any) -> None:
    broker = GroupBroker(4)

    def use(client: sync.Client) -> None:
        with client.consumer("g", "t", start="earliest") as consumer:
            started, resume = threading.Event(), threading.Event()

            def slow() -> None:
                for message in consumer:
                    if message.queue_offset == 3:
                        return  # a thread that ends acknowledges nothing
                    started.set()
                    assert resume.wait(LIMIT_S)

            slowly = threading.Thread(target=slow)
            slowly.start()
            assert started.wait(LIMIT_S)
            messages = iter(consumer)
            for _ in range(2):
                next(messages)
            (queue,) = consumer.assigned
            assert consumer.position(queue) == 0
            resume.set()
            slowly.join(LIMIT_S)
            assert consumer.position(queue) == 2

    in_a_thread(fake_cluster, broker, use)
    assert broker.offsets["t"] == 3


def test_message_block_in_a_thread_acknowledges_or_gives_back(fake_cluster: Any) -> None:
    broker = GroupBroker(2)

    def use(client: sync.Client) -> None:
        with client.consumer("g", "t", start="earliest") as consumer:
            for error in (None, ZeroDivisionError()):
                message = consumer.receive(LIMIT_S)
                assert message is not None
                with contextlib.suppress(ZeroDivisionError), message:
                    if error is not None:
                        raise error

    in_a_thread(fake_cluster, broker, use)
    assert [sent["offset"] for sent in broker.sent_back] == ["100"]
    assert broker.offsets["t"] == 2


def endless_request(client: sync.Client) -> None:
    client.request("t", b"?", timeout=3600)


def endless_pull(client: sync.Client) -> None:
    client.pull("t", 0, 0, wait=3600)


def endless_sends(client: sync.Client) -> None:
    while True:
        client.send("t", b"x", timeout=3600)


def endless_receives(client: sync.Client) -> None:
    with client.consumer("g", "t") as consumer:
        while True:
            consumer.receive(3600)


@pytest.mark.parametrize("use", [endless_request, endless_pull, endless_sends, endless_receives])
async def test_closing_the_client_ends_the_calls_of_other_threads(
    fake_cluster: Any, use: Callable[[sync.Client], None]
) -> None:
    async with fake_cluster(GroupBroker(0)) as cluster:
        client = await asyncio.to_thread(sync.connect, cluster.namesrv.address)
        ended: list[NeveError] = []

        def call() -> None:
            try:
                use(client)
            except NeveError as error:
                ended.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        await until(lambda: bool({SEND, 11} & set(cluster.brokers[0].codes())))
        await asyncio.to_thread(client.close)
        await asyncio.to_thread(thread.join, DEADLINE_S / 2)
        assert not thread.is_alive()
        assert len(ended) == 1
        with pytest.raises(ClientError, match="closed"):
            client.send("t", b"x")
        client.close()


async def test_iterating_thread_ends_when_the_client_is_closed(fake_cluster: Any) -> None:
    async with fake_cluster(GroupBroker(1)) as cluster:
        client = await asyncio.to_thread(sync.connect, cluster.namesrv.address)
        seen: list[int] = []
        started = threading.Event()

        def iterate() -> None:
            with client.consumer("g", "t", start="earliest") as consumer:
                for message in consumer:
                    seen.append(message.queue_offset)
                    started.set()
            seen.append(-1)

        thread = threading.Thread(target=iterate)
        thread.start()
        assert await asyncio.to_thread(started.wait, LIMIT_S)
        await asyncio.to_thread(client.close)
        await asyncio.to_thread(thread.join, LIMIT_S)
        assert seen == [0, -1]
