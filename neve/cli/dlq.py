"""`neve dlq`: the dead letters of consumer groups."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from neve.cli import completed
from neve.cli.aliases import VerbGroup
from neve.cli.cluster import cluster_options, connect
from neve.cli.failures import NOT_FOUND, Failure
from neve.cli.output import emit, output_option, say, time_text
from neve.cli.replay import begin, filters_of, range_options, rate_of, requested_part, tasks_option

_SHOWN = 20
_LETTER_COLUMNS = ("broker", "queue", "offset", "origin", "tags", "keys", "retries", "stored", "body_bytes")

count_option = click.option(
    "-c",
    "--count",
    type=click.IntRange(1),
    default=_SHOWN,
    show_default=True,
    help="The newest of each queue, at most.",
)


@click.group(cls=VerbGroup)
def dlq() -> None:
    """Dead letters of consumer groups: list, show and redrive them."""


@dlq.command("list")
@click.argument("group", required=False, metavar="")  # `dlq ls GROUP` was `dlq show GROUP`
@click.option("-c", "--count", type=click.IntRange(1), default=_SHOWN, hidden=True)
@output_option
@cluster_options
def list_groups(*, group: str | None, count: int, output: str, namesrv: str) -> None:
    """List the groups that have dead letters, and how many."""
    if group is not None:
        _show(group, count, output, namesrv)
        return
    rows = asyncio.run(_groups(namesrv))
    emit([_with_times(row, output) for row in rows], ["group", "dead_letters", "newest"], output)


@dlq.command()
@click.argument("group", shell_complete=completed.groups)
@count_option
@output_option
@cluster_options
def show(*, group: str, count: int, output: str, namesrv: str) -> None:
    """Show the newest dead letters of GROUP, with the topics that they come from."""
    _show(group, count, output, namesrv)


def _show(group: str, count: int, output: str, namesrv: str) -> None:
    rows = asyncio.run(_letters(namesrv, group, count))
    emit([_with_times(row, output) for row in rows], _LETTER_COLUMNS, output)


@dlq.command()
@click.argument("group", shell_complete=completed.groups)
@click.option(
    "--into",
    "target",
    metavar="retry|origin|TOPIC",
    default="retry",
    show_default=True,
    help="To the retry topic, for this group only; to the topic that each comes from, for all groups; or to a topic.",
)
@click.option("--origin", help="Only dead letters that come from this topic.")
@click.option("--all", "from_first", is_flag=True, help="Include those that the previous redrive processed.")
@click.option("--name", help="Name of the replay.  [default: redrive-GROUP]")
@range_options
@tasks_option
@output_option
@cluster_options
def redrive(
    *,
    group: str,
    target: str,
    from_first: bool,
    name: str | None,
    dry_run: bool,
    tasks: Path,
    output: str,
    namesrv: str,
    **wanted: Any,
) -> None:
    """Send the dead letters of GROUP again.

    They stay in the dead-letter topic, so a redrive starts where the previous one of its name ended; --all starts with
    the first. A redrive is a replay: `neve replay list`, `resume` and `cancel` apply to it.
    """
    from neve.client.validators import check_group
    from neve.copy.task import DONE, ORIGIN, RETRY, CopyTarget, Range, Task
    from neve.copy.task_files import TaskBook
    from neve.errors import ClientError
    from neve.remoting.names import DLQ_PREFIX

    try:
        check_group(group)
    except ClientError as error:
        raise click.BadParameter(error.remark, param_hint="GROUP") from error
    is_back = target in {ORIGIN, RETRY}
    task = Task(
        name=name or f"redrive-{group}",
        source=DLQ_PREFIX + group,
        target=CopyTarget(None if is_back else target, target if is_back else None, group),
        namesrv=namesrv,
        to_namesrv=namesrv,
        filters=filters_of(wanted),
        rate=rate_of(wanted["rate"]),
    )
    book = TaskBook(tasks.expanduser())
    ranges: list[Range] | None = None
    if book.has(task.name):
        before = book.load(task.name)
        if before.state == DONE:
            ranges = before.ranges
        if ranges and not from_first:
            had_filters = before.filters != type(before.filters)()
            skipped = " (it had filters: what they excluded is skipped)" if had_filters else ""
            say(f"starting where the previous redrive {task.name} ended{skipped}; --all starts with the first")
    part = requested_part(wanted)
    begin(task, part, tasks=tasks, dry_run=dry_run, output=output, before=ranges, from_first=from_first)


async def _groups(namesrv: str) -> list[dict[str, Any]]:
    from neve.remoting.names import DLQ_PREFIX

    async with connect(namesrv) as client:
        rows = []
        for topic in await client.admin.topic_list():
            if not topic.startswith(DLQ_PREFIX):
                continue
            stats = (await client.admin.topic_stats(topic)).values()
            rows.append(
                {
                    "group": topic.removeprefix(DLQ_PREFIX),
                    "dead_letters": sum(one.messages for one in stats),
                    "newest": max((one.last_update_ms for one in stats), default=0) or None,
                }
            )
    return rows


async def _letters(namesrv: str, group: str, count: int) -> list[dict[str, Any]]:
    from neve.copy.engine import copy_range
    from neve.copy.messages import origin_of
    from neve.copy.source import BrokerSource, Chunk
    from neve.errors import BrokerError
    from neve.remoting.codes import ResponseCode
    from neve.remoting.names import DLQ_PREFIX

    topic = DLQ_PREFIX + group
    rows: list[dict[str, Any]] = []
    async with connect(namesrv) as client:
        source = BrokerSource(client, topic)
        try:
            bounds = await source.bounds()
        except BrokerError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            raise Failure(NOT_FOUND, f"group {group} has no dead letters: topic {topic} does not exist") from error
        for queue, (first, end) in bounds.items():

            async def add(chunk: Chunk, broker: str = queue.broker_name, number: int = queue.queue_id) -> bool:
                rows.extend(
                    {
                        "broker": broker,
                        "queue": number,
                        "offset": message.queue_offset,
                        "origin": origin_of(message),
                        "tags": message.tags,
                        "keys": " ".join(message.keys),
                        "retries": message.reconsume_times,
                        "stored": message.store_timestamp,
                        "body_bytes": len(message.body),
                        "msg_id": message.msg_id,
                        "properties": dict(message.properties),
                    }
                    for message in chunk.messages
                )
                return True

            await copy_range(source, queue, max(first, end - count), end, add)
    return rows


def _with_times(row: dict[str, Any], output: str) -> dict[str, Any]:
    """Return the row with times as text, except for JSON."""
    if output == "json":
        return row
    return {name: time_text(value) if name in {"newest", "stored"} else value for name, value in row.items()}
