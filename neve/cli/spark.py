"""`neve spark`: archived topics as tables of a local Spark."""

from __future__ import annotations

import json

import click

from neve.cli.output import emit, output_option, say, store_option
from neve.cli.times import to_ms


@click.group()
def spark() -> None:
    """Query archived topics with Spark."""


@spark.command()
@click.argument("query")
@store_option(required=True)
@click.option("-t", "--topic", "topics", multiple=True, help="Topic to offer as a table; all of the store by default.")
@click.option("--decode", type=click.Choice(["text", "json", "bytes"]), default="text", show_default=True,
              help="What bodies are.")  # fmt: skip
@click.option("--schema", help="Columns of a JSON body as DDL: 'carrier STRING, dep_delay DOUBLE'.")
@click.option("--from", "start", help="Stored at or after this ISO 8601 time.")
@click.option("--to", "end", help="Stored before this ISO 8601 time.")
@click.option("--master", default="local[*]", show_default=True, help="Spark master.")
@output_option
def sql(
    *,
    query: str,
    store: str,
    topics: tuple[str, ...],
    decode: str,
    schema: str | None,
    start: str | None,
    end: str | None,
    master: str,
    output: str,
) -> None:
    """Run QUERY; each topic is a table of its name, bodies are in the column `text` (or `value` with --decode json)."""
    if schema is not None and decode != "json":
        raise click.UsageError("--schema goes with --decode json")
    from neve.archive.follow import catalogs
    from neve.cli.store import open_source
    from neve.spark import read_topic, session

    known = sorted({topic for catalog in catalogs(open_source(store)).values() for topic in catalog.topics()})
    engine = session(store, master=master, app_name="neve spark sql", conf={"spark.log.level": "ERROR"})
    begin, stop = (None if start is None else to_ms(start)), (None if end is None else to_ms(end))
    try:
        for topic in topics or known:
            frame = read_topic(engine, topic, store=store, start=begin, end=stop, decode=decode, schema=schema)
            frame.createOrReplaceTempView(f"`{topic}`")
        answer = engine.sql(query)
        if output == "json":
            for line in answer.toJSON().collect():
                click.echo(json.dumps(json.loads(line), ensure_ascii=False))
            return
        rows = [row.asDict(recursive=True) for row in answer.collect()]
        emit(rows, answer.columns, output)
        say(f"{len(rows)} rows")
    finally:
        engine.stop()
