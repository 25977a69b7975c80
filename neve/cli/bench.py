"""`neve bench`: throughput of sends and reads, and end-to-end latency."""

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
from neve.cli.options import POSITIVE_DURATION
from neve.cli.output import emit_one, output_option, say
from neve.entropy import system_entropy, unique_name

Command = TypeVar("Command", bound=Callable[..., Any])

# Larger than any body, so that compression does not affect the result.
_NEVER_COMPRESSED = 1 << 31
_STAMP_BYTES = 8
_CONCURRENCY = click.IntRange(1, 4096)
_MESSAGES = 10_000
_FILL_BATCH_BYTES = 256 << 10


def _options(*, with_batch: bool) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        options = [
            click.argument("topic", required=False, metavar="[TOPIC]", shell_complete=completed.topics),
            click.option(
                "--messages", type=click.IntRange(1), help=f"Number of messages.  [default: {_MESSAGES}, or --seconds]"
            ),
            click.option("--seconds", type=POSITIVE_DURATION, metavar="DURATION", help="Stop after this time."),
            click.option(
                "--size",
                type=click.IntRange(_STAMP_BYTES, 4 << 20),
                default=1024,
                show_default=True,
                help="Bytes per body.",
            ),
        ]
        if with_batch:
            options += [
                click.option("--batch", type=_CONCURRENCY, default=1, show_default=True, help="Messages per request."),
                click.option(
                    "--in-flight", type=_CONCURRENCY, default=64, show_default=True, help="Requests in flight."
                ),
                click.option("--rate", type=click.FloatRange(0.1), help="Messages per second, sent on schedule."),
            ]
        options += [
            click.option("--keep", is_flag=True, help="Keep the topic that it created."),
            click.option("--quiet", is_flag=True, help="Print no progress."),
        ]
        for option in reversed([*options, cluster_options, output_option]):
            command = option(command)
        return command

    return add


@click.group()
def bench() -> None:
    """Measure any RocketMQ cluster: sends, reads, and end-to-end latency.

    Without TOPIC a topic is created at all brokers and deleted afterwards. One command is limited by one CPU core: run
    several in parallel to load a cluster. The CPU time of brokers is reported if they run on this machine as your user.
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
    """Send messages. A latency runs from the request, or with --rate from its scheduled time, to the answer."""
    from neve.cli.benching import Load

    load = Load(_count(messages, seconds), seconds, size, batch, in_flight, rate)
    _print(asyncio.run(_run("produce", namesrv, topic, load, keep=keep, quiet=quiet)), output)


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
    """Read messages from the start of a topic, without a group. A topic that it creates is filled first.

    A latency is that of a pull of up to 1,024 messages.
    """
    from neve.cli.benching import Load

    count = messages if topic is not None else _count(messages, seconds)
    load = Load(count, seconds, size, max(_FILL_BATCH_BYTES // size, 1))
    _print(asyncio.run(_run("consume", namesrv, topic, load, keep=keep, quiet=quiet)), output)


@bench.command()
@_options(with_batch=False)
@click.option("--rate", type=click.FloatRange(0.1), default=1000.0, show_default=True, help="Messages a second.")
@click.option("--in-flight", type=_CONCURRENCY, default=256, show_default=True, help="Maximum requests in flight.")
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
    """Send at a rate and read at the same time. A latency runs from scheduled time to reception."""
    from neve.cli.benching import Load

    if topic is not None:
        raise click.UsageError("latency creates its own topic: messages of others hold no timestamp")
    load = Load(_count(messages, seconds), seconds, size, 1, in_flight, rate)
    figures = asyncio.run(_run("latency", namesrv, None, load, keep=keep, quiet=quiet))
    _print(figures, output)
    if figures["not_received"]:
        raise Failure(FAILED, f"{figures['not_received']} stored messages were not received")


def _count(messages: int | None, seconds: float | None) -> int | None:
    return _MESSAGES if messages is None and seconds is None else messages


async def _run(
    what: str, namesrv: str, topic: str | None, load: Any, *, keep: bool, quiet: bool
) -> dict[str, Any]:  # fmt: skip
    from neve.cli import benching

    async with connect(namesrv, compress_over=_NEVER_COMPRESSED) as client:
        tick = benching.Ticker(wanted=not quiet and sys.stderr.isatty())
        work = {"produce": benching.produce, "consume": benching.consume, "latency": benching.latency}[what]
        if topic is not None:
            return {"topic": topic, **await work(client, topic, load, tick)}
        async with benching.own_topic(client, f"neve-bench-{unique_name(system_entropy)[:8]}", keep=keep) as made:
            if what == "consume":
                quiet_tick = benching.Ticker(wanted=False)
                filled = await benching.produce(client, made, load._replace(in_flight=16), quiet_tick)
                await benching.until_visible(client, made, filled["messages"])
            return {"topic": made, **await work(client, made, load, tick)}


def _print(figures: dict[str, Any], output: str) -> None:
    emit_one({name: value for name, value in figures.items() if output == "json" or value is not None}, output)
    if (figures["client_cpu_share"] or 0) >= BUSY:
        say("this command used a whole CPU core: the cluster may be faster")
    if figures.get("failed"):
        raise Failure(FAILED, f"{figures['failed']} messages were not stored: {figures['failure']}")
