"""`neve topic ttl`: how long the messages of a topic are kept, and what a shorter TTL would delete."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from neve.archive.policy.ttl import FOR_EVER_HOURS, ttl_ms_of
from neve.cli import completed
from neve.cli.aliases import VerbGroup
from neve.cli.cluster import administer, cluster_options, connect
from neve.cli.failures import UNREACHABLE, Failure, explain
from neve.cli.options import yes_option
from neve.cli.output import ask, emit, output_option, say, size_text, store_option
from neve.cli.ttl import BROKER_DEFAULT, format_ttl, shorter, ttl_value
from neve.clock import system_now_ms
from neve.remoting.names import RESERVE_TIME

if TYPE_CHECKING:
    from neve.archive.catalog.catalog import Catalog

PLAN_COLUMNS = ("topic", "ttl", "objects_deleted", "objects_cut", "rows_deleted", "bytes_deleted", "rows_kept")


@click.group(cls=VerbGroup)
def ttl() -> None:
    """The TTL of a topic: how long its messages are kept, in both tiers."""


def hours_of(attributes: Mapping[str, str]) -> int | None:
    """Return the TTL among the attributes of a topic; None if the broker's default applies."""
    text = attributes.get(RESERVE_TIME)
    if text is None or not text.lstrip("-").isdigit() or int(text) == BROKER_DEFAULT:
        return None
    return min(int(text), FOR_EVER_HOURS)


@ttl.command(name="show")
@click.argument("topic", shell_complete=completed.topics)
@cluster_options
@output_option
def show_ttl(topic: str, namesrv: str, output: str) -> None:
    """Show the TTL of a topic."""
    hours, effective = asyncio.run(_effective(namesrv, topic))
    emit([{**_row(topic, hours), "effective_hours": effective}], ["topic", "ttl"], output)


@ttl.command(name="list")
@click.option("--all", "everything", is_flag=True, help="Include the topics of servers and groups.")
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
@click.option("--yes", is_flag=True, help="Do not ask before the TTL becomes shorter.")
@store_option()
@cluster_options
def set_ttl(topic: str, hours: int, yes: bool, store: str | None, namesrv: str) -> None:
    """Set the TTL of a topic: 36h, 90d, 2w or forever.

    Before the TTL becomes shorter, it asks; with --store it shows what would be deleted.
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
@yes_option
@cluster_options
def unset_ttl(topic: str, yes: bool, namesrv: str) -> None:
    """Restore the broker's default TTL for a topic."""
    before = asyncio.run(_get(namesrv, topic))
    if before is not None and not yes:
        question = f"The broker's default may be shorter than {format_ttl(before)}. Unset the TTL of {topic}?"
        ask(question)
    asyncio.run(_change(namesrv, topic, None))
    say(f"TTL of {topic}: {format_ttl(before)} → default")


@ttl.command(name="plan")
@click.argument("topic", required=False, shell_complete=completed.topics)
@click.option("--ttl", "hours", callback=ttl_value, help="Assume this TTL.  [default: the one that is set]")
@store_option(required=True)
@cluster_options
@output_option
def plan_ttl(topic: str | None, hours: int | None, store: str, namesrv: str, output: str) -> None:
    """Show what a TTL deletes from the archive now, and change nothing."""
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

    open_source(store)  # an unusable store is an error even if no topic has a TTL
    rows = [_plan_of(store, name, hours) for name, hours in wanted if hours is not None]
    emit(rows, PLAN_COLUMNS, output)
    _refuse_as_whole(unreached)
    if not rows:
        say(
            "no topic has a TTL of its own"
            if topic is None
            else f"{topic} has no TTL of its own: assume one with --ttl"
        )


def _plan_of(store: str, topic: str, hours: int) -> dict[str, Any]:
    from neve.archive.catalog.journal_reader import catalogs
    from neve.cli.store import open_source

    return expiry_plan(topic, catalogs(open_source(store)).values(), hours, system_now_ms())


def expiry_plan(topic: str, catalogs: Iterable[Catalog], hours: int, now_ms: int) -> dict[str, Any]:
    """Return how much expires at `now_ms`, as the plans of all brokers say."""
    from neve.archive.policy.expiry import expire_topic, rows_below

    removed = cut = rows_deleted = bytes_deleted = rows_kept = 0
    for catalog in catalogs:
        recorded = functools.partial(catalog.recorded_minimum, topic)
        keys, minimums = expire_topic(catalog, topic, ttl_ms_of(hours), now_ms)
        expired = set(keys)
        for name in catalog.objects(topic):
            hidden = rows_below(name, recorded)
            rows = name.rows - hidden
            if name.key in expired:
                removed += 1
                bytes_deleted += name.size
            else:
                rows = rows_below(name, functools.partial(_raised, recorded, minimums)) - hidden
                cut += rows > 0
            rows_deleted += rows
            rows_kept += name.rows - hidden - rows
    return {
        "topic": topic,
        "ttl": format_ttl(hours),
        "objects_deleted": removed,
        "objects_cut": cut,
        "rows_deleted": rows_deleted,
        "bytes_deleted": bytes_deleted,
        "size_deleted": size_text(bytes_deleted),
        "rows_kept": rows_kept,
    }


def _raised(recorded: Callable[[int], int], minimums: Mapping[int, int], queue: int) -> int:
    return max(recorded(queue), minimums.get(queue, 0))


def _row(topic: str, hours: int | None) -> dict[str, Any]:
    return {"topic": topic, "ttl": format_ttl(hours), "hours": hours}


async def _get(namesrv: str, topic: str) -> int | None:
    async with connect(namesrv) as client:
        return hours_of((await client.admin.topic_config(topic)).attributes)


async def _effective(namesrv: str, topic: str) -> tuple[int | None, int | None]:
    """Return the hours among the attributes of a topic, and those in force.

    Without a TTL of its own, the shortest default of its brokers is in force. It is None if a broker does not report
    its default, as Apache's.
    """
    hours = await _get(namesrv, topic)
    if hours is not None:
        return hours, hours
    async with administer(namesrv) as admin:
        defaults = [
            (await admin.brokers.configuration(at.broker)).values.get("defaultTtlHours", "")
            for at in await admin.topics.settings_of(topic)
        ]
    known = [min(int(text), FOR_EVER_HOURS) if int(text) > 0 else FOR_EVER_HOURS for text in defaults if text]
    return None, min(known) if known and len(known) == len(defaults) else None


async def _all(namesrv: str, everything: bool = True) -> tuple[list[tuple[str, int | None]], list[str]]:
    """Return the TTLs by topic, and the topics whose broker did not answer."""
    from neve.errors import NeveError

    found: list[tuple[str, int | None]] = []
    unreached: list[str] = []
    async with administer(namesrv) as admin:
        for topic in await admin.topics.names(include_system=everything):
            try:
                found.append((topic, hours_of((await admin.client.admin.topic_config(topic)).attributes)))
            except NeveError as error:
                say(f"{topic}: {error}")  # the other topics are listed all the same
                explained = explain(error)
                if explained is not None and explained.exit_code == UNREACHABLE:
                    unreached.append(topic)
    return found, unreached


def _refuse_as_whole(unreached: Sequence[str]) -> None:
    """Fail after an incomplete list was printed.

    Raises:
        Failure: brokers of these topics did not answer.
    """
    if unreached:
        raise Failure(UNREACHABLE, f"not reached: the brokers of {', '.join(unreached)}")


async def _change(namesrv: str, topic: str, value: str | None) -> None:
    attribute = f"-{RESERVE_TIME}" if value is None else f"+{RESERVE_TIME}={value}"
    async with administer(namesrv) as admin:
        for at in await admin.topics.settings_of(topic):
            await admin.topics.change(topic, at, {"attributes": attribute})
