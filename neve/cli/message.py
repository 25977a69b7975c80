"""`neve message`: single messages: found by id, key, offset or time, their traces, sent again to one group."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from neve.cli import completed
from neve.cli.aliases import AliasedGroup
from neve.cli.cluster import cluster_options, connect
from neve.cli.failures import NOT_FOUND, Failure
from neve.cli.message_lines import to_line
from neve.cli.output import emit, output_option, say, size_text, time_text
from neve.cli.standstill import Standstill

if TYPE_CHECKING:
    from neve.client import AsyncClient, Message, MessageQueue

_SHOWN = 16 * 1024


@click.group(cls=AliasedGroup)
def message() -> None:
    """Single messages: find and show them, their traces, send one again to a group."""


@message.command()
@click.argument("msg_id", metavar="[ID]", required=False)
@click.option(
    "-t", "--topic", shell_complete=completed.topics, help="Of this topic; for an ID only where that is the producer's."
)
@click.option("--key", help="Those with this key.")
@click.option("--queue", type=int, help="With --offset: of this queue.")
@click.option("--offset", type=click.IntRange(0), help="The one at this offset.")
@click.option("--at", metavar="WHEN", help="The first of each queue stored then or later: ISO 8601 time, -90m.")
@click.option("--broker", help="With --queue: at this broker.")
@click.option("--limit", type=click.IntRange(1, 1000), default=32, show_default=True, help="With --key: so many.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "body"]),
    default="table",
    show_default=True,
    help="Its fields and its body, a JSON line as of `neve consume -o json`, or the bytes of its body alone.",
)
@cluster_options
def get(
    *,
    msg_id: str | None,
    topic: str | None,
    key: str | None,
    queue: int | None,
    offset: int | None,
    at: str | None,
    broker: str | None,
    limit: int,
    output: str,
    namesrv: str,
) -> None:
    """Show a message, hot or archived: by its ID (of either kind), by a key, by queue and offset, or by its time."""
    if sum(chosen is not None for chosen in (msg_id, key, offset, at)) != 1:
        raise click.UsageError("which one? an ID, --key, --queue and --offset, or --at: one of them")
    if (topic is None) and msg_id is None:
        raise click.UsageError("--key, --offset and --at are within a --topic")
    if (offset is None) != (queue is None) or (broker is not None and queue is None):
        raise click.UsageError("--offset and --queue go together, --broker with them")
    found = asyncio.run(_get(namesrv, topic, msg_id, key, queue, offset, at, broker, limit))
    if not found:
        raise Failure(NOT_FOUND, "there is no such message")
    for number, one in enumerate(found):
        if output == "body":
            click.echo(one.body, nl=False)
        elif output == "json":
            click.echo(to_line(one, "auto"))
        else:
            click.echo("\n" * bool(number) + _fields(one))


async def _get(  # noqa: PLR0917 - the command line's own
    namesrv: str,
    topic: str | None,
    msg_id: str | None,
    key: str | None,
    queue: int | None,
    offset: int | None,
    at: str | None,
    broker: str | None,
    limit: int,
) -> list[Message]:
    async with connect(namesrv) as client:
        if msg_id is not None:
            return [await client.view_message(msg_id, topic)]
        assert topic is not None
        if key is not None:
            found = await client.query_messages(topic, key, max_count=limit)
            if len(found) >= limit:
                say(f"{limit} messages; there may be more (--limit)")
            return found
        queues = [
            one
            for one in await client.queues(topic)
            if queue in (None, one.queue_id) and broker in (None, one.broker_name)
        ]
        if not queues:
            raise Failure(NOT_FOUND, f"{topic} has no such queue")
        if offset is not None:
            if len(queues) > 1:
                names = ", ".join(one.broker_name for one in queues)
                raise click.UsageError(f"queue {queue} is at {names}: name one with --broker")
            return await _first(client, queues[0], offset, offset + 1)
        from neve.cli.times import to_ms

        assert at is not None
        time = to_ms(at)
        firsts = await asyncio.gather(*(_stored_at(client, one, time) for one in queues))
        return sorted((one for first in firsts for one in first), key=lambda one: one.store_timestamp)


async def _stored_at(client: AsyncClient, queue: MessageQueue, time: int) -> list[Message]:
    offset = await client.offset_by_time(queue.topic, queue, time)
    return [one for one in await _first(client, queue, offset, 1 << 62) if one.store_timestamp >= time]


async def _first(client: AsyncClient, queue: MessageQueue, offset: int, end: int) -> list[Message]:
    """The first message of the queue from `offset` on, before `end`."""
    end = min(end, await client.max_offset(queue.topic, queue))
    standstill = Standstill(queue, end)
    while offset < end:
        found = await client.pull(queue.topic, queue, offset, 1)
        if inside := [one for one in found.messages if offset <= one.queue_offset < end]:
            return inside[:1]
        if not await standstill.is_at(offset, found.next_offset):
            offset = found.next_offset
    return []


def _fields(one: Message) -> str:
    queue = one.queue
    rows = {
        "topic": one.topic,
        "broker": queue.broker_name if queue else "",
        "queue": str(queue.queue_id) if queue else "",
        "offset": str(one.queue_offset),
        "msg_id": one.msg_id,
        "offset_msg_id": one.offset_msg_id,
        "tags": one.tags or "",
        "keys": " ".join(one.keys),
        "born": f"{time_text(one.born_timestamp)} at {one.born_host}",
        "stored": f"{time_text(one.store_timestamp)} at {one.store_host}",
        "redeliveries": str(one.reconsume_times),
        "flag": str(one.flag),
        **{f"property {name}": value for name, value in one.properties.items() if name not in _ABOVE},
        "body": f"{len(one.body)} bytes",
    }
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value}".rstrip() for name, value in rows.items()]
    try:
        text = one.body.decode()
    except UnicodeDecodeError:
        return "\n".join([*lines, "", "(no text; -o body prints its bytes)"])
    if len(text) > _SHOWN:
        text = f"{text[:_SHOWN]}… ({size_text(len(one.body))}; -o body prints it all)"
    return "\n".join([*lines, "", text])


_ABOVE = {"TAGS", "KEYS", "UNIQ_KEY"}


@message.command()
@click.argument("msg_id", metavar="ID")
@click.option("--trace-topic", default="RMQ_SYS_TRACE_TOPIC", show_default=True, help="Where clients' traces are.")
@cluster_options
@output_option
def trace(msg_id: str, trace_topic: str, namesrv: str, output: str) -> None:
    """Show what clients that trace tell of a message: who sent it, which groups had it, how that ended.

    ID is the producer's. Clients send traces where they are told to, and some seconds later.
    """
    rows = asyncio.run(_trace(namesrv, msg_id, trace_topic))
    if not rows:
        raise Failure(NOT_FOUND, f"{trace_topic} has no trace of {msg_id}")
    emit(rows, ["at", "what", "group", "client", "cost_ms", "outcome"], output)


async def _trace(namesrv: str, msg_id: str, trace_topic: str) -> list[dict[str, Any]]:
    from neve.client.trace.format import parse_traces

    async with connect(namesrv) as client:
        stored = await client.query_messages(trace_topic, msg_id, max_count=1000)
    told = [
        {"client": one.born_host.rpartition(":")[0], **row}
        for one in stored
        for row in parse_traces(one.body.decode("utf-8", "replace"))
        if row.get("msg_id") == msg_id
    ]
    began = {row["request_id"]: row for row in told if row["what"] == "SubBefore"}
    rows = []
    for row in told:
        if row["what"] == "SubBefore":
            continue
        before = began.pop(row.get("request_id", ""), None)
        rows.append(_event(row, before))
    rows += [_event(row, None) for row in began.values()]
    return sorted(rows, key=lambda row: str(row["at"]))


def _event(row: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """`before` is when its handler was called, of a message that was consumed."""
    what = {"Pub": "sent", "SubBefore": "handed over", "SubAfter": "consumed", "EndTransaction": "ended"}[row["what"]]
    at = (before or row).get("at_ms")
    if row["what"] == "SubBefore":
        outcome = "no end is told"
    elif row["what"] == "EndTransaction":
        outcome = str(row.get("state"))
    else:
        outcome = "success" if row.get("is_success") == "true" else "failed"
    return {
        "at": time_text(int(at)) if at else None,
        "what": what,
        "group": row.get("group") or (before or {}).get("group"),
        "client": row["client"],
        "cost_ms": int(row["cost_ms"]) if row.get("cost_ms") else None,
        "outcome": outcome,
        "details": {**(before or {}), **row},
    }


@message.command()
@click.argument("msg_id", metavar="ID")
@click.option("-g", "--group", required=True, shell_complete=completed.groups, help="Who gets it again.")
@click.option("-t", "--topic", shell_complete=completed.topics, help="Its topic; needed where ID is the producer's.")
@cluster_options
def resend(msg_id: str, group: str, topic: str | None, namesrv: str) -> None:
    """Send a message again to one group; the others of its topic do not see it.

    A copy goes to the retry topic %RETRY%GROUP, which its push consumers read; they see the topic that it is of.
    It gets new offsets there and keeps its id.
    """
    one = asyncio.run(_resend(namesrv, msg_id, group, topic))
    say(f"{one.msg_id} of {one.topic} goes to {group} again")


async def _resend(namesrv: str, msg_id: str, group: str, topic: str | None) -> Message:
    async with connect(namesrv) as client:
        one = await client.view_message(msg_id, topic)
        await client.send_to_group(one, group)
        return one
