"""`neve topic trim`: a topic's oldest messages are deleted, below an offset or before a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click

from neve.cli import completed
from neve.cli.cluster import cluster_options, connect
from neve.cli.failures import FAILED, NOT_FOUND, USAGE, Failure
from neve.cli.output import admin_option, ask, emit, output_option, say
from neve.cli.times import to_ms

_APACHE = "an Apache broker deletes no messages by offset or time: its topics have a TTL, its log fileReservedTime"


class Trim(NamedTuple):
    """Of one queue: where it begins and shall begin."""

    broker: str
    queue: int
    begin: int
    to: int
    messages: int
    cold: int

    def row(self) -> dict[str, Any]:
        return self._asdict()


@click.command()
@click.argument("name", metavar="TOPIC", shell_complete=completed.topics)
@click.option("--before-offset", "offset", type=click.IntRange(0), help="Delete what is below; needs --queue.")
@click.option("--before-time", "before", metavar="TIME", help="Delete what was stored before: ISO 8601, or -90m.")
@click.option("--queue", type=click.IntRange(0), help="Only this queue, of each broker.")
@click.option("--broker", help="Only at this broker.")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@admin_option
@cluster_options
@output_option
def trim(
    *,
    name: str,
    offset: int | None,
    before: str | None,
    queue: int | None,
    broker: str | None,
    dry_run: bool,
    yes: bool,
    admin: str | None,
    namesrv: str,
    output: str,
) -> None:
    """Delete a topic's oldest messages, archived or not: its queues begin at an offset, or a time.

    What is deleted is shown before. It is out of every reader's sight at once, also after a restart or a restore.
    Whole objects are deleted after expireGrace, and until then `neve archive unexpire` brings it back. To erase
    messages by their key for good see `neve archive erase`.
    """
    from neve.cli.admin import post_json
    from neve.cli.admin_address import find_admin

    if (offset is None) is (before is None):
        raise click.UsageError("either --before-offset or --before-time")
    if offset is not None and queue is None:
        raise click.UsageError("--before-offset is of a --queue: offsets of different queues have nothing in common")
    plan = asyncio.run(_plan(namesrv, name, _Wanted(offset, None if before is None else to_ms(before), queue, broker)))
    emit([one.row() for one in plan], ["broker", "queue", "begin", "to", "messages", "cold"], output)
    count = sum(one.messages for one in plan)
    if dry_run or not count:
        say(f"{count} messages of {name} would be deleted" if dry_run else "there is nothing to delete")
        return
    if not yes:
        ask(f"Delete {count} messages of {name}?")
    for at, queues in _by_broker(plan).items():
        offsets = ",".join(f"{one.queue}:{one.to}" for one in queues)
        port = admin or find_admin(None, at, namesrv)
        done = post_json(port, "/topic/trim", topic=name, offsets=offsets)
        begins = {int(number): int(begin) for number, begin in done["begins"].items()}
        if short := [str(one.queue) for one in queues if begins.get(one.queue, 0) < one.to]:
            raise Failure(FAILED, f"queue {', '.join(short)} of {name} at {at} begins lower: the same command goes on")
        count = sum(one.messages for one in queues)
        say(f"{at}: {count} messages deleted, {done['objects']} objects go after the grace")


class _Wanted(NamedTuple):
    offset: int | None
    time_ms: int | None
    queue: int | None
    broker: str | None


def _by_broker(plan: Sequence[Trim]) -> Mapping[str, list[Trim]]:
    found: dict[str, list[Trim]] = {}
    for one in plan:
        if one.messages:
            found.setdefault(one.broker, []).append(one)
    return found


async def _plan(namesrv: str, topic: str, wanted: _Wanted) -> list[Trim]:
    """What is in force now, and what of it is meant. Raises Failure."""
    from neve.cli.brokers import brokers

    async with brokers(namesrv) as asked, connect(namesrv) as client:
        asked.named(wanted.broker)
        told = await asked.topic_stats(topic)
        names = [name for name in told if wanted.broker in {None, name}]
        if not names:
            raise Failure(NOT_FOUND, f"there is no topic {topic}" + (f" at {wanted.broker}" if wanted.broker else ""))
        if apaches := [name for name in names if "adminPort" not in await asked.config(name)]:
            raise Failure(FAILED, f"{', '.join(apaches)}: {_APACHE}")
        plan = []
        for name in names:
            for place, entry in sorted((told[name].get("offsetTable") or {}).items()):
                if wanted.queue in {None, place.queue_id}:
                    to = wanted.offset
                    if wanted.time_ms is not None:
                        to = await client.offset_by_time(topic, place, wanted.time_ms)
                    plan.append(_trim(name, place.queue_id, entry, to or 0))
    if not plan:
        raise Failure(NOT_FOUND, f"{topic} has no queue {wanted.queue}")
    if wanted.offset is not None and (short := [one for one in plan if one.to < wanted.offset]):
        raise Failure(USAGE, f"queue {short[0].queue} of {topic} at {short[0].broker} ends at {short[0].to}")
    return plan


def _trim(broker: str, queue: int, entry: Mapping[str, Any], to: int) -> Trim:
    """Never back, and no further than there is something."""
    low, high = int(entry["minOffset"]), int(entry["maxOffset"])
    end = min(max(to, low), high)
    existing = int(entry.get("messages", high - low))
    hot = min(int(entry.get("localMinOffset", low)), high)
    # of offsets that exist nowhere it is not told where they are: no more than there are messages
    cold = min(int(entry.get("coldMessages", existing)), max(min(hot, end) - low, 0))
    return Trim(broker, queue, low, end, min(end - low, existing), min(cold, existing))
