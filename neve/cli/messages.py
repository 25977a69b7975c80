"""`neve produce` and `neve consume`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from neve.cli.cluster import cluster_options, connect
from neve.cli.failures import FEWER, Failure
from neve.cli.output import say

if TYPE_CHECKING:
    from neve.client import AsyncClient, Consumer, Message, PopConsumer, Subscription

IN_FLIGHT = 64


@click.command()
@click.argument("topic")
@click.argument("body", required=False)
@click.option("--tags", help="Tag of the message.")
@click.option("-k", "--key", "keys", multiple=True, help="A key; may be repeated.")
@click.option(
    "-p", "--property", "properties", multiple=True, metavar="NAME=VALUE", help="A property; may be repeated."
)
@click.option("--queue", type=int, help="Into this queue only.")
@click.option("--order-key", help="All into the queue of this key, one after the other.")
@click.option("--delay", type=click.FloatRange(0), metavar="SECONDS", help="Deliver so many seconds later.")
@cluster_options
def produce(
    *,
    topic: str,
    body: str | None,
    tags: str | None,
    keys: tuple[str, ...],
    properties: tuple[str, ...],
    queue: int | None,
    order_key: str | None,
    delay: float | None,
    namesrv: str,
) -> None:
    """Send BODY as one message, or each line of stdin that is not empty. Prints a JSON line for each."""
    if queue is not None and order_key is not None:
        raise click.UsageError("--queue and --order-key exclude each other")
    pairs = dict(_pair(text) for text in properties)
    options: dict[str, Any] = {"tags": tags, "keys": list(keys), "properties": pairs, "queue": queue}
    options |= {"order_key": order_key, "delay": delay}
    sent = asyncio.run(_produce(namesrv, topic, body, options))
    say(f"sent {sent} messages to {topic}")


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--property")
    return name, value


async def _produce(namesrv: str, topic: str, body: str | None, options: dict[str, Any]) -> int:
    sent = 0
    async with connect(namesrv) as client:
        if body is not None:
            await _send(client, topic, body.encode(), options)
            return 1
        # In order means: the next is sent when the one before is stored.
        in_flight = 1 if options["order_key"] is not None else IN_FLIGHT
        waiting: set[asyncio.Task[None]] = set()
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            if not (text := line.rstrip(b"\r\n")):
                continue
            if len(waiting) >= in_flight:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            waiting.add(asyncio.create_task(_send(client, topic, text, options)))
            sent += 1
        await asyncio.gather(*waiting)
    return sent


async def _send(client: AsyncClient, topic: str, body: bytes, options: dict[str, Any]) -> None:
    result = await client.send(topic, body, **options)
    answer = {
        "status": str(result.status),
        "msg_id": result.msg_id,
        "broker": result.queue.broker_name,
        "queue": result.queue.queue_id,
        "offset": result.queue_offset,
    }
    if result.recall_handle is not None:
        answer["recall_handle"] = result.recall_handle
    click.echo(json.dumps(answer))


_IDLE_S = 3.0
# Who asks for a number of messages wants them, even where the first ones have to come from the archive.
_IDLE_COUNTED_S = 60.0


@click.command()
@click.argument("topic")
@click.option("-g", "--group", help="Join this group; otherwise read without one, from every queue.")
@click.option("--tags", "expression", default="*", help='Tag filter, such as "EWR || JFK".')
@click.option("--sql", help="SQL92 filter over the properties, such as \"size > 5 AND colour = 'red'\".")
@click.option(
    "--broadcast",
    "how",
    flag_value="broadcast",
    help="With a group: read all queues beside the other members; offsets are kept in ~/.rocketmq_offsets.",
)
@click.option("--pop", "how", flag_value="pop", help="With a group: pop; the broker gives each message to one member.")
@click.option("--share", "how", flag_value="share", default=True, help="With a group: pull a share of the queues.")
@click.option("--from", "start", default="first", show_default=True, help="first, last, or ISO 8601 time.")
@click.option(
    "-c", "--count", type=click.IntRange(1), help="End after so many messages; exit code 7 if there are fewer."
)
@click.option("--idle", type=float, help="With a group: end after so many idle seconds.  [default: 3, with --count 60]")
@click.option("--queue", type=int, help="Only this queue (without a group).")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Bodies, or a JSON line for each message.",
)
@cluster_options
def consume(
    *,
    topic: str,
    group: str | None,
    expression: str,
    sql: str | None,
    how: str,
    start: str,
    count: int | None,
    idle: float | None,
    queue: int | None,
    output: str,
    namesrv: str,
) -> None:
    """Print the messages of a topic, archived ones too: bodies, or JSON lines with everything.

    Without a group it ends where the queues end, in a group when no message has come for --idle seconds. Where that
    is before --count messages, the exit code is 7.
    """
    from neve.client import Subscription

    begin = _start(start)
    if sql is not None and expression != "*":
        raise click.UsageError("--tags or --sql, not both")
    wanted = Subscription(expression) if sql is None else Subscription.sql(sql)
    if idle is None:
        idle = _IDLE_S if count is None else _IDLE_COUNTED_S
    if group is None:
        if how != "share":
            raise click.UsageError(f"--{how} needs a --group")
        work = _read(namesrv, topic, wanted=wanted, start=begin, queue=queue, count=count, output=output)
    else:
        work = _consume_in_group(
            namesrv, {topic: wanted}, start=begin, group=group, how=how, idle=idle, count=count, output=output
        )
    seen = asyncio.run(work)
    if count is not None and seen < count:
        why = "the queues have no more" if group is None else f"none came for {idle:g} s"
        raise Failure(FEWER, f"{seen} of {count} messages: {why}")
    say(f"{seen} messages")


def _start(text: str) -> str | int:
    if text in {"first", "last"}:
        return text
    from neve.cli.times import to_ms

    return to_ms(text)


async def _read(
    namesrv: str,
    topic: str,
    *,
    wanted: Subscription,
    start: str | int,
    queue: int | None,
    count: int | None,
    output: str,
) -> int:
    seen = 0
    async with connect(namesrv) as client:
        async for message in client.reader(topic, start=start, queue=queue, expression=wanted):
            _print(message, output)
            seen += 1
            if seen == count:
                break
    return seen


async def _consume_in_group(
    namesrv: str,
    topics: dict[str, Subscription],
    *,
    start: str | int,
    group: str,
    how: str,
    idle: float,
    count: int | None,
    output: str,
) -> int:
    async with connect(namesrv) as client:
        if how == "pop":
            if isinstance(start, int):
                raise click.BadParameter("--pop begins first or last", param_hint="--from")
            popping = client.pop_consumer(group, topics, start=start)
            return await _join(popping, idle=idle, count=count, output=output)
        pulling = client.consumer(group, topics, start=start, broadcast=how == "broadcast")
        return await _join(pulling, idle=idle, count=count, output=output)


async def _join(consumer: Consumer | PopConsumer, *, idle: float, count: int | None, output: str) -> int:
    seen = 0
    async with consumer:
        while seen != count and (message := await consumer.receive(timeout=idle)) is not None:
            _print(message, output)
            seen += 1
            await message.ack()
    return seen


def _print(message: Message, output: str) -> None:
    if output == "text":
        click.echo(message.body)
        return
    queue = message.queue
    row = {
        "topic": message.topic,
        "broker": queue.broker_name if queue else None,
        "queue": queue.queue_id if queue else None,
        "offset": message.queue_offset,
        "msg_id": message.msg_id,
        "tags": message.tags,
        "keys": list(message.keys),
        "store_timestamp": message.store_timestamp,
        "properties": dict(message.properties),
        "body": message.body.decode("utf-8", "replace"),
    }
    click.echo(json.dumps(row, ensure_ascii=False))
