"""`neve consume`: the messages of a topic, as a member of a group or without one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Literal

import click

from neve.cli import completed
from neve.cli.cluster import cluster_options, connect
from neve.cli.failures import FEWER, Failure
from neve.cli.line_parts import delimiter_bytes
from neve.cli.message_formats import as_body, as_json, by_format
from neve.cli.message_lines import BODY_FORMS
from neve.cli.output import say
from neve.cli.printed import Printed
from neve.cli.quantities import seconds_or_span
from neve.cli.spans import Wanted, offsets, spans

if TYPE_CHECKING:
    from neve.client import AsyncClient, Consumer, MessageQueue, PopConsumer, Subscription
    from neve.client.times import Start

_IDLE_S = 3.0
# Who asks for a number of messages wants them, even where the first ones have to come from the archive.
_IDLE_COUNTED_S = 60.0


@click.command()
@click.argument("topic", shell_complete=completed.topics)
@click.option(
    "-g",
    "--group",
    shell_complete=completed.groups,
    help="Join this group; otherwise read without one, from every queue.",
)
@click.option("--tags", "expression", default="*", help='Tag filter, such as "EWR || JFK".')
@click.option("--sql", help="SQL92 filter over the properties, such as \"size > 5 AND colour = 'red'\".")
@click.option(
    "--broadcast",
    is_flag=True,
    help="With a group: read all queues beside the other members; offsets are kept in ~/.rocketmq_offsets.",
)
@click.option("--pop", is_flag=True, help="With a group: pop; the broker gives each message to one member.")
@click.option("--share", is_flag=True, help="With a group: pull a share of the queues.  [default]")
@click.option(
    "--from",
    "start",
    default="first",
    show_default=True,
    metavar="WHEN",
    help="first, last, a time (ISO 8601), or -90m: so long ago; a group that has read of a queue goes on there.",
)
@click.option("--to", "end", metavar="WHEN", help="Up to that time, of storing (without a group).")
@click.option(
    "--offset", "between", metavar="N[:M]", help="From offset N of each queue, or N up to before M (without a group)."
)
@click.option("--last", type=click.IntRange(1, 100_000), metavar="N", help="The last N messages (without a group).")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is stored from now on, until Ctrl-C.")
@click.option(
    "-c", "--count", type=click.IntRange(1), help="End after so many messages; exit code 7 if there are fewer."
)
@click.option(
    "--idle",
    type=seconds_or_span,
    metavar="SECONDS|TIME",
    help="With a group, --from last or --follow: end after so long without a message, as 5 or 5s.  "
    "[default: 3, with --count 60, with --follow never]",
)
@click.option("--queue", type=int, help="Only this queue, of each broker (without a group).")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Bodies, or a JSON line for each message.",
)
@click.option(
    "--body",
    "body_form",
    type=click.Choice(BODY_FORMS),
    help="With -o json: as text where it is UTF-8 and else as base64, as base64 always, or as both.  [default: auto]",
)
@click.option(
    "-F",
    "--format",
    "message_format",
    metavar="TEXT",
    help=r"Print this of each: %s body, %k keys, %h properties, %t topic, %q queue, %o offset, %T time in ms, \n, "
    "and more (docs/command-line.md).",
)
@click.option(
    "-D",
    "--delimiter",
    metavar="TEXT",
    help=r"Print this behind each body: text, \0, \xHH, or nothing.  [default: \n]",
)
@cluster_options
def consume(
    *,
    topic: str,
    group: str | None,
    expression: str,
    sql: str | None,
    broadcast: bool,
    pop: bool,
    share: bool,
    start: str,
    end: str | None,
    between: str | None,
    last: int | None,
    follow: bool,
    count: int | None,
    idle: float | None,
    queue: int | None,
    output: str,
    body_form: str | None,
    message_format: str | None,
    delimiter: str | None,
    namesrv: str,
) -> None:
    """Print the messages of a topic, archived ones too: bodies, JSON lines with everything, or what --format says.

    Without a group it reads queue by queue and ends where these end now; with --follow it goes on. With --from last and
    in a group it ends when no message has come for --idle seconds. Where that is before --count messages, the exit code
    is 7. What is printed of a group's messages is acknowledged once the reader of the output has it.
    """
    from neve.client import Subscription

    if sql is not None and expression != "*":
        raise click.UsageError("--tags or --sql, not both")
    subscription = Subscription(expression) if sql is None else Subscription.sql(sql)
    hows = [how for how, is_chosen in (("broadcast", broadcast), ("pop", pop), ("share", share)) if is_chosen]
    if len(hows) > 1:
        raise click.UsageError(" and ".join(f"--{how}" for how in hows) + " exclude each other")
    without_group = {"--queue": queue, "--to": end, "--offset": between, "--last": last}
    if group is None and hows:
        raise click.UsageError(f"--{hows[0]} needs a --group")
    if group is not None and (given := [name for name, value in without_group.items() if value is not None]):
        raise click.UsageError(f"{given[0]} is for reading without a group: members of a group share all queues")
    waits = group is not None or start == "last" or follow
    if idle is not None and not waits:
        raise click.UsageError(
            "--idle goes with --group, --from last or --follow: without them it ends where the queues end"
        )
    if idle is None and not follow:
        idle = _IDLE_S if count is None else _IDLE_COUNTED_S
    printed = _printed(output, body_form, message_format, delimiter, limit=count)
    if group is None:
        wanted = _wanted(start, end, between, last, follow=follow)
        work = _read(
            namesrv, topic, wanted, subscription, queue=queue, follows=waits, idle=idle, printed=printed
        )  # fmt: skip
    else:
        work = _consume_in_group(
            namesrv,
            {topic: subscription},
            start=_start(start),
            group=group,
            how=hows[0] if hows else "share",
            idle=idle,
            printed=printed,
        )
    asyncio.run(_counted(work, printed))
    if count is not None and printed.count < count:
        why = f"none came for {idle:g} s" if waits and idle is not None else _NO_MORE
        raise Failure(FEWER, f"{printed.count} of {count} messages: {why}")
    say(f"{printed.count} messages")


_CALL_S = 20.0
_PULLED = 256
_BUFFERED = 4096
_NO_MORE = "the queues have no more"


def _printed(
    output: str, body_form: str | None, message_format: str | None, delimiter: str | None, *, limit: int | None
) -> Printed:
    if body_form is not None and output != "json":
        raise click.UsageError("--body goes with -o json")
    if (message_format is not None or delimiter is not None) and output == "json":
        raise click.UsageError("-o json prints lines of its own form: leave --format and --delimiter out")
    if message_format is not None and delimiter is not None:
        raise click.UsageError(r"--format says what is behind a body, too (\n): leave --delimiter out")
    if output == "json":
        return Printed(as_json(body_form or "auto"), limit=limit)
    if message_format is not None:
        return Printed(by_format(message_format), limit=limit)
    behind = b"" if delimiter == "" else delimiter_bytes(delimiter or "\\n")
    return Printed(as_body(behind), limit=limit, bodies_end=behind)


_STARTS: dict[str, Literal["earliest", "latest"]] = {"first": "earliest", "last": "latest"}


def _start(text: str) -> Literal["earliest", "latest"] | int:
    if text in _STARTS:
        return _STARTS[text]
    from neve.cli.times import to_ms

    return to_ms(text)


def _wanted(start: str, end: str | None, between: str | None, last: int | None, *, follow: bool) -> Wanted:
    typed = click.get_current_context().get_parameter_source("start") is click.core.ParameterSource.COMMANDLINE
    chosen = [name for name, is_it in (("--from", typed), ("--offset", between), ("--last", last)) if is_it]
    if len(chosen) > 1:
        raise click.UsageError(" and ".join(chosen) + " exclude each other")
    if end is not None and (follow or start == "last"):
        raise click.UsageError("--to is an end, --follow and --from last have none")
    begin = _start(start)
    from_ms = begin if isinstance(begin, int) else None
    to_ms = None if end is None else _start(end)
    if isinstance(to_ms, str):
        raise click.BadParameter(f"{end!r} is no time", param_hint="--to")
    first, before = (None, None) if between is None else offsets(between)
    if follow and before is not None:
        raise click.UsageError("--offset N:M has an end, --follow has none")
    return Wanted(from_ms, to_ms, first, before, last, only_new=begin == "latest")


async def _counted(work: Coroutine[Any, Any, None], printed: Printed) -> None:
    try:
        async with printed.watched():
            await work
    except asyncio.CancelledError:
        say(f"{printed.count} messages")
        raise


async def _read(
    namesrv: str,
    topic: str,
    wanted: Wanted,
    subscription: Subscription,
    *,
    queue: int | None,
    follows: bool,
    idle: float | None,
    printed: Printed,
) -> None:
    from neve.cli.reading import Reading

    async with connect(namesrv, timeout=_CALL_S) as client:
        found = await spans(client, topic, wanted, queue)
        reading = Reading(client, topic, wanted, subscription, printed)
        if wanted.last is not None:
            await reading.read_last(found, wanted.last)
        elif not wanted.only_new:
            await reading.read(found)
        if follows and not printed.is_full:
            say(f"waiting for messages of {topic} from now on")
            await reading.follow({span.queue: max(span.begin, span.end) for span in found}, idle, queue)


async def _consume_in_group(
    namesrv: str,
    topics: dict[str, Subscription],
    *,
    start: Literal["earliest", "latest"] | int,
    group: str,
    how: str,
    idle: float | None,
    printed: Printed,
) -> None:
    if how == "pop" and not isinstance(start, str):
        raise click.BadParameter("--pop begins first or last", param_hint="--from")
    typed = click.get_current_context().get_parameter_source("start") is click.core.ParameterSource.COMMANDLINE
    async with connect(namesrv) as client:
        if typed and how != "broadcast":
            await _tell_where_it_goes_on(client, group, topics, start)
        if how == "pop":
            assert isinstance(start, str)
            await _join(client.pop_consumer(group, topics, start=start), idle, printed)
            return
        pulling = client.consumer(
            group,
            topics,
            start=start,
            broadcast=how == "broadcast",
            pull_batch=min(_PULLED, printed.limit or _PULLED),
            max_buffered=_BUFFERED,
            max_buffered_per_queue=_BUFFERED,
        )
        await _join(pulling, idle, printed)


async def _tell_where_it_goes_on(client: AsyncClient, group: str, topics: Iterable[str], start: Start) -> None:
    """--from is where a group begins; where a broker has an offset of it, it goes on, as RocketMQ's groups do."""
    for topic in topics:
        queues = await client.queues(topic)
        elsewhere = 0
        for queue in queues:
            stored = await client.committed(group, topic, queue)
            elsewhere += stored is not None and stored != await _offset_at(client, topic, queue, start)
        if elsewhere:
            where = f"{elsewhere} of {len(queues)} queues of {topic}"
            say(f"{group} has offsets in {where}: it goes on there, not at --from")


async def _offset_at(client: AsyncClient, topic: str, queue: MessageQueue, start: Start) -> int:
    if not isinstance(start, str):
        return await client.offset_by_time(topic, queue, start)
    return await (client.min_offset if start == "earliest" else client.max_offset)(topic, queue)


async def _join(consumer: Consumer | PopConsumer, idle: float | None, printed: Printed) -> None:
    async with consumer:
        while not printed.is_full and (message := await consumer.receive(timeout=idle)) is not None:
            at_hand = [message]
            is_much = printed.add(message)
            while not (is_much or printed.is_full) and (following := await consumer.receive(timeout=0)) is not None:
                at_hand.append(following)
                is_much = printed.add(following)
            await printed.flush()
            for one in at_hand:
                await one.ack()
        if not printed.is_full and consumer.problem is not None:
            raise consumer.problem  # the reason why no message arrived
