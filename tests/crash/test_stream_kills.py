"""SIGKILL the driver of a stream while the archive that it reads is written, compacted and expired.

NEVE_STREAM_MESSAGES=1000000 and NEVE_STREAM_KILLS=20 set the size; a few are enough for every commit. Two brokers write
with a clock that advances four hours per round. They wait for the stream, which has the same effect as a grace period
of a day: no broker is more than BEHIND rounds ahead of the stream's checkpoint. So objects that a batch reads may have
expired or been compacted, but none of them is deleted yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from infra.clock import ManualClock
from neve.archive.policy.ttl import HOUR_MS
from neve.spark.planning.journal_positions import Position, decoded
from tests.kit.archive.archiving_by_clock import GRACE_HOURS, ArchivingByClock
from tests.kit.clock.waiting import wait_until
from tests.kit.server import spark_jvm
from tests.kit.server.processes import Processes

pytestmark = pytest.mark.servers

MESSAGES = int(os.environ.get("NEVE_STREAM_MESSAGES", "10000"))
KILLS = int(os.environ.get("NEVE_STREAM_KILLS", "2"))
SEED = int(os.environ.get("NEVE_SEED", "20"))
ROUNDS = KILLS * 10
ROUND_HOURS = 4
BEHIND = GRACE_HOURS // ROUND_HOURS - 1  # In rounds.
#: Objects of one topic expire before a delayed stream has read them; those of the other live long enough to be
#: compacted.
TTL_HOURS = {"brief": 2 * ROUND_HOURS, "long": 4 * GRACE_HOURS}
QUEUES = 2
PATIENCE_S = 600.0
LOG = "driver.log"
#: The error of Spark's tasks if one of their new workers had no processor for ten seconds.
TOO_BUSY = "Python worker failed to connect back"
_FOUND = "found "
#: The maximum time between the begin of a batch and the kill.
INTO_A_BATCH_S = 0.3

DRIVER = """
import json, os, sys
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
store, home, most = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("WARN")
rows = spark.readStream.format("neve").options(
    store=store, subscribePattern="brief|long|late", startingOffsets="earliest", maxOffsetsPerTrigger=most
).load()
columns = rows.select("topic", "broker", "queue_id", "queue_offset", "body")
table = columns.writeStream.format("parquet").option("checkpointLocation", home + "/checkpoint")
query = table.start(home + "/table")
while not os.path.exists(home + "/end"):
    query.awaitTermination(1)
query.stop()
table.trigger(availableNow=True).start(home + "/table").awaitTermination()
place = f.concat_ws("/", "broker", "topic", "queue_id", "queue_offset")
found = spark.read.parquet(home + "/table").groupBy("broker", "topic", "queue_id").agg(
    f.count("*"), f.countDistinct("queue_offset"), f.min("queue_offset"), f.max("queue_offset"),
    f.sum((f.col("body").cast("string") != place).cast("int")),
)
print("found", json.dumps([list(row) for row in found.collect()]))
"""


class Driver(Processes):
    """A stream into a table of Parquet files, with the position in its checkpoint."""

    def __init__(self, directory: Path, store: str, most: int) -> None:
        super().__init__(directory)
        script = directory / "stream.py"
        script.write_text(DRIVER)
        self._command = [sys.executable, str(script), store, str(directory), str(most)]
        self._checkpoint = directory / "checkpoint"

    @override
    def start(self) -> Driver:
        """Start the driver and return at once, because a starting driver may be killed, too."""
        self._told = len(self.log(LOG)) if LOG in self._logs else 0
        self.process = self.spawn(self._command, LOG, ENVIRONMENT)
        return self

    def position(self) -> Position | None:
        """Return the position after the last committed batch."""
        done = self._newest("commits")
        if done < 0:
            return None
        return decoded(json.loads((self._checkpoint / "offsets" / str(done)).read_text().splitlines()[-1]))

    def is_amid_batch(self) -> bool:
        return self._newest("offsets") > self._newest("commits")

    def keep_up(self) -> None:
        """Restart a driver that ended for lack of processor time; any other end is an error."""
        if self.process.poll() in {None, 0}:
            return
        told = self.log(LOG)[self._told :]
        assert TOO_BUSY in told, f"the driver ended: {told[-4000:]}"
        self.kill()
        self.start()

    def kill_amid_batch(self, after: float) -> bool:
        """SIGKILL some time after the begin of a batch; return whether it hit that batch, because some end sooner."""
        self.wait_until(self.is_amid_batch, "a batch")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(after)
        self.keep_up()
        self.kill()
        return self.is_amid_batch()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            self.keep_up()
            return condition()

        wait_until(holds, what, PATIENCE_S)

    def to_the_end(self) -> list[list[Any]]:
        """Process all remaining input; return the rows of the table."""
        (self.directory / "end").touch()
        self.wait_until(lambda: _FOUND in self.log(LOG) and self.process.poll() is not None, "the end of the stream")
        found: list[list[Any]] = json.loads(self.log(LOG).rpartition(_FOUND)[2].splitlines()[0])
        return found

    def _newest(self, of: str) -> int:
        folder = self._checkpoint / of
        names = [one.name for one in folder.iterdir()] if folder.is_dir() else []
        return max((int(name) for name in names if name.isdigit()), default=-1)


ENVIRONMENT = {
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_SUBMIT_OPTS": spark_jvm.driver_options(),
    "PYTHONWARNINGS": "ignore",
}


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[tuple[ManualClock, dict[str, ArchivingByClock]]]:
    clock = ManualClock(1_767_225_600_000)  # The begin of a day.
    (tmp_path / "archive").mkdir()
    with ExitStack() as stack:
        made = {
            name: stack.enter_context(
                ArchivingByClock(tmp_path / name, f"dir:{tmp_path}/archive", name, clock, TTL_HOURS)
            )
            for name in ("a", "b")
        }
        yield clock, made


def behind(position: Position | None, brought: Mapping[str, list[int]]) -> int:
    """Return by how many rounds the stream is behind the broker with the largest distance."""
    worst = 0
    for broker, ends in brought.items():
        place = None if position is None else position.brokers.get(broker)
        done = -1 if place is None else place.through - (1 if place.left else 0)
        worst = max(worst, sum(end > done for end in ends))
    return worst


def test_stream_has_each_row_once_after_repeated_kills_of_its_driver(
    tmp_path: Path, brokers: tuple[ManualClock, dict[str, ArchivingByClock]]
) -> None:
    clock, archives = brokers
    chance = random.Random(SEED)
    each = -(-MESSAGES // (ROUNDS * len(archives) * 2 * QUEUES))
    kills_at = {ROUNDS * kill // KILLS for kill in range(KILLS)}  # The first kill is within the first batch.
    brought: dict[str, list[int]] = {name: [] for name in archives}
    amid, lags = Counter[bool](), list[int]()
    with Driver(tmp_path / "stream", f"dir:{tmp_path}/archive", 3 * MESSAGES // ROUNDS) as driver:
        for number in range(ROUNDS):
            for name, archive in archives.items():
                for queue in range(QUEUES):
                    archive.send("brief", queue, each)
                    archive.send("late" if number >= ROUNDS // 2 else "long", queue, each)
                archive.archive(compacts=number % 3 == 2, checkpoints=number % 5 == 4)
                brought[name].append(archive.brought_by)
            if number in kills_at:
                amid[driver.kill_amid_batch(chance.uniform(0, INTO_A_BATCH_S))] += 1
                driver.start()
            lags.append(behind(driver.position(), brought))
            # Rows that expire before a stream begins are not part of it.
            most = BEHIND if number else 0
            driver.wait_until(lambda: behind(driver.position(), brought) <= most, "the stream catches up")  # noqa: B023
            clock.advance(ROUND_HOURS * HOUR_MS)
        found = driver.to_the_end()

    kinds = sum((archive.kinds for archive in archives.values()), Counter[str]())
    print(f"messages {sum(sum(one.ends.values()) for one in archives.values())}, kills {amid}, entries {dict(kinds)}")
    assert {tuple(row) for row in found} == {
        (name, topic, queue, count, count, 0, count - 1, 0)
        for name, archive in archives.items()
        for (topic, queue), count in archive.ends.items()
    }
    # A harness whose kills hit nothing proves nothing.
    assert amid.total() == KILLS
    assert amid[True] * 3 >= KILLS, "kills amid a batch"
    assert kinds["Replace"] and kinds["Expire"] and kinds["Deleted"] and kinds["Checkpoint"], kinds
    assert max(lags) * ROUND_HOURS > TTL_HOURS["brief"], f"nothing expired before it was read: {lags}"
