"""A batch that nobody takes is sent again for a while, the same one; what is refused for good is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from neve.client import Message, ToSend, connect
from neve.errors import BrokerError
from neve.remoting.codes import RequestCode
from neve.remoting.command import RemotingCommand
from tests.unit.client.fake_cluster import Answer, FakeCluster, refuse, run, send_ok, sends

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
