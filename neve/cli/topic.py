"""`neve topic`: topics of the cluster behind a name server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import click

from neve.cli.cluster import cluster_options, connect
from neve.cli.output import ask, emit, emit_one, output_option, say
from neve.cli.topic_names import topic_names
from neve.cli.topic_ttl import hours_of, ttl
from neve.cli.ttl import format_ttl, ttl_value
from neve.remoting.names import RESERVE_TIME


@click.group()
def topic() -> None:
    """Create, list, describe and delete topics; set their TTL."""


topic.add_command(ttl)


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
        if known and broker is None:
            from neve.cli.failures import CONFLICT, Failure

            raise Failure(CONFLICT, f"topic {name} exists already")
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
@click.argument("name")
@cluster_options
@output_option
def describe(name: str, namesrv: str, output: str) -> None:
    """Show a topic's settings and the offsets of its queues."""
    config, queues = asyncio.run(_describe(namesrv, name))
    if output == "json":
        emit_one({**config, "queues": queues}, output)
        return
    emit_one(config, output)
    click.echo()
    emit(queues, ["broker", "queue", "min_offset", "max_offset", "messages"], output)


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
        }
        for queue, one in stats.items()
    ]
    return about, queues


@topic.command()
@click.argument("name")
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
