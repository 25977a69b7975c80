"""Tests of the batch sender: retries, deliveries, and messages that are not stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from neve.client import BatchItem, Message, connect, sync
from neve.errors import BrokerError, ClientError, UnknownOutcome
from neve.remoting.codes import RequestCode
from neve.remoting.command import RemotingCommand
from tests.kit.clock.waiting import until
from tests.kit.cluster.fake_cluster import Answer, FakeCluster, refuse, send_ok, sends, silent

Running = Callable[..., AbstractAsyncContextManager[FakeCluster]]
BUSY, NO_PERMISSION = 2, 16


async def test_busy_broker_gets_the_same_batch_until_it_accepts(fake_cluster: Running) -> None:
    asked: list[bytes] = []

    def busy_at_first(request: RemotingCommand) -> Answer:
        if request.code == RequestCode.SEND_BATCH_MESSAGE:
            asked.append(bytes(request.body))
        return refuse(BUSY)(request) if len(asked) <= 4 else send_ok(request)

    async with fake_cluster(busy_at_first) as cluster, connect(cluster.namesrv.address, send_retries=0) as client:
        sender = client.batch_sender()
        await sender.put_all([BatchItem(Message("orders", b"1")), BatchItem(Message("orders", b"2"))])
        await sender.flush()
        assert sender.sent == 2
    assert len(asked) == 5
    assert len(set(asked)) == 1


@pytest.mark.parametrize(("code", "patience", "most"), [(NO_PERMISSION, 30, 1), (BUSY, 0.05, 1)])
async def test_permanent_refusal_and_retry_timeout_are_raised(
    fake_cluster: Running, code: int, patience: float, most: int
) -> None:
    async with (
        fake_cluster(refuse(code)) as cluster,
        connect(cluster.namesrv.address, send_retries=0) as client,
    ):
        sender = client.batch_sender(retry_timeout=patience)
        await sender.put_all([BatchItem(Message("orders", b"1"))])
        with pytest.raises(BrokerError) as told:
            await sender.flush()
        assert told.value.code == code
        assert sender.sent == 0
        assert len(sends(cluster.brokers[0])) == most


async def test_tags_and_keys_count_in_the_size_of_a_batch(fake_cluster: Running) -> None:
    async with fake_cluster(send_ok) as cluster, connect(cluster.namesrv.address) as client:
        sender = client.batch_sender(max_bytes=30_000)
        await sender.put_all([BatchItem(Message("orders", b"1", keys=("k" * 20_000,))) for _ in range(3)])
        await sender.put_all([BatchItem(Message("orders", b"1", tags="t" * 20_000)) for _ in range(3)])
        await sender.flush()
        assert len(sends(cluster.brokers[0])) == 6


async def test_batch_sender_counts_and_logs_messages_sent_again(
    fake_cluster: Running, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_cluster(silent) as cluster, connect(cluster.namesrv.address, send_retries=0) as client:
        server = cluster.brokers[0]
        sender = client.batch_sender(attempt_timeout=0.2)
        await sender.put_all([BatchItem(Message("orders", b"1")), BatchItem(Message("orders", b"2"))])
        flushing = asyncio.ensure_future(sender.flush())
        await until(lambda: len(sends(server)) == 2, "the batch is sent again")
        server.handler = send_ok
        await flushing
        again = len(sends(server)) - 1
        assert again >= 1
        assert (sender.sent, sender.repeated, sender.not_stored) == (2, 2 * again, [])
    (warning, *_) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("sent again, may be stored twice: topic=orders msg_id=")
    assert "cause=no answer from" in warning


async def test_batch_sender_waits_longer_for_an_answer_than_a_send(fake_cluster: Running) -> None:
    async with (
        fake_cluster(silent) as cluster,
        connect(cluster.namesrv.address, attempt_timeout=0.05, timeout=0.1) as client,
    ):
        now = asyncio.get_running_loop().time
        server = cluster.brokers[0]
        sender = client.batch_sender()
        await sender.put_all([BatchItem(Message("orders", b"1"))])
        flushing = asyncio.ensure_future(sender.flush())
        await until(lambda: len(sends(server)) == 1)
        late = now() + 0.3
        await until(lambda: now() > late, "three times as long as a whole send may take")
        (batch,) = sends(server)
        server.reply(batch, 0, {"msgId": "ID", "queueId": "0", "queueOffset": "7"})
        await flushing
        assert (sender.sent, sender.repeated) == (1, 0)


async def test_batch_sender_names_messages_that_are_not_stored(fake_cluster: Running) -> None:
    async with fake_cluster(refuse(NO_PERMISSION)) as cluster, connect(cluster.namesrv.address) as client:
        sender = client.batch_sender(max_messages=2, in_flight=1)
        several = [Message("orders", b"%d" % number) for number in range(9)]
        with pytest.raises(BrokerError):
            await sender.put_all(BatchItem(message) for message in several)
        assert sorted(message.body for message in sender.not_stored) == [message.body for message in several]
        with pytest.raises(BrokerError):
            await sender.flush()
        assert sorted(message.body for message in sender.not_stored) == [message.body for message in several]


async def test_closing_the_client_ends_batches_in_flight(fake_cluster: Running) -> None:
    async with fake_cluster(silent) as cluster:
        client = connect(cluster.namesrv.address)
        await client.start()
        sender = client.batch_sender()
        await sender.put_all([BatchItem(Message("orders", b"1"))])
        flushing = asyncio.ensure_future(sender.flush())
        await until(lambda: len(sends(cluster.brokers[0])) == 1)
        await client.close()
        with pytest.raises(UnknownOutcome, match="the client was closed during a send to orders"):
            await flushing
        assert [message.body for message in sender.not_stored] == [b"1"]


# ---- deliveries


def stored_apart(request: RemotingCommand) -> Answer:
    """Store a batch from offset 7 on."""
    return 0, {"msgId": "A,B,C", "queueId": "0", "queueOffset": "7"}, b""


async def test_each_message_has_a_delivery_with_its_own_result(fake_cluster: Running) -> None:
    async with fake_cluster(stored_apart) as cluster, connect(cluster.namesrv.address) as client:
        async with client.batch_sender() as sender:
            deliveries = [
                await sender.put("orders", b"1", tags="T"),
                await sender.put(Message("orders", b"2")),
                await sender.put("orders", "3", keys=["k"]),
            ]
            assert not any(delivery.done() for delivery in deliveries)
        results = [delivery.result() for delivery in deliveries]
        assert [(one.queue_offset, one.offset_msg_id) for one in results] == [(7, "A"), (8, "B"), (9, "C")]
        assert len({one.msg_id for one in results}) == 3
        assert len(sends(cluster.brokers[0])) == 1


async def test_delivery_raises_why_its_message_is_not_stored(fake_cluster: Running) -> None:
    async with fake_cluster(refuse(NO_PERMISSION)) as cluster, connect(cluster.namesrv.address) as client:
        sender = client.batch_sender(max_messages=2)
        sent = [await sender.put("orders", b"%d" % number) for number in range(3)]
        with pytest.raises(BrokerError):
            await sender.flush()
        for delivery in sent:
            with pytest.raises(BrokerError, match="code 16"):
                await delivery
        assert [message.body for message in sender.not_stored] == [b"0", b"1", b"2"]
        with pytest.raises(BrokerError):
            await sender.put("orders", b"3")
        assert sender.not_stored[-1].body == b"3"


async def test_block_that_raises_sends_nothing_more(fake_cluster: Running) -> None:
    async with fake_cluster(send_ok) as cluster, connect(cluster.namesrv.address) as client:
        with pytest.raises(ZeroDivisionError):
            async with client.batch_sender(max_messages=2) as sender:
                stored, _, discarded = [await sender.put("orders", b"%d" % number) for number in range(3)]
                raise ZeroDivisionError
        assert stored.result().queue_offset == 7
        assert discarded.cancelled()
        assert [message.body for message in sender.not_stored] == [b"2"]
        assert (sender.sent, len(sends(cluster.brokers[0]))) == (2, 1)


async def test_cancelled_put_is_an_error_of_the_sender(fake_cluster: Running) -> None:
    """The batch of the cancelled put also has messages of other tasks."""

    async with fake_cluster(silent) as cluster, connect(cluster.namesrv.address) as client:
        sender = client.batch_sender(max_messages=2, in_flight=1)
        *_, delivery = [await sender.put("orders", b"%d" % number) for number in range(3)]
        putting = asyncio.ensure_future(sender.put("orders", b"3"))
        await until(lambda: len(sends(cluster.brokers[0])) == 1)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        with pytest.raises(ClientError, match="was cancelled before its batch was sent"):
            await delivery
        server = cluster.brokers[0]
        server.reply(sends(server)[0], 0, {"msgId": "ID", "queueId": "0", "queueOffset": "7"})
        with pytest.raises(ClientError, match="was cancelled before its batch was sent"):
            await sender.flush()
        assert sender.sent == 2


async def test_delivery_that_its_caller_cancels_does_not_end_the_batch(fake_cluster: Running) -> None:
    async with fake_cluster(send_ok) as cluster, connect(cluster.namesrv.address) as client:
        async with client.batch_sender() as sender:
            given_up, kept = await sender.put("orders", b"1"), await sender.put("orders", b"2")
            given_up.cancel()
        assert (sender.sent, kept.result().queue_offset) == (2, 8)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"max_messages": 0}, "max_messages must be at least 1, got 0"),
        ({"max_bytes": 0}, "max_bytes must be at least 1, got 0"),
        ({"in_flight": 0}, "in_flight must be at least 1, got 0"),
        ({"retry_timeout": -1}, "retry_timeout must be at least 0 s, got -1"),
        ({"attempt_timeout": 0}, "attempt_timeout must be more than 0 s, got 0"),
    ],
)
async def test_batch_sender_refuses_a_limit_out_of_range(
    fake_cluster: Running, limits: dict[str, Any], why: str
) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        with pytest.raises(ClientError, match=why):
            client.batch_sender(**limits)


async def test_synchronous_batch_sender_returns_futures(fake_cluster: Running) -> None:
    def use(namesrv: str) -> None:
        with sync.connect(namesrv) as client:
            with client.batch_sender() as sender:
                stored = [sender.put("orders", b"1"), sender.put(Message("orders", b"2"))]
                sender.put_all([BatchItem(Message("orders", b"3")), Message("orders", b"4")])
            assert [one.result(5).queue_offset for one in stored] == [7, 8]
            assert (sender.sent, sender.repeated, sender.not_stored) == (4, 0, [])
            with pytest.raises(ZeroDivisionError), client.batch_sender() as sender:
                discarded = sender.put("orders", b"5")
                raise ZeroDivisionError
            assert discarded.cancelled()

    async with fake_cluster(send_ok) as cluster:
        await asyncio.to_thread(use, cluster.namesrv.address)
