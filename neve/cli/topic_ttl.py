"""`neve topic ttl`: how long a topic's messages are kept, and what a shorter time would delete."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from neve.archive.policy.ttl import FOR_EVER_HOURS, ttl_ms_of
from neve.cli import completed
from neve.cli.aliases import AliasedGroup
from neve.cli.cluster import cluster_options, connect
from neve.cli.failures import UNREACHABLE, Failure, explain
from neve.cli.output import ask, emit, output_option, say, size_text, store_option
from neve.cli.topic_names import topic_names
from neve.cli.ttl import BROKER_DEFAULT, format_ttl, shorter, ttl_value
from neve.clock import system_now_ms
from neve.remoting.names import RESERVE_TIME

if TYPE_CHECKING:
    from neve.archive.catalog.catalog import Catalog

PLAN_COLUMNS = ("topic", "ttl", "objects_gone", "objects_cut", "rows_gone", "bytes_gone", "rows_kept")


@click.group(cls=AliasedGroup)
def ttl() -> None:
    """How long a topic's messages are kept, in both tiers."""


def hours_of(attributes: Mapping[str, str]) -> int | None:
    """The TTL in a topic's attributes; None: the broker's default holds."""
    text = attributes.get(RESERVE_TIME)
    if text is None or not text.lstrip("-").isdigit() or int(text) == BROKER_DEFAULT:
        return None
    return min(int(text), FOR_EVER_HOURS)


@ttl.command(name="get")
@click.argument("topic", shell_complete=completed.topics)
@cluster_options
@output_option
def get_ttl(topic: str, namesrv: str, output: str) -> None:
    """Show a topic's TTL."""
    hours, effective = asyncio.run(_effective(namesrv, topic))
    emit([{**_row(topic, hours), "effective_hours": effective}], ["topic", "ttl"], output)


@ttl.command(name="list")
@click.option("--all", "everything", is_flag=True, help="Also the servers' own topics, retry topics among them.")
@cluster_options
@output_option
def list_ttls(everything: bool, namesrv: str, output: str) -> None:
    """Show the TTL of every topic."""
    found, unreached = asyncio.run(_all(namesrv, everything))
    emit([_row(topic, hours) for topic, hours in found], ["topic", "ttl"], output)
    _refuse_as_whole(unreached)


@ttl.command(name="set")
@click.argument("topic", shell_complete=completed.topics)
@click.argument("hours", metavar="TTL", callback=ttl_value)
@click.option("--yes", is_flag=True, help="Do not ask before a TTL gets shorter.")
@store_option()
@cluster_options
def set_ttl(topic: str, hours: int, yes: bool, store: str | None, namesrv: str) -> None:
    """Set a topic's TTL: 36h, 90d, 2w or forever.

    Before it gets shorter, what would go is shown (with --store) and asked for.
    """
    before, effective = asyncio.run(_effective(namesrv, topic))
    if shorter(hours, before):
        if store is not None:
            emit([_plan_of(store, topic, hours)], PLAN_COLUMNS, "table")
        if not yes:
            default = f" ({format_ttl(effective)})" if before is None and effective is not None else ""
            question = f"Shorten the TTL of {topic} from {format_ttl(before)}{default} to {format_ttl(hours)}?"
            ask(question)
    asyncio.run(_change(namesrv, topic, str(hours)))
    say(f"TTL of {topic}: {format_ttl(before)} → {format_ttl(hours)}")


@ttl.command(name="unset")
@click.argument("topic", shell_complete=completed.topics)
@click.option("--yes", is_flag=True, help="Do not ask.")
@cluster_options
def unset_ttl(topic: str, yes: bool, namesrv: str) -> None:
    """Give a topic the broker's default TTL again."""
    before = asyncio.run(_get(namesrv, topic))
    if before is not None and not yes:
        question = f"The broker's default may be shorter than {format_ttl(before)}. Unset the TTL of {topic}?"
        ask(question)
    asyncio.run(_change(namesrv, topic, None))
    say(f"TTL of {topic}: {format_ttl(before)} → default")


@ttl.command(name="plan")
@click.argument("topic", required=False, shell_complete=completed.topics)
@click.option("--ttl", "hours", callback=ttl_value, help="Try this TTL; otherwise the one that is set.")
@store_option(required=True)
@cluster_options
@output_option
def plan_ttl(topic: str | None, hours: int | None, store: str, namesrv: str, output: str) -> None:
    """Show what a TTL deletes from the archive now. Nothing is changed."""
    unreached: Sequence[str] = ()
    if hours is not None:
        if topic is None:
            raise click.UsageError("--ttl needs a TOPIC")
        wanted: Sequence[tuple[str, int | None]] = [(topic, hours)]
    elif topic is not None:
        wanted = [(topic, asyncio.run(_get(namesrv, topic)))]
    else:
        wanted, unreached = asyncio.run(_all(namesrv))
    from neve.cli.store import open_source

    open_source(store)  # an unusable store is an error also if no topic has a TTL
    rows = [_plan_of(store, name, hours) for name, hours in wanted if hours is not None]
    emit(rows, PLAN_COLUMNS, output)
    _refuse_as_whole(unreached)
    if not rows:
        say("no topic has its own TTL" if topic is None else f"{topic} has no TTL of its own: try one with --ttl")


def _plan_of(store: str, topic: str, hours: int) -> dict[str, Any]:
    from neve.archive.catalog.journal_reader import catalogs
    from neve.cli.store import open_source

    return expiry_plan(topic, catalogs(open_source(store)).values(), hours, system_now_ms())


def expiry_plan(topic: str, catalogs: Iterable[Catalog], hours: int, now_ms: int) -> dict[str, Any]:
    """What leaves the readers' view at `now_ms`: what each broker's own plan says, counted."""
    from neve.archive.policy.expiry import expire_topic, rows_below

    gone = cut = rows_gone = bytes_gone = rows_kept = 0
    for catalog in catalogs:
        recorded = functools.partial(catalog.recorded_minimum, topic)
        keys, minimums = expire_topic(catalog, topic, ttl_ms_of(hours), now_ms)
        expired = set(keys)
        for name in catalog.objects(topic):
            hidden = rows_below(name, recorded)
            rows = name.rows - hidden
            if name.key in expired:
                gone += 1
                bytes_gone += name.size
            else:
                rows = rows_below(name, functools.partial(_raised, recorded, minimums)) - hidden
                cut += rows > 0
            rows_gone += rows
            rows_kept += name.rows - hidden - rows
    return {
        "topic": topic,
        "ttl": format_ttl(hours),
        "objects_gone": gone,
        "objects_cut": cut,
        "rows_gone": rows_gone,
        "bytes_gone": bytes_gone,
        "size_gone": size_text(bytes_gone),
        "rows_kept": rows_kept,
    }


def _raised(recorded: Callable[[int], int], minimums: Mapping[int, int], queue: int) -> int:
    return max(recorded(queue), minimums.get(queue, 0))


def _row(topic: str, hours: int | None) -> dict[str, Any]:
    return {"topic": topic, "ttl": format_ttl(hours), "hours": hours}


async def _get(namesrv: str, topic: str) -> int | None:
    async with connect(namesrv) as client:
        return hours_of((await client.topic_config(topic)).attributes)


async def _effective(namesrv: str, topic: str) -> tuple[int | None, int | None]:
    """The hours in the topic's attributes, and those in force: without its own TTL the shortest default of its brokers.

    None: a broker that names no default, as Apache's.
    """
    from neve.cli.brokers import brokers

    hours = await _get(namesrv, topic)
    if hours is not None:
        return hours, hours
    async with brokers(namesrv) as asked:
        defaults = [(await asked.config(at.broker)).get("defaultTtlHours", "") for at in await asked.topic(topic, None)]
    known = [min(int(text), FOR_EVER_HOURS) if int(text) > 0 else FOR_EVER_HOURS for text in defaults if text]
    return None, min(known) if known and len(known) == len(defaults) else None


async def _all(namesrv: str, everything: bool = True) -> tuple[list[tuple[str, int | None]], list[str]]:
    """TTLs by topic, and the topics whose broker could not be reached."""
    from neve.errors import NeveError

    found: list[tuple[str, int | None]] = []
    unreached: list[str] = []
    async with connect(namesrv) as client:
        for topic in await topic_names(client, everything):
            try:
                found.append((topic, hours_of((await client.topic_config(topic)).attributes)))
            except NeveError as error:
                say(f"{topic}: {error}")  # one without an answer is no reason to hide the others
                explained = explain(error)
                if explained is not None and explained.exit_code == UNREACHABLE:
                    unreached.append(topic)
    return found, unreached


def _refuse_as_whole(unreached: Sequence[str]) -> None:
    """After what is known was shown: it was not all.

    Raises:
        Failure: there are topics whose broker could not be reached.
    """
    if unreached:
        raise Failure(UNREACHABLE, f"not reached: the brokers of {', '.join(unreached)}")


async def _change(namesrv: str, topic: str, value: str | None) -> None:
    from neve.cli.brokers import brokers

    attribute = f"-{RESERVE_TIME}" if value is None else f"+{RESERVE_TIME}={value}"
    async with brokers(namesrv) as asked:
        for at in await asked.topic(topic, None):
            await asked.set_topic(topic, at, {"attributes": attribute})
