"""`neve topic`: the topics of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import click

from neve.cli import completed
from neve.cli.aliases import VerbGroup
from neve.cli.cluster import administer, cluster_options, connect
from neve.cli.failures import CONFLICT, Failure
from neve.cli.options import yes_option
from neve.cli.output import ask, emit, emit_one, output_option, say, time_text
from neve.cli.topic_trim import trim
from neve.cli.topic_ttl import hours_of, ttl
from neve.cli.ttl import format_ttl, ttl_value
from neve.remoting.names import RESERVE_TIME


@click.group(cls=VerbGroup)
def topic() -> None:
    """Topics: settings, queues, TTL, deletion of their oldest messages."""


topic.add_command(ttl)
topic.add_command(trim)

topic_argument = click.argument("name", metavar="TOPIC", shell_complete=completed.topics)


@topic.command()
@click.argument("name", metavar="TOPIC")
@click.option("-q", "--queues", type=click.IntRange(1, 1024), default=8, show_default=True, help="Queues per broker.")
@click.option("--ttl", "hours", callback=ttl_value, help="How long messages are kept: 36h, 90d, forever.")
@click.option("--broker", help="Create it at this broker only.  [default: all brokers]")
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
            exists = name in await client.admin.topic_list()
        except NeveError:
            exists = False  # a name server without brokers has no list; the creation reports the cause
        if exists and (broker is None or broker in (await client.admin.topic_route(name)).brokers):
            where = "" if broker is None else f" at {broker}"
            raise Failure(CONFLICT, f"topic {name} exists already{where}: `neve topic set` changes it")
        await client.admin.create_topic(name, queues, attributes, broker=broker)


@topic.command(name="list")
@click.option("--all", "everything", is_flag=True, help="Include the topics of servers and groups.")
@cluster_options
@output_option
def list_topics(everything: bool, namesrv: str, output: str) -> None:
    """List the topics."""
    names = asyncio.run(_list(namesrv, everything))
    emit([{"topic": name} for name in names], ["topic"], output)


async def _list(namesrv: str, everything: bool) -> list[str]:
    async with administer(namesrv) as admin:
        return await admin.topics.names(include_system=everything)


@topic.command()
@topic_argument
@click.option("--tiers", is_flag=True, help="Show where its messages are: broker, archive, or both.")
@cluster_options
@output_option
def show(name: str, tiers: bool, namesrv: str, output: str) -> None:
    """Show the settings of a topic and the offsets of its queues.

    COLD is the number of messages that exist in the archive only. Messages from HOT_OFFSET on are on the broker's disk.

    --tiers prints a SUMMARY; for each queue the OFFSETs that the archive, both tiers, or the broker holds; for each
    broker the SIZE of the topic's objects, and in SYNC how far archiving is behind.
    """
    if tiers:
        from neve.cli.topic_tiers import described, emit_tiers

        emit_tiers(asyncio.run(described(namesrv, name)), output)
        return
    config, queues = asyncio.run(_show(namesrv, name))
    if output == "json":
        emit_one({**config, "queues": queues}, output)
        return
    emit_one(config, output)
    click.echo()
    emit(queues, _columns(queues), output)


def _columns(queues: list[dict[str, Any]]) -> list[str]:
    """Return the columns; those of the archive only if a broker has one."""
    tiers = ["hot_offset", "cold"] if any(row["hot_offset"] is not None for row in queues) else []
    return ["broker", "queue", "min_offset", *tiers[:1], "max_offset", "messages", *tiers[1:], "last_stored"]


async def _show(namesrv: str, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    async with connect(namesrv) as client:
        config = await client.admin.topic_config(name)
        stats = await client.admin.topic_stats(name)
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


@topic.command(name="set")
@topic_argument
@click.option("-q", "--queues", type=click.IntRange(1, 65535), help="Queues per broker, to read and to write.")
@click.option("--read-queues", type=click.IntRange(0, 65535), help="Queues that consumers see.")
@click.option("--write-queues", type=click.IntRange(0, 65535), help="Queues that producers see.")
@click.option(
    "--perm", type=click.Choice(list(_PERMISSIONS)), callback=_permission, help="Permit to read, write, or both."
)
@click.option("--set", "attributes", multiple=True, metavar="NAME=VALUE", help="Set an attribute; NAME= removes it.")
@click.option("--broker", help="Change it at this broker only.  [default: all that have it]")
@click.option("--yes", is_flag=True, help="Do not ask before messages become unreadable.")
@cluster_options
def set_topic(
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
    """Change the queues, permissions or attributes of a topic. Settings that are not named stay.

    To remove queues, reduce --write-queues first, and --read-queues after all groups have read the other queues.
    """
    if queues is not None and (read_queues is not None or write_queues is not None):
        raise click.UsageError("--queues sets both --read-queues and --write-queues: leave these out")
    changes = {
        "readQueueNums": read_queues if queues is None else queues,
        "writeQueueNums": write_queues if queues is None else queues,
        "perm": perm,
    }
    wanted = {key: str(value) for key, value in changes.items() if value is not None}
    if attributes:
        wanted["attributes"] = ",".join(map(_signed, attributes))
    if not wanted:
        raise click.UsageError("nothing to change: give --queues, --perm, --set, …")
    for line in asyncio.run(_set(namesrv, name, wanted, broker, yes=yes)):
        say(line)


def _signed(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals or not key or {",", "+"} & {*text}:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--set")
    return f"+{key}={value}" if value else f"-{key}"


async def _set(
    namesrv: str, name: str, wanted: Mapping[str, str], broker: str | None, *, yes: bool
) -> list[str]:  # fmt: skip
    async with administer(namesrv) as admin:
        found = await admin.topics.settings_of(name, broker)
        reads = int(wanted.get("readQueueNums", 1 << 31))
        fewer = [at.broker for at in found if reads < at.number("readQueueNums")]
        if fewer and not yes:
            ask(f"Consumers will not see queues {reads} and above of {name} at {', '.join(fewer)}. Continue?")
        for at in found:
            await admin.topics.change(name, at, wanted)
        return [
            f"{name} at {at.broker}: queues to read {at.number('readQueueNums')}, "
            f"to write {at.number('writeQueueNums')}, permission {at.settings.get('perm')}"
            for at in await admin.topics.settings_of(name, broker)
        ]


@topic.command()
@topic_argument
@yes_option
@cluster_options
def delete(name: str, yes: bool, namesrv: str) -> None:
    """Delete a topic and all its messages."""
    if not yes:
        ask(f"Delete topic {name} and all its messages, including archived ones?")
    asyncio.run(_delete(namesrv, name))
    say(f"deleted {name}")


async def _delete(namesrv: str, name: str) -> None:
    async with connect(namesrv) as client:
        await client.admin.topic_config(name)  # reports a topic that does not exist, which deletion would not
        await client.admin.delete_topic(name)
