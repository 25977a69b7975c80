"""`neve spark shell`: a Python prompt with Spark, in which archived topics are frames and tables."""

from __future__ import annotations

import code
import sys
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from neve.cli.output import store_option
from neve.cli.store import open_source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@click.command()
@store_option(required=True)
@click.option(
    "-t", "--topic", "topics", multiple=True, help="Topic to offer; may be repeated.  [default: all of the store]"
)
@click.option("--decode", type=click.Choice(["text", "json", "bytes"]), default="text", show_default=True,
              help="Format of bodies.")  # fmt: skip
@click.option("--schema", help="Columns of a JSON body as DDL: 'carrier STRING, dep_delay DOUBLE'.")
@click.option("--master", default="local[*]", show_default=True, help="Spark master.")
def shell(*, store: str, topics: tuple[str, ...], decode: str, schema: str | None, master: str) -> None:
    """Open a Python prompt (IPython, if installed) with `spark`, and each topic as a frame and a table.

    A topic whose name is not a Python identifier is `topics["NAME"]`, and needs backticks in SQL.
    """
    if schema is not None and decode != "json":
        raise click.UsageError("--schema needs --decode json")
    from neve.spark import read_topic, session

    chosen = topics or known_topics(store)
    engine = session(store, master=master, app_name="neve spark shell", conf={"spark.log.level": "ERROR"})
    try:
        frames = offered(engine, chosen, store, decode=decode, schema=schema)
        names: dict[str, Any] = {name: frame for name, frame in frames.items() if name.isidentifier()}
        names |= {"spark": engine, "topics": frames, "store": store}
        names["read_topic"] = partial(read_topic, engine, store=store)
        _prompt(names, frames)
    finally:
        engine.stop()


def known_topics(store: str) -> list[str]:
    """Return the topics of a store.

    Raises:
        FileNotFoundError: the store holds no archive.
    """
    from neve.archive.catalog.journal_reader import catalogs

    return sorted({topic for catalog in catalogs(open_source(store)).values() for topic in catalog.topics()})


def offered(
    engine: SparkSession,
    topics: Collection[str],
    store: str,
    *,
    start: int | None = None,
    end: int | None = None,
    decode: str,
    schema: str | None,
) -> dict[str, DataFrame]:
    """Return each topic as a frame, and register it as a table of its name. Times are milliseconds since 1970."""
    from neve.archive.catalog.journal_reader import catalogs
    from neve.archive.read.selection import Selection
    from neve.spark.bodies import decode_bodies
    from neve.spark.known_topics import check_known
    from neve.spark.reader import topic_frame

    source = open_source(store)
    known = catalogs(source)
    frames: dict[str, DataFrame] = {}
    for topic in topics:
        check_known(source, known, topic)
        rows = topic_frame(engine, topic, known, Selection(start, end), store=store)
        frames[topic] = decode_bodies(rows, decode, schema=schema)
    for topic, frame in frames.items():
        frame.createOrReplaceTempView(f"`{topic}`")
    return frames


def _prompt(names: dict[str, Any], frames: Mapping[str, object]) -> None:
    banner = (
        f"topics: {', '.join(frames) or 'none'}\n"
        "spark, topics[NAME], read_topic(NAME, start=…, …), spark.sql('SELECT … FROM NAME')"
    )
    if sys.stdin.isatty():
        try:
            from IPython import start_ipython
        except ModuleNotFoundError:
            pass
        else:
            click.echo(banner, err=True)
            start_ipython(argv=["--no-banner"], user_ns=names)
            return
    code.interact(banner=banner, local=names, exitmsg="")
