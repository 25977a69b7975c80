"""`neve topic`: topics of the cluster behind a name server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import click

from neve.cli import completed
from neve.cli.aliases import AliasedGroup
from neve.cli.cluster import cluster_options, connect
from neve.cli.output import ask, emit, emit_one, output_option, say, time_text
from neve.cli.topic_names import topic_names
from neve.cli.topic_trim import trim
from neve.cli.topic_ttl import hours_of, ttl
from neve.cli.ttl import format_ttl, ttl_value
from neve.remoting.names import RESERVE_TIME


@click.group(cls=AliasedGroup)
def topic() -> None:
    """Create, list, describe and delete topics; set their TTL; delete their oldest messages."""


topic.add_command(ttl)
topic.add_command(trim)


@topic.command()
@click.argument("name")
@click.option("-q", "--queues", type=click.IntRange(1, 1024), default=8, show_default=True, help="At each broker.")
@click.option("--ttl", "hours", callback=ttl_value, help="How long messages are kept: 36h, 90d, forever.")
@click.option("--broker", help="Only on this broker; otherwise on all.")
@cluster_options
def create(name: str, queues: int, hours: int | None, broker: str | None, namesrv: str) -> None:
    """Create a topic."""
    attributes: dict[str, str | None] = {} if hours is None else {RESERVE_TIME: str(hours)}
    asyncio.run(_create(namesrv, name, queues, attributes, broker))
    say(f"created {name} with {queues} queues" + ("" if hours is None else f", TTL {format_ttl(hours)}"))


async def _create(
    namesrv: str, name: str, queues: int, attributes: Mapping[str, str | None], broker: str | None
) -> None:
    from neve.errors import NeveError

    async with connect(namesrv) as client:
        try:
            known = name in await client.topic_list()
        except NeveError:
            known = False  # an empty cluster has no list yet; creating answers for itself
        if known and (broker is None or broker in (await client.topic_route(name)).brokers):
            from neve.cli.failures import CONFLICT, Failure

            where = "" if broker is None else f" at {broker}"
            raise Failure(CONFLICT, f"topic {name} exists already{where}: `neve topic alter` changes it")
        await client.create_topic(name, queues, attributes, broker=broker)


@topic.command(name="list")
@click.option("--all", "everything", is_flag=True, help="Also the servers' own topics.")
@cluster_options
@output_option
def list_topics(everything: bool, namesrv: str, output: str) -> None:
    """List the topics."""
    names = asyncio.run(_list(namesrv, everything))
    emit([{"topic": name} for name in names], ["topic"], output)


async def _list(namesrv: str, everything: bool) -> list[str]:
    async with connect(namesrv) as client:
        return await topic_names(client, everything)


@topic.command()
@click.argument("name", shell_complete=completed.topics)
@click.option("--tiers", is_flag=True, help="Show which part of it is where: broker, archive, or both.")
@cluster_options
@output_option
def describe(name: str, tiers: bool, namesrv: str, output: str) -> None:
    """Show a topic's settings and the offsets of its queues.

    COLD of the messages the archive alone has; from HOT_OFFSET on the broker has them on its disk, too.

    With --tiers a SUMMARY; of each queue the OFFSETs between which the archive alone, both, or the broker alone has
    messages; of each broker what the topic's objects hold (SIZE), and how far archiving is behind (SYNC).
    """
    if tiers:
        from neve.cli.topic_tiers import described, emit_tiers

        emit_tiers(asyncio.run(described(namesrv, name)), output)
        return
    config, queues = asyncio.run(_describe(namesrv, name))
    if output == "json":
        emit_one({**config, "queues": queues}, output)
        return
    emit_one(config, output)
    click.echo()
    emit(queues, _columns(queues), output)


def _columns(queues: list[dict[str, Any]]) -> list[str]:
    """Of a broker without an archive nothing is cold."""
    tiers = ["hot_offset", "cold"] if any(row["hot_offset"] is not None for row in queues) else []
    return ["broker", "queue", "min_offset", *tiers[:1], "max_offset", "messages", *tiers[1:], "last_stored"]


async def _describe(namesrv: str, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    async with connect(namesrv) as client:
        config = await client.topic_config(name)
        stats = await client.topic_stats(name)
    about = {
        "topic": config.name,
        "read_queues": config.read_queues,
        "write_queues": config.write_queues,
        "perm": config.perm,
        "ttl": format_ttl(hours_of(config.attributes)),
        "attributes": dict(config.attributes),
    }
    queues = [
        {
            "broker": queue.broker_name,
            "queue": queue.queue_id,
            "min_offset": one.min_offset,
            "max_offset": one.max_offset,
            "messages": one.messages,
            "hot_offset": one.local_min_offset,
            "cold": None if one.local_min_offset is None else one.cold_messages,
            "last_stored": time_text(one.last_update_ms or None),
        }
        for queue, one in stats.items()
    ]
    return about, queues


_PERMISSIONS = {"rw": 6, "r": 4, "w": 2, "none": 0}


def _permission(_context: click.Context, _parameter: click.Parameter, text: str | None) -> int | None:
    return None if text is None else _PERMISSIONS[text]


@topic.command()
@click.argument("name", shell_complete=completed.topics)
@click.option("-q", "--queues", type=click.IntRange(1, 65535), help="Queues to read and to write, at each broker.")
@click.option("--read-queues", type=click.IntRange(0, 65535), help="Queues that consumers see.")
@click.option("--write-queues", type=click.IntRange(0, 65535), help="Queues that producers see.")
@click.option(
    "--perm", type=click.Choice(list(_PERMISSIONS)), callback=_permission, help="Who may: rw, only read, only write."
)
@click.option("--set", "attributes", multiple=True, metavar="NAME=VALUE", help="An attribute; NAME= removes it.")
@click.option("--broker", help="Only at this broker; otherwise at all that have it.")
@click.option("--yes", is_flag=True, help="Do not ask before messages can't be read any more.")
@cluster_options
def alter(
    *,
    name: str,
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    perm: int | None,
    attributes: tuple[str, ...],
    broker: str | None,
    yes: bool,
    namesrv: str,
) -> None:
    """Change a topic: its queues, permissions, attributes. What is not named stays as it is.

    To lose queues in order: fewer to write first, and fewer to read once all groups have read the others.
    """
    if queues is not None and (read_queues is not None or write_queues is not None):
        raise click.UsageError("--queues is both --read-queues and --write-queues")
    changes = {
        "readQueueNums": read_queues if queues is None else queues,
        "writeQueueNums": write_queues if queues is None else queues,
        "perm": perm,
    }
    wanted = {key: str(value) for key, value in changes.items() if value is not None}
    if attributes:
        wanted["attributes"] = ",".join(map(_signed, attributes))
    if not wanted:
        raise click.UsageError("nothing to change: --queues, --perm, --set, …")
    for line in asyncio.run(_alter(namesrv, name, wanted, broker, yes=yes)):
        say(line)


def _signed(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals or not key or {",", "+"} & {*text}:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--set")
    return f"+{key}={value}" if value else f"-{key}"


async def _alter(
    namesrv: str, name: str, wanted: Mapping[str, str], broker: str | None, *, yes: bool
) -> list[str]:  # fmt: skip
    from neve.cli.brokers import brokers

    async with brokers(namesrv) as asked:
        found = await asked.topic(name, broker)
        reads = int(wanted.get("readQueueNums", 1 << 31))
        fewer = [at.broker for at in found if reads < at.number("readQueueNums")]
        if fewer and not yes:
            ask(f"Consumers will not see queues {reads} and above of {name} at {', '.join(fewer)}. Go on?")
        for at in found:
            await asked.set_topic(name, at, wanted)
        return [
            f"{name} at {at.broker}: queues to read {at.number('readQueueNums')}, "
            f"to write {at.number('writeQueueNums')}, permission {at.settings.get('perm')}"
            for at in await asked.topic(name, broker)
        ]


@topic.command()
@click.argument("name", shell_complete=completed.topics)
@click.option("--yes", is_flag=True, help="Do not ask.")
@cluster_options
def delete(name: str, yes: bool, namesrv: str) -> None:
    """Delete a topic and all its messages."""
    if not yes:
        ask(f"Delete topic {name} and all its messages, the archived ones too?")
    asyncio.run(_delete(namesrv, name))
    say(f"deleted {name}")


async def _delete(namesrv: str, name: str) -> None:
    async with connect(namesrv) as client:
        await client.topic_config(name)  # says "not found" where deleting would pass silently
        await client.delete_topic(name)
