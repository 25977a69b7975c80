"""`neve message`: shows single messages and their traces, and sends a message again to one group."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from neve.cli import completed
from neve.cli.aliases import VerbGroup
from neve.cli.cluster import cluster_options, connect
from neve.cli.failures import NOT_FOUND, Failure
from neve.cli.message_lines import to_line
from neve.cli.options import INSTANT, broker_option, key_option, queue_option
from neve.cli.output import emit, output_option, say, size_text, time_text
from neve.cli.spans import QueueChoice, chosen_queues
from neve.cli.standstill import Standstill

if TYPE_CHECKING:
    from neve.client import AsyncClient, Message, MessageQueue

_SHOWN_CHARACTERS = 16 * 1024


@click.group(cls=VerbGroup)
def message() -> None:
    """Single messages: show them and their traces, send one again to a group."""


@message.command()
@click.argument("msg_id", metavar="[ID]", required=False)
@click.option(
    "-t",
    "--topic",
    shell_complete=completed.topics,
    help="The topic; not needed for an ID that names a broker's offset.",
)
@key_option
@click.option("--offset", type=click.IntRange(0), help="The message at this offset; needs --queue.")
@click.option(
    "--at",
    type=INSTANT,
    metavar="TIME",
    help="The first message of each queue stored at this time or later: ISO 8601, or -90m.",
)
@queue_option
@broker_option
@click.option("--limit", type=click.IntRange(1, 1000), default=32, show_default=True, help="With --key: at most.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "body"]),
    default="table",
    show_default=True,
    help="Fields and body, a JSON line as of `neve consume -o json`, or only the bytes of the body.",
)
@cluster_options
def show(
    *,
    msg_id: str | None,
    topic: str | None,
    key: str | None,
    queue: int | None,
    offset: int | None,
    at: int | None,
    broker: str | None,
    limit: int,
    output: str,
    namesrv: str,
) -> None:
    """Show a message, archived or not: by its ID, by a key, by queue and offset, or by its store time."""
    if sum(chosen is not None for chosen in (msg_id, key, offset, at)) != 1:
        raise click.UsageError("give one of: an ID, --key, --queue with --offset, or --at")
    if (topic is None) and msg_id is None:
        raise click.UsageError("--key, --offset and --at need --topic")
    choice = QueueChoice(queue, broker)
    if offset is not None and queue is None:
        raise click.UsageError("--offset needs --queue")
    if choice != QueueChoice() and offset is None and at is None:
        raise click.UsageError("--queue and --broker need --offset or --at")
    found = asyncio.run(_find(namesrv, topic, msg_id, key, choice, offset, at, limit))
    if not found:
        raise Failure(NOT_FOUND, "no message matches")
    for number, one in enumerate(found):
        if output == "body":
            click.echo(one.body, nl=False)
        elif output == "json":
            click.echo(to_line(one, "auto"))
        else:
            click.echo("\n" * bool(number) + _fields(one))


async def _find(  # noqa: PLR0917 - the arguments of the command line
    namesrv: str,
    topic: str | None,
    msg_id: str | None,
    key: str | None,
    choice: QueueChoice,
    offset: int | None,
    at: int | None,
    limit: int,
) -> list[Message]:
    async with connect(namesrv) as client:
        if msg_id is not None:
            return [await client.admin.view_message(msg_id, topic)]
        assert topic is not None
        if key is not None:
            found = await client.admin.query_messages(topic, key, max_count=limit)
            if len(found) >= limit:
                say(f"{limit} messages, there may be more: raise --limit")
            return found
        queues = await chosen_queues(client, topic, choice)
        if offset is not None:
            if len(queues) > 1:
                names = ", ".join(one.broker_name for one in queues)
                raise click.UsageError(f"queue {choice.queue} exists at {names}: name one with --broker")
            return await _first(client, queues[0], offset, offset + 1)
        assert at is not None
        firsts = await asyncio.gather(*(_stored_at(client, one, at) for one in queues))
        return sorted((one for first in firsts for one in first), key=lambda one: one.store_timestamp)


async def _stored_at(client: AsyncClient, queue: MessageQueue, time: int) -> list[Message]:
    offset = await client.offset_by_time(queue.topic, queue, time)
    return [one for one in await _first(client, queue, offset, 1 << 62) if one.store_timestamp >= time]


async def _first(client: AsyncClient, queue: MessageQueue, offset: int, end: int) -> list[Message]:
    """Return the first message of the queue from `offset` on, before `end`."""
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
        return "\n".join([*lines, "", "(the body is not UTF-8; -o body prints its bytes)"])
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]}… ({size_text(len(one.body))}; -o body prints all of it)"
    return "\n".join([*lines, "", text])


_ABOVE = {"TAGS", "KEYS", "UNIQ_KEY"}


@message.command()
@click.argument("msg_id", metavar="ID")
@click.option("--trace-topic", default="RMQ_SYS_TRACE_TOPIC", show_default=True, help="Topic of the traces.")
@cluster_options
@output_option
def trace(msg_id: str, trace_topic: str, namesrv: str, output: str) -> None:
    """Show the traces of a message: its producer, the groups that consumed it, and the outcomes.

    ID is the producer's. Only clients with tracing switched on send traces, some seconds later.
    """
    rows = asyncio.run(_trace(namesrv, msg_id, trace_topic))
    if not rows:
        raise Failure(
            NOT_FOUND, f"{trace_topic} has no trace of {msg_id}: tracing may be off, or the trace not sent yet"
        )
    emit(rows, ["at", "what", "group", "client", "cost_ms", "outcome"], output)


async def _trace(namesrv: str, msg_id: str, trace_topic: str) -> list[dict[str, Any]]:
    from neve.client.trace.format import parse_traces

    async with connect(namesrv) as client:
        stored = await client.admin.query_messages(trace_topic, msg_id, max_count=1000)
    traces = [
        {"client": one.born_host.rpartition(":")[0], **row}
        for one in stored
        for row in parse_traces(one.body.decode("utf-8", "replace"))
        if row.get("msg_id") == msg_id
    ]
    began = {row["request_id"]: row for row in traces if row["what"] == "SubBefore"}
    rows = []
    for row in traces:
        if row["what"] == "SubBefore":
            continue
        before = began.pop(row.get("request_id", ""), None)
        rows.append(_event(row, before))
    rows += [_event(row, None) for row in began.values()]
    return sorted(rows, key=lambda row: str(row["at"]))


def _event(row: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """Return the row of a trace; `before` is the trace of the call of the consumer's handler."""
    what = {"Pub": "sent", "SubBefore": "delivered", "SubAfter": "consumed", "EndTransaction": "ended"}[row["what"]]
    at = (before or row).get("at_ms")
    if row["what"] == "SubBefore":
        outcome = "no outcome reported"
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
@click.option("-g", "--group", required=True, shell_complete=completed.groups, help="The group that gets it again.")
@click.option(
    "-t",
    "--topic",
    shell_complete=completed.topics,
    help="The topic; not needed for an ID that names a broker's offset.",
)
@cluster_options
def resend(msg_id: str, group: str, topic: str | None, namesrv: str) -> None:
    """Send a message again to one group; the other groups of its topic do not get it.

    A copy is sent to the retry topic %RETRY%GROUP, which the group's push consumers read under the original topic. The
    copy keeps its id and gets a new offset.
    """
    one = asyncio.run(_resend(namesrv, msg_id, group, topic))
    say(f"{one.msg_id} of {one.topic} was sent again to {group}")


async def _resend(namesrv: str, msg_id: str, group: str, topic: str | None) -> Message:
    async with connect(namesrv) as client:
        one = await client.admin.view_message(msg_id, topic)
        await client.send_to_group(one, group)
        return one
