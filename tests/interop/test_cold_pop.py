"""Pop calls of the stock client on messages that are evicted to MinIO while they are in flight.

A receipt handle stays valid after the eviction of its message. Unacknowledged messages are redelivered from the
archive, also if the retried message was itself evicted.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bench import jvm
from tests.interop.agent import Conversation
from tests.interop.cold_cluster import ColdCluster, running

pytestmark = pytest.mark.servers
SOURCES = Path(__file__).parent / "java5"  # 4.x does not have pop.
GROUP, TOPIC, COUNT = "workers", "jobs", 20
LONG_MS, SHORT_MS, POLL_MS = 120_000, 1_000, 15_000


class ColdMessage(NamedTuple):
    """A message with its receipt handle."""

    topic: str
    queue: int
    offset: int
    retries: int
    key: str
    born: str
    unique_id: str
    handle: str
    body: bytes

    def is_again(self, first: ColdMessage, retries: int) -> bool:
        """Return whether `other` is the same message, delivered once more."""
        same = (self.topic, self.key, self.born, self.unique_id, self.body)
        return same == (first.topic, first.key, first.born, first.unique_id, first.body) and self.retries == retries


class PopClient(Conversation):
    def __init__(self, cluster: ColdCluster, home: Path) -> None:
        server = cluster.server
        super().__init__(
            "Pop", server.namesrv, "broker-a", server.broker, sources=SOURCES, version=jvm.SERVER, home=home
        )

    def pop(self, count: int, *, poll_ms: int = POLL_MS) -> list[ColdMessage]:
        """Pop repeatedly until there are `count` messages, or until a pop finds none within its poll time."""
        found: list[ColdMessage] = []
        while len(found) < count:
            rows = self.ask("pop", GROUP, TOPIC, count - len(found), LONG_MS, poll_ms)
            if not rows:
                break
            found += [
                ColdMessage(
                    topic, int(queue), int(offset), int(retries), key, born, unique_id, handle, base64.b64decode(body)
                )
                for _, topic, queue, offset, retries, key, born, unique_id, handle, body in rows
            ]
        return found

    def ack(self, *messages: ColdMessage) -> None:
        for message in messages:
            assert self.ask("ack", GROUP, TOPIC, message.handle) == [["ACKED", "OK"]]

    def let_come_again(self, *messages: ColdMessage) -> None:
        for message in messages:
            ((_, status, handle),) = self.ask("hide", GROUP, TOPIC, message.handle, SHORT_MS)
            assert status == "OK"
            assert handle != message.handle


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColdCluster]:
    with running(tmp_path_factory.mktemp("pop"), jvm.SERVER) as cluster:
        yield cluster


def test_evicted_popped_messages_are_acknowledged_or_redelivered(cluster: ColdCluster, tmp_path: Path) -> None:
    cluster.make_topic(TOPIC)
    sent = {one.key: one.body for one in cluster.agent.produce("plain", TOPIC, COUNT, "job")}
    with PopClient(cluster, tmp_path) as client:
        out = client.pop(8)
        assert len(out) == 8
        client.ack(*out[:2])
        cluster.offload_all()
        client.ack(*out[2:4])
        rest = client.pop(COUNT - 8)
        assert {one.key: one.body for one in (*out, *rest)} == sent
        reads = cluster.cold_reads()
        client.let_come_again(*out[4:7])  # The eighth message stays in flight.
        again = {one.key: one for one in client.pop(3)}
        assert sorted(again) == sorted(one.key for one in out[4:7])
        assert all(again[one.key].is_again(one, 1) for one in out[4:7])
        assert cluster.cold_reads() > reads
        client.ack(*rest)
        assert_retried_message_comes_again_out_of_the_archive(cluster, client, [again[one.key] for one in out[4:7]])
        assert client.pop(1, poll_ms=SHORT_MS) == []


def assert_retried_message_comes_again_out_of_the_archive(
    cluster: ColdCluster, client: PopClient, again: list[ColdMessage]
) -> None:
    """Assert redelivery of an archived retry: its record is in the group's pop-retry topic."""
    cluster.offload_all()
    client.ack(*again[:2])
    client.let_come_again(again[2])
    (third,) = client.pop(1)
    assert third.is_again(again[2], 2)
    client.ack(third)
