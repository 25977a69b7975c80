"""`neve pipeline`: Spark's declarative pipelines over archived topics; the words around `neve.spark.pipeline`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neve.cli.aliases import AliasedGroup
from neve.cli.cluster import cluster_options
from neve.cli.failures import CONFLICT, FAILED, USAGE, Failure
from neve.cli.output import emit, output_option, say, store_option, time_text

if TYPE_CHECKING:
    from neve.spark.pipeline.record import Run
    from neve.spark.pipeline.run import Refresh
    from neve.spark.pipeline.status import Flow

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group(cls=AliasedGroup)
def pipeline() -> None:
    """Declared Spark pipelines: from a topic to tables, and to other topics."""


@pipeline.command()
@click.argument("directory", type=click.Path(path_type=Path))
@store_option(required=True)
@click.option("-t", "--topic", required=True, help="The archived topic that it reads.")
@click.option("--schema", help="Columns of JSON bodies as DDL: 'carrier STRING, dep_delay DOUBLE'.  [default: text]")
@click.option("--into", help="Topic that its windows go to, at the brokers of --namesrv.  [default: tables only]")
@click.option("--window", default="1 hour", show_default=True, help="Length of a window.")
@click.option("--late", default="10 minutes", show_default=True, help="So long a window waits behind the newest "
              "message.")  # fmt: skip
@cluster_options
def init(
    *, directory: Path, store: str, topic: str, schema: str | None, into: str | None, window: str, late: str,
    namesrv: str,
) -> None:  # fmt: skip
    """Write a pipeline to begin with into DIRECTORY: a topic, a clean table, windows of it, and those into a topic.

    Spec and definitions are Spark's own; change them as you like.
    """
    from neve.archive.store.url import parse_store_url
    from neve.spark.pipeline.project import Wanted, create

    try:
        parse_store_url(store)
        target = None if into is None else (namesrv, into)
        files = create(directory, Wanted(directory.absolute().name, store, topic, schema, target, window, late))
    except ValueError as error:
        raise Failure(USAGE, str(error)) from error
    for file in files:
        click.echo(str(file))
    say(f"the table `windows` gets a window when a message arrives that is {late} newer than the window's end")
    say(f"next: neve pipeline dry-run {directory}, then neve pipeline run {directory}")


def _spec_argument(command: Command) -> Command:
    return click.argument("where", type=click.Path(path_type=Path), default=".", metavar="[SPEC|DIRECTORY]")(command)


def _engine_options(command: Command) -> Command:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="The outcome as one JSON object; progress as JSON lines."),
        click.option("--remote", help="A Spark Connect server, sc://HOST:PORT, with a catalog of its own."),
        click.option("--master", help="Spark master.  [default: spark-submit's, or local[*]]"),
    ):
        command = option(command)
    return command


@pipeline.command()
@_spec_argument
@click.option("--refresh", multiple=True, metavar="TABLE", help="Only this table; may be given several times.")
@click.option("--full-refresh", multiple=True, metavar="TABLE", help="Empty this table and make it again.")
@click.option("--full-refresh-all", is_flag=True, help="Empty all tables and make them again. What went into a topic "
              "goes there again.")  # fmt: skip
@_engine_options
def run(
    *, where: Path, refresh: tuple[str, ...], full_refresh: tuple[str, ...], full_refresh_all: bool,
    master: str | None, remote: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Take all tables up to the end of their topics, from where the last run ended, and end.

    A run that was killed is gone on with by the next. Exit code 5: another run goes on.
    """
    from neve.spark.pipeline.run import Refresh

    if full_refresh_all and (refresh or full_refresh):
        raise click.UsageError("--full-refresh-all is of all tables: without --refresh and --full-refresh")
    _carry_out(
        where,
        Refresh(refresh, full_refresh, full_refresh_all),
        dry=False,
        master=master,
        remote=remote,
        as_json=as_json,
    )


@pipeline.command("dry-run")
@_spec_argument
@_engine_options
def dry_run(*, where: Path, master: str | None, remote: str | None, as_json: bool) -> None:
    """Look whether it would run: definitions, columns, tables, sources. Nothing is read, and nothing written."""
    from neve.spark.pipeline.run import Refresh

    _carry_out(where, Refresh(), dry=True, master=master, remote=remote, as_json=as_json)


@pipeline.command()
@_spec_argument
@output_option
def status(*, where: Path, output: str) -> None:
    """Tell what each flow has done last, and how far behind the archive it is. Starts no Spark.

    `behind` counts the messages of the spec's topic that are archived and not in a batch that is done.
    """
    from neve.spark.pipeline.run import STORE, TOPIC, find_spec, read_spec
    from neve.spark.pipeline.status import standing

    file = find_spec(where)
    spec = read_spec(file)
    store, topic = spec.configuration.get(STORE), spec.configuration.get(TOPIC)
    told = standing(file.parent, spec.storage, None if store is None or topic is None else (store, topic))
    if output == "json":
        runs = [_as_json(run) for run in told.runs]
        click.echo(json.dumps({"pipeline": spec.name, "runs": runs, "flows": [one._asdict() for one in told.flows]}))
        return
    if told.runs:
        newest = told.runs[-1]
        end = "" if newest.ended_ms is None else f", ended {time_text(newest.ended_ms)}"
        say(f"{spec.name}: the last run began {time_text(newest.began_ms)}{end}: {newest.error or newest.state}")
    else:
        say(f"{spec.name}: no run yet")
    columns = ("flow", "state", "at", "batches", "last_batch", "position", "behind")
    emit([_row(flow) for flow in told.flows], columns, output)


def _row(flow: Flow) -> dict[str, object]:
    state = f"{flow.state or ''}{', amid a batch' if flow.is_amid else ''}"
    return {
        "flow": flow.name,
        "state": state,
        "at": time_text(flow.at_ms),
        "batches": flow.batches,
        "last_batch": time_text(flow.batch_ms),
        "position": flow.position,
        "behind": flow.behind,
    }


def _carry_out(
    where: Path, refresh: Refresh, *, dry: bool, master: str | None, remote: str | None, as_json: bool
) -> None:
    from neve.spark.pipeline.record import Busy
    from neve.spark.pipeline.run import BadPipeline, Event, RunFailed, find_spec, run_pipeline

    def progress(event: Event) -> None:
        say(json.dumps(event._asdict(), ensure_ascii=False) if as_json else event.text)

    if master is not None and remote is not None:
        raise click.UsageError("--master is of a Spark here, --remote of one that runs: one of them")
    try:
        done = run_pipeline(find_spec(where), dry=dry, refresh=refresh, master=master, remote=remote, progress=progress)
    except BadPipeline as error:
        raise Failure(USAGE, str(error)) from error
    except Busy as error:
        raise Failure(CONFLICT, str(error)) from error
    except RunFailed as error:
        raise Failure(FAILED, str(error)) from error
    if as_json:
        click.echo(json.dumps(_as_json(done), ensure_ascii=False))


def _as_json(run: Run) -> Any:
    import msgspec

    return msgspec.to_builtins(run)
