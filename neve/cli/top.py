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
from neve.cli.cluster import cluster_options
from neve.cli.output import emit, output_option, size_text
from neve.clock import system_now_ms

if TYPE_CHECKING:
    from neve.cli.traffic import Seen

_CLEAR = "\x1b[H\x1b[2J"


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC...]", shell_complete=completed.topics)
@click.option("--once", is_flag=True, help="Print it once.")
@click.option(
    "--interval", type=click.FloatRange(1), default=5.0, show_default=True, metavar="SECONDS", help="Between two looks."
)
@click.option(
    "--rows", type=click.IntRange(1), default=15, show_default=True, help="Of topics and of groups; -o json has all."
)
@click.option("--all", "everything", is_flag=True, help="Also the servers' own topics and groups.")
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
    """Show what goes through the cluster: brokers, topics and groups, the busiest first, until Ctrl-C.

    Rates are those that brokers count over the last minute, of brokers themselves over the last ten seconds. TIER is
    where a group reads on: hot, or cold, in the archive; COLD how much of its lag the archive alone has. Apache's
    brokers tell of no tiers. With -o json a line each time.
    """
    asyncio.run(_show(namesrv, topics, once=once, interval=interval, rows=rows, everything=everything, output=output))


async def _show(
    namesrv: str, topics: Sequence[str], *, once: bool, interval: float, rows: int, everything: bool, output: str
) -> None:  # fmt: skip
    from neve.cli.brokers import brokers
    from neve.cli.consumer_groups import consumer_groups
    from neve.cli.traffic import Traffic

    while True:
        async with brokers(namesrv) as asked, consumer_groups(namesrv) as groups:
            seen = await Traffic(asked, groups).look(topics, everything)
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


def _print(seen: Seen, now_ms: int, rows: int) -> None:
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
    """With bytes as people read them."""
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
