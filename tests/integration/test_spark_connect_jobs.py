"""Sink, `verify` and the program of docs/analyse/spark-deploy.md through Spark Connect.

The client is a process of its own, which starts the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from infra.objects.open import open_store
from tests.integration.page_blocks import blocks
from tests.integration.spark_archive import commit
from tests.integration.spark_connect import create, received, through_connect
from tests.kit.archive.archive_on_paper import ArchiveOnPaper

pytestmark = pytest.mark.servers

Up = Callable[..., AbstractContextManager[Any]]
ROOT = Path(__file__).parents[2]

JOBS = """
import contextlib, io, json, sys
from pyspark.sql import SparkSession, functions as f
from neve.spark.verify import verify
store, home, namesrv, program = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
assert type(spark).__module__.startswith("pyspark.sql.connect")

checked = verify(spark, store=store, topics=["sound"])
found = [checked.objects, checked.rows, [fault.key for _, fault in checked.faults]]

rows = spark.range(0, 100, 1, 3).select(f.concat(f.lit("n"), "id").alias("body"), f.lit("batch").alias("tags"))
rows.write.format("neve").options(namesrv=namesrv, topic="into").mode("append").save()
stream = spark.readStream.format("neve").options(store=store, topic="orders", startingOffsets="earliest").load()
query = stream.select("body", f.lit("stream").alias("tags")).writeStream.format("neve")
query = query.options(namesrv=namesrv, topic="into", checkpointLocation=home + "/checkpoint")
query = query.trigger(availableNow=True).start()
assert query.awaitTermination(200)
assert query.exception() is None
with contextlib.redirect_stdout(io.StringIO()) as out:
    exec(program)
found.append(out.getvalue())
print("found", json.dumps(found))
spark.stop()
"""


@pytest.mark.timeout(600)
def test_sink_and_verify_through_a_connect_server(tmp_path: Path, neve_up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"dir:{tmp_path / 'archive'}"
    sound = ArchiveOnPaper(open_store(url), "a", "sound")
    keys = [commit(sound, number, 10 * number, 10 * number + 9) for number in range(3)]
    (tmp_path / "archive" / keys[1]).write_bytes(b"damaged")
    ArchiveOnPaper(open_store(url), "007", "orders").write(0, 0, 0, 15, hour=1)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SPARK_TESTING", "1")  # The server listens on a free port.
    (program,) = [block for block in blocks("spark-deploy.md") if block.language == "python"]
    text = program.text.replace("dir:/srv/archive", url)
    text = text.replace('SparkSession.builder.remote("sc://HOST:15002").getOrCreate()', "SparkSession.active()")
    with neve_up(tmp_path / "up") as server:
        asyncio.run(create("into", server.namesrv))
        arguments = (url, str(tmp_path), server.namesrv, text)
        objects, rows, faulty, printed = through_connect(JOBS, tmp_path, *arguments, timeout=500)
        sent = asyncio.run(received("into", server.namesrv, 115))
    assert (objects, rows, set(faulty)) == (3, 30, {keys[1]})
    assert printed == program.output
    assert sorted(body for tag, body in sent if tag == "batch") == sorted(f"n{number}" for number in range(100))
    assert len([body for tag, body in sent if tag == "stream"]) == 15
