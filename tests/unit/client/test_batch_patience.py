"""A batch that nobody takes is sent again for a while, the same one; what is refused for good is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from neve.client import Message, ToSend, connect
from neve.errors import BrokerError, UnknownOutcome
from neve.remoting.codes import RequestCode
from neve.remoting.command import RemotingCommand
from tests.unit.client.fake_cluster import Answer, FakeCluster, refuse, run, send_ok, sends, silent
from tests.waiting import until

Running = Callable[..., AbstractAsyncContextManager[FakeCluster]]
BUSY, NO_PERMISSION = 2, 16


def test_a_busy_broker_gets_the_same_batch_again_until_it_takes_it(fake_cluster: Running) -> None:
    asked: list[bytes] = []

    def busy_at_first(request: RemotingCommand) -> Answer:
        if request.code == RequestCode.SEND_BATCH_MESSAGE:
            asked.append(bytes(request.body))
        return refuse(BUSY)(request) if len(asked) <= 4 else send_ok(request)

    async def work() -> None:
        async with fake_cluster(busy_at_first) as cluster, connect(cluster.namesrv.address, send_retries=0) as client:
            sender = client.batch_sender()
            await sender.put([ToSend(Message("orders", b"1")), ToSend(Message("orders", b"2"))])
            await sender.flush()
            assert sender.sent == 2
        assert len(asked) == 5
        assert len(set(asked)) == 1

    run(work)


@pytest.mark.parametrize(("code", "patience", "most"), [(NO_PERMISSION, 30, 1), (BUSY, 0.05, 1)])
def test_a_refusal_and_the_end_of_patience_are_told(
    fake_cluster: Running, code: int, patience: float, most: int
) -> None:
    async def work() -> None:
        async with (
            fake_cluster(refuse(code)) as cluster,
            connect(cluster.namesrv.address, send_retries=0) as client,
        ):
            sender = client.batch_sender(patience=patience)
            await sender.put([ToSend(Message("orders", b"1"))])
            with pytest.raises(BrokerError) as told:
                await sender.flush()
            assert told.value.code == code
            assert sender.sent == 0
            assert len(sends(cluster.brokers[0])) == most

    run(work)


def test_tags_and_keys_count_in_the_size_of_a_batch(fake_cluster: Running) -> None:
    async def work() -> None:
        async with fake_cluster(send_ok) as cluster, connect(cluster.namesrv.address) as client:
            sender = client.batch_sender(size=30_000)
            await sender.put([ToSend(Message("orders", b"1", keys=("k" * 20_000,))) for _ in range(3)])
            await sender.put([ToSend(Message("orders", b"1", tags="t" * 20_000)) for _ in range(3)])
            await sender.flush()
            assert len(sends(cluster.brokers[0])) == 6

    run(work)


def test_batch_sender_counts_and_logs_messages_sent_again(
    fake_cluster: Running, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with fake_cluster(silent) as cluster, connect(cluster.namesrv.address, send_retries=0) as client:
            server = cluster.brokers[0]
            sender = client.batch_sender(attempt_timeout=0.2)
            await sender.put([ToSend(Message("orders", b"1")), ToSend(Message("orders", b"2"))])
            flushing = asyncio.ensure_future(sender.flush())
            await until(lambda: len(sends(server)) == 2, "the batch is sent again")
            server.handler = send_ok
            await flushing
            again = len(sends(server)) - 1
            assert again >= 1
            assert (sender.sent, sender.repeated, sender.not_stored) == (2, 2 * again, [])

    run(work)
    (warning, *_) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("sent again, may be stored twice: topic=orders msg_id=")
    assert "cause=no answer from" in warning


def test_batch_sender_waits_longer_for_an_answer_than_a_send(fake_cluster: Running) -> None:
    async def work() -> None:
        async with (
            fake_cluster(silent) as cluster,
            connect(cluster.namesrv.address, attempt_timeout=0.05, timeout=0.1) as client,
        ):
            now = asyncio.get_running_loop().time
            server = cluster.brokers[0]
            sender = client.batch_sender()
            await sender.put([ToSend(Message("orders", b"1"))])
            flushing = asyncio.ensure_future(sender.flush())
            await until(lambda: len(sends(server)) == 1)
            late = now() + 0.3
            await until(lambda: now() > late, "three times as long as a whole send may take")
            (batch,) = sends(server)
            server.reply(batch, 0, {"msgId": "ID", "queueId": "0", "queueOffset": "7"})
            await flushing
            assert (sender.sent, sender.repeated) == (1, 0)

    run(work)


def test_batch_sender_names_messages_that_are_not_stored(fake_cluster: Running) -> None:
    async def work() -> None:
        async with fake_cluster(refuse(NO_PERMISSION)) as cluster, connect(cluster.namesrv.address) as client:
            sender = client.batch_sender(messages=2, in_flight=1)
            several = [Message("orders", b"%d" % number) for number in range(9)]
            with pytest.raises(BrokerError):
                await sender.put(ToSend(message) for message in several)
            assert sorted(message.body for message in sender.not_stored) == [message.body for message in several]
            with pytest.raises(BrokerError):
                await sender.flush()
            assert sorted(message.body for message in sender.not_stored) == [message.body for message in several]

    run(work)


def test_closing_the_client_ends_batches_in_flight(fake_cluster: Running) -> None:
    async def work() -> None:
        async with fake_cluster(silent) as cluster:
            client = connect(cluster.namesrv.address)
            await client.start()
            sender = client.batch_sender()
            await sender.put([ToSend(Message("orders", b"1"))])
            flushing = asyncio.ensure_future(sender.flush())
            await until(lambda: len(sends(cluster.brokers[0])) == 1)
            await client.close()
            with pytest.raises(UnknownOutcome, match="the client ended while messages to orders were on their way"):
                await flushing
            assert [message.body for message in sender.not_stored] == [b"1"]

    run(work)
