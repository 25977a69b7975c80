"""`neve bench`: how fast a cluster takes messages, gives them, and how long they are on their way."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from neve.cli import completed
from neve.cli.bench_figures import BUSY
from neve.cli.cluster import cluster_options, connect
from neve.cli.failures import FAILED, Failure
from neve.cli.output import emit_one, output_option, say
from neve.entropy import system_entropy, unique_name

Command = TypeVar("Command", bound=Callable[..., Any])

#: Larger than any body: what is measured is not how well a filling is deflated.
_NEVER_DEFLATED = 1 << 31
_STAMP_BYTES = 8
_UP_TO = click.IntRange(1, 4096)
_MESSAGES = 10_000
_FILL_BATCH_BYTES = 256 << 10


def _options(*, with_batch: bool) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        options = [
            click.argument("topic", required=False, metavar="[TOPIC]", shell_complete=completed.topics),
            click.option("--messages", type=click.IntRange(1), help=f"So many.  [default: {_MESSAGES}, or --seconds]"),
            click.option("--seconds", type=click.FloatRange(0.1), help="So long."),
            click.option(
                "--size",
                type=click.IntRange(_STAMP_BYTES, 4 << 20),
                default=1024,
                show_default=True,
                help="Of a body, in bytes.",
            ),
        ]
        if with_batch:
            options += [
                click.option("--batch", type=_UP_TO, default=1, show_default=True, help="Messages in a request."),
                click.option("--in-flight", type=_UP_TO, default=64, show_default=True, help="Requests at a time."),
                click.option("--rate", type=click.FloatRange(0.1), help="Messages a second; each has its moment."),
            ]
        options += [
            click.option("--keep", is_flag=True, help="Leave the topic that it made."),
            click.option("--quiet", is_flag=True, help="Tell nothing on the way."),
        ]
        for option in reversed([*options, cluster_options, output_option]):
            command = option(command)
        return command

    return add


@click.group()
def bench() -> None:
    """Measure any RocketMQ cluster: sends, reads, and the way from one to the other.

    Without a TOPIC one is made at all brokers, and goes again. It is this command's processor that ends it first, soon:
    several may run beside each other. CPU of brokers is told where they are on this machine and are yours.
    """


@bench.command()
@_options(with_batch=True)
def produce(
    *,
    topic: str | None,
    messages: int | None,
    seconds: float | None,
    size: int,
    batch: int,
    in_flight: int,
    rate: float | None,
    keep: bool,
    quiet: bool,
    namesrv: str,
    output: str,
) -> None:
    """Send messages. A latency is from a request, or with --rate from its moment, to its answer."""
    from neve.cli.benching import Load

    load = Load(_count(messages, seconds), seconds, size, batch, in_flight, rate)
    _tell(asyncio.run(_run("produce", namesrv, topic, load, keep=keep, quiet=quiet)), output)


@bench.command()
@_options(with_batch=False)
def consume(
    *,
    topic: str | None,
    messages: int | None,
    seconds: float | None,
    size: int,
    keep: bool,
    quiet: bool,
    namesrv: str,
    output: str,
) -> None:
    """Read messages from a topic's beginning, without a group; a topic that it makes itself is filled first.

    A latency is that of a pull of up to 1024 messages.
    """
    from neve.cli.benching import Load

    count = messages if topic is not None else _count(messages, seconds)
    load = Load(count, seconds, size, max(_FILL_BATCH_BYTES // size, 1))
    _tell(asyncio.run(_run("consume", namesrv, topic, load, keep=keep, quiet=quiet)), output)


@bench.command()
@_options(with_batch=False)
@click.option("--rate", type=click.FloatRange(0.1), default=1000.0, show_default=True, help="Messages a second.")
@click.option("--in-flight", type=_UP_TO, default=256, show_default=True, help="Requests at most.")
def latency(
    *,
    topic: str | None,
    messages: int | None,
    seconds: float | None,
    size: int,
    rate: float,
    in_flight: int,
    keep: bool,
    quiet: bool,
    namesrv: str,
    output: str,
) -> None:
    """Send at a rate and read at the same time: from a message's moment until it is read."""
    from neve.cli.benching import Load

    if topic is not None:
        raise click.UsageError("latency makes a topic of its own: others' messages have no moment in them")
    load = Load(_count(messages, seconds), seconds, size, 1, in_flight, rate)
    told = asyncio.run(_run("latency", namesrv, None, load, keep=keep, quiet=quiet))
    _tell(told, output)
    if told["not_received"]:
        raise Failure(FAILED, f"{told['not_received']} messages that were stored were not received")


def _count(messages: int | None, seconds: float | None) -> int | None:
    return _MESSAGES if messages is None and seconds is None else messages


async def _run(
    what: str, namesrv: str, topic: str | None, load: Any, *, keep: bool, quiet: bool
) -> dict[str, Any]:  # fmt: skip
    from neve.cli import benching

    async with connect(namesrv, compress_over=_NEVER_DEFLATED) as client:
        tick = benching.Ticker(wanted=not quiet and sys.stderr.isatty())
        work = {"produce": benching.produce, "consume": benching.consume, "latency": benching.latency}[what]
        if topic is not None:
            return {"topic": topic, **await work(client, topic, load, tick)}
        async with benching.own_topic(client, f"neve-bench-{unique_name(system_entropy)[:8]}", keep=keep) as made:
            if what == "consume":
                quiet_tick = benching.Ticker(wanted=False)
                filled = await benching.produce(client, made, load._replace(in_flight=16), quiet_tick)
                await benching.until_shown(client, made, filled["messages"])
            return {"topic": made, **await work(client, made, load, tick)}


def _tell(told: dict[str, Any], output: str) -> None:
    emit_one({name: value for name, value in told.items() if output == "json" or value is not None}, output)
    if (told["client_cpu_share"] or 0) >= BUSY:
        say("this command used a whole processor: the cluster may be faster")
    if told.get("failed"):
        raise Failure(FAILED, f"{told['failed']} messages were not stored: {told['failure']}")
