"""A neve slave archives the messages of an unmodified Apache master, and stock clients read them from the slave.

`make beside-apache` runs this test with 200,000 messages, and counts them with Spark.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow.dataset
import pytest

import neve.archive
from bench import jvm
from bench.wire import PULL, PULL_RETRY_IMMEDIATELY, SUCCESS, Client, pull_ext
from neve import spark as neve_spark
from tests.interop.agent import FLAGS, SOURCES
from tests.interop.apache_master import apache, read, send, slave_of
from tests.interop.promoted import FILE_SIZE, catches_up, loses
from tests.kit.clock.waiting import wait_until
from tests.kit.server.apache import ApacheServer
from tests.kit.server.neve import Serving

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # The dependency is pyspark's.
]
#: The number of small messages from the stock producer; others fill the log's files.
MESSAGES = int(os.environ.get("NEVE_BESIDE_APACHE", "200"))
IS_LARGE = MESSAGES > 10_000
TOPIC, GROUP, QUEUES = "payments", "late_readers", 4
_CHANGE_S = 120.0
_CLIENT_S = 120 + MESSAGES // 200
_QUERY_OFFSET, _DELETE_EXPIRED_LOG = 14, 329


def archiving(master: ApacheServer, directory: Path) -> Serving:
    return slave_of(master, directory, storeUrl=store_of(directory), archiveMinBytes="1", archivePeriod="1s")


def store_of(directory: Path) -> str:
    return f"dir:{directory}/bucket"


def java(master: ApacheServer, main: str, *args: object) -> list[list[str]]:
    home = master.directory / "client"
    home.mkdir(exist_ok=True)
    command = jvm.java(jvm.classes(SOURCES, jvm.SERVER), main, master.namesrv, *map(str, args), home=home, flags=FLAGS)
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CLIENT_S + 60, check=False)
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert lines and lines[-1] == ["DONE"], f"{main} {args}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return [line[1:] for line in lines[:-1]]


def offload(slave: Serving) -> None:
    told = slave.post("/archive/offload?roll=1&evict=1")
    assert not [line for line in told if "error" in line], told


def is_evicted(slave: Serving, below: int) -> bool:
    """Return whether the segment is evicted, which happens once the slave learns that the master has deleted it."""
    offload(slave)
    return first_file(slave.directory) >= below


def first_file(directory: Path) -> int:
    return min(int(path.name) for path in (directory / "store" / "commitlog").iterdir() if path.name.isdigit())


def bytes_of(address: str, queue: int, start: int, end: int) -> bytes:
    """Return the records as pulls return them."""
    found = b""
    with Client(address) as client:
        while start < end:
            answer = client.invoke(PULL, pull_ext("raw_reader", TOPIC, queue, start))
            if answer.code == PULL_RETRY_IMMEDIATELY:
                continue
            assert answer.code == SUCCESS, (queue, start, answer)
            found += answer.body
            start = int(answer.extFields["nextBeginOffset"])
    return found


def fill(master: ApacheServer, files: int) -> None:
    with Client(master.broker) as client:
        for number in range(files * FILE_SIZE // 200_000 + 1):
            client.send(TOPIC, number % QUEUES, b"%08d" % number + bytes(200_000))


def ends_of(master: ApacheServer) -> dict[int, int]:
    with Client(master.broker) as client:
        return {queue: client.bounds(TOPIC, queue)[1] for queue in range(QUEUES)}


@pytest.fixture
def at_another_hour() -> dict[str, str]:
    """Return settings that prevent deletion while the test runs; on request the master keeps only its newest file."""
    return {"fileReservedTime": "0", "deleteWhen": f"{datetime.now().astimezone() + timedelta(hours=12):%H}"}


def test_messages_deleted_by_the_master_are_read_from_slave_and_bucket(
    tmp_path: Path, at_another_hour: dict[str, str]
) -> None:
    with apache(tmp_path / "apache", **at_another_hour) as master, archiving(master, tmp_path / "neve") as slave:
        with Client(master.broker) as client:
            client.create_topic(TOPIC, QUEUES)
        sent = java(master, "Produce", TOPIC, "sync", MESSAGES, "m")
        assert len(sent) == MESSAGES
        fill(master, 2)
        ends, end = ends_of(master), catches_up(master.broker)
        border = end - end % FILE_SIZE
        originals = {queue: bytes_of(master.broker, queue, 0, ends[queue]) for queue in range(QUEUES)}
        wait_until(lambda: slave.metric("neve_archive_safe_below") >= border, "the master's flush", _CHANGE_S)
        offload(slave)
        assert first_file(slave.directory) == 0, "the master has it, and what waits there with it"
        with Client(master.broker) as client:
            client.ask(_DELETE_EXPIRED_LOG, {})
            wait_until(lambda: client.bounds(TOPIC, 0)[0] > 0, "the master drops its oldest files", _CHANGE_S)
        wait_until(lambda: first_file(master.directory) >= border, "all but the newest", _CHANGE_S)
        wait_until(lambda: is_evicted(slave, border), "the local copy goes", _CHANGE_S)
        for queue in range(QUEUES):
            assert bytes_of(slave.broker, queue, 0, ends[queue]) == originals[queue]

        total = sum(ends.values())
        got = java(master, "ReadAt", GROUP, TOPIC, 1, total, _CLIENT_S)
        assert {(int(queue), int(offset)) for queue, offset, _ in got} == {
            (queue, offset) for queue, end in ends.items() for offset in range(end)
        }
        bodies = {(int(queue), int(offset)): base64.b64decode(body) for queue, offset, body in got}
        assert all(bodies[int(queue), int(offset)] == base64.b64decode(body) for _, queue, offset, _, body in sent)
        with Client(master.broker) as client:
            place = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": 0}
            assert client.ask(_QUERY_OFFSET, place).extFields["offset"] == str(ends[0]), "its position is the master's"

        in_bucket = dict(counted(store_of(slave.directory)))
        assert in_bucket.keys() == ends.keys()
        assert all(MESSAGES // QUEUES <= count <= ends[queue] for queue, count in in_bucket.items())
        if IS_LARGE:
            assert by_spark(store_of(slave.directory)) == in_bucket
        assert "Traceback" not in slave.log()


def counted(store: str) -> Iterator[tuple[int, int]]:
    """Return the number of messages by queue, counted by DuckDB after checking that no offset occurs twice."""
    keys = neve.archive.open(store).keys(TOPIC)
    rows = pyarrow.dataset.dataset([f"{store.removeprefix('dir:')}/{key}" for key in keys], format="parquet")  # noqa: F841
    found = duckdb.execute(
        "SELECT queue_id, count(*), count(DISTINCT queue_offset), min(queue_offset), max(queue_offset) "
        "FROM rows GROUP BY 1"
    ).fetchall()
    for queue, count, distinct, first, last in found:
        assert (first, last, distinct) == (0, count - 1, count)
        yield queue, count


def by_spark(store: str) -> dict[int, int]:
    spark = neve_spark.session(store, master="local[2]", conf={"spark.ui.enabled": "false"})
    try:
        rows = neve_spark.read_topic(spark, TOPIC, store=store).groupBy("queue_id").count().collect()
    finally:
        spark.stop()
    return {row["queue_id"]: row["count"] for row in rows}


def test_slave_stops_archiving_when_the_master_lost_archived_messages(tmp_path: Path) -> None:
    with apache(tmp_path / "apache") as master, archiving(master, tmp_path / "neve") as slave:
        with Client(master.broker) as client:
            client.create_topic("orders", 1)
        send(master, 30, 200_000)
        send(master, 10, 200_000)
        end = catches_up(master.broker)
        border = end - end % FILE_SIZE
        assert border == FILE_SIZE
        wait_until(lambda: slave.metric("neve_archive_safe_below") == border, "the master's flush", _CHANGE_S)
        slave.post("/archive/offload?roll=1")
        archived = json.loads(slave.get("/archive/status"))["objects"]
        assert archived > 0
        originals = read(slave.broker, 40)

        master.kill()
        loses(master.directory / "store", FILE_SIZE // 2, FILE_SIZE)
        master.start()
        wait_until(lambda: slave.metric("neve_archive_diverged") == 1, "the slave sees it", _CHANGE_S)
        send(master, 30, 190_000)
        catches_up(master.broker)
        assert read(slave.broker, 30) == read(master.broker, 30)
        assert read(slave.broker, 30) != originals[:30]
        slave.stop()
        slave.start()
        assert slave.metric("neve_archive_diverged") == 1
        assert "the master lost its log above" in slave.get("/readyz")
        assert "the master lost its log above" in json.dumps(slave.post("/archive/offload?roll=1"))
        assert json.loads(slave.get("/archive/status"))["objects"] == archived
        assert "Traceback" not in slave.log()
