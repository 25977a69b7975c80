"""`format("neve")` as a sink on a real Spark and a real broker: columns, refusals, and killed streams."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neve import spark as neve_spark
from neve.client import Message, connect
from neve.client.send.queue_selector import select_by_hash
from tests.client_conformance.conftest import create_topic
from tests.kit.clock.waiting import until, wait_until
from tests.kit.server.processes import Processes

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    conf = {"spark.ui.enabled": "false", "spark.log.level": "OFF", "spark.sql.shuffle.partitions": "1"}
    session = neve_spark.session(master="local[2]", conf=conf)
    yield session
    session.stop()


@pytest.fixture
def topic(namesrv: str) -> str:
    name = f"t{uuid.uuid4().hex[:10]}"

    async def make() -> None:
        async with connect(namesrv) as client:
            await create_topic(client, name, 4)

    asyncio.run(make())
    return name


def messages_of(namesrv: str, topic: str) -> list[Message]:
    async def read() -> list[Message]:
        async with connect(namesrv) as client:
            return [message async for message in client.reader(topic)]

    return asyncio.run(read())


def written(frame: Any, namesrv: str, **options: str) -> None:
    frame.write.format("neve").options(namesrv=namesrv, **options).mode("append").save()


def test_rows_become_messages_with_all_their_columns(spark: Any, namesrv: str, topic: str) -> None:
    frame = spark.range(0, 2_000, 1, 4).selectExpr(
        "to_json(struct(id)) AS body",
        "concat('T', id % 3) AS tag",
        "array(concat('k', id)) AS keys",
        "map('colour', 'red') AS properties",
        "concat('order-', id % 7) AS order_key",
    )
    written(frame, namesrv, topic=topic)
    found = messages_of(namesrv, topic)
    assert sorted(message.body for message in found) == sorted(f'{{"id":{n}}}'.encode() for n in range(2_000))
    queues = sorted({message.queue for message in found if message.queue is not None})
    for message in found:
        number = int(message.body[6:-1])
        assert (message.tags, message.keys) == (f"T{number % 3}", (f"k{number}",))
        assert message.properties["colour"] == "red"
        assert message.queue == select_by_hash(f"order-{number % 7}")(queues, message)
    rows = [message.properties["NEVE_SINK"].split("/") for message in found]
    assert len({tuple(row) for row in rows}) == 2_000
    assert {(job, batch, partition) for job, batch, partition, _ in rows} == {
        (rows[0][0], "0", str(n)) for n in range(4)
    }


def test_invalid_writes_are_rejected_before_the_first_row(spark: Any, namesrv: str, topic: str) -> None:
    frame = spark.range(10).selectExpr("cast(id AS STRING) AS body")
    for other, options, why in (
        (frame, {"topic": topic + "x"}, f"topic {topic}x does not exist: neve topic create"),
        (frame, {"topic": topic, "exactlyOnce": "true"}, "rows are written at least once"),
        (frame.selectExpr("body", "1.5 AS flag"), {"topic": topic}, "column flag has type decimal"),
        (frame.selectExpr("body", "body AS colour"), {"topic": topic}, "column colour is unknown"),
        (frame, {}, "the option topic or the column topic is required"),
        (frame.selectExpr("body", f"'{topic}x' AS topic"), {}, f"topic {topic}x does not exist"),
        (frame.selectExpr("repeat('x', 2000) AS body"), {"topic": topic, "maxMessageSize": "1999"}, "more than 1999"),
    ):
        with pytest.raises(Exception, match=why):
            written(other, namesrv, **options)
    with pytest.raises(Exception, match="allow only appending"):
        frame.write.format("neve").options(namesrv=namesrv, topic=topic).mode("overwrite").save()
    assert messages_of(namesrv, topic) == []


STREAM = """
import sys
from neve.spark import session
source, home, namesrv, topic = sys.argv[1:]
spark = session(master="local[1]", conf={"spark.ui.enabled": "false", "spark.log.level": "OFF"})
frame = spark.readStream.schema("id BIGINT").option("maxFilesPerTrigger", 1).parquet(source)
sink = frame.selectExpr("concat('row ', id) AS body").writeStream.format("neve")
sink = sink.options(namesrv=namesrv, topic=topic, inFlight="1", batchMessages="10").option("checkpointLocation", home)
query = sink.trigger(availableNow=True).start()
query.awaitTermination()
"""

ROWS, FILES = 4_000, 2  # Each file is a batch of the stream, with hundreds of sequential requests.


def test_killed_stream_loses_no_row_and_its_repeats_are_identifiable(
    spark: Any, namesrv: str, topic: str, tmp_path: Path
) -> None:
    """The stream is killed within a batch, and sends its rows again with the same identities."""
    source = tmp_path / "source"
    spark.range(0, ROWS, 1, FILES).write.parquet(str(source))
    script = tmp_path / "stream.py"
    script.write_text(STREAM)
    command = [sys.executable, str(script), str(source), str(tmp_path / "checkpoint"), namesrv, topic]
    killed = Processes(tmp_path / "killed")
    killed.spawn(command, "log", {"PYTHONWARNINGS": "ignore"})
    try:
        asyncio.run(until_stored(namesrv, topic, 100))
    finally:
        killed.kill()
    again = Processes(tmp_path / "again")
    process = again.spawn(command, "log", {"PYTHONWARNINGS": "ignore"})
    try:
        wait_until(lambda: process.poll() is not None, "the end of the stream", 240)
        assert process.returncode == 0, again.log("log")[-3000:]
    finally:
        again.kill()
    found = messages_of(namesrv, topic)
    bodies = Counter(message.body for message in found)
    assert set(bodies) == {f"row {n}".encode() for n in range(ROWS)}
    rows = {message.properties["NEVE_SINK"]: message.body for message in found}
    assert len(rows) == ROWS, "a row that was sent twice says the same twice, and no two rows say the same"
    assert len(found) > ROWS, "nothing was sent twice: the kill came too late to show anything"
    kinds = "topic STRING, broker STRING, queue_id INT, queue_offset BIGINT, body BINARY, properties MAP<STRING,STRING>"
    frame = spark.createDataFrame(
        [(topic, "b", m.queue.queue_id, m.queue_offset, m.body, dict(m.properties)) for m in found if m.queue]
        + [(topic, "b", 99, n, b"another's", None) for n in range(5)],
        kinds,
    )
    once = Counter(bytes(row.body) for row in neve_spark.without_repeats(frame).collect())
    assert once == Counter([*bodies, *[b"another's"] * 5])


def test_without_repeats_by_msg_id_reads_copies_of_a_producer_once(spark: Any) -> None:
    columns = (
        "topic STRING, broker STRING, queue_id INT, queue_offset BIGINT, msg_id STRING, properties MAP<STRING,STRING>"
    )
    rows = [
        ("t", "a", 0, 0, "1", None),
        ("t", "b", 3, 7, "1", None),
        ("other", "a", 0, 0, "1", None),
        ("t", "a", 0, 1, None, None),
        ("t", "a", 0, 2, None, None),
        ("t", "a", 0, 3, "2", {"NEVE_SINK": "q/0/0/0"}),
        ("t", "a", 0, 4, "3", {"NEVE_SINK": "q/0/0/0"}),
    ]
    frame = spark.createDataFrame(rows, columns)
    assert neve_spark.without_repeats(frame).count() == 6
    once = neve_spark.without_repeats(frame, by="msg_id").collect()
    assert Counter((row.topic, row.msg_id in ("2", "3") or row.msg_id) for row in once) == Counter(
        [("t", "1"), ("other", "1"), ("t", None), ("t", None), ("t", True)]
    )
    with pytest.raises(ValueError, match="by must be None or 'msg_id', got 'keys'"):
        neve_spark.without_repeats(frame, by="keys")


async def until_stored(namesrv: str, topic: str, count: int) -> None:
    async with connect(namesrv) as client:

        async def is_stored() -> bool:
            return sum(one.max_offset for one in (await client.admin.topic_stats(topic)).values()) >= count

        await until(is_stored, f"{count} messages of {topic}", 240)
