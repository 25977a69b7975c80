"""Stock Java clients, 5.3.3 and 4.9.8, against `neve up`; the expectations follow Apache's own clients."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench import jvm
from bench.wire import ROUTE, SUCCESS, Client
from infra.objects import minio
from tests.interop.agent import FLAGS, StockAgent
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NEVE, NeveServer
from tests.kit.wire.admin_port import post_request

pytestmark = pytest.mark.servers
SOURCES = Path(__file__).parent / "java"
VERSIONS = [jvm.SERVER, jvm.CLIENT_OLD]
FAST = {"archiveMinBytes": "1"}
QUEUES = 4
#: A client ends as soon as it has its messages, but the machine may be busy.
TAKE_S = 120
END_S = TAKE_S + 60


@dataclass(frozen=True, slots=True)
class SentLine:
    status: str
    queue: int
    offset: int
    unique_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class ReceivedLine:
    queue: int
    offset: int
    retries: int
    flag: int
    tags: str
    keys: str
    colour: str
    unique_id: str
    body: bytes


class Clients:
    """Java clients of one version, each in its own process."""

    def __init__(self, namesrv: str, version: str, home: Path) -> None:
        self.namesrv, self.version, self.home = namesrv, version, home
        home.mkdir(parents=True, exist_ok=True)

    def _lines(self, main: str, *args: object) -> list[list[str]]:
        class_path = jvm.classes(SOURCES, self.version)
        command = jvm.java(class_path, main, self.namesrv, *map(str, args), home=self.home, flags=FLAGS)
        done = subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)
        lines = [line.split("\t") for line in done.stdout.splitlines()]
        assert lines and lines[-1] == ["DONE"], f"{main} {args}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        assert not [line for line in lines if line[0] == "FAILED"], lines
        return lines

    def produce(self, topic: str, mode: str, count: int, prefix: str = "m") -> list[SentLine]:
        rows = [line[1:] for line in self._lines("Produce", topic, mode, count, prefix) if line[0] == "SENT"]
        return [SentLine(s, int(q), int(o), uid, base64.b64decode(body)) for s, q, o, uid, body in rows]

    def consume(
        self, group: str, topic: str, count: int, *, expression: str = "*", mode: str = "concurrent"
    ) -> list[ReceivedLine]:
        lines = self._lines("Consume", group, topic, expression, mode, count, TAKE_S)
        return [_got(line[1:]) for line in lines if line[0] == "GOT"]


def _got(row: list[str]) -> ReceivedLine:
    queue, offset, retries, flag, tags, keys, colour, unique_id, body = row
    return ReceivedLine(
        int(queue), int(offset), int(retries), int(flag), tags, keys, colour, unique_id, base64.b64decode(body)
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NeveServer]:
    with NeveServer(tmp_path_factory.mktemp("neve"), settings=FAST) as running:
        yield running


@pytest.fixture(params=VERSIONS)
def clients(request: pytest.FixtureRequest, server: NeveServer, tmp_path: Path) -> Clients:
    return Clients(server.namesrv, request.param, tmp_path)


@pytest.fixture
def topic(server: NeveServer, request: pytest.FixtureRequest, clients: Clients) -> str:
    """Create a topic of four queues for this test and its parameters."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", request.node.name).strip("_")
    make_topic(server, name)
    return name


def make_topic(server: NeveServer, name: str) -> None:
    """Create a topic; return once the name server routes clients to it."""
    with Client(server.broker) as broker, Client(server.namesrv) as namesrv:
        broker.create_topic(name, QUEUES)
        wait_until(lambda: namesrv.invoke(ROUTE, {"topic": name}).code == SUCCESS, f"route of {name}")


def assert_same(sent: list[SentLine], got: list[ReceivedLine], *, ids: bool = True) -> None:
    """Assert that the received messages are the acknowledged ones: queue, offset, id and bytes."""
    assert Counter((s.queue, s.offset, s.body) for s in sent) == Counter((g.queue, g.offset, g.body) for g in got)
    if ids:
        assert {(s.body, s.unique_id) for s in sent} == {(g.body, g.unique_id) for g in got}


def assert_dense(sent: list[SentLine]) -> None:
    offsets: dict[int, list[int]] = defaultdict(list)
    for one in sent:
        offsets[one.queue].append(one.offset)
    for queue, given in offsets.items():
        assert sorted(given) == list(range(len(given))), f"queue {queue}"


@pytest.mark.parametrize("mode", ["sync", "async", "batch"])
def test_sent_messages_are_consumed_unchanged(clients: Clients, topic: str, mode: str) -> None:
    sent = clients.produce(topic, mode, 40)
    assert {s.status for s in sent} == {"SEND_OK"}
    assert_dense(sent)
    # Apache's own broker also assigns the batch's id to each message of a 5.x batch.
    assert_same(sent, clients.consume(f"g_{topic}", topic, 40), ids=mode != "batch")


def test_oneway_messages_are_consumed(clients: Clients, topic: str) -> None:
    assert clients.produce(topic, "oneway", 40) == []
    got = clients.consume(f"g_{topic}", topic, 40)
    assert {g.keys for g in got} == {f"m-key-{i}" for i in range(40)}


def test_tag_filter_selects_messages_with_their_properties(clients: Clients, topic: str) -> None:
    clients.produce(topic, "sync", 40)
    got = clients.consume(f"g_{topic}", topic, 20, expression="odd || none")
    by_flag = {g.flag: g for g in got}
    assert sorted(by_flag) == list(range(1, 40, 2))
    for flag, message in by_flag.items():
        assert (message.tags, message.keys) == ("odd", f"m-key-{flag}")
        assert message.colour == ("red" if flag % 3 == 0 else "blue")


def test_message_is_redelivered_after_reconsume_later(clients: Clients, topic: str) -> None:
    sent = clients.produce(topic, "sync", 6)
    got = clients.consume(f"g_{topic}", topic, 12, mode="retry")
    assert_same(sent, [g for g in got if g.retries == 0])
    assert Counter(g.body for g in got if g.retries == 1) == Counter(s.body for s in sent)


def test_orderly_consumer_sees_each_queue_in_order(clients: Clients, topic: str) -> None:
    sent = clients.produce(topic, "queued", 60)
    got = clients.consume(f"g_{topic}", topic, 60, mode="orderly")
    assert_same(sent, got)
    for queue in {g.queue for g in got}:
        offsets = [g.offset for g in got if g.queue == queue]
        assert offsets == sorted(offsets), f"queue {queue}"


def test_group_resumes_where_it_stopped(clients: Clients, topic: str) -> None:
    first = clients.produce(topic, "sync", 20, "first")
    assert_same(first, clients.consume(f"g_{topic}", topic, 20))
    second = clients.produce(topic, "sync", 20, "second")
    assert_same(second, clients.consume(f"g_{topic}", topic, 20))


@pytest.mark.parametrize("version", VERSIONS)
def test_mqadmin_manages_topics_and_lists_the_cluster(server: NeveServer, tmp_path: Path, version: str) -> None:
    """Each version creates its own topic, and finds it, its queues and the broker."""
    name = f"admin_{version.replace('.', '_')}"
    attributes = ["-a", "+reserve.time=720"] if version == jvm.SERVER else []  # 4.x does not have attributes.
    with StockAgent(server.namesrv, version, tmp_path / "admin") as agent:
        made = agent.admin("updateTopic", "-c", "DefaultCluster", "-t", name, "-r", "4", "-w", "4", *attributes)
        assert "success" in made, made
        assert name in agent.admin("topicList").split()
        route = agent.admin("topicRoute", "-t", name)
        assert server.broker in route, route
        clusters = agent.admin("clusterList")
    assert "DefaultCluster" in clusters, clusters
    assert server.broker in clusters, clusters
    if version == jvm.SERVER:
        assert_ttl_of_30_days(server, name)


def assert_ttl_of_30_days(server: NeveServer, topic: str) -> None:
    """Assert that `neve topic ttl` reads the hours that the stock tool wrote into the topic's attributes."""
    command = [NEVE, "topic", "ttl", "show", topic, "--namesrv", server.namesrv]
    ttl = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ttl.returncode == 0, ttl.stderr
    assert "30d" in ttl.stdout, ttl.stdout


def offload(server: NeveServer) -> list[dict[str, object]]:
    """Archive all messages and evict the local segments, like `neve archive offload --roll --evict`."""
    request = post_request(f"http://{server.admin}/archive/offload?roll=1&evict=1")
    with urllib.request.urlopen(request, timeout=120) as answer:
        return [json.loads(line) for line in answer.read().splitlines() if line.strip()]


@pytest.mark.parametrize("version", VERSIONS)
def test_push_consumer_crosses_from_minio_to_local(
    tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the topic is only in the bucket and half on disk; a new group receives all of it, byte for byte."""
    with minio.running(tmp_path / "minio") as store:
        minio.create_bucket(store, "interop")
        for key, value in store.environment.items():
            monkeypatch.setenv(key, value)
        with NeveServer(tmp_path / "neve", store=store.url("interop"), settings=FAST) as server:
            clients = Clients(server.namesrv, version, tmp_path / "client")
            make_topic(server, "boundary")
            cold = clients.produce("boundary", "batch", 40, "cold")
            report = offload(server)
            assert not _local_segments_before(server, report), report
            hot = clients.produce("boundary", "sync", 40, "hot")
            got = clients.consume("g_boundary", "boundary", 80)
            assert_same(cold + hot, got, ids=False)


def _local_segments_before(server: NeveServer, report: list[dict[str, object]]) -> list[Path]:
    """Return the local commit log files from offset 0 on; there are none after an eviction."""
    assert report, "the offload said nothing"
    return list((server.directory / "data").rglob(f"commitlog/{0:020d}"))
