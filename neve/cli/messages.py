"""`neve produce` and `neve consume`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from neve.cli.cluster import cluster_options, connect
from neve.cli.failures import FAILED, FEWER, NOT_FOUND, Failure, explain
from neve.cli.message_lines import BODY_FORMS, BadLine, Outgoing, from_line, to_line
from neve.cli.output import say

if TYPE_CHECKING:
    from neve.client import AsyncClient, Consumer, Message, MessageQueue, PopConsumer, Subscription

IN_FLIGHT = 64


@click.command()
@click.argument("topic")
@click.argument("body", required=False)
@click.option("--tags", help="Tag of the message.")
@click.option("-k", "--key", "keys", multiple=True, help="A key; may be repeated.")
@click.option(
    "-p", "--property", "properties", multiple=True, metavar="NAME=VALUE", help="A property; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Lines are JSON as `neve consume -o json` prints them.")
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
    as_json: bool,
    queue: int | None,
    order_key: str | None,
    delay: float | None,
    namesrv: str,
) -> None:
    """Send BODY as one message, or each line of stdin that is not empty. Prints a JSON line for each.

    With --json a line has `body` (text) or `body_base64`, and if wanted `tags`, `keys`, `properties` and `flag`. What
    it says of where it was stored does not count, and of a stored message no property that clients or brokers added.

    The first line that can't be sent ends it: it is named, with how many were stored; the exit code is its own.
    """
    if queue is not None and order_key is not None:
        raise click.UsageError("--queue and --order-key exclude each other")
    if as_json and body is not None:
        raise click.UsageError("--json reads lines of stdin: leave BODY out")
    if as_json and (tags is not None or keys or properties):
        raise click.UsageError("--json: each line has its own tags, keys and properties")
    common = Outgoing(b"", tags, keys, dict(_pair(text) for text in properties))
    sending = _Sending(topic, {"queue": queue, "order_key": order_key, "delay": delay})
    if body is not None:
        asyncio.run(_produce_one(namesrv, sending, common._replace(body=body.encode())))
    else:
        asyncio.run(_produce_lines(namesrv, sending, None if as_json else common))
    say(f"sent {sending.stored} messages to {topic}")


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--property")
    return name, value


async def _produce_one(namesrv: str, sending: _Sending, message: Outgoing) -> None:
    async with connect(namesrv) as client:
        await sending.send(client, message)


async def _produce_lines(namesrv: str, sending: _Sending, common: Outgoing | None) -> None:
    """`common` is what every line is sent with; None: lines are JSON and say it."""
    from neve.cli.stdin_lines import stdin_lines

    if sys.stdin.isatty():
        say("reading lines from the terminal; Ctrl-D ends")
    async with connect(namesrv) as client:
        try:
            async for number, text in stdin_lines():
                if not text:
                    continue
                try:
                    message = from_line(text) if common is None else common._replace(body=text)
                except BadLine as error:
                    sending.failures[number] = error
                else:
                    await sending.begin(client, number, message)
                if sending.failures:
                    break
            await sending.settle()
        except asyncio.CancelledError:
            await sending.settle()  # what has left may be stored: its receipt is printed
            say(f"{sending.stored} messages are stored")
            raise
    sending.tell()


class _Sending:
    """Lines on their way, and what became of them."""

    def __init__(self, topic: str, options: Mapping[str, Any]) -> None:
        self._topic = topic
        self._options = options
        # In order means: the next is sent when the one before is stored.
        self._limit = 1 if options["order_key"] is not None else IN_FLIGHT
        self._waiting: dict[asyncio.Task[None], int] = {}
        self.stored = 0
        self.last_line = 0
        self.failures: dict[int, BaseException] = {}

    async def begin(self, client: AsyncClient, line: int, message: Outgoing) -> None:
        """Sends a line as soon as there is room, unless one before it fails meanwhile."""
        while len(self._waiting) >= self._limit:
            await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
        if self.failures:
            return
        self.last_line = line
        task = asyncio.create_task(self.send(client, message, line))
        self._waiting[task] = line
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        line = self._waiting.pop(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self.failures[line] = error

    async def send(self, client: AsyncClient, message: Outgoing, line: int | None = None) -> None:
        result = await client.send(
            self._topic,
            message.body,
            tags=message.tags,
            keys=message.keys,
            properties=message.properties,
            flag=message.flag,
            **self._options,
        )
        answer: dict[str, Any] = {} if line is None else {"line": line}
        answer |= {
            "status": str(result.status),
            "msg_id": result.msg_id,
            "broker": result.queue.broker_name,
            "queue": result.queue.queue_id,
            "offset": result.queue_offset,
        }
        if result.recall_handle is not None:
            answer["recall_handle"] = result.recall_handle
        self.stored += 1
        click.echo(json.dumps(answer))

    async def settle(self) -> None:
        """Every line that left has its answer."""
        while self._waiting:
            await asyncio.wait(self._waiting)

    def tell(self) -> None:
        """
        Raises:
            Failure: a line failed; with its number, and what was stored.
        """
        if not self.failures:
            return
        first = min(self.failures)
        error = self.failures[first]
        explained = explain(error)
        if isinstance(error, BrokenPipeError) or (explained is None and not isinstance(error, BadLine)):
            raise error
        others = sorted(self.failures.keys() - {first})
        text = f"line {first}: {error}" + (f"; failed too: {', '.join(map(str, others))}" if others else "")
        after = f"line {max(self.last_line, first)}"
        text += f"; {self.stored} messages are stored, their receipts are printed; nothing after {after} was sent"
        raise Failure(FAILED if explained is None else explained.exit_code, text)


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
    help="first, last, or ISO 8601 time; a group that has read of a queue goes on there.",
)
@click.option(
    "-c", "--count", type=click.IntRange(1), help="End after so many messages; exit code 7 if there are fewer."
)
@click.option(
    "--idle",
    type=float,
    help="With a group or --from last: end after so many idle seconds.  [default: 3, with --count 60]",
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
    "form",
    type=click.Choice(BODY_FORMS),
    help="With -o json: as text where it is UTF-8 and else as base64, as base64 always, or as both.  [default: auto]",
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
    count: int | None,
    idle: float | None,
    queue: int | None,
    output: str,
    form: str | None,
    namesrv: str,
) -> None:
    """Print the messages of a topic, archived ones too: bodies, or JSON lines with everything.

    Without a group it ends where the queues end; with --from last and in a group when no message has come for --idle
    seconds. Where that is before --count messages, the exit code is 7.
    """
    from neve.client import Subscription

    begin = _start(start)
    if sql is not None and expression != "*":
        raise click.UsageError("--tags or --sql, not both")
    if form is not None and output != "json":
        raise click.UsageError("--body goes with -o json")
    wanted = Subscription(expression) if sql is None else Subscription.sql(sql)
    hows = [how for how, is_chosen in (("broadcast", broadcast), ("pop", pop), ("share", share)) if is_chosen]
    if len(hows) > 1:
        raise click.UsageError(" and ".join(f"--{how}" for how in hows) + " exclude each other")
    waits = group is not None or begin == "last"
    if idle is not None and not waits:
        raise click.UsageError("--idle goes with --group or --from last: without them it ends where the queues end")
    if idle is None:
        idle = _IDLE_S if count is None else _IDLE_COUNTED_S
    show = _Shown(output, form or "auto")
    if group is None:
        if hows:
            raise click.UsageError(f"--{hows[0]} needs a --group")
        work = _read(namesrv, topic, wanted=wanted, start=begin, queue=queue, idle=idle, count=count, show=show)
    else:
        if queue is not None:
            raise click.UsageError("--queue is for reading without a group: members of a group share all queues")
        work = _consume_in_group(
            namesrv,
            {topic: wanted},
            start=begin,
            group=group,
            how=hows[0] if hows else "share",
            idle=idle,
            count=count,
            show=show,
        )
    seen = asyncio.run(work)
    if count is not None and seen < count:
        raise Failure(FEWER, f"{seen} of {count} messages: " + (f"none came for {idle:g} s" if waits else _NO_MORE))
    say(f"{seen} messages")


_NO_MORE = "the queues have no more"


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
    idle: float,
    count: int | None,
    show: _Shown,
) -> int:
    seen = 0
    async with connect(namesrv) as client:
        queues = [one for one in await client.queues(topic) if queue in (None, one.queue_id)]
        if not queues:
            raise Failure(NOT_FOUND, f"{topic} has no queue" + ("" if queue is None else f" {queue}"))
        if start == "last":
            messages = _follow(client, topic, queues, wanted, idle)
        else:
            messages = _read_to_the_ends(client, topic, queues, wanted, start)
        async with contextlib.aclosing(messages):
            async for message in messages:
                show(message)
                seen += 1
                if seen == count:
                    break
    return seen


async def _read_to_the_ends(
    client: AsyncClient, topic: str, queues: list[MessageQueue], wanted: Subscription, start: str | int
) -> AsyncGenerator[Message]:
    for queue in queues:
        async for message in client.reader(topic, start=start, queue=queue, expression=wanted):
            yield message


_LONG_POLL_S = 15.0


async def _follow(
    client: AsyncClient, topic: str, queues: list[MessageQueue], wanted: Subscription, idle: float
) -> AsyncGenerator[Message]:
    """What is stored from now on, until none has come for `idle` seconds."""
    arrived: asyncio.Queue[Message | BaseException] = asyncio.Queue(_AHEAD)

    async def tail(queue: MessageQueue, offset: int) -> None:
        try:
            while True:
                found = await client.pull(topic, queue, offset, expression=wanted, wait=_LONG_POLL_S)
                for message in found.messages:
                    await arrived.put(message)
                offset = found.next_offset
        except Exception as error:  # noqa: BLE001 - raised by who reads
            await arrived.put(error)

    ends = [await client.max_offset(topic, queue) for queue in queues]
    say(f"waiting for messages of {topic} from now on")
    tails = [asyncio.create_task(tail(queue, end)) for queue, end in zip(queues, ends, strict=True)]
    try:
        while True:
            try:
                async with asyncio.timeout(idle):
                    item = await arrived.get()
            except TimeoutError:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        for task in tails:
            task.cancel()
        await asyncio.gather(*tails, return_exceptions=True)


_AHEAD = 256


async def _consume_in_group(
    namesrv: str,
    topics: dict[str, Subscription],
    *,
    start: str | int,
    group: str,
    how: str,
    idle: float,
    count: int | None,
    show: _Shown,
) -> int:
    if how == "pop" and isinstance(start, int):
        raise click.BadParameter("--pop begins first or last", param_hint="--from")
    typed = click.get_current_context().get_parameter_source("start") is click.core.ParameterSource.COMMANDLINE
    async with connect(namesrv) as client:
        if typed and how != "broadcast":
            await _tell_where_it_goes_on(client, group, topics, start)
        if how == "pop":
            assert isinstance(start, str)
            popping = client.pop_consumer(group, topics, start=start)
            return await _join(popping, idle=idle, count=count, show=show)
        pulling = client.consumer(group, topics, start=start, broadcast=how == "broadcast")
        return await _join(pulling, idle=idle, count=count, show=show)


async def _tell_where_it_goes_on(client: AsyncClient, group: str, topics: Iterable[str], start: str | int) -> None:
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


async def _offset_at(client: AsyncClient, topic: str, queue: MessageQueue, start: str | int) -> int:
    if isinstance(start, int):
        return await client.offset_by_time(topic, queue, start)
    return await (client.min_offset if start == "first" else client.max_offset)(topic, queue)


async def _join(consumer: Consumer | PopConsumer, *, idle: float, count: int | None, show: _Shown) -> int:
    seen = 0
    async with consumer:
        while seen != count and (message := await consumer.receive(timeout=idle)) is not None:
            show(message)
            seen += 1
            await message.ack()
        if seen != count and consumer.problem is not None:
            raise consumer.problem  # "none came" would be half of the truth
    return seen


class _Shown(NamedTuple):
    """How a message is printed."""

    output: str
    form: str

    def __call__(self, message: Message) -> None:
        click.echo(message.body if self.output == "text" else to_line(message, self.form).encode())
