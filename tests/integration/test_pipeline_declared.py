"""`neve pipeline`: a topic through tables into a topic by real runs, one of them killed; each message counts once.

The archive is a bucket, the tables are files.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
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
from neve.spark.pipeline.status import standing
from tests.servers.neve import NEVE
from tests.waiting import wait_until

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]

Up = Callable[..., AbstractContextManager[Any]]
TOPIC, INTO = "orders", "orders-told"
TAGS = ("paid", "open", "")
LATE_S, WINDOW_S = 2, 1
RUN_S = 240.0


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The archive's URL; its credentials are in the environment."""
    with minio.running(tmp_path / "minio") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        minio.create_bucket(server, "archive")
        yield server.url("archive", "some%20prefix")


def test_runs_go_on_where_the_last_one_ended_though_it_was_killed(tmp_path: Path, neve_up: Up, store: str) -> None:
    home = tmp_path / "pipeline"
    eager = ("archiveMaxAge=1s", "archivePeriod=1s")
    settings = [word for one in eager for word in ("--set", one)]
    with neve_up(tmp_path / "up", "--store", store, *settings) as server:
        for topic in (TOPIC, INTO):
            run(NEVE, "topic", "create", topic, "--queues", "2", "-n", server.namesrv)
        run(
            NEVE, "pipeline", "init", str(home), "--store", store, "-t", TOPIC, "--schema", "n BIGINT, amount DOUBLE",
            "--into", INTO, "--window", f"{WINDOW_S} second", "--late", f"{LATE_S} seconds", "-n", server.namesrv,
        )  # fmt: skip
        definitions = home / "transformations" / "clean.py"
        definitions.write_text(definitions.read_text().replace('"1000000"', '"16"'))  # a run of many batches

        send(server.namesrv, range(30))
        archived(server, store, 31)
        first = json.loads(run(*pipeline("run", home)))
        assert (first["state"], {flow["state"] for flow in first["flows"].values()}) == ("completed", {"completed"})
        assert numbers(home) == list(range(30))

        send(server.namesrv, range(30, 70))
        archived(server, store, 72)
        kill_amid_a_batch(home)
        told = json.loads(run(NEVE, "pipeline", "status", str(home), "-o", "json"))
        assert [one["state"] for one in told["runs"]] == ["completed", "killed"]
        assert sum(flow["behind"] or 0 for flow in told["flows"]) > 0

        send(server.namesrv, range(70, 90))
        # In an entry of its own: of two queues in one, a batch may have the last of one before all of the other.
        archived(server, store, 93)
        after = time.time() + LATE_S + WINDOW_S + 1
        wait_until(lambda: time.time() > after, "a message that closes all windows before it")
        send(server.namesrv, range(90, 91))
        archived(server, store, 95)
        assert json.loads(run(*pipeline("run", home)))["state"] == "completed"
        windows = asyncio.run(consume(server.namesrv))

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
    flows = {
        flow.name.rpartition(".")[2]: flow for flow in standing(home, (home / "storage").as_uri(), (store, TOPIC)).flows
    }
    assert flows.keys() == {"clean", "dead", "windows", "by_tag", "tell"}
    assert {flow.state for flow in flows.values()} == {"completed"}
    assert (flows["clean"].behind, flows["clean"].is_amid) == (0, False)


def pipeline(verb: str, home: Path) -> list[str]:
    return [NEVE, "pipeline", verb, str(home), "--master", "local[2]", "--json"]


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr[-4000:]}"
    return done.stdout


def send(namesrv: str, numbers: range) -> None:
    """Half of them packed; and one body that is no JSON."""

    async def all_of_them() -> None:
        async with connect(namesrv, compress_over=64) as client:
            for number in numbers:
                body = json.dumps({"n": number, "amount": number / 2, "text": "x" * (100 if number % 2 else 1)})
                tags = TAGS[number % len(TAGS)] or None
                await client.send(TOPIC, body.encode(), tags=tags, queue=number % 2)
            await client.send(TOPIC, b"no JSON", queue=0)

    asyncio.run(all_of_them())


def archived(server: Any, store: str, rows: int) -> None:
    run(NEVE, "archive", "offload", "--roll", "--admin", server.admin)
    wait_until(lambda: len(sent(store)) == rows, "the archive has all that was sent")


def sent(store: str) -> list[tuple[str | None, int, int | None]]:
    """Of each archived message tag, store time and number."""
    topic = neve.archive.open(store).topic(TOPIC)
    found: list[tuple[str | None, int, int | None]] = []
    for queue in topic.queues():
        for record in topic.read(queue):
            body = inflate(record.body, record.sys_flag)
            number = None if body == b"no JSON" else int(json.loads(body)["n"])
            found.append((record.properties.get("TAGS"), record.store_timestamp, number))
    return found


def kill_amid_a_batch(home: Path) -> None:
    """SIGKILL to a run and its JVM, when it has done one batch of the clean table and begun another."""
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
    """What Spark's list of a table's files says, or all files where Spark keeps none."""
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
    return sorted(row["n"] for row in table(home, "clean"))


async def consume(namesrv: str) -> Counter[tuple[int, str | None]]:
    """Windows by second and tag; one that was sent again after the kill says the same."""
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
