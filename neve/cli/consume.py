"""`neve consume`: prints the messages of a topic, in a consumer group or without one."""

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
from neve.cli.options import DURATION, INSTANT, ParamType, broker_option, offsets_option, queue_option, tags_option
from neve.cli.output import say
from neve.cli.printed import Printed
from neve.cli.spans import QueueChoice, RequestedSpan, spans

if TYPE_CHECKING:
    from typing_extensions import override

    from neve.client import AsyncClient, Consumer, MessageQueue, PopConsumer, Subscription
else:

    def override(method: Any) -> Any:
        return method


_IDLE_S = 3.0
# With --count, the first messages may have to be fetched from the archive.
_IDLE_COUNTED_S = 60.0
_CALL_S = 20.0
_PULL_BATCH = 256
_BUFFERED = 4096
EARLIEST: Literal["earliest"] = "earliest"
LATEST: Literal["latest"] = "latest"
_STARTS: dict[Any, Literal["earliest", "latest"]] = {
    EARLIEST: EARLIEST,
    LATEST: LATEST,
    "first": EARLIEST,
    "last": LATEST,
}


class _Start(ParamType):
    """`earliest`, `latest`, or a time in milliseconds since 1970."""

    name = "start"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _STARTS.get(value) or INSTANT.convert(value, param, ctx)


@click.command()
@click.argument("topic", shell_complete=completed.topics)
@click.option(
    "-g",
    "--group",
    shell_complete=completed.groups,
    help="Join this group.  [default: read every queue without a group]",
)
@tags_option("*")
@click.option("--sql", help="SQL92 filter over the properties, such as \"size > 5 AND colour = 'red'\".")
@click.option(
    "--broadcast",
    is_flag=True,
    help="With --group: read all queues beside the other members; offsets are kept in ~/.rocketmq_offsets.",
)
@click.option("--pop", is_flag=True, help="With --group: pop; the broker gives each message to one member.")
@click.option("--share", is_flag=True, help="With --group: pull a share of the queues.  [default]")
@click.option(
    "--from",
    "start",
    type=_Start(),
    default=EARLIEST,
    show_default=True,
    metavar="TIME",
    help="earliest, latest, or stored at this time or later: ISO 8601, or -90m. A group continues at its committed "
    "offset where it has one.",
)
@click.option("--to", "end", type=INSTANT, metavar="TIME", help="Stored before this time: ISO 8601, or -10m.")
@offsets_option
@click.option("--last", type=click.IntRange(1, 100_000), metavar="N", help="Only the last N messages.")
@click.option("-f", "--follow", is_flag=True, help="Continue with new messages until Ctrl-C.")
@click.option(
    "-c", "--count", type=click.IntRange(1), help="Stop after this many messages; exit code 7 if there are fewer."
)
@click.option(
    "--idle",
    type=DURATION,
    metavar="DURATION",
    help="With --group, --from latest or --follow: stop after this time without a message, as 5s.  "
    "[default: 3s, with --count 60s, with --follow never]",
)
@queue_option
@broker_option
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
    help="With -o json: text if it is UTF-8 and base64 otherwise, base64 always, or both.  [default: auto]",
)
@click.option(
    "-F",
    "--format",
    "message_format",
    metavar="TEXT",
    help=r"Print this for each: %s body, %k keys, %h properties, %t topic, %q queue, %o offset, %T time in ms, \n, "
    "and more (docs/reference/command-line.md).",
)
@click.option(
    "-D",
    "--delimiter",
    metavar="TEXT",
    help=r"Print this after each body: text, \0, \xHH, or nothing.  [default: \n]",
)
@cluster_options
def consume(
    *,
    topic: str,
    group: str | None,
    tags: str,
    sql: str | None,
    broadcast: bool,
    pop: bool,
    share: bool,
    start: Literal["earliest", "latest"] | int,
    end: int | None,
    offsets: tuple[int | None, int | None] | None,
    last: int | None,
    follow: bool,
    count: int | None,
    idle: float | None,
    queue: int | None,
    broker: str | None,
    output: str,
    body_form: str | None,
    message_format: str | None,
    delimiter: str | None,
    namesrv: str,
) -> None:
    """Print the messages of a topic, including archived ones: bodies, JSON lines, or what --format describes.

    Without a group it reads each queue up to its present end, or continues with --follow. With --from latest, or in a
    group, it stops when no message has arrived for --idle. Exit code 7: it stopped before --count messages. A group's
    message is acknowledged after the reader of the output has received it.

    --to, --offsets, --last, --queue and --broker need no --group.
    """
    from neve.client import Subscription

    if sql is not None and tags != "*":
        raise click.UsageError("--tags and --sql exclude each other")
    subscription = Subscription(tags) if sql is None else Subscription.sql(sql)
    modes = [name for name, is_chosen in (("broadcast", broadcast), ("pop", pop), ("share", share)) if is_chosen]
    if len(modes) > 1:
        raise click.UsageError(" and ".join(f"--{name}" for name in modes) + " exclude each other")
    without_group = {"--queue": queue, "--broker": broker, "--to": end, "--offsets": offsets, "--last": last}
    if group is None and modes:
        raise click.UsageError(f"--{modes[0]} needs --group")
    if group is not None and (given := [name for name, value in without_group.items() if value is not None]):
        raise click.UsageError(f"{given[0]} excludes --group: the members of a group share all queues")
    waits = group is not None or start == LATEST or follow
    if idle is not None and not waits:
        raise click.UsageError(
            "--idle needs --group, --from latest or --follow: else it stops at the end of the queues"
        )
    if idle is None and not follow:
        idle = _IDLE_S if count is None else _IDLE_COUNTED_S
    printed = _printed(output, body_form, message_format, delimiter, limit=count)
    if group is None:
        wanted = _wanted(start, end, offsets, last, follow=follow)
        choice = QueueChoice(queue, broker)
        work = _read(namesrv, topic, wanted, subscription, choice=choice, follows=waits, idle=idle, printed=printed)
    else:
        work = _consume_in_group(
            namesrv,
            {topic: subscription},
            start=start,
            group=group,
            mode=modes[0] if modes else "share",
            idle=idle,
            printed=printed,
        )
    asyncio.run(_counted(work, printed))
    if count is not None and printed.count < count:
        why = f"no message for {idle:g} s" if waits and idle is not None else "the queues have no more"
        raise Failure(FEWER, f"{printed.count} of {count} messages: {why}")
    say(f"{printed.count} messages")


def _printed(
    output: str, body_form: str | None, message_format: str | None, delimiter: str | None, *, limit: int | None
) -> Printed:
    if body_form is not None and output != "json":
        raise click.UsageError("--body needs -o json")
    if (message_format is not None or delimiter is not None) and output == "json":
        raise click.UsageError("-o json has a form of its own: leave --format and --delimiter out")
    if message_format is not None and delimiter is not None:
        raise click.UsageError(r"--format includes the text after a body (\n): leave --delimiter out")
    if output == "json":
        return Printed(as_json(body_form or "auto"), limit=limit)
    if message_format is not None:
        return Printed(by_format(message_format), limit=limit)
    end = b"" if delimiter == "" else delimiter_bytes(delimiter or "\\n")
    return Printed(as_body(end), limit=limit, bodies_end=end)


def _is_typed(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _wanted(
    start: Literal["earliest", "latest"] | int,
    end: int | None,
    offsets: tuple[int | None, int | None] | None,
    last: int | None,
    *,
    follow: bool,
) -> RequestedSpan:
    starts = (("--from", _is_typed("start")), ("--offsets", offsets is not None), ("--last", last is not None))
    if len(chosen := [name for name, is_chosen in starts if is_chosen]) > 1:
        raise click.UsageError(" and ".join(chosen) + " exclude each other")
    if end is not None and (follow or start == LATEST):
        raise click.UsageError("--to excludes --follow and --from latest, which have no end")
    first, before = offsets or (None, None)
    if follow and before is not None:
        raise click.UsageError("--offsets FIRST:END excludes --follow, which has no end")
    from_ms = start if isinstance(start, int) else None
    return RequestedSpan(from_ms, end, first, before, last, only_new=start == LATEST)


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
    wanted: RequestedSpan,
    subscription: Subscription,
    *,
    choice: QueueChoice,
    follows: bool,
    idle: float | None,
    printed: Printed,
) -> None:
    from neve.cli.reading import Reading

    async with connect(namesrv, timeout=_CALL_S) as client:
        found = await spans(client, topic, wanted, choice)
        reading = Reading(client, topic, wanted, subscription, printed)
        if wanted.last is not None:
            await reading.read_last(found, wanted.last)
        elif not wanted.only_new:
            await reading.read(found)
        if follows and not printed.is_full:
            say(f"waiting for new messages of {topic}")
            await reading.follow({span.queue: max(span.begin, span.end) for span in found}, idle, choice)


async def _consume_in_group(
    namesrv: str,
    topics: dict[str, Subscription],
    *,
    start: Literal["earliest", "latest"] | int,
    group: str,
    mode: str,
    idle: float | None,
    printed: Printed,
) -> None:
    if mode == "pop" and isinstance(start, int):
        raise click.BadParameter("--pop starts at earliest or latest", param_hint="--from")
    async with connect(namesrv) as client:
        if _is_typed("start") and mode != "broadcast":
            await _report_committed_offsets(client, group, topics, start)
        if mode == "pop":
            assert not isinstance(start, int)
            await _join(client.pop_consumer(group, topics, start=start), idle, printed)
            return
        pulling = client.consumer(
            group,
            topics,
            start=start,
            broadcast=mode == "broadcast",
            pull_batch=min(_PULL_BATCH, printed.limit or _PULL_BATCH),
            max_buffered=_BUFFERED,
            max_buffered_per_queue=_BUFFERED,
        )
        await _join(pulling, idle, printed)


async def _report_committed_offsets(
    client: AsyncClient, group: str, topics: Iterable[str], start: Literal["earliest", "latest"] | int
) -> None:
    """Report queues where the group does not start at --from: it continues at its committed offset, as in RocketMQ."""
    for topic in topics:
        queues = await client.queues(topic)
        differing = 0
        for queue in queues:
            committed = await client.committed(group, topic, queue)
            differing += committed is not None and committed != await _offset_at(client, topic, queue, start)
        if differing:
            where = f"{differing} of {len(queues)} queues of {topic}"
            say(f"{group} has committed offsets in {where}: it continues there, not at --from")


async def _offset_at(
    client: AsyncClient, topic: str, queue: MessageQueue, start: Literal["earliest", "latest"] | int
) -> int:
    if not isinstance(start, str):
        return await client.offset_by_time(topic, queue, start)
    return await (client.min_offset if start == EARLIEST else client.max_offset)(topic, queue)


async def _join(consumer: Consumer | PopConsumer, idle: float | None, printed: Printed) -> None:
    async with consumer:
        while not printed.is_full and (message := await consumer.receive(timeout=idle)) is not None:
            batch = [message]
            is_large = printed.add(message)
            while not (is_large or printed.is_full) and (following := await consumer.receive(timeout=0)) is not None:
                batch.append(following)
                is_large = printed.add(following)
            await printed.flush()
            for one in batch:
                await one.ack()
        if not printed.is_full and consumer.problem is not None:
            raise consumer.problem  # the reason why no message arrived
