"""The steps of the demo, in order.

    publish ─▶ consume by tag ─▶ offload and evict ─▶ replay from the archive ─▶ query with Spark ─▶ compare with pandas

The first result that differs from the source data ends the demo with exit code 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pandas as pd

from neve.cli.failures import FAILED, Failure
from neve.cli.output import size_text
from neve.client import Message, connect
from neve.clock import system_monotonic
from neve.demo import flights as data
from neve.demo.flights import FLIGHTS, QUEUES, WEATHER, Different
from neve.demo.report import ArchivedTopic, Results, page
from neve.demo.servers import Servers, cold_reads, neve, running, store_url
from neve.demo.story import Story, TimedStep

TAG = "JFK"
_AHEAD = 4  # Batches prepared while one is in flight.
_IDLE_S = 30.0
_SURPLUS_S = 1.0  # How long a consumer waits for messages beyond the expected ones.
SPARK = {"spark.ui.enabled": "false", "spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "2"}
NEXT = (
    ("neve up --data /tmp/neve --store dir:/tmp/neve-archive", "run a name server and a broker of your own"),
    ("neve help", "list the help pages: formats, times, stores, …"),
    ("neve demo --keep", "keep data and archive, and explore them"),
)


def tour(store: str, limit: int | None, *, keep: bool, report: Path) -> None:
    """Run the demo and write its report.

    Raises:
        Failure: a result differs from the source data, or a step fails.
    """
    story, results, began = Story(), Results(), system_monotonic()
    flights, weather = data.load(limit)
    story.title(
        f"neve demo: {len(flights):,} flights from New York in 2013 go through a broker, its archive and Spark.\n"
        "Every result is compared with the source data."
    )
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="neve-demo-"))
        if not keep:
            stack.callback(shutil.rmtree, root, ignore_errors=True)
        try:
            servers = _start(story, root, store, stack)
            _publish(story, servers, flights, weather)
            _consume(story, servers, flights)
            _archive(story, servers, results)
            _preview_ttl(story, servers)
            _replay(story, servers, flights)
            _query(story, servers, results, flights, weather)
        except Different as difference:
            raise Failure(FAILED, f"the demo failed: {difference}") from difference
    seconds = system_monotonic() - began
    story.section("Result")
    story.line(f"everything that came back is what went in: {len(story.proven)} comparisons, {seconds:.0f} s in all")
    next_commands = _commands_of_kept(root) if keep and store == "dir" else NEXT
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(page(story, results, next_commands, seconds), encoding="utf-8")
    story.line(f"report: {report.absolute()}")
    if keep:
        story.line(f"data, archive and logs: {root}")
    story.section("Where to look next")
    for command, purpose in next_commands:
        story.line(f"$ {command}\n    {purpose}")


def _start(story: Story, root: Path, store: str, stack: ExitStack) -> Servers:
    story.section("Start a name server and a broker")
    with story.step("started"):
        url = store_url(root, store, stack)
        servers = stack.enter_context(running(root, url))
    story.line(f"$ neve up --data {root / 'data'} --store {shlex.quote(url)}")
    story.line(f"name server {servers.namesrv}, broker {servers.broker}, admin port {servers.admin}")
    return servers


def _publish(story: Story, servers: Servers, flights: pd.DataFrame, weather: pd.DataFrame) -> None:
    story.section("Publish the flights, and the weather of their hours")
    _run(story, servers, "topic", "create", FLIGHTS, "--queues", str(QUEUES[FLIGHTS]))
    _run(story, servers, "topic", "create", WEATHER, "--queues", str(QUEUES[WEATHER]), "--ttl", "30d")
    with story.step("flights", len(flights)) as step:
        asyncio.run(_send(servers, FLIGHTS, data.flight_messages(flights), step))
    with story.step("hours of weather", len(weather)) as step:
        asyncio.run(_send(servers, WEATHER, data.weather_messages(weather), step))


def _consume(story: Story, servers: Servers, flights: pd.DataFrame) -> None:
    story.section(f"Consume the flights from {TAG}, by tag")
    expected = set(flights.index[flights.origin == TAG])
    with story.step("flights", len(expected)) as step:
        rows = asyncio.run(_receive(servers, "by-tag", TAG, step))
    data.compare_numbers(rows, expected, f"consuming {TAG}")
    story.prove(f"the {len(expected):,} flights from {TAG} were received, none twice, and no other flight")


def _archive(story: Story, servers: Servers, results: Results) -> None:
    story.section("Move all messages to the archive, and evict the local log")
    with story.step("archived and evicted"):
        _run(story, servers, "archive", "offload", "--roll", "--evict")
    objects = json.loads(neve("archive", "list", "--store", servers.store, "-o", "json"))
    for topic in QUEUES:
        own = [one for one in objects if one["topic"] == topic]
        rows, size, wire = (sum(one[name] for one in own) for name in ("rows", "bytes", "wire_bytes"))
        results.archived.append(ArchivedTopic(topic, len(own), rows, size, wire))
        share = f", {100 * size / wire:.0f} % of their bytes in the log" if wire else ""
        story.line(f"{topic}: objects={len(own)}, rows={rows:,}, {size_text(size)}{share}")
    with story.step("verified"):
        story.line("$ neve archive verify --deep")
        neve("archive", "verify", "--deep", "--store", servers.store)
    story.prove("the checksums of all objects match, and no queue has a gap")


def _preview_ttl(story: Story, servers: Servers) -> None:
    story.section("Preview what a TTL deletes from the archive")
    for arguments in ([WEATHER], [WEATHER, "--ttl", "1h"]):
        story.line(f"$ neve topic ttl plan {shlex.join(arguments)}")
        story.line(neve("topic", "ttl", "plan", *arguments, "--store", servers.store, "--namesrv", servers.namesrv))


def _replay(story: Story, servers: Servers, flights: pd.DataFrame) -> None:
    """Read all flights from offset 0; only the archive has them now."""
    story.section("Read all flights again, from the archive")
    before = cold_reads(servers.admin)
    with story.step("flights", len(flights)) as step:
        rows = asyncio.run(_receive(servers, "replay", "*", step))
    data.compare_numbers(rows, set(flights.index), "replaying")
    pulls = cold_reads(servers.admin) - before
    if pulls <= 0:
        raise Different("the replay was not read from the archive")
    story.prove(f"all {len(flights):,} flights were read, none twice; {pulls:,} pulls were answered from the archive")


def _query(story: Story, servers: Servers, results: Results, flights: pd.DataFrame, weather: pd.DataFrame) -> None:
    from neve.spark import read_topic, session

    story.section("Query the archive with Spark, without the broker")
    with (
        story.step("Spark session"),
        _stderr_to(servers.directory / "spark.log"),
    ):  # Java and Spark warn on stderr, each time.
        spark = session(servers.store, master="local[2]", app_name="neve demo", conf=SPARK)
    try:
        for topic, schema in data.SCHEMAS.items():
            frame = read_topic(spark, topic, store=servers.store, decode="json", schema=schema)
            frame.createOrReplaceTempView(topic)
        with story.step("flights, counted by carrier", len(flights)):
            results.carriers = [tuple(row) for row in spark.sql(data.BY_CARRIER).collect()]
        data.compare_table(results.carriers, data.expected_by_carrier(flights), "by carrier")
        with story.step("flights, joined with the weather of their hour", len(flights)):
            results.hours = [tuple(row) for row in spark.sql(data.BY_HOUR).collect()]
        data.compare_table(results.hours, data.expected_by_hour(flights, weather), "by hour")
    finally:
        spark.stop()
    story.prove(f"Spark's figures of {len(results.carriers)} carriers and {len(results.hours)} hours equal pandas'")
    story.table(("carrier", "flights", "delay"), results.carriers)
    story.table(("hour", "flights", "delay", "temp", "wind"), results.hours)


# ---- helpers


def _commands_of_kept(root: Path) -> Sequence[tuple[str, str]]:
    store = shlex.quote(f"dir:{root / 'archive'}")
    flights = f"--topic {FLIGHTS} --decode json --schema {shlex.quote(data.SCHEMAS[FLIGHTS])}"
    return (
        (f"neve archive list --store {store}", "list the Parquet objects"),
        (f"neve spark shell --store {store} {flights}", "query the flights in a Python prompt with Spark"),
        (f"neve up --data {root / 'data'} --store {store}", "start the servers again"),
    )


def _run(story: Story, servers: Servers, *arguments: str) -> None:
    """Run a command against the demo's servers, and print it as a user of a local cluster would type it."""
    story.line(f"$ neve {shlex.join(arguments)}")
    where = ("--admin", servers.admin) if arguments[0] == "archive" else ("--namesrv", servers.namesrv)
    neve(*arguments, *where)


async def _send(servers: Servers, topic: str, messages: Iterator[Message], step: TimedStep) -> None:
    """Send batches with one sender per queue, so that a queue keeps the order of the data."""
    queues = QUEUES[topic]
    waiting: list[asyncio.Queue[list[Message] | None]] = [asyncio.Queue(_AHEAD) for _ in range(queues)]
    # Long enough for any machine: a batch that is sent again after a time-out may be stored and counted twice.
    async with connect(servers.namesrv, timeout=120.0, attempt_timeout=60.0) as client:

        async def send(queue: int) -> None:
            while (batch := await waiting[queue].get()) is not None:
                result = await client.send_batch(topic, batch, queue=queue)
                if result.status != "SEND_OK":
                    raise Different(f"a batch to {topic} was answered {result.status}")
                step.done += len(batch)

        try:
            async with asyncio.TaskGroup() as group:
                for queue in range(queues):
                    group.create_task(send(queue))
                for number, batch in enumerate(data.chunks(messages)):
                    await waiting[number % queues].put(batch)
                for channel in waiting:
                    await channel.put(None)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed


async def _receive(servers: Servers, group: str, expression: str, step: TimedStep) -> list[int]:
    """Return the row numbers of the flights of a step, and of immediately following ones."""
    rows: list[int] = []
    async with (
        connect(servers.namesrv) as client,
        client.consumer(
            group, {FLIGHTS: expression}, start="earliest", max_buffered=20_000, pull_batch=1024
        ) as consumer,
    ):
        while (message := await consumer.receive(_IDLE_S if len(rows) < (step.total or 0) else _SURPLUS_S)) is not None:
            async with message:
                rows.append(int(json.loads(message.body)["row"]))
            step.done = len(rows)
    return rows


@contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """Write the stderr of this process, and of processes that start meanwhile, to a file; on failure, print it."""
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with path.open("wb") as log:
            os.dup2(log.fileno(), 2)
        yield
    except BaseException:
        os.write(before, path.read_bytes()[-4000:])
        raise
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
