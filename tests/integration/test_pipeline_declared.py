"""`examples/declared` under `spark-pipelines`: each message counts once although one run is killed.

The commands are those of docs/analyse/pipelines.md. The archive is a bucket, the tables are files.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow.parquet as pq
import pytest

import neve.archive
from infra.objects import minio
from neve.client import connect
from neve.record.bodies import inflate
from neve.spark.jars import pyspark_jars
from tests.integration.page_blocks import blocks, normalized
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NEVE

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1200)]

Up = Callable[..., AbstractContextManager[Any]]
ROOT = Path(__file__).parents[2]
PAGE = blocks("pipelines.md")
TOPIC, INTO = "flights", "flights-by-minute"
TAGS = ("paid", "open", "")
LATE_S, WINDOW_S = 2, 1
RUN_S = 480.0


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the archive's URL; its credentials are in the environment."""
    with minio.running(tmp_path / "minio") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        minio.create_bucket(server, "archive")
        yield server.url("archive", "some%20prefix")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of the project, with the environment of `spark-pipelines` set."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SPARK_TESTING", "1")  # The server listens on a free port.
    return tmp_path / "pipeline"


def project(home: Path, store: str, namesrv: str) -> None:
    """Copy the example as on its page, with places of this test, windows of a second, and batches of 16 messages."""
    run("bash", "-ec", f"cd {ROOT}; {command('cp ', home)}; {command('sed ', home)}")
    file = home / "spark-pipeline.yml"
    text = file.read_text().replace("dir:/var/lib/neve/archive", json.dumps(store)).replace("127.0.0.1:9876", namesrv)
    file.write_text(text.replace("libraries:", '  spark.sql.shuffle.partitions: "2"\nlibraries:'))
    windows = home / "transformations" / "windows.sql"
    text = windows.read_text().replace("10 SECONDS", f"{LATE_S} SECONDS")
    windows.write_text(text.replace("'1 minute'", f"'{WINDOW_S} second'"))
    definitions = home / "transformations" / "clean.py"
    definitions.write_text(definitions.read_text().replace('"1000000"', '"16"'))


def test_declared_pipeline_counts_each_message_once_after_a_kill(
    tmp_path: Path, home: Path, neve_up: Up, store: str
) -> None:
    eager = ("archiveMaxAge=1s", "archivePeriod=1s")
    settings = [word for one in eager for word in ("--set", one)]
    with neve_up(tmp_path / "up", "--store", store, *settings) as server:
        for topic in (TOPIC, INTO):
            run(NEVE, "topic", "create", topic, "--queues", "2", "-n", server.namesrv)
        project(home, store, server.namesrv)
        run(*pipeline("dry-run", home))
        assert not (home / "storage").exists()

        send(server.namesrv, range(30))
        archived(server, store, 31)
        run(*pipeline("run", home))
        assert numbers(home) == list(range(30))

        send(server.namesrv, range(30, 70))
        archived(server, store, 72)
        kill_amid_a_batch(home)

        send(server.namesrv, range(70, 90))
        # A journal entry of its own: if one entry had both queues, a batch could read all of one queue before the
        # other.
        archived(server, store, 93)
        after = time.time() + LATE_S + WINDOW_S + 1
        wait_until(lambda: time.time() > after, "a message that closes all windows before it")
        send(server.namesrv, range(90, 91))
        archived(server, store, 95)
        run(*pipeline("run", home))
        windows = asyncio.run(consume(server.namesrv))

    (listing,) = [block for block in PAGE if block.text.startswith("ls ")]
    assert normalized(run("bash", "-c", command("ls ", home))) == normalized(listing.output)
    rows = sent(store)
    assert numbers(home) == list(range(91))
    assert [row["body"] for row in table(home, "dead")] == [b"no JSON"] * 4
    tags = Counter(tag for tag, _, number in rows if number is not None)
    assert {row["tags"]: row["messages"] for row in table(home, "by_tag")} == tags
    closed = max(at for _, at, _ in rows) - LATE_S * 1000
    expected = Counter(
        (at // 1000, tag) for tag, at, number in rows if number is not None and at // 1000 * 1000 + 1000 <= closed
    )
    assert sum(expected.values()) == 90
    assert windows == expected


def pipeline(verb: str, home: Path) -> list[str]:
    """Return a command of the page, with the commands that set the environment before it."""
    path = f"{pyspark_jars().parent / 'bin'}:{Path(sys.executable).parent}:$PATH"
    return [
        "bash", "-ec",
        f"export PATH={path}; {command('export ', home)}; exec {command(f'spark-pipelines {verb} ', home)}",
    ]  # fmt: skip


def command(begin: str, home: Path) -> str:
    """Return the command of docs/analyse/pipelines.md that begins like this, in a directory of this test."""
    (found,) = [block.text for block in PAGE if block.text.startswith(begin)]
    return found.replace("/srv/shop", str(home))


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def send(namesrv: str, numbers: range) -> None:
    """Send messages, half of them compressed and one with a body that is not JSON."""

    async def all_of_them() -> None:
        async with connect(namesrv, compress_over=64) as client:
            for number in numbers:
                body = json.dumps({"dep_delay": number, "carrier": "x" * (100 if number % 2 else 1)})
                tags = TAGS[number % len(TAGS)] or None
                await client.send(TOPIC, body.encode(), tags=tags, queue=number % 2)
            await client.send(TOPIC, b"no JSON", queue=0)

    asyncio.run(all_of_them())


def archived(server: Any, store: str, rows: int) -> None:
    run(NEVE, "archive", "offload", "--roll", "--admin", server.admin)
    wait_until(lambda: len(sent(store)) == rows, "the archive has all that was sent")


def sent(store: str) -> list[tuple[str | None, int, int | None]]:
    """Return tag, store time and number of each archived message."""
    topic = neve.archive.open(store).topic(TOPIC)
    found: list[tuple[str | None, int, int | None]] = []
    for queue in topic.queues():
        for record in topic.read(queue):
            body = inflate(record.body, record.sys_flag)
            number = None if body == b"no JSON" else int(json.loads(body)["dep_delay"])
            found.append((record.properties.get("TAGS"), record.store_timestamp, number))
    return found


def kill_amid_a_batch(home: Path) -> None:
    """Kill a run and its JVMs after one batch of the clean table was committed and the next has begun."""
    log = (home.parent / "killed.log").open("wb")
    before = len(batches(home, "commits"))
    with log, subprocess.Popen(pipeline("run", home), stdout=log, stderr=log, start_new_session=True) as process:

        def is_amid() -> bool:
            assert process.poll() is None, (home.parent / "killed.log").read_text()[-4000:]
            done, begun = (batches(home, what) for what in ("commits", "offsets"))
            return len(done) > before and max(begun) > max(done)

        wait_until(is_amid, "a run is amid a batch", RUN_S)
        os.killpg(process.pid, signal.SIGKILL)


def batches(home: Path, what: str) -> list[int]:
    return [int(one.name) for one in (home / "storage").rglob(f"clean/*/{what}/*") if one.name.isdigit()]


def table(home: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows of the files in Spark's list of a table, or of all files if it has no list."""
    folder = home / "warehouse" / name
    paths = sorted(set(listed(folder))) if (folder / "_spark_metadata").exists() else sorted(folder.glob("*.parquet"))
    return [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]


def listed(folder: Path) -> Iterator[Path]:
    logs = {file.name: file for file in (folder / "_spark_metadata").iterdir() if not file.name.startswith(".")}
    compact = max((int(name.removesuffix(".compact")) for name in logs if name.endswith(".compact")), default=-1)
    for name, file in logs.items():
        if name == f"{compact}.compact" or (name.isdigit() and int(name) > compact):
            for line in file.read_text().splitlines()[1:]:
                yield Path(unquote(urlsplit(json.loads(line)["path"]).path))


def numbers(home: Path) -> list[int]:
    return sorted(int(row["dep_delay"]) for row in table(home, "clean"))


async def consume(namesrv: str) -> Counter[tuple[int, str | None]]:
    """Return messages by second and tag; assert that a window sent again after the kill has the same count."""
    found: Counter[tuple[int, str | None]] = Counter()
    async with (
        connect(namesrv) as client,
        client.consumer("dashboard", {INTO: "*"}, start="earliest") as consumer,
    ):
        while (message := await consumer.receive(60.0 if not found else 5.0)) is not None:
            told = json.loads(message.body)
            place = (int(datetime.fromisoformat(told["start"]).timestamp()), told.get("tags"))
            assert found.get(place, told["messages"]) == told["messages"]
            found[place] = told["messages"]
            await message.ack()
    return found
