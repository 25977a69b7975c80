"""`materialize`: a topic, decoded and typed, as a table of its own that each run takes up to the archive's end.

What is new is what the journals brought since the table's position, as for a stream: what is compacted or comes back
brings nothing, so no row comes twice. Each commit has rows and position together (`table_log`). What was erased from
the archive goes from the table as well; what expired there stays, or goes if it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from neve.archive.follow import catalogs
from neve.archive.source import open_source
from neve.entropy import Entropy, system_entropy, unique_name
from neve.spark.builder import parse_store
from neve.spark.jobs.table_log import TableLog
from neve.spark.jobs.table_run import MaterializeJob, Progress, Run
from neve.spark.jobs.table_store import TableStore, open_table
from neve.spark.jobs.table_writer import SparkWriter
from neve.spark.known_topics import check_known
from neve.spark.planning.options import Options, Subscription

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

KEEP, DROP = "keep", "drop"
ROWS_PER_COMMIT = 5_000_000


def materialize(
    spark: SparkSession,
    topic: str,
    *,
    store: str,
    table: str,
    kind: str = "text",
    schema: StructType | str | None = None,
    schema_file: str | None = None,
    message: str | None = None,
    on_error: str = "null",
    flat: bool = False,
    expired: str = KEEP,
    broker: str | None = None,
    fails_on_data_loss: bool = True,
    rows_per_commit: int = ROWS_PER_COMMIT,
    progress: Progress = lambda _: None,
    table_store: TableStore | None = None,
    entropy: Entropy = system_entropy,
) -> MaterializeJob:
    """Takes the table up to the archive's end, in commits of about so many rows.

    Args:
        table: `dir:PATH`, or `s3://BUCKET/PREFIX?…` of a store that honours If-None-Match.
        kind, schema, schema_file, message, on_error: as of `neve.spark.decode_bodies`.
        flat: the fields of `value` are columns of the table.
        expired: "keep" or "drop" rows that have expired from the archive since they came into the table.
        fails_on_data_loss: where rows expired before any run saw them; otherwise they are left out.

    Raises:
        FileNotFoundError: there is no archive, or no such topic in it.
        NoTable: there is a table that was begun otherwise.
        Overtaken: another run has committed meanwhile.
        DataLoss: rows expired before any run saw them.
    """
    if expired not in (KEEP, DROP):
        raise ValueError(f"expired is {KEEP!r} or {DROP!r}, not {expired!r}")
    source = open_source(store)
    known = catalogs(source, broker)
    check_known(source, known, topic)
    where = parse_store(table)
    log = TableLog(table_store or open_table(table), unique_name(entropy), where.path)
    writer = SparkWriter(
        spark, topic, store, log, where.path,
        kind=kind, schema=schema, schema_file=schema_file, message=message, on_error=on_error, flat=flat,
    )  # fmt: skip
    options = Options(store, Subscription(frozenset({topic})), broker=broker, fails_on_data_loss=fails_on_data_loss)
    settings = {"topic": topic, "broker": broker or "", "on_error": on_error, "columns": writer.columns()}
    run = Run(source, options, table=table, log=log, writer=writer, progress=progress)
    return run.to_the_end(settings, rows_per_commit, drops_expired=expired == DROP)
