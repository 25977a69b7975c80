"""`neve spark verify`, `materialize`, `report`: the jobs of `neve.spark.jobs` as verbs, with progress and a report."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neve.cli.cluster import cluster_options
from neve.cli.failures import CONFLICT, FAILED, UNREACHABLE, USAGE, Failure
from neve.cli.group import summaries
from neve.cli.output import say, size_text, store_option
from neve.cli.times import to_ms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Command = TypeVar("Command", bound=Callable[..., Any])
_TOLD = 50  # faults that a terminal is shown


def job_options(command: Command) -> Command:
    """What all jobs take."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="The report as one JSON object; progress as JSON lines."),
        click.option("--master", help="Spark master.  [default: spark-submit's, or local[*]]"),
        store_option(required=True),
    ):
        command = option(command)
    return command


@click.command()
@click.option("-t", "--topic", "topics", multiple=True, help="This topic only; may be given several times.")
@click.option("--broker", help="Only the archive of this broker.")
@click.option("--quick", is_flag=True, help="Read no object: compare sizes, and whether queues have a hole.")
@click.option("--resume", type=click.Path(dir_okay=False), help="Note in this file what has been checked; a check that "
              "was broken off goes on with it. It goes when the check has ended.")  # fmt: skip
@job_options
def verify(
    *, topics: tuple[str, ...], broker: str | None, quick: bool, resume: str | None, store: str, master: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Read and decode all archived objects on all cores, and compare them with the journal.

    Finds what is damaged, cut short, missing or another's, wrong checksums of bodies, holes and overlaps of offsets.
    Exit code 1: something is wrong, each with its object and offsets; 6: a store did not give all objects.
    """
    from neve.spark.jobs.verify import Progress
    from neve.spark.jobs.verify import verify as job

    def progress(done: Progress) -> None:
        sizes = f"{size_text(done.bytes)} of {size_text(done.of_bytes)}"
        told = f"{done.objects} of {done.of_objects} objects, {sizes}, {done.faults} faults"
        say(json.dumps(done._asdict()) if as_json else told)

    with _spark(store, master, "neve spark verify") as spark:
        done = job(
            spark, store=store, broker=broker, topics=topics or None, deep=not quick, resume=resume, progress=progress
        )
    if as_json:
        click.echo(json.dumps(done.as_json(), ensure_ascii=False))
    else:
        for name, fault in done.faults[:_TOLD]:
            offsets = (
                "" if fault.queue is None or not fault.key else f" (queue {fault.queue}, {fault.first}…{fault.last})"
            )
            click.echo(f"broker {name}: {fault.told()}{offsets}")
        for name, key, reason in done.unread[:_TOLD]:
            click.echo(f"broker {name}: {key}: not read: {reason}")
        if done.taken_over:
            say(f"{done.taken_over} objects were checked before, {resume} says")
        say(f"{done.objects} objects, {done.rows} rows, {size_text(done.bytes)}, {done.gaps} gaps")
    if done.faults:
        raise Failure(FAILED, f"{len(done.faults)} faults")
    if done.unread:
        raise Failure(UNREACHABLE, f"{len(done.unread)} objects were not read")


@click.command()
@click.argument("topic")
@click.argument("table")
@click.option("--decode", type=click.Choice(["bytes", "text", "json", "avro", "protobuf"]), default="text",
              show_default=True, help="What bodies are.")  # fmt: skip
@click.option("--schema", help="Type of the values as DDL: 'carrier STRING, dep_delay DOUBLE'.")
@click.option("--schema-file", type=click.Path(exists=True, dir_okay=False), help="Of avro its .avsc, of protobuf a "
              "descriptor set.")  # fmt: skip
@click.option("--message", help="Of protobuf the full name of a body's message.")
@click.option("--registry", help="Instead of a file: http(s)://HOST:PORT of the schema registry whose numbers bodies "
              "begin with. NEVE_REGISTRY_AUTH says user:password.")  # fmt: skip
@click.option("--flat", is_flag=True, help="The fields of the values are columns of the table.")
@click.option("--on-error", type=click.Choice(["null", "stop"]), default="null", show_default=True,
              help="Of a body that is none: no value, and why in body_error; or stop.")  # fmt: skip
@click.option("--dead-letters", metavar="TABLE", help="A table of their own for rows whose bodies are none.")
@click.option(
    "--expired",
    type=click.Choice(["keep", "drop"]),
    default="keep",
    show_default=True,
    help="What becomes of the table's rows that have expired from the archive. What was erased goes always.",
)
@click.option("--lossy", is_flag=True, help="Go on without rows that expired before any run saw them.")
@click.option("--broker", help="Of this broker's archive alone.")
@click.option("--rows-per-commit", type=click.IntRange(min=1), default=5_000_000, show_default=True,
              help="About so many rows at once; a run that dies loses no commit.")  # fmt: skip
@job_options
def materialize(
    *, topic: str, table: str, decode: str, schema: str | None, schema_file: str | None, message: str | None,
    registry: str | None, flat: bool, on_error: str, dead_letters: str | None, expired: str, lossy: bool,
    broker: str | None, rows_per_commit: int, store: str, master: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Take TABLE, a directory of Parquet by day, up to the end of the archived TOPIC: what is new, each row once.

    TABLE is dir:PATH or s3://BUCKET/PREFIX?…, made by the first run. Run it as often as you like: one that was
    killed left nothing that a reader sees, and the next goes on.
    """
    from neve.spark.jobs.materialize import materialize as job
    from neve.spark.jobs.table_log import NoTable, Overtaken
    from neve.spark.jobs.table_run import MaterializeJob
    from neve.spark.jobs.table_store import open_table

    def progress(done: MaterializeJob) -> None:
        told = f"{done.rows} rows more, {done.table_rows} in the table, {size_text(done.table_bytes)}"
        say(json.dumps(done.as_json(), ensure_ascii=False) if as_json else told)

    if decode == "json" and schema is None and flat:
        raise click.UsageError("--flat needs a --schema")
    try:
        tables = [table] if dead_letters is None else [table, dead_letters]
        for one in tables:
            open_table(one)  # a wrong URL is told before a JVM starts
        with _spark(store, master, "neve spark materialize", *tables) as spark:
            done = job(
                spark, topic, store=store, table=table, kind=decode, schema=schema, schema_file=schema_file,
                message=message, registry=registry, on_error=on_error, dead_letters=dead_letters, flat=flat,
                expired=expired, broker=broker, fails_on_data_loss=not lossy, rows_per_commit=rows_per_commit,
                progress=progress,
            )  # fmt: skip
    except (NoTable, Overtaken) as error:
        raise Failure(CONFLICT, str(error)) from error
    except ValueError as error:
        raise Failure(USAGE, str(error)) from error
    if as_json:
        click.echo(json.dumps(done.as_json(), ensure_ascii=False))
        return
    dropped = f", {done.dropped_rows} dropped" if done.dropped_rows else ""
    dead = "" if dead_letters is None else f"; {done.dead_rows} dead letters in {dead_letters}"
    say(f"{done.rows} rows added{dropped}; {done.table_rows} rows in {done.table_files} files of {table}{dead}")


@click.command()
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("-t", "--topic", "topics", multiple=True, help="This topic only; may be given several times.")
@click.option("--broker", help="Only the archive of this broker.")
@click.option("--from", "start", help="Stored at or after this ISO 8601 time.")
@click.option("--to", "end", help="Stored before this ISO 8601 time.")
@click.option("--lag", is_flag=True, help="And the lag of all consumer groups, of the brokers behind --namesrv.")
@cluster_options
@job_options
def report(
    *, folder: str, topics: tuple[str, ...], broker: str | None, start: str | None, end: str | None, lag: bool,
    namesrv: str, store: str, master: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Count what is archived by topic and day into FOLDER: tables as JSON and Parquet, and report.html with plots.

    Traffic, sizes, tags, producers, retries and dead letters. The page needs no network and no script.
    """
    from neve.clock import system_now_ms
    from neve.spark.jobs.report import report as job
    from neve.spark.jobs.report_files import write_report

    begin, stop = (None if start is None else to_ms(start)), (None if end is None else to_ms(end))
    groups = asyncio.run(summaries(namesrv)) if lag else None
    with _spark(store, master, "neve spark report") as spark:
        tables = job(spark, store=store, topics=topics or None, broker=broker, start=begin, end=stop)
    if groups is not None:
        tables["lag"] = groups
    files = write_report(folder, tables, store=store, made_ms=system_now_ms())
    if as_json:
        click.echo(json.dumps({"job": "report", "folder": folder, "files": files, **tables}, ensure_ascii=False))
        return
    traffic = tables["traffic"]
    messages, count = sum(row["messages"] for row in traffic), len({row["topic"] for row in traffic})
    say(f"{messages} messages of {count} topics: {folder}/{files[-1]}")


class _spark:  # noqa: N801 - a context, used as a function
    """A session that ends with the verb; Spark's own errors as what they are."""

    def __init__(self, store: str, master: str | None, name: str, *others: str) -> None:
        self._store, self._master, self._name, self._others = store, master, name, others

    def __enter__(self) -> SparkSession:
        from neve.cli.store import open_source
        from neve.spark import session

        open_source(self._store)  # a wrong URL is told before a JVM starts
        conf = {"spark.log.level": "ERROR", "spark.ui.enabled": "false"}
        self._session = session(self._store, *self._others, master=self._master, app_name=self._name, conf=conf)
        return self._session

    def __exit__(self, *_: object) -> None:
        self._session.stop()
