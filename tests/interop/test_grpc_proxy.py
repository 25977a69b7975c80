"""All flows of official gRPC clients against neve, through Apache's own proxy.

The proxy works as in a RocketMQ cluster: it finds the broker through the name server, registers as producer for the
topics that are sent to, pops, acknowledges with its own receipts, and forwards check-backs to its clients.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infra.net.remoting_server import open_connection
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from tests.interop.proxy import ProxyServer
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NeveServer

pytestmark = pytest.mark.servers
AGENT = Path(__file__).with_name("grpc_agent.py")
SETTINGS = {"transactionCheckInterval": "500", "transactionTimeOut": "500"}
#: The message type of a topic, by the attribute that the proxy reads.
KINDS = {"normal": "NORMAL", "fifo": "FIFO", "delay": "DELAY", "transaction": "TRANSACTION"}
ORDERLY = "orderly"
GROUPS = ["simple", "hidden", "late", "transacted", "pushed", "taken", ORDERLY]
QUEUES = 2
#: The shortest invisible time that the proxy accepts.
INVISIBLE_S = 10
WITHIN_S = 60
_ANSWER_S = 120


class Received(NamedTuple):
    body: str
    attempt: int
    id: str
    tag: str | None
    number: int


class GrpcClient:
    """The official Python client, in its own process."""

    def __init__(self, endpoints: str, home: Path) -> None:
        home.mkdir()
        self._log = home / "agent.log"
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(AGENT), endpoints],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "HOME": str(home)},
            )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put('{"error": "the agent ended"}')

    def ask(self, verb: str, **request: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": verb, **request}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._lines.get(timeout=_ANSWER_S))
        assert "ok" in answer, f"{verb} {request}: {answer}\n{self._log.read_text()[-3000:]}"
        return answer["ok"]

    def receive(self, topic: str, group: str, count: int, *, within: float = WITHIN_S) -> list[Received]:
        rows = self.ask("receive", topic=topic, group=group, count=count, invisible=INVISIBLE_S, within=within)
        return [Received(**row) for row in rows]

    def ack(self, *messages: Received) -> None:
        for message in messages:
            self.ask("ack", number=message.number)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()


class Stack(NamedTuple):
    neve: NeveServer
    client: GrpcClient

    def offset(self, topic: str, group: str) -> int:
        """Return the sum over all queues of the offsets up to which the group has acknowledged without a gap."""
        return self._over_queues(Code.QUERY_CONSUMER_OFFSET, topic, consumerGroup=group)

    def stored(self, topic: str) -> int:
        """Return the number of messages that the topic ever had."""
        return self._over_queues(Code.GET_MAX_OFFSET, topic)

    def _over_queues(self, code: int, topic: str, **more: str) -> int:
        async def ask() -> int:
            host, _, port = self.neve.broker.rpartition(":")
            connection = await open_connection(host, int(port))
            try:
                exts = [{"topic": topic, "queueId": str(number), **more} for number in range(QUEUES)]
                answers = [await connection.invoke(RemotingCommand(code, ext=ext), 30) for ext in exts]
                return sum(int(answer.ext["offset"]) for answer in answers if answer.code == 0)
            finally:
                connection.close()

        return asyncio.run(ask())


async def _prepare(broker: str) -> None:
    host, _, port = broker.rpartition(":")
    connection = await open_connection(host, int(port))
    try:
        for topic, kind in KINDS.items():
            ext = {
                "topic": topic, "defaultTopic": "TBW102", "readQueueNums": str(QUEUES), "perm": "6",
                "writeQueueNums": str(QUEUES), "topicFilterType": "SINGLE_TAG", "order": "false",
                "attributes": f"+message.type={kind}",
            }  # fmt: skip
            answer = await connection.invoke(RemotingCommand(Code.UPDATE_AND_CREATE_TOPIC, ext=ext), 30)
            assert answer.code == 0, answer.remark
        for group in GROUPS:
            body = json.dumps({"groupName": group, "consumeMessageOrderly": group == ORDERLY}).encode()
            command = RemotingCommand(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
            answer = await connection.invoke(command, 30)
            assert answer.code == 0, answer.remark
    finally:
        connection.close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("grpc")
    with NeveServer(root / "neve", settings=SETTINGS) as server:
        asyncio.run(_prepare(server.broker))
        with ProxyServer(root / "proxy", server.namesrv) as proxy:
            client = GrpcClient(proxy.endpoints, root / "client")
            try:
                yield Stack(server, client)
            finally:
                client.close()


def test_sent_messages_are_received_and_acknowledged(stack: Stack) -> None:
    sent = {
        stack.client.ask("send", topic="normal", body=f"order {number}", tag="new")["id"]: f"order {number}"
        for number in range(8)
    }
    got = stack.client.receive("normal", "simple", len(sent))
    assert {message.id: message.body for message in got} == sent
    assert {(message.tag, message.attempt) for message in got} == {("new", 1)}
    stack.client.ack(*got)
    assert stack.offset("normal", "simple") == len(sent)


def test_fifo_messages_are_delivered_and_redelivered_in_order(stack: Stack) -> None:
    for number in range(4):
        stack.client.ask("send", topic="fifo", body=f"step {number}", group="one account")
    first = stack.client.receive("fifo", ORDERLY, 1)
    assert [(message.body, message.attempt) for message in first] == [("step 0", 1)]
    stack.client.ack(*first)
    kept = stack.client.receive("fifo", ORDERLY, 2)
    assert [message.body for message in kept] == ["step 1", "step 2"]
    stack.client.ack(kept[0])
    again = stack.client.receive("fifo", ORDERLY, 2)  # Not before the invisible time is over.
    assert [(message.body, message.attempt) for message in again] == [("step 2", 2), ("step 3", 1)]
    stack.client.ack(*again)
    assert stack.offset("fifo", ORDERLY) == 4


def test_message_is_redelivered_after_a_changed_invisible_time(stack: Stack) -> None:
    sent = stack.client.ask("send", topic="normal", body="hide me")["id"]
    first = next(message for message in stack.client.receive("normal", "hidden", 9) if message.id == sent)
    stack.client.ask("hide", number=first.number, seconds=INVISIBLE_S)
    again: list[Received] = []
    while not any(message.id == sent for message in again):
        again += stack.client.receive("normal", "hidden", 1)
    found = next(message for message in again if message.id == sent)
    assert (found.body, found.attempt) == ("hide me", 2)
    stack.client.ack(found)


def test_delayed_message_is_delivered_when_due_unless_recalled(stack: Stack) -> None:
    when = int(time.time()) + 6
    recalled = stack.client.ask("send", topic="delay", body="recalled", at_ms=when * 1000)
    late = stack.client.ask("send", topic="delay", body="late", at_ms=when * 1000)
    assert stack.client.ask("recall", topic="delay", handle=recalled["recall_handle"])["id"] == recalled["id"]
    got = stack.client.receive("delay", "late", 1)
    assert [(message.id, message.body) for message in got] == [(late["id"], "late")]
    assert int(time.time()) >= when
    stack.client.ack(*got)
    assert stack.stored("delay") == 1  # The recalled message was due before this one.


def test_transactions_end_by_request_or_by_check_back(stack: Stack) -> None:
    for body, end in (
        ("committed", "commit"),
        ("rolled back", "rollback"),
        ("forgotten", ""),
        ("forgotten: roll back", ""),
    ):
        stack.client.ask("transaction", topic="transaction", body=body, end=end)
    got = stack.client.receive("transaction", "transacted", 2)
    assert {message.body for message in got} == {"committed", "forgotten"}
    stack.client.ack(*got)
    wait_until(lambda: set(stack.client.ask("asked")) == {"forgotten", "forgotten: roll back"}, "the check-backs")
    assert stack.stored("transaction") == 2


def test_push_consumer_gets_all_messages_and_failed_ones_again(stack: Stack) -> None:
    bodies = [f"pushed {number}" for number in range(20)]
    for body in bodies:
        stack.client.ask("send", topic="normal", body=body)
    got = stack.client.ask("push", topic="normal", group="pushed", prefix="pushed", count=len(bodies), fails=bodies[3])
    ours = [(row["body"], row["attempt"]) for row in got if row["body"] in bodies]
    assert sorted(ours) == sorted([*((body, 1) for body in bodies), (bodies[3], 2)])
