"""`materialize`: a topic, decoded and typed, as a table of its own that each run takes up to the archive's end.

What is new is what the journals brought since the table's position, as for a stream: what is compacted or comes back
brings nothing, so no row comes twice. Each commit has rows and position together (`table_log`). What was erased from
the archive goes from the table as well; what expired there stays, or goes if it is asked for. A table of dead letters
is one more, with a position of its own: each of the two has each of its rows once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from neve.archive.catalog.journal_reader import catalogs
from neve.archive.store.source import open_source
from neve.entropy import Entropy, system_entropy, unique_name
from neve.spark.builder import parse_store
from neve.spark.jobs.table_log import TableLog
from neve.spark.jobs.table_run import MaterializeJob, Progress, Run
from neve.spark.jobs.table_store import TableStore, open_table
from neve.spark.jobs.table_writer import ALL, DEAD, GOOD, SparkWriter
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
    registry: str | None = None,
    on_error: str = "null",
    dead_letters: str | None = None,
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
        kind, schema, schema_file, message, registry, on_error: as of `neve.spark.decode_bodies`.
        dead_letters: a table of its own, named as `table`, for rows whose bodies can't be decoded, as they are stored.
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
    if dead_letters is not None and (on_error != "null" or dead_letters == table):
        raise ValueError("dead_letters is another table, and goes with on_error='null'")
    source = open_source(store)
    known = catalogs(source, broker)
    check_known(source, known, topic)
    options = Options(store, Subscription(frozenset({topic})), broker=broker, fails_on_data_loss=fails_on_data_loss)

    def run(at: str, of: TableStore, half: str) -> MaterializeJob:
        where = parse_store(at)
        log = TableLog(of, unique_name(entropy), where.path)
        writer = SparkWriter(
            spark, topic, store, log, where.path,
            kind=kind, schema=schema, schema_file=schema_file, message=message, registry=registry, on_error=on_error,
            flat=flat, half=half,
        )  # fmt: skip
        settings = {"topic": topic, "broker": broker or "", "on_error": _ON_ERROR[half] or on_error}
        settings["columns"] = writer.columns()
        work = Run(source, options, table=at, log=log, writer=writer, progress=progress)
        return work.to_the_end(settings, rows_per_commit, drops_expired=expired == DROP)

    main = table_store or open_table(table)
    if dead_letters is None:
        return run(table, main, ALL)
    dead = run(dead_letters, open_table(dead_letters), DEAD)  # so that what the other leaves out is there already
    return run(table, main, GOOD)._replace(dead_rows=dead.table_rows)


#: What a table remembers of where bodies go that are none; one that leaves them out stays so.
_ON_ERROR = {ALL: "", GOOD: "dead letters", DEAD: "dead letters"}
