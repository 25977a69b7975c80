"""Stock clients, 5.3.3 and 4.9.8, on messages that only MinIO has: what they see is what they saw while it was local.

For each version one broker: topics are filled and consumed hot, then archived and evicted; every test reads cold, with
the archive forced to answer.
"""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest

from bench import jvm
from bench.servers import NeveServer, wait_until
from bench.wire import Client
from infra import minio
from tests.interop.agent import Agent, Got, Sent

pytestmark = pytest.mark.servers
SETTINGS = {
    "archiveMinBytes": "1",
    "enablePropertyFilter": "true",
    "mappedFileSizeCommitLog": "8m",
    "tieredStorageLevel": "FORCE",
}
COUNT = 60
PAIR_QUEUES, PAIR_COUNT = 10, 800
FOREVER = 1 << 60
DEAD = "%DLQ%g_dead"


@dataclass
class Cluster:
    """A broker whose archive is in MinIO, clients of one version, and what they saw before anything was archived."""

    server: NeveServer
    agent: Agent
    hot: dict[str, list[Got]] = field(default_factory=dict)

    def make_topic(self, name: str, queues: int = 4) -> None:
        with Client(self.server.broker) as broker:
            broker.create_topic(name, queues)

    def consumed_hot(self, topic: str, count: int) -> list[Got]:
        self.hot[topic] = self.agent.push(f"hot_{len(self.hot)}", topic, count)
        assert len(self.hot[topic]) == count
        return self.hot[topic]

    def offload(self) -> list[dict[str, object]]:
        """Everything into the archive, and the local segments away: `neve archive offload --roll --evict`."""
        request = urllib.request.Request(f"http://{self.server.admin}/archive/offload?roll=1&evict=1", method="POST")
        with urllib.request.urlopen(request, timeout=120) as answer:
            return [json.loads(line) for line in answer.read().splitlines() if line.strip()]

    def offload_all(self) -> None:
        """Returns once nothing that is in the log now is local: what waits for its time may keep it there a while."""
        written = self.segments()
        wait_until(lambda: not self.offload_leaves(written), "the eviction of all", step=0.5)

    def offload_leaves(self, segments: set[str]) -> set[str]:
        """Those of the segments that are still local after another offload."""
        self.offload()
        return segments & self.segments()

    def segments(self) -> set[str]:
        """Commit log files that hold something; after a roll there may be none."""
        files = (self.server.directory / "data").rglob("commitlog/*")
        return {file.name for file in files if file.name.isdigit() and file.read_bytes()[:64].strip(b"\0")}

    def cold_reads(self) -> float:
        with urllib.request.urlopen(f"http://{self.server.admin}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("neve_cold_reads"))


@pytest.fixture(scope="module", params=[jvm.SERVER, jvm.CLIENT_OLD])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("cold")
    with minio.running(home / "minio") as store, pytest.MonkeyPatch.context() as patch:
        minio.create_bucket(store, "cold")
        for key, value in store.environment.items():
            patch.setenv(key, value)
        server = NeveServer(home / "neve", store=store.url("cold"), settings=SETTINGS)
        with server, Agent(server.namesrv, request.param, home / "agent") as agent:
            cluster = Cluster(server, agent)
            fill(cluster)
            cluster.offload_all()
            yield cluster


def fill(cluster: Cluster) -> None:
    """One topic for each way to send, consumed once while it is local; one group whose messages all die."""
    agent = cluster.agent
    for topic, mode, count in (("plain", "plain", COUNT), ("batch", "batch", COUNT), ("ordered", "queued", COUNT)):
        cluster.make_topic(topic)
        assert_arrived(agent.produce(mode, topic, count, topic), cluster.consumed_hot(topic, count))
    cluster.make_topic("paid")
    committed = agent.produce("transaction", "paid", COUNT, "paid")
    assert sorted(got.key for got in cluster.consumed_hot("paid", len(committed))) == sorted(s.key for s in committed)
    cluster.make_topic("later")
    delayed = agent.produce("level 1", "later", 8, "later")
    assert sorted(got.key for got in cluster.consumed_hot("later", len(delayed))) == sorted(s.key for s in delayed)
    cluster.make_topic("wide", PAIR_QUEUES)
    agent.produce("queued", "wide", PAIR_COUNT, "wide")
    cluster.make_topic("doomed")
    agent.produce("plain", "doomed", 6, "doomed")
    agent.push("g_dead", "doomed", 12, mode="fail 9 dead")
    cluster.consumed_hot(DEAD, 6)


def assert_arrived(sent: Iterable[Sent], got: Iterable[Got]) -> None:
    places = Counter((one.queue, one.offset, one.key, one.body) for one in sent)
    assert Counter((one.queue, one.offset, one.key, one.body) for one in got) == places


def assert_same(got: Iterable[Got], expected: Iterable[Got]) -> None:
    """Bit for bit what was consumed hot: once each, with ids, times, hosts and properties."""
    assert sorted(got) == sorted(expected)


@pytest.mark.parametrize("topic", ["plain", "batch", "ordered", "paid", "later", DEAD])
def test_cold_messages_are_the_hot_ones(cluster: Cluster, topic: str) -> None:
    before = cluster.cold_reads()
    assert_same(cluster.agent.push(f"cold_{topic[-4:]}", topic, len(cluster.hot[topic])), cluster.hot[topic])
    assert cluster.cold_reads() > before


def test_orderly_consumption_goes_on_over_the_border_of_the_archive(cluster: Cluster) -> None:
    cluster.make_topic("border")
    first = cluster.agent.produce("queued", "border", COUNT, "first")
    cluster.offload_all()
    second = cluster.agent.produce("queued", "border", COUNT, "second")
    got = cluster.agent.push("g_border", "border", 2 * COUNT, mode="orderly")
    assert_arrived(first + second, got)
    for queue in range(4):
        offsets = [one.offset for one in got if one.queue == queue]
        assert offsets == list(range(len(offsets))), f"queue {queue}"


def test_filters_select_the_same_cold(cluster: Cluster) -> None:
    odd = [one for one in cluster.hot["plain"] if one.value_of("TAGS") == "odd"]
    assert_same(cluster.agent.push("g_tag", "plain", len(odd), expression="odd || none"), odd)
    red = [one for one in cluster.hot["batch"] if one.value_of("colour") == "red" and int(one.value_of("number")) > 20]
    expression = "colour = 'red' AND number > 20 AND TAGS IS NOT NULL"
    assert_same(cluster.agent.push("g_sql", "batch", len(red), expression=expression, mode="sql"), red)


def test_broadcast_consumer_gets_all_cold(cluster: Cluster) -> None:
    got = cluster.agent.push("g_broadcast", "plain", COUNT, mode="broadcast")
    assert_same(got, cluster.hot["plain"])


def test_lite_pull_seeks_to_a_cold_offset(cluster: Cluster) -> None:
    wanted = [one for one in cluster.hot["ordered"] if one.queue == 2 and one.offset >= 5]
    assert_same(cluster.agent.lite("g_lite", "ordered", 2, 5, len(wanted)), wanted)


def test_refused_cold_messages_are_retried_die_and_are_read_cold_as_dead_letters(cluster: Cluster) -> None:
    """The offset in the consumer's refusal is that of an evicted record."""
    got = cluster.agent.push("g_fail", "plain", 2 * COUNT, mode="fail 9 dead")
    first = [one for one in got if one.retries == 0]
    assert_same(first, cluster.hot["plain"])
    again = [one for one in got if one.retries == 1]
    assert Counter(one.key for one in again) == Counter(one.key for one in first)
    ids = {one.key: one.offset_id for one in first}
    assert all(one.value_of("ORIGIN_MESSAGE_ID") == ids[one.key] for one in again)
    dead = cluster.agent.push("g_mourner", "%DLQ%g_fail", COUNT)
    assert {one.key: one.body for one in dead} == {one.key: one.body for one in first}
    cluster.offload_all()
    assert_same(cluster.agent.push("g_digger", "%DLQ%g_fail", COUNT), dead)


def test_cold_messages_are_found_by_key_id_offset_and_time(cluster: Cluster) -> None:
    agent, plain = cluster.agent, cluster.hot["plain"]
    one = plain[17]
    assert [found.body for found in agent.by_key("plain", one.key, 32, 0, FOREVER)] == [one.body]
    for message_id in (one.offset_id, one.unique_id):
        found = agent.view("plain", message_id)
        assert (found.place, found.stored, found.properties, found.body) == (
            one.place, one.stored, one.properties, one.body,
        )  # fmt: skip
    assert one.unique_id in agent.admin("queryMsgByKey", "-t", "plain", "-k", one.key)
    assert f"{one.offset}" in agent.admin("queryMsgByUniqueKey", "-t", "plain", "-i", one.unique_id)
    topic = ["-t", "plain"] if agent.version == jvm.SERVER else []  # 4.x knows no such option
    assert one.key in agent.admin("queryMsgById", "-i", one.offset_id, *topic)
    place = ["-b", "broker-a", "-i", str(one.queue), "-o", str(one.offset)]
    assert one.key in agent.admin("queryMsgByOffset", "-t", "plain", *place)
    for queue in range(4):
        rows = sorted((each.offset, each.stored) for each in plain if each.queue == queue)
        for offset, stored in rows:
            first = min(other for other, time in rows if time == stored)
            assert agent.offset_at("plain", queue, stored) == first, (queue, offset)


def test_group_reset_to_a_cold_time_goes_on_from_there(cluster: Cluster) -> None:
    agent, plain = cluster.agent, cluster.hot["plain"]
    group = "g_reset"
    assert len(agent.push(group, "plain", COUNT)) == COUNT
    times = sorted(one.stored for one in plain)
    since = times[COUNT // 2]
    wanted = [one for one in plain if one.stored >= since]
    said = agent.admin("resetOffsetByTime", "-g", group, "-t", "plain", "-s", since, "-f", "true")
    assert "#offset" in said or "rollback" in said.lower(), said
    assert_same(agent.push(group, "plain", len(wanted)), wanted)


def test_group_that_changes_in_a_cold_replay_loses_nothing(cluster: Cluster) -> None:
    """Ten queues, two members: the second joins at a quarter, the first leaves at three. What it held may repeat."""
    got, second = cluster.agent.pair("g_pair", "wide", PAIR_COUNT)
    assert 0 < second < len(got)
    offsets = {queue: {one.offset for one in got if one.queue == queue} for queue in range(PAIR_QUEUES)}
    assert offsets == {queue: set(range(PAIR_COUNT // PAIR_QUEUES)) for queue in range(PAIR_QUEUES)}
    by_place: dict[tuple[str, int, int], set[Got]] = {}
    for one in got:
        by_place.setdefault(one.place, set()).add(one)
    assert all(len(seen) == 1 for seen in by_place.values())


@pytest.mark.parametrize("cluster", [jvm.SERVER], indirect=True)
def test_waiting_messages_come_while_what_was_before_them_is_in_the_archive_only(cluster: Cluster) -> None:
    """A delay level and a timer: what waits keeps its segment; once delivered, it goes and is read cold."""
    cluster.make_topic("waiting")
    sent = [
        one for mode in ("level 3", "timer 9000") for one in cluster.agent.produce(mode, "waiting", 8, f"w{mode[0]}")
    ]
    written = cluster.segments()
    assert cluster.offload_leaves(written), "nothing waits: the messages were delivered at once"
    hot = cluster.agent.push("g_waiting", "waiting", len(sent))
    assert {one.key: one.body for one in hot} == {one.key: one.body for one in sent}
    cluster.offload_all()
    assert_same(cluster.agent.push("g_waited", "waiting", len(sent)), hot)
