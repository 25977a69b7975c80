"""`neve top`: live traffic by topic, group and tier."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from neve.cli import completed
from neve.cli.cluster import administer, cluster_options
from neve.cli.options import POSITIVE_DURATION
from neve.cli.output import emit, output_option, size_text
from neve.clock import system_now_ms

if TYPE_CHECKING:
    from neve.cli.traffic import TrafficSample

_CLEAR = "\x1b[H\x1b[2J"


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC...]", shell_complete=completed.topics)
@click.option("--once", is_flag=True, help="Print once and stop.")
@click.option(
    "--interval", type=POSITIVE_DURATION, default="5s", show_default=True, metavar="DURATION", help="Refresh interval."
)
@click.option(
    "--rows",
    type=click.IntRange(1),
    default=15,
    show_default=True,
    help="Rows of topics and of groups; -o json has all.",
)
@click.option("--all", "everything", is_flag=True, help="Include the topics and groups of servers.")
@cluster_options
@output_option
def top(
    *,
    topics: tuple[str, ...],
    once: bool,
    interval: float,
    rows: int,
    everything: bool,
    namesrv: str,
    output: str,
) -> None:
    """Show the traffic of brokers, topics and groups, the busiest first, until Ctrl-C.

    Brokers count the rates of topics and groups over the last minute, and their own over the last ten seconds. TIER is
    where a group reads next: hot, or cold (the archive). COLD is the share of its lag that exists in the archive only.
    Apache's brokers report no tiers. -o json prints a line each time.
    """
    asyncio.run(_show(namesrv, topics, once=once, interval=interval, rows=rows, everything=everything, output=output))


async def _show(
    namesrv: str, topics: Sequence[str], *, once: bool, interval: float, rows: int, everything: bool, output: str
) -> None:  # fmt: skip
    from neve.cli.traffic import TrafficReader

    while True:
        async with administer(namesrv) as admin:
            seen = await TrafficReader(admin).look(topics, everything)
        now_ms = system_now_ms()
        if output == "json":
            click.echo(json.dumps({"time_ms": now_ms, **seen._asdict()}, ensure_ascii=False))
        else:
            if not once and sys.stdout.isatty():
                click.echo(_CLEAR, nl=False)
            _print(seen, now_ms, rows)
        if once:
            return
        sys.stdout.flush()
        await asyncio.sleep(interval)


def _print(seen: TrafficSample, now_ms: int, rows: int) -> None:
    click.echo(datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    click.echo()
    emit(seen.brokers, ["broker", "in_per_s", "out_per_s", "disk"], "table")
    click.echo()
    emit(_shown(seen.topics, rows), ["topic", "in_per_s", "in_bytes", "out_per_s", "out_bytes"], "table")
    click.echo()
    columns = ["group", "topic", "out_per_s", "out_bytes", "lag"]
    tiers = ["cold", "tier"] if any(row["cold"] is not None for row in seen.groups) else []
    emit(_shown(seen.groups, rows), [*columns, *tiers], "table")
    click.echo()


def _shown(rows: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Return the first rows with bytes as text."""
    return [
        {
            **row,
            **{
                name.removesuffix("_per_s"): f"{size_text(row[name])}/s"
                for name in ("in_bytes_per_s", "out_bytes_per_s")
                if name in row
            },
        }
        for row in rows[:limit]
    ]
