"""`neve topic trim`: deletes the oldest messages of a topic, below an offset or before a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click

from neve.cli import completed
from neve.cli.cluster import administer, cluster_options
from neve.cli.failures import FAILED, NOT_FOUND, USAGE, Failure
from neve.cli.options import INSTANT, broker_option, queue_option, yes_option
from neve.cli.output import admin_option, ask, emit, output_option, say

_APACHE = (
    "Apache's brokers cannot delete by offset or time: use `neve topic ttl set`, or fileReservedTime of the broker"
)


class Trim(NamedTuple):
    """The present and the future first offset of a queue."""

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
@click.option("--before-offset", "offset", type=click.IntRange(0), help="Delete lower offsets; needs --queue.")
@click.option(
    "--before-time", "before", type=INSTANT, metavar="TIME", help="Delete messages stored earlier: ISO 8601, or -90m."
)
@queue_option
@broker_option
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and change nothing.")
@yes_option
@admin_option
@cluster_options
@output_option
def trim(
    *,
    name: str,
    offset: int | None,
    before: int | None,
    queue: int | None,
    broker: str | None,
    dry_run: bool,
    yes: bool,
    admin: str | None,
    namesrv: str,
    output: str,
) -> None:
    """Delete the oldest messages of a topic in both tiers, below an offset or before a time.

    It shows what it deletes, and asks. No reader sees the messages afterwards, not even after a restart or a restore.
    Whole objects are deleted after expireGrace; until then `neve archive unexpire` restores them. To erase messages
    by key, see `neve archive erase`.
    """
    from neve.cli.admin import post_json
    from neve.cli.admin_address import find_admin

    if (offset is None) is (before is None):
        raise click.UsageError("give one of --before-offset and --before-time")
    if offset is not None and queue is None:
        raise click.UsageError("--before-offset needs --queue: offsets of different queues are not related")
    plan = asyncio.run(_plan(namesrv, name, _Wanted(offset, before, queue, broker)))
    emit([one.row() for one in plan], ["broker", "queue", "begin", "to", "messages", "cold"], output)
    count = sum(one.messages for one in plan)
    if dry_run or not count:
        say(
            f"{count} messages of {name} would be deleted"
            if dry_run
            else f"{name} has no such messages: nothing was deleted"
        )
        return
    if not yes:
        ask(f"Delete {count} messages of {name}?")
    for at, queues in _by_broker(plan).items():
        offsets = ",".join(f"{one.queue}:{one.to}" for one in queues)
        port = admin or find_admin(None, at, namesrv)
        done = post_json(port, "/topic/trim", topic=name, offsets=offsets)
        begins = {int(number): int(begin) for number, begin in done["begins"].items()}
        if short := [str(one.queue) for one in queues if begins.get(one.queue, 0) < one.to]:
            raise Failure(
                FAILED, f"queue {', '.join(short)} of {name} at {at} still has lower offsets: repeat the command"
            )
        count = sum(one.messages for one in queues)
        say(f"{at}: deleted {count} messages, and after expireGrace {done['objects']} objects")


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
    """Return the effect on each queue.

    Raises:
        Failure: no such topic or queue, an offset above the end, or an Apache broker.
    """
    async with administer(namesrv) as admin:
        client = admin.client
        admin.brokers.require(wanted.broker)
        answers = await admin.topics.offsets(topic)
        names = [name for name in answers if wanted.broker in {None, name}]
        if not names:
            raise Failure(NOT_FOUND, f"there is no topic {topic}" + (f" at {wanted.broker}" if wanted.broker else ""))
        if apaches := [name for name in names if "adminPort" not in (await admin.brokers.configuration(name)).values]:
            raise Failure(FAILED, f"{', '.join(apaches)}: {_APACHE}")
        plan = []
        for name in names:
            for place, entry in sorted((answers[name].get("offsetTable") or {}).items()):
                if wanted.queue in {None, place.queue_id}:
                    to = wanted.offset
                    if wanted.time_ms is not None:
                        to = await client.offset_by_time(topic, place, wanted.time_ms)
                    plan.append(_trim(name, place.queue_id, entry, to or 0))
    if not plan:
        raise Failure(NOT_FOUND, f"{topic} has no queue {wanted.queue}")
    if wanted.offset is not None and (short := [one for one in plan if one.to < wanted.offset]):
        raise Failure(
            USAGE,
            f"queue {short[0].queue} of {topic} at {short[0].broker} ends at {short[0].to}: give a lower offset",
        )
    return plan


def _trim(broker: str, queue: int, entry: Mapping[str, Any], to: int) -> Trim:
    """Return the effect on one queue; the new first offset is between the present one and the end."""
    low, high = int(entry["minOffset"]), int(entry["maxOffset"])
    end = min(max(to, low), high)
    existing = int(entry.get("messages", high - low))
    hot = min(int(entry.get("localMinOffset", low)), high)
    # brokers do not report which offsets have no message: the number of messages is the limit
    cold = min(int(entry.get("coldMessages", existing)), max(min(hot, end) - low, 0))
    return Trim(broker, queue, low, end, min(end - low, existing), min(cold, existing))
