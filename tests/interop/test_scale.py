"""Add, stop and kill brokers and name servers while a stock Java producer and a group of two consumers are at work.

    ns0, ns1          two name servers; every broker registers with both
    a, b              the brokers at the start
    c                 is added                                        the producer and the group find it
    a                 loses its write permission (mqadmin), is drained, archived and stopped
    b                 is killed and started again
    ns0, then ns1     are killed: the clients use cached routes, then the one that is started again

Every acknowledged message is consumed, no queue has a gap, and the bucket has all messages of all brokers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import jvm
from bench.wire import ROUTE, SUCCESS, Client
from infra.objects import minio
from infra.objects.open import open_store
from neve import archive
from neve import spark as neve_spark
from neve.remoting.body import TopicRouteData, loads_as
from tests.interop.steady import TOPIC, PlacedMessage, Steady, assert_each_offset_once_acknowledged_and_consumed
from tests.kit.clock.waiting import wait_until
from tests.kit.server.apache import mqadmin
from tests.kit.server.neve import Serving, settings_as_options
from tests.kit.server.processes import free_ports

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # The dependency is pyspark's.
]
#: `make soak` tests both client versions with more messages between events, and counts the archive with Spark.
SOAK = bool(os.environ.get("NEVE_SOAK"))
VERSIONS = [jvm.SERVER, jvm.CLIENT_OLD] if SOAK else [jvm.SERVER]
QUEUES = 4
#: The number of messages that must be acknowledged and consumed between two events.
STEP = 300 if SOAK else 30


class NameServer(Serving):
    """A `neve namesrv` that can be killed and started again at its address."""

    def __init__(self, directory: Path) -> None:
        (port,) = free_ports(1)
        settings = {"listenPort": port, "bindAddress": "127.0.0.1", "kvConfigPath": directory / "kv.json"}
        super().__init__(directory, "namesrv", *settings_as_options(settings))
        self.at = f"127.0.0.1:{port}"

    def brokers_of(self, topic: str) -> set[str]:
        """Return the brokers to which the name server routes a producer."""
        with Client(self.at) as client:
            answer = client.invoke(ROUTE, {"topic": topic})
        if answer.code != SUCCESS:
            return set()
        return {each.broker_name for each in loads_as(answer.body, TopicRouteData).queue_datas if each.perm & 2}


class NamedBroker(Serving):
    """A `neve broker` with its own name; several share a bucket."""

    def __init__(self, name: str, directory: Path, namesrvs: str, store: str) -> None:
        self.name = name
        port, admin = free_ports(2)
        self.at = f"127.0.0.1:{port}"
        settings = {
            "brokerName": name, "listenPort": port, "adminPort": admin, "bindAddress": "127.0.0.1",
            "brokerIP1": "127.0.0.1", "namesrvAddr": namesrvs, "storePathRootDir": directory / "data",
            "storeUrl": store, "mappedFileSizeCommitLog": "8m", "registerNameServerPeriod": "10s",
            "archiveMinBytes": 1,
        }  # fmt: skip
        super().__init__(directory, "broker", *settings_as_options(settings))

    def create_topic(self) -> None:
        with Client(self.at) as client:
            client.create_topic(TOPIC, QUEUES)

    def offload(self) -> None:
        """Archive all messages and evict the local copies."""
        self.post("/archive/offload?roll=1&evict=1")


class GrowingCluster:
    def __init__(self, home: Path, store: str) -> None:
        self._home, self.store = home, store
        self.namesrvs = [NameServer(home / f"ns{number}") for number in range(2)]
        self.addresses = ";".join(each.at for each in self.namesrvs)
        self.brokers: dict[str, NamedBroker] = {}

    def add(self, name: str) -> NamedBroker:
        broker = self.brokers[name] = NamedBroker(name, self._home / name, self.addresses, self.store).start()
        broker.create_topic()
        wait_until(lambda: all(name in each.brokers_of(TOPIC) for each in self.namesrvs), f"route to {name}")
        return broker

    def stop(self) -> None:
        for each in (*self.brokers.values(), *self.namesrvs):
            each.stop()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrowingCluster]:
    with minio.running(tmp_path / "minio") as store:
        minio.create_bucket(store, "shared")
        for key, value in store.environment.items():
            monkeypatch.setenv(key, value)
        cluster = GrowingCluster(tmp_path, store.url("shared"))
        try:
            for each in cluster.namesrvs:
                each.start()
            for name in "ab":
                cluster.add(name)
            yield cluster
        finally:
            cluster.stop()


@pytest.mark.parametrize("version", VERSIONS)
def test_acknowledged_messages_survive_added_stopped_and_killed_servers(
    cluster: GrowingCluster, version: str, tmp_path: Path
) -> None:
    first, second = cluster.namesrvs
    with Steady(cluster.addresses, version, tmp_path / "client") as steady:
        send_more(steady, "ab")
        cluster.add("c")
        send_more(steady, "abc")
        scale_in(cluster, steady, tmp_path)
        cluster.brokers["b"].kill()
        send_more(steady, "c")
        cluster.brokers["b"].start()
        send_more(steady, "bc")
        first.kill()
        send_more(steady, "bc")
        second.kill()
        send_more(steady, "bc", 5 * STEP)  # Long enough for clients to request routes more than once.
        first.start()
        # Brokers reconnect to it by themselves, and so does a client that has never used it.
        wait_until(lambda: first.brokers_of(TOPIC) == {"b", "c"}, "the brokers' return to the name server")
        send_more(steady, "bc")
        steady.stop_sending()
        for broker in "abc":
            steady.drained(broker)
        acked, got = list(steady.acked), list(steady.got)
    assert_each_offset_once_acknowledged_and_consumed(acked, got)
    for broker in "bc":
        cluster.brokers[broker].offload()
    assert_archived(cluster.store, acked)


def send_more(steady: Steady, brokers: str, count: int = STEP) -> None:
    steady.send_more(brokers, count)


def scale_in(cluster: GrowingCluster, steady: Steady, home: Path) -> None:
    """Remove a broker like an operator: stop writes, wait for the consumers, archive, stop."""
    leaving = cluster.brokers["a"]
    said = mqadmin(cluster.addresses, "wipeWritePerm", "-b", "a", home=home / "admin")
    assert said.count("OK") == len(cluster.namesrvs), said
    wait_until(lambda: all(each.brokers_of(TOPIC) == {"b", "c"} for each in cluster.namesrvs), "the wiped permission")
    send_more(steady, "bc")  # The producer has a new route by then.
    before = Counter(row.broker for row in steady.acked)["a"]
    send_more(steady, "bc")
    assert Counter(row.broker for row in steady.acked)["a"] == before, "a took messages after its permission went"
    steady.drained("a")
    leaving.offload()
    assert leaving.stop() == 0
    assert all("a" not in each.brokers_of(TOPIC) for each in cluster.namesrvs)
    send_more(steady, "bc")


def assert_archived(store: str, acked: list[PlacedMessage]) -> None:
    """Assert that the journals of three brokers under one prefix form the complete topic, without a running broker."""
    reader = archive.open(open_store(store))
    found = set()
    for broker in reader.catalogs:
        topic = reader.topic(TOPIC, broker)
        for queue in topic.queues():
            for record in topic.read(queue):
                found.add(PlacedMessage(int(record.properties["KEYS"]), broker, queue, record.queue_offset))
    assert set(acked) <= found
    if SOAK:
        assert seen_by_spark(store) == found


def seen_by_spark(store: str) -> set[PlacedMessage]:
    spark = neve_spark.session(store, master="local[2]", conf={"spark.ui.enabled": "false"})
    try:
        rows = neve_spark.read_topic(spark, TOPIC, store=store).collect()
    finally:
        spark.stop()
    return {PlacedMessage(int(row["keys"][0]), row["broker"], row["queue_id"], row["queue_offset"]) for row in rows}
