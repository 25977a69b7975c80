"""Tests of the order in which `neve produce` sends lines."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from neve.cli.message_lines import Outgoing
from neve.cli.progress import MessageProgress
from neve.cli.sending import How, Sending
from neve.cli.stdout_bytes import StdoutBytes
from neve.client import connect
from neve.record.bodies import decode_batch
from neve.remoting.command import RemotingCommand
from tests.kit.cluster.fake_cluster import Answer, FakeServer, refuse, running, send_ok, sends


class SlowBroker:
    """A broker that answers sends some loop turns later, in reverse order."""

    def __init__(self) -> None:
        self.server: FakeServer | None = None
        self.most = 0
        self._held: list[RemotingCommand] = []

    def __call__(self, request: RemotingCommand) -> Answer:
        if request.code not in (310, 320):
            return 0, {}, b""
        self._held.append(request)
        self.most = max(self.most, len(self._held))
        asyncio.get_running_loop().call_later(0.005, self._answer)
        return None

    def _answer(self) -> None:
        assert self.server is not None
        request = self._held.pop()
        self.server.reply(request, 0, {"msgId": "ID", "queueId": request.ext["e"], "queueOffset": "7"})


def lines_of(server: FakeServer) -> list[int]:
    found: list[int] = []
    for request in sends(server):
        found += (
            [int(body) for _, body, _ in decode_batch(request.body)] if request.code == 320 else [int(request.body)]
        )
    return found


async def produced(client: Any, topic: str, how: How) -> Sending:
    sending = Sending(client, topic, how, receipts=StdoutBytes(), progress=MessageProgress("sent", shown=False))
    for first in range(0, 300, 30):
        for number in range(first, first + 30):
            sending.add(number + 1, Outgoing(b"%d" % number))
        await sending.send()
    await sending.settle()
    return sending


@pytest.mark.parametrize("queue", [None, 0])
async def test_produce_has_one_request_in_flight_per_queue(queue: int | None) -> None:
    """A broker may store concurrent requests in any order."""

    slow = [SlowBroker(), SlowBroker()]
    async with running(*slow) as cluster, connect(cluster.namesrv.address) as client:
        for broker, server in zip(slow, cluster.brokers, strict=True):
            broker.server = server
        sending = await produced(client, "t", How(queue, quiet=True))
        assert sending.stored == 300
        found = [lines_of(server) for server in cluster.brokers]
        assert sorted(found[0] + found[1]) == list(range(300))
        assert [broker.most for broker in slow] == [1, 1], "each broker has one queue"
        for lines in found:
            assert lines == sorted(lines)
            assert len(lines) > 100


async def test_produce_sends_a_line_to_another_broker_if_one_refuses_it() -> None:
    async with running(refuse(2), send_ok) as cluster, connect(cluster.namesrv.address) as client:
        sending = await produced(client, "t", How(quiet=True))
        assert sending.stored == 300
        assert Counter(lines_of(cluster.brokers[1])) == Counter(range(300))


async def test_produce_begins_no_more_batches_at_a_broker_that_failed() -> None:
    """A broker that does not answer would hold each batch for the time of an attempt."""

    async with running(refuse(2), send_ok) as cluster, connect(cluster.namesrv.address) as client:
        await produced(client, "t", How(quiet=True))
        assert len(sends(cluster.brokers[0])) == 1


async def test_produce_begins_batches_again_after_the_pause_of_a_failed_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neve.cli.sending._AVOID_S", 0.0)

    async with running(refuse(2), send_ok) as cluster, connect(cluster.namesrv.address) as client:
        await produced(client, "t", How(quiet=True))
        assert len(sends(cluster.brokers[0])) > 1


async def test_produce_tries_a_third_broker_if_two_refuse_a_line() -> None:
    several = running(refuse(2), refuse(2), send_ok)
    async with several as cluster, connect(cluster.namesrv.address, send_retries=2) as client:
        sending = await produced(client, "t", How(quiet=True))
        assert sending.stored == 300
        assert Counter(lines_of(cluster.brokers[2])) == Counter(range(300))


async def test_produce_to_a_topic_without_a_route_lets_the_producer_choose() -> None:
    async with running(send_ok) as cluster, connect(cluster.namesrv.address) as client:
        cluster.unknown_topics = {"new"}
        sending = await produced(client, "new", How(quiet=True))
        assert sending.stored == 300
        assert lines_of(cluster.brokers[0]) == list(range(300))
