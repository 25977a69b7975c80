"""`neve spark`: archived topics as tables of a local Spark."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import click

from neve.cli.failures import USAGE, Failure
from neve.cli.options import time_range_options
from neve.cli.output import emit, output_option, say, store_option
from neve.cli.spark_schema import schema as schema_verb
from neve.cli.spark_shell import known_topics, offered
from neve.cli.spark_shell import shell as shell_verb
from neve.cli.spark_verify import verify as verify_verb


@click.group()
def spark() -> None:
    """Query archived topics with Spark."""


for verb in (schema_verb, verify_verb, shell_verb):
    spark.add_command(verb)


@spark.command()
@click.argument("query")
@store_option(required=True)
@click.option(
    "-t",
    "--topic",
    "topics",
    multiple=True,
    help="Topic to use as a table; may be repeated.  [default: all of the store]",
)
@click.option("--decode", type=click.Choice(["text", "json", "bytes"]), default="text", show_default=True,
              help="Format of bodies.")  # fmt: skip
@click.option("--schema", help="Columns of a JSON body as DDL: 'carrier STRING, dep_delay DOUBLE'.")
@time_range_options
@click.option("--master", default="local[*]", show_default=True, help="Spark master.")
@output_option
def sql(
    *,
    query: str,
    store: str,
    topics: tuple[str, ...],
    decode: str,
    schema: str | None,
    start: int | None,
    end: int | None,
    master: str,
    output: str,
) -> None:
    """Run QUERY. Each topic is a table of its name; bodies are in column `text`, or `value` with --decode json."""
    if schema is not None and decode != "json":
        raise click.UsageError("--schema needs --decode json")
    from neve.spark import session

    known = known_topics(store)
    engine = session(store, master=master, app_name="neve spark sql", conf={"spark.log.level": "ERROR"})
    from pyspark.errors import PySparkException
    from pyspark.logger import PySparkLogger

    PySparkLogger.getLogger("SQLQueryContextLogger").disabled = True  # it prints each error with the stack of the JVM
    try:
        offered(engine, topics or known, store, start=start, end=end, decode=decode, schema=schema)
        answer = engine.sql(query)
        if output == "json":
            for line in answer.toJSON().collect():
                click.echo(json.dumps(json.loads(line), ensure_ascii=False))
            return
        rows = [row.asDict(recursive=True) for row in answer.collect()]
        emit(rows, answer.columns, output)
        say(f"{len(rows)} rows")
    except PySparkException as error:
        raise Failure(USAGE, refused_sql(str(error), query, topics or known)) from error
    finally:
        engine.stop()


def refused_sql(error: str, query: str, topics: Sequence[str]) -> str:
    """Return Spark's error for a query with its position, without the plan and the stack of the JVM."""
    lines = error.partition("JVM stacktrace:")[0].strip().split("\n")
    plan = next((at for at, line in enumerate(lines) if at and _PLAN.match(line)), len(lines))
    text = "\n".join(lines[:plan]).rstrip().rstrip(";")
    bare = re.sub(r"`[^`]*`|'[^']*'", "", query)
    quoted = [f"`{topic}`" for topic in topics if not topic.isidentifier() and topic in bare]
    if quoted:
        return f"{text}\nput such a name in backticks (and the query in single quotes): {', '.join(quoted)}"
    if "TABLE_OR_VIEW_NOT_FOUND" in text:
        return f"{text}\nthe topics of this store: {', '.join(topics) or 'none'}"
    return text


# A node of a logical plan, which follows the message.
_PLAN = re.compile(r"\s*(\+- |:- |'?[A-Z]\w+ \[|'[A-Z])")
