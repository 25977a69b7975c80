"""A pipeline to begin with: a topic becomes a clean table, the table windows of time, and those go to another topic."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SPEC = "spark-pipeline.yml"
_DEFINITIONS = "transformations"
_INTERVAL = re.compile(r"[1-9]\d{0,5} (second|minute|hour|day)s?")


class Wanted(NamedTuple):
    """What a new pipeline reads and writes.

    `schema`: the JSON bodies' fields as DDL, None where bodies are text. `into`: name servers and topic. `late`: how
    long a window waits behind the newest message.
    """

    name: str
    store: str
    topic: str
    schema: str | None = None
    into: tuple[str, str] | None = None
    window: str = "1 hour"
    late: str = "10 minutes"


def create(home: Path, wanted: Wanted) -> list[Path]:
    """The files of a pipeline, in a directory that is not there yet, or is empty.

    Raises:
        FileExistsError: something is there.
        ValueError: an interval that is none.
    """
    for interval in (wanted.window, wanted.late):
        if not _INTERVAL.fullmatch(interval):
            raise ValueError(f"{interval!r} is no length of time: 30 seconds, 10 minutes, 1 hour, 1 day")
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise FileExistsError(f"{home} is there and not empty: name a directory that is new")
    written = []
    for name, text in _FILES.items():
        if (content := text(wanted, home.absolute())) is None:
            continue
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, "utf-8")
        written.append(path)
    return written


def _spec(wanted: Wanted, home: Path) -> str:
    configuration = {"spark.neve.store": wanted.store, "spark.neve.topic": wanted.topic}
    if wanted.into is not None:
        configuration["spark.neve.namesrv"], configuration["spark.neve.into"] = wanted.into
    configuration["spark.sql.shuffle.partitions"] = "2"
    told = "\n".join(f"  {name}: {_quoted(value)}" for name, value in configuration.items())
    return f"""\
# Spark's own format: https://spark.apache.org/docs/latest/declarative-pipelines-programming-guide.html
name: {_quoted(wanted.name)}
# Positions of all flows. A directory that this machine alone sees, or s3a://…
storage: {_quoted((home / "storage").as_uri())}
configuration:
{told}
libraries:
  - glob:
      include: {_DEFINITIONS}/**
"""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a string of JSON is one of YAML


def _clean(wanted: Wanted, _home: Path) -> str:
    types = "" if wanted.schema is None else "from pyspark.sql.types import StructType\n"
    bodies = ""
    decoded, columns = 'decode_bodies(rows, "text")', '"text"'
    if wanted.schema is not None:
        fields = json.dumps(wanted.schema, ensure_ascii=False)
        bodies = f"# What the bodies are; `neve spark schema {wanted.topic}` shows what there is.\n"
        bodies += f"BODIES = StructType.fromDDL({fields})\n"
        decoded, columns = 'decode_bodies(rows, "json", schema=BODIES)', '"value.*"'
    return f'''\
"""The topic, message by message: what could be decoded, and what could not.

Each run goes on where the one before ended, and each message lands in one of the tables once.
"""

from pyspark import pipelines as dp
{types}
from neve.spark import decode_bodies

{bodies}SOURCE = {{
    "store": spark.conf.get("spark.neve.store"),
    "topic": spark.conf.get("spark.neve.topic"),
    "startingOffsets": "earliest",
    "maxOffsetsPerTrigger": "1000000",
}}


def decoded():
    rows = spark.readStream.format("neve").options(**SOURCE).load()
    return {decoded}


@dp.table(format="parquet")
def clean():
    place = ("store_timestamp", "broker", "queue_id", "queue_offset", "tags")
    return decoded().where("body_error IS NULL").select(*place, {columns})


@dp.table(format="parquet")
def dead():
    place = ("store_timestamp", "broker", "queue_id", "queue_offset", "msg_id", "body_error", "body", "body_codec")
    return decoded().where("body_error IS NOT NULL").select(*place)
'''


def _windows(wanted: Wanted, _home: Path) -> str:
    return f"""\
-- Windows of time. One is told once, when a message has come that is newer than its end by {wanted.late}; what comes
-- for it after that is left out.
CREATE STREAMING TABLE windows USING parquet AS
SELECT window.start AS start, window.end AS end, tags, count(*) AS messages
FROM STREAM clean WATERMARK store_timestamp DELAY OF INTERVAL {wanted.late.upper()}
GROUP BY window(store_timestamp, '{wanted.window}'), tags
"""


def _by_tag(_wanted: Wanted, _home: Path) -> str:
    return """\
-- Worked out anew by each run, of all that is in `clean`.
CREATE MATERIALIZED VIEW by_tag USING parquet AS
SELECT tags, count(*) AS messages, max(store_timestamp) AS newest FROM clean GROUP BY tags
"""


def _into_topic(wanted: Wanted, _home: Path) -> str | None:
    if wanted.into is None:
        return None
    return '''\
"""The windows, as messages of another topic: JSON, those of one tag in order, each sent at least once.

What a run that was killed sends again has the same property NEVE_SINK.
"""

from pyspark import pipelines as dp
from pyspark.sql import functions as f

dp.create_sink(
    "told", "neve", {"namesrv": spark.conf.get("spark.neve.namesrv"), "topic": spark.conf.get("spark.neve.into")}
)


@dp.append_flow(target="told")
def tell():
    tag = f.coalesce("tags", f.lit("none"))
    return spark.readStream.table("windows").select(
        f.to_json(f.struct("start", "end", "tags", "messages")).alias("body"), tag.alias("order_key"), "tags"
    )
'''


def _ignored(_wanted: Wanted, _home: Path) -> str:
    return "storage/\nwarehouse/\n.neve/\n"


_FILES: dict[str, Callable[[Wanted, Path], str | None]] = {
    SPEC: _spec,
    f"{_DEFINITIONS}/clean.py": _clean,
    f"{_DEFINITIONS}/windows.sql": _windows,
    f"{_DEFINITIONS}/by_tag.sql": _by_tag,
    f"{_DEFINITIONS}/into_topic.py": _into_topic,
    ".gitignore": _ignored,
}
