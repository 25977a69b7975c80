"""`format("neve")` with a name server reads archived and unarchived messages as one table and one stream.

`make seam` performs a hundred reads and streams accordingly longer (NEVE_SEAM_READS).
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from neve import spark as neve_spark
from neve.client.send.transaction import LocalTransactionState
from neve.client.sync import connect
from neve.remoting.codes import RequestCode
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NeveServer
from tests.kit.server.requests import ask

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

READS = int(os.environ.get("NEVE_SEAM_READS", "5"))
QUEUES = 4
#: The pause between two sends and two rounds: on a slow machine the amount to read must stay in proportion to its
#: speed.
SEND_PAUSE_S, ROUND_PAUSE_S = 0.1, 0.3
BATCHES_S = 240.0  # For a few batches of a stream on a busy machine.


@pytest.fixture(scope="module")
def neve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NeveServer]:
    settings = {"mappedFileSizeCommitLog": "256k", "messageDelayLevel": "1s 5s"}
    with NeveServer(tmp_path_factory.mktemp("neve"), settings=settings) as server:
        yield server


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    conf = {"spark.ui.enabled": "false", "spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "1"}
    session = neve_spark.session(master="local[2]", conf=conf)
    yield session
    session.stop()


def table(spark: Any, neve: NeveServer, topic: str, **options: str) -> Any:
    told = {"store": neve.store, "subscribe": topic, "namesrv": neve.namesrv, **options}
    return spark.read.format("neve").options(**told).load()


def archive(neve: NeveServer) -> None:
    """Archive all messages and evict as many local ones as possible."""
    assert neve.post("/archive/offload?roll=1&evict=1")[-1]["backlog_bytes"] == 0


def rows_in_order(frame: Any) -> list[Any]:
    return list(frame.orderBy("broker", "queue_id", "queue_offset").collect())


def send_all_shapes(neve: NeveServer, topic: str) -> None:
    """Send messages of all kinds, to queue 0 if the API allows it."""
    with connect(neve.namesrv) as client:
        client.admin.create_topic(topic, 2)
        client.send(topic, "plain", queue=0)
        client.send(topic, "größe", tags="t", keys=["k1", "k2"], properties={"ä": "ö"}, flag=7, queue=0)
        client.send_batch(topic, [f"of a batch {n}" for n in range(5)], queue=0)
        client.send(topic, b"\x00\xff" * 10, delay_level=1, queue=0)
        with client.transaction_producer("tx", check=lambda message: LocalTransactionState.UNKNOWN) as producer:
            producer.send(topic, "committed", execute=lambda message: LocalTransactionState.COMMIT)
            producer.send(topic, "rolled back", execute=lambda message: LocalTransactionState.ROLLBACK)
            producer.send(topic, "not decided", execute=lambda message: LocalTransactionState.UNKNOWN)
    for kind in ("zlib", "lz4", "zstd"):
        with connect(neve.namesrv, compress_type=kind) as client:
            client.send(topic, b"much of the same " * 1000, tags=kind, queue=1)
    ext = {
        "a": "p", "b": topic, "c": "TBW102", "d": "2", "e": "1", "f": "0", "g": "-1", "h": "9",
        "i": "K\x01one\x02K\x01two\x02UNIQ_KEY\x01u\x02KEYS\x01 x  y \x02odd", "j": "3", "k": "false", "m": "false",
    }  # fmt: skip
    (answer,) = ask(neve, (RequestCode.SEND_MESSAGE_V2, ext, b"of a client that keeps no rules"))
    assert answer.code == 0, answer.remark


def test_row_from_a_broker_equals_the_archived_row(spark: Any, neve: NeveServer) -> None:
    send_all_shapes(neve, "shapes")
    with connect(neve.namesrv) as client:
        wait_until(lambda: sum(client.max_offset("shapes", queue) for queue in (0, 1)) == 13, "the delayed one")
    hot = rows_in_order(table(spark, neve, "shapes"))
    assert len(hot) == 13
    assert {row.body_codec for row in hot} == {"none", "zlib", "lz4", "zstd"}

    def archived() -> Any:
        return spark.read.format("neve").options(store=neve.store, subscribePattern="shapes").load()

    assert archived().count() == 0
    archive(neve)
    cold = rows_in_order(archived())
    for one, other in zip(hot, cold, strict=True):
        assert one.asDict() == other.asDict()
    assert rows_in_order(table(spark, neve, "shapes")) == cold, "the broker's are not read a second time"


def test_filters_column_selection_and_sql_cover_both_tiers(spark: Any, neve: NeveServer) -> None:
    with connect(neve.namesrv) as client:
        client.admin.create_topic("filters", 1)
        for first in (0, 10):
            for n in range(first, first + 10):
                client.send("filters", f"{n}", tags="even" if n % 2 == 0 else "odd", keys=[f"key-{n}"], queue=0)
            if not first:
                archive(neve)
    frame = table(spark, neve, "filters", tag="odd")
    assert sorted(row.queue_offset for row in frame.collect()) == list(range(1, 20, 2))
    assert [row.body for row in table(spark, neve, "filters", key="key-15").collect()] == [b"15"]
    middle = '{"filters": {"0": 8}}', '{"filters": {"0": 12}}'
    cut = table(spark, neve, "filters", startingOffsets=middle[0], endingOffsets=middle[1])
    assert sorted(row.queue_offset for row in cut.collect()) == [8, 9, 10, 11]
    stored = {row.queue_offset: row.store_timestamp for row in table(spark, neve, "filters").collect()}
    newest = stored[19]  # Other messages may have the same millisecond.
    at = str(round(newest.timestamp() * 1000))
    before = table(spark, neve, "filters", endingTimestamp=at).where("tags = 'even'").collect()
    assert {row.queue_offset for row in before} == {n for n in range(0, 20, 2) if stored[n] < newest} != set()
    since = table(spark, neve, "filters", startingTimestamp=at).collect()
    assert {row.queue_offset for row in since} == {n for n in range(20) if stored[n] >= newest}
    told = f"store '{neve.store}', namesrv '{neve.namesrv}', topic 'filters'"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW filters USING neve OPTIONS ({told})")
    (found,) = spark.sql("SELECT count(*), max(queue_offset) FROM filters WHERE body > '1'").collect()
    assert tuple(found) == (18, 19)
    few = spark.read.format("neve").schema("broker STRING, body BINARY")
    few = few.options(store=neve.store, subscribe="filters", namesrv=neve.namesrv).load()
    assert Counter(row.broker for row in few.collect()) == {"broker-a": 20}


class OffloadedTraffic:
    """A producer and an archive that offloads and evicts its messages."""

    def __init__(self, neve: NeveServer, topic: str) -> None:
        self._neve, self._topic = neve, topic
        self.sent = [0] * QUEUES  # The number of acknowledged messages by queue.
        self.rounds = 0
        self.problems: list[BaseException] = []
        self._is_over = threading.Event()

    def is_archived(self) -> None:
        """Wait until a round has archived messages of each queue; a problem of the traffic ends the wait."""
        wait_until(lambda: min(self.sent) > 0 or bool(self.problems), "messages in each queue")
        later = self.rounds + 2  # The round in progress may have begun earlier.
        wait_until(lambda: self.rounds >= later or bool(self.problems), "a round of the archive")
        assert not self.problems, self.problems

    def produce(self) -> None:
        with connect(self._neve.namesrv) as client:
            while not self._is_over.is_set():
                for queue in range(QUEUES):
                    result = client.send_batch(self._topic, [b"x" * 100] * 20, queue=queue)
                    assert result.queue_offset == self.sent[queue]
                    self.sent[queue] += 20
                self._is_over.wait(SEND_PAUSE_S)

    def archive(self) -> None:
        while not self._is_over.is_set():
            assert self._neve.post("/archive/offload?roll=1&evict=1")[-1]["failed"] == 0
            self.rounds += 1
            self._is_over.wait(ROUND_PAUSE_S)

    def _kept(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told by who waits for it
            self.problems.append(error)

    @contextmanager
    def log_resume(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._kept, args=(work,)) for work in (self.produce, self.archive)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()
        assert not self.problems, self.problems


def dense(offsets: list[tuple[int, int]]) -> list[int]:
    """Return the number of offsets of each queue after checking that each occurs once and none is missing."""
    ends = []
    for queue in range(QUEUES):
        of_queue = sorted(offset for number, offset in offsets if number == queue)
        assert of_queue == list(range(len(of_queue))), f"queue {queue}"
        ends.append(len(of_queue))
    return ends


def test_batches_during_live_traffic_have_no_gaps(spark: Any, neve: NeveServer) -> None:
    with connect(neve.namesrv) as client:
        client.admin.create_topic("live", QUEUES)
    traffic = OffloadedTraffic(neve, "live")
    mixed = 0
    with traffic.log_resume():
        traffic.is_archived()
        for _ in range(READS):
            before, archived = list(traffic.sent), spark.read.format("neve").options(store=neve.store, topic="live")
            cold = archived.load().count()
            frame = table(spark, neve, "live", minPartitions="2")
            ends = dense([tuple(row) for row in frame.select("queue_id", "queue_offset").collect()])
            assert all(end >= sent for end, sent in zip(ends, before, strict=True)), (before, ends)
            mixed += 0 < cold < sum(ends)
            assert not traffic.problems, traffic.problems
    assert mixed, "some read went over the seam"
    frame = table(spark, neve, "live").select("queue_id", "queue_offset")
    assert dense([tuple(row) for row in frame.collect()]) == traffic.sent
    print(f"\n{READS} reads, {mixed} over the seam, {sum(traffic.sent)} rows in the end, {traffic.rounds} rounds")


def started(spark: Any, neve: NeveServer, home: Path, topic: str, **trigger: Any) -> Any:
    told = {"store": neve.store, "subscribe": topic, "namesrv": neve.namesrv, "startingOffsets": "earliest"}
    told |= {"maxOffsetsPerTrigger": "3000", "consumerGroup": "stream"}
    frame = spark.readStream.format("neve").options(**told).load().select("queue_id", "queue_offset")
    written = frame.writeStream.format("parquet").option("path", f"{home}/table")
    return written.option("checkpointLocation", f"{home}/checkpoint").trigger(**trigger).start()


def is_under_way(query: Any, traffic: OffloadedTraffic) -> bool:
    """Return whether some batches are finished or the query has ended."""
    return len(query.recentProgress) >= 2 or query.exception() is not None or bool(traffic.problems)


def test_stream_during_live_traffic_has_each_row_once_and_no_lag(spark: Any, neve: NeveServer, tmp_path: Path) -> None:
    with connect(neve.namesrv) as client:
        client.admin.create_topic("flow", QUEUES)
    traffic = OffloadedTraffic(neve, "flow")
    with traffic.log_resume():
        traffic.is_archived()
        for _ in range(max(2, READS // 5)):
            query = started(spark, neve, tmp_path, "flow", processingTime="0 seconds")
            try:
                wait_until(partial(is_under_way, query, traffic), "batches of the stream", BATCHES_S)
            finally:
                query.stop()
            assert query.exception() is None, query.exception()
            # Remove the last commit from the checkpoint, as if the driver had died before writing it.
            commits = tmp_path / "checkpoint" / "commits"
            newest = max((one for one in commits.iterdir() if one.name.isdigit()), key=lambda one: int(one.name))
            newest.unlink()
            (commits / f".{newest.name}.crc").unlink(missing_ok=True)
    archive(neve)
    query = started(spark, neve, tmp_path, "flow", availableNow=True)
    assert query.awaitTermination(BATCHES_S)
    assert all(int(one["numInputRows"]) <= 3000 for one in query.recentProgress)
    found = [tuple(row) for row in spark.read.parquet(f"{tmp_path}/table").collect()]
    assert dense(found) == traffic.sent
    with connect(neve.namesrv) as client:
        stats = client.admin.consume_stats("stream", "flow")
    assert [one.consumer_offset for _, one in sorted(stats.items())] == traffic.sent


def test_unreachable_tier_is_an_error(spark: Any, neve: NeveServer) -> None:
    with pytest.raises(Exception, match="no name server is reachable"):
        table(spark, neve, "live", namesrv="127.0.0.1:1").collect()
    with pytest.raises(Exception, match="topic nowhere is at no broker, and not in this archive"):
        table(spark, neve, "nowhere").collect()
    with pytest.raises(Exception, match="is internal to brokers and not for clients"):
        table(spark, neve, "RMQ_SYS_TRANS_HALF_TOPIC").collect()
    with connect(neve.namesrv) as client:
        client.admin.create_topic("closed", 1)
        client.send("closed", "x", queue=0)
        client.admin.create_topic("closed", 1, perm=2)
    with pytest.raises(Exception, match="topic closed at broker broker-a: its permissions do not allow reading"):
        table(spark, neve, "closed").collect()


def test_checkpoint_has_offsets_by_queue(spark: Any, neve: NeveServer, tmp_path: Path) -> None:
    with connect(neve.namesrv) as client:
        client.admin.create_topic("checkpointed", 1)
        client.send_batch("checkpointed", ["a", "b"], queue=0)
    assert started(spark, neve, tmp_path, "checkpointed", availableNow=True).awaitTermination(BATCHES_S)
    newest = max((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda one: int(one.name))
    told = json.loads(newest.read_text().splitlines()[-1])
    assert told["brokers"]["broker-a"]["checkpointed"] == {"0": 2}
