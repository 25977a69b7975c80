"""A pipeline on real data that is killed at random while it runs: a year of flights from New York, with the weather.

    live producer ─▶ broker ─▶ archive ─▶ stream ─▶ clean tables ─▶ hourly aggregates ─▶ topic ─▶ consumer ─▶ pandas

The Spark job is killed at random moments within its batches, and started again. At the end the consumer's results are
compared with those that pandas computes from the source data: if a figure differs, the program ends with exit code 1.

    python -m examples.pipeline --store dir|minio [--limit N] [--stops 3] [--seed N] [--keep]

The job itself, as one would schedule it:

    python -m examples.pipeline --job --archive URL --namesrv HOST:PORT --home DIR [--once]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

from neve.client import Message, connect
from neve.demo.flights import (
    BATCH,
    FLIGHTS,
    QUEUES,
    WEATHER,
    Different,
    chunks,
    flight_messages,
    load,
    weather_messages,
)
from neve.demo.servers import Servers, neve, running, store_url
from neve.demo.story import Story

HOURLY = "hourly"
SCHEMAS = {
    FLIGHTS: "row LONG, carrier STRING, origin STRING, time_hour STRING, dep_delay DOUBLE, distance DOUBLE",
    WEATHER: "row LONG, origin STRING, time_hour STRING, temp DOUBLE, wind_speed DOUBLE",
}
COLUMNS = ("flights", "delayed", "delay", "distance", "temp", "wind")
#: The job's maximum number of rows in a batch, so that there are enough batches to be killed in.
BATCH_ROWS = 25_000
#: Messages are archived a second after they are sent.
EAGER = ("archiveMaxAge=1s", "archivePeriod=1s")
PATIENCE_S = 300.0
QUIET_S = 2.0
#: The error of Spark's tasks if one of their new workers had no processor for ten seconds.
TOO_BUSY = "Python worker failed to connect back"
#: The steps within whose batches the job is killed, in turn, and the maximum time from the begin of a batch.
STEPS = (HOURLY, FLIGHTS, WEATHER)
INTO_A_BATCH_S = 3.0

Figures = dict[tuple[str, str], tuple[Any, ...]]  # (origin, hour) -> COLUMNS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=["dir", "minio"], default="dir", help="where the archive lives")
    parser.add_argument("--limit", type=int, help="only the first N flights and the weather up to them")
    parser.add_argument("--stops", type=int, default=3, help="how often the job is killed (3)")
    parser.add_argument("--seed", type=int, help="of the moments at which it is")
    parser.add_argument("--keep", action="store_true", help="keep the directory with data, archive and tables")
    parser.add_argument("--job", action="store_true", help="be the Spark job")
    parser.add_argument("--archive", help="of the job: the store's URL")
    parser.add_argument("--namesrv", help="of the job")
    parser.add_argument("--home", type=Path, help="of the job: its tables and checkpoints")
    parser.add_argument("--once", action="store_true", help="of the job: what there is now, and no more")
    options = parser.parse_args()
    if options.job:
        job(options.archive, options.namesrv, options.home, is_resident=not options.once)
        return 0
    with ExitStack() as stack:
        if options.keep:
            root = Path(tempfile.mkdtemp(prefix="neve-pipeline-"))
            print(f"data, archive and tables stay in {root}")
        else:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neve-pipeline-")))
        try:
            run(root, options, stack)
        except Different as difference:
            print(f"DIFFERENT: {difference}", file=sys.stderr)
            return 1
    print("every figure is what pandas says")
    return 0


def run(root: Path, options: argparse.Namespace, stack: ExitStack) -> None:
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    story = Story()
    story.line(f"seed {seed}")
    flights, weather = load(options.limit)
    with story.step("servers started"):
        servers = stack.enter_context(running(root, store_url(root, options.store, stack), *EAGER))
    for topic, queues in (QUEUES | {HOURLY: QUEUES[FLIGHTS]}).items():
        neve("topic", "create", topic, "--queues", str(queues), "--namesrv", servers.namesrv)
    job_ = Job(root / "job", servers)
    stack.callback(job_.kill)
    with story.step(f"messages through a job that is killed {options.stops} times", len(flights) + len(weather)):
        asyncio.run(live(servers, flights, weather, job_, options.stops, random.Random(seed)))
        neve("archive", "offload", "--roll", "--admin", servers.admin)
        rows = job_.to_the_end()
    story.line("\n".join(job_.told))
    if rows != {FLIGHTS: [len(flights)] * 2, WEATHER: [len(weather)] * 2}:
        raise Different(f"the clean tables have these rows, and so many different ones: {rows}")
    with story.step("results of the job consumed"):
        found, messages = asyncio.run(consume(servers))
    story.line(f"{messages:,} messages of {len(found):,} hours at an airport")
    compare(found, expected(flights, weather))


async def live(
    servers: Servers, flights: pd.DataFrame, weather: pd.DataFrame, job_: Job, stops: int, chance: random.Random
) -> None:
    """Send the year in parts, one for each life of the job, which is killed while its part arrives or is processed."""
    messages = {FLIGHTS: flight_messages(flights), WEATHER: weather_messages(weather)}
    async with connect(servers.namesrv, timeout=120.0, attempt_timeout=60.0) as client:
        for life in range(stops + 1):
            job_.start()
            last = life == stops
            parts = {
                topic: list(coming if last else islice(coming, len(frame) // (stops + 1)))
                for (topic, coming), frame in zip(messages.items(), (flights, weather), strict=True)
            }
            sending = asyncio.create_task(send_parts(client, parts))
            if not last:
                await asyncio.to_thread(
                    job_.kill_amid_batch, STEPS[life % len(STEPS)], chance.uniform(0.0, INTO_A_BATCH_S)
                )
            await sending


async def send_parts(client: Any, parts: Mapping[str, list[Message]]) -> None:
    for topic, messages in parts.items():
        for number, batch in enumerate(chunks(iter(messages), BATCH)):
            result = await client.send_batch(topic, batch, queue=number % QUEUES[topic])
            if result.status != "SEND_OK":
                raise Different(f"a batch to {topic} was answered {result.status}")


async def consume(servers: Servers) -> tuple[Figures, int]:
    """Return the last result for each hour and the number of messages; messages of one hour arrive in order."""
    found: Figures = {}
    count = 0
    async with (
        connect(servers.namesrv) as client,
        client.consumer("dashboard", {HOURLY: "*"}, start="earliest") as consumer,
    ):
        while (message := await consumer.receive(PATIENCE_S if not count else QUIET_S)) is not None:
            async with message:
                told, count = json.loads(message.body), count + 1
                found[told["origin"], told["time_hour"]] = tuple(told.get(name) for name in COLUMNS)
    return found, count


def expected(flights: pd.DataFrame, weather: pd.DataFrame) -> Figures:
    """Compute the same from the source data. Sums are of whole numbers, so their order makes no difference."""
    hour = ["origin", "time_hour"]
    flown = flights.groupby(hour).agg(
        flights=("carrier", "size"), delayed=("dep_delay", "count"),
        delay=("dep_delay", "sum"), distance=("distance", "sum"),
    )  # fmt: skip
    seen = weather.groupby(hour).agg(temp=("temp", "max"), wind=("wind_speed", "max"))
    both = flown.join(seen, how="left")
    return {
        key: tuple(None if value != value else value for value in values)  # NaN does not equal itself.
        for key, *values in both.itertuples(name=None)
    }


def compare(found: Figures, wanted: Figures) -> None:
    if found.keys() != wanted.keys():
        missing, more = len(wanted.keys() - found.keys()), len(found.keys() - wanted.keys())
        raise Different(f"{missing} hours are missing, {more} too many")
    for place, figures in wanted.items():
        if found[place] != figures:
            raise Different(f"{place}: the topic says {found[place]}, pandas {figures}")


# ---- the job's process


@dataclass
class Job:
    """The job's process, and ways to kill it."""

    home: Path
    servers: Servers

    def __post_init__(self) -> None:
        self.home.mkdir()
        self.told: list[str] = []
        self._begun: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._life_at = 0  # The start of the running job's log.
        self._log = self.home / "job.log"

    def start(self) -> None:
        self._begun = {step: self._batches(step, "offsets") for step in STEPS}
        self._again()

    def _again(self) -> None:
        self._life_at = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log, start_new_session=True)

    def kill_amid_batch(self, step: str, after: float) -> None:
        """SIGKILL the job some time after it began a batch of that step, which may be finished by then."""
        deadline = time.monotonic() + PATIENCE_S
        while self._batches(step, "offsets") <= self._begun[step]:
            if time.monotonic() > deadline:
                raise Different(f"the job began no batch of {step} within {PATIENCE_S:g} s: {self._tail()}")
            self._wait(0.02)
        self._wait(after)
        self.kill()
        done = {one: self._batches(one, "commits") for one in STEPS}
        amid = [one for one in STEPS if self._batches(one, "offsets") > done[one]]
        self.told.append(f"killed after {sum(done.values())} batches, amid one of {' and '.join(amid) or 'none'}")

    def to_the_end(self) -> dict[str, list[int]]:
        """End the running job and let another process the rest; return rows and distinct rows of the clean tables."""
        self.kill()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = subprocess.run([*self._command(), "--once"], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
            if TOO_BUSY not in done.stderr or time.monotonic() > deadline:
                raise Different(f"the job ended with {done.returncode}: {done.stderr[-4000:]}")
        rows: dict[str, list[int]] = json.loads(done.stdout.rpartition("rows ")[2])
        return rows

    def kill(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def _wait(self, seconds: float) -> None:
        """Sleep, and restart a job that ended for lack of processor time; any other end is an error."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            if TOO_BUSY.encode() not in self._log.read_bytes()[self._life_at :]:
                raise Different(f"the job ended by itself: {self._tail()}")
            self.kill()
            self._again()

    def _batches(self, step: str, what: str) -> int:
        """Return the number of batches of all lives, by the checkpoint: `offsets` have begun, `commits` are done."""
        return sum(one.name.isdigit() for one in (self.home / f"{step}.checkpoint" / what).glob("*"))

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def _command(self) -> list[str]:
        servers = self.servers
        places = ["--archive", servers.store, "--namesrv", servers.namesrv, "--home", str(self.home)]
        return [sys.executable, "-m", "examples.pipeline", "--job", *places]


# ---- the job


def job(store: str, namesrv: str, home: Path, *, is_resident: bool) -> None:
    """Run the steps in turn: new archived rows into the clean tables, then the updated hours into the topic.

    After a kill each step resumes at its own checkpoint. A message of the archive is inserted into its table once. An
    hour may be sent twice, or before all its flights are inserted: its last message is the valid one.
    """
    from neve.spark import session

    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
    conf = {"spark.ui.enabled": "false", "spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "2"}
    spark = session(store, master="local[2]", conf=conf)
    while True:
        for topic in (WEATHER, FLIGHTS):
            clean(spark, store, topic, home)
        aggregate(spark, namesrv, home)
        if not is_resident:
            break
    rows = {}
    for topic in (FLIGHTS, WEATHER):
        numbers = table(spark, topic, home).select("row")
        rows[topic] = [numbers.count(), numbers.distinct().count()]
    print("rows", json.dumps(rows))
    spark.stop()


def clean(spark: Any, store: str, topic: str, home: Path) -> None:
    """Convert bodies to typed columns."""
    from neve.spark import decode_bodies

    source = spark.readStream.format("neve").options(store=store, topic=topic, startingOffsets="earliest")
    rows = decode_bodies(source.option("maxOffsetsPerTrigger", BATCH_ROWS).load(), "json", schema=SCHEMAS[topic])
    good = rows.where("body_error IS NULL").select("value.*", "broker", "queue_id", "queue_offset")
    end(good.writeStream.format("parquet").option("path", f"{home}/{topic}"), home / f"{topic}.checkpoint")


def aggregate(spark: Any, namesrv: str, home: Path) -> None:
    """Recompute the hours for which flights or weather were inserted since, each from all of its rows."""

    def tell(touched: Any, _batch: int) -> None:
        hours(spark, touched.distinct(), home).write.format("neve").options(namesrv=namesrv, topic=HOURLY).mode(
            "append"
        ).save()

    landed = [
        spark.readStream.schema(table(spark, topic, home).schema).parquet(f"{home}/{topic}")
        for topic in (FLIGHTS, WEATHER)
        if has_rows(topic, home)
    ]
    if len(landed) == 2:
        touched = landed[0].select("origin", "time_hour").union(landed[1].select("origin", "time_hour"))
        end(touched.writeStream.foreachBatch(tell), home / f"{HOURLY}.checkpoint")


def hours(spark: Any, touched: Any, home: Path) -> Any:
    """Return the hours as messages; those of one hour have one queue, in order."""
    from pyspark.sql import functions as f

    hour = ["origin", "time_hour"]
    flown = table(spark, FLIGHTS, home).join(touched, hour, "left_semi").groupBy(hour)
    flown = flown.agg(
        f.count("*").alias("flights"), f.count("dep_delay").alias("delayed"), f.sum("distance").alias("distance"),
        f.coalesce(f.sum("dep_delay"), f.lit(0.0)).alias("delay"),
    )  # fmt: skip
    seen = table(spark, WEATHER, home).groupBy(hour).agg(f.max("temp").alias("temp"), f.max("wind_speed").alias("wind"))
    place = f.concat_ws("/", *hour)
    return flown.join(seen, hour, "left").select(
        f.to_json(f.struct(*hour, *COLUMNS)).alias("body"), place.alias("order_key"), f.array(place).alias("keys"),
        f.col("origin").alias("tags"),
    )  # fmt: skip


def table(spark: Any, topic: str, home: Path) -> Any:
    return spark.read.parquet(f"{home}/{topic}")


def has_rows(topic: str, home: Path) -> bool:
    return any(one.name.isdigit() for one in (home / f"{topic}.checkpoint" / "commits").glob("*"))


def end(writer: Any, checkpoint: Path) -> None:
    writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    sys.exit(main())
