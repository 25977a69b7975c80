"""Brokers and name servers that come, go and die under a stock Java producer and a group of two, at work throughout.

    ns0, ns1          two name servers; every broker registers with both
    a, b              the brokers at the start
    c                 is added                                        the producer and the group find it
    a                 loses its write permission (mqadmin), is drained, archived and stopped
    b                 is killed and started again
    ns0, then ns1     are killed: the clients live on what they know, then on the one that comes back

What was acknowledged is consumed; of each queue every offset; and the bucket has it, whatever broker it was sent to.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import pytest

from bench import jvm
from bench.wire import ROUTE, SUCCESS, Client
from infra import minio
from infra.object_store.open import open_store
from neve import archive
from neve import spark as neve_spark
from neve.remoting.body import TopicRouteData, loads_as
from tests.interop.agent import FLAGS, SOURCES
from tests.servers.apache import mqadmin
from tests.servers.neve import Serving, settings_as_options
from tests.servers.processes import free_ports
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # pyspark's
]
#: `make soak`: both clients, more messages between two events, and Spark on what is left.
SOAK = bool(os.environ.get("NEVE_SOAK"))
VERSIONS = [jvm.SERVER, jvm.CLIENT_OLD] if SOAK else [jvm.SERVER]
TOPIC, QUEUES = "orders", 4
#: Messages that must get through between two events.
STEP = 300 if SOAK else 30
DEADLINE_S = 90


class NameServer(Serving):
    """`neve namesrv`; it may be killed and started again at its address."""

    def __init__(self, directory: Path) -> None:
        (port,) = free_ports(1)
        settings = {"listenPort": port, "bindAddress": "127.0.0.1", "kvConfigPath": directory / "kv.json"}
        super().__init__(directory, "namesrv", *settings_as_options(settings))
        self.at = f"127.0.0.1:{port}"

    def brokers_of(self, topic: str) -> set[str]:
        """Those that the name server would send a producer to."""
        with Client(self.at) as client:
            answer = client.invoke(ROUTE, {"topic": topic})
        if answer.code != SUCCESS:
            return set()
        return {each.broker_name for each in loads_as(answer.body, TopicRouteData).queue_datas if each.perm & 2}


class Broker(Serving):
    """`neve broker` with a name of its own; several share a bucket."""

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
        """Everything into the bucket, and the local copy away."""
        self.post("/archive/offload?roll=1&evict=1")


class Row(NamedTuple):
    """A message and where it is."""

    number: int
    broker: str
    queue: int
    offset: int


class Steady:
    """The Java producer and the two consumers of Steady.java."""

    def __init__(self, namesrvs: str, version: str, home: Path) -> None:
        home.mkdir(parents=True)
        self._log = home / "steady.log"
        command = jvm.java(jvm.classes(SOURCES, version), "Steady", namesrvs, TOPIC, "g_steady", home=home, flags=FLAGS)
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.acked: list[Row] = []
        self.got: list[Row] = []
        self.refused: list[str] = []
        self._said: set[str] = set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, *rest = line.rstrip("\n").split("\t")
            if kind in ("ACK", "GOT"):
                number, broker, queue, offset = rest
                row = Row(int(number), broker, int(queue), int(offset))
                (self.acked if kind == "ACK" else self.got).append(row)
            elif kind == "NACK":
                self.refused.append(line)
            self._said.add(kind)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        def ended_or_holds() -> bool:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            return condition()

        try:
            wait_until(ended_or_holds, what, DEADLINE_S)
        except TimeoutError as late:
            told = (
                f"{Counter(row.broker for row in self.acked)} acknowledged, {Counter(row.broker for row in self.got)}"
            )
            raise AssertionError(f"{late}; {told} consumed; refused: {self.refused[-3:]}") from late

    def go_on(self, brokers: str, count: int = STEP) -> None:
        """Returns when each of the brokers took and gave so many more messages than now."""
        sent, got = Counter(row.broker for row in self.acked), Counter(row.broker for row in self.got)

        def enough() -> bool:
            more = Counter(row.broker for row in self.acked) - sent, Counter(row.broker for row in self.got) - got
            return all(each[broker] >= count for each in more for broker in brokers)

        self.wait(enough, f"{count} more messages through each of {brokers}")

    def drained(self, broker: str) -> None:
        """Returns when all that the broker acknowledged so far was consumed."""
        owed = {row for row in self.acked if row.broker == broker}
        self.wait(lambda: owed <= set(self.got), f"the consumption of all that {broker} has")

    def stop_sending(self) -> None:
        self._tell("stop\n")
        self.wait(lambda: "STOPPED" in self._said, "the end of sending")

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill() if any(exc) else self._process.stdin.close()
        self._process.wait(60)
        self._reader.join()
        self._process.stdout.close()


class Cluster:
    def __init__(self, home: Path, store: str) -> None:
        self._home, self.store = home, store
        self.namesrvs = [NameServer(home / f"ns{number}") for number in range(2)]
        self.addresses = ";".join(each.at for each in self.namesrvs)
        self.brokers: dict[str, Broker] = {}

    def add(self, name: str) -> Broker:
        broker = self.brokers[name] = Broker(name, self._home / name, self.addresses, self.store).start()
        broker.create_topic()
        wait_until(lambda: all(name in each.brokers_of(TOPIC) for each in self.namesrvs), f"route to {name}")
        return broker

    def stop(self) -> None:
        for each in (*self.brokers.values(), *self.namesrvs):
            each.stop()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with minio.running(tmp_path / "minio") as store:
        minio.create_bucket(store, "shared")
        for key, value in store.environment.items():
            monkeypatch.setenv(key, value)
        cluster = Cluster(tmp_path, store.url("shared"))
        try:
            for each in cluster.namesrvs:
                each.start()
            for name in "ab":
                cluster.add(name)
            yield cluster
        finally:
            cluster.stop()


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_acknowledged_is_lost_while_servers_come_and_go(cluster: Cluster, version: str, tmp_path: Path) -> None:
    first, second = cluster.namesrvs
    with Steady(cluster.addresses, version, tmp_path / "client") as steady:
        steady.go_on("ab")
        cluster.add("c")
        steady.go_on("abc")
        scale_in(cluster, steady, tmp_path)
        cluster.brokers["b"].kill()
        steady.go_on("c")
        cluster.brokers["b"].start()
        steady.go_on("bc")
        first.kill()
        steady.go_on("bc")
        second.kill()
        steady.go_on("bc", 5 * STEP)  # long enough to ask for routes more than once
        first.start()
        # Brokers come back to it by themselves, and so does a client that never heard of them.
        wait_until(lambda: first.brokers_of(TOPIC) == {"b", "c"}, "the brokers' return to the name server")
        steady.go_on("bc")
        steady.stop_sending()
        for broker in "abc":
            steady.drained(broker)
        acked, got = list(steady.acked), list(steady.got)
    assert_each_offset_once_acknowledged_and_consumed(acked, got)
    for broker in "bc":
        cluster.brokers[broker].offload()
    assert_archived(cluster.store, acked)


def scale_in(cluster: Cluster, steady: Steady, home: Path) -> None:
    """What an operator does: no more writes, wait for the consumers, archive, stop."""
    leaving = cluster.brokers["a"]
    said = mqadmin(cluster.addresses, "wipeWritePerm", "-b", "a", home=home / "admin")
    assert said.count("OK") == len(cluster.namesrvs), said
    wait_until(lambda: all(each.brokers_of(TOPIC) == {"b", "c"} for each in cluster.namesrvs), "the wiped permission")
    steady.go_on("bc")  # the producer has a new route by then
    before = Counter(row.broker for row in steady.acked)["a"]
    steady.go_on("bc")
    assert Counter(row.broker for row in steady.acked)["a"] == before, "a took messages after its permission went"
    steady.drained("a")
    leaving.offload()
    assert leaving.stop() == 0
    assert all("a" not in each.brokers_of(TOPIC) for each in cluster.namesrvs)
    steady.go_on("bc")


def assert_each_offset_once_acknowledged_and_consumed(acked: list[Row], got: list[Row]) -> None:
    """An offset is one message. A queue was consumed without a gap; a message that came twice has its one place."""
    places: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    for row in (*acked, *got):
        places[row[1:]].add(row.number)
    assert all(len(numbers) == 1 for numbers in places.values())
    consumed: dict[tuple[str, int], set[int]] = defaultdict(set)
    for row in got:
        consumed[row.broker, row.queue].add(row.offset)
    for (broker, queue), offsets in consumed.items():
        assert offsets == set(range(len(offsets))), f"{broker}, queue {queue}"
    assert set(acked) <= set(got)


def assert_archived(store: str, acked: list[Row]) -> None:
    """Three brokers' journals below one prefix add up to the topic, without a broker that is alive."""
    reader = archive.open(open_store(store))
    found = set()
    for broker in reader.catalogs:
        topic = reader.topic(TOPIC, broker)
        for queue in topic.queues():
            for record in topic.read(queue):
                found.add(Row(int(record.properties["KEYS"]), broker, queue, record.queue_offset))
    assert set(acked) <= found
    if SOAK:
        assert seen_by_spark(store) == found


def seen_by_spark(store: str) -> set[Row]:
    spark = neve_spark.session(store, master="local[2]", conf={"spark.ui.enabled": "false"})
    try:
        rows = neve_spark.read_topic(spark, TOPIC, store=store).collect()
    finally:
        spark.stop()
    return {Row(int(row["keys"][0]), row["broker"], row["queue_id"], row["queue_offset"]) for row in rows}
