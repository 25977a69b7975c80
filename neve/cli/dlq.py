"""`neve dlq`: messages that a consumer group gave up, looked at and sent back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from neve.cli.aliases import AliasedGroup
from neve.cli.cluster import cluster_options, connect
from neve.cli.failures import NOT_FOUND, Failure
from neve.cli.output import emit, output_option, say, time_text
from neve.cli.replay import asked_of, begin, filters_of, range_options, rate_of, tasks_option

_SHOWN = 20


@click.group(cls=AliasedGroup)
def dlq() -> None:
    """Dead letters of consumer groups: list them, send them back."""


@dlq.command("ls")
@click.argument("group", required=False)
@click.option("-c", "--count", type=click.IntRange(1), default=_SHOWN, show_default=True,
              help="Of a group: its newest dead letters, so many of each queue.")  # fmt: skip
@output_option
@cluster_options
def list_verb(*, group: str | None, count: int, output: str, namesrv: str) -> None:
    """Groups that have dead letters, and how many; of GROUP the newest, with the topics that they come from."""
    if group is None:
        rows = asyncio.run(_groups(namesrv))
        emit([_told(row, output) for row in rows], ["group", "dead_letters", "newest"], output)
        return
    rows = asyncio.run(_letters(namesrv, group, count))
    columns = ["broker", "queue", "offset", "origin", "tags", "keys", "retries", "stored", "body_bytes"]
    emit([_told(row, output) for row in rows], columns, output)


@dlq.command()
@click.argument("group")
@click.option(
    "--into",
    "target",
    metavar="retry|origin|TOPIC",
    default="retry",
    show_default=True,
    help="To the group alone, by its retry topic; to the topic that each comes from, for all groups; or to a topic.",
)
@click.option("--origin", help="Only those that come from this topic.")
@click.option("--all", "from_first", is_flag=True, help="Also what the redrive before this one went through.")
@click.option("--name", help="Of the replay that this is.  [default: redrive-GROUP]")
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
    """Send the dead letters of GROUP back.

    They stay in the dead-letter topic, which only grows: a redrive begins where the one of that name before it ended,
    and --all with the first. It is a replay: `neve replay ls`, `resume` and `cancel` have it, too.
    """
    from neve.client.validators import check_group
    from neve.copy.task import DONE, ORIGIN, RETRY, Range, Target, Task
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
        target=Target(None if is_back else target, target if is_back else None, group),
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
            had = (
                " (it had filters: what these left out is passed over)"
                if before.filters != type(before.filters)()
                else ""
            )
            say(f"going on where the redrive {task.name} before this ended{had}; --all begins with the first")
    begin(task, asked_of(wanted), tasks=tasks, dry_run=dry_run, output=output, before=ranges, from_first=from_first)


async def _groups(namesrv: str) -> list[dict[str, Any]]:
    from neve.remoting.names import DLQ_PREFIX

    async with connect(namesrv) as client:
        rows = []
        for topic in await client.topic_list():
            if not topic.startswith(DLQ_PREFIX):
                continue
            stats = (await client.topic_stats(topic)).values()
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
            raise Failure(NOT_FOUND, f"group {group} has no dead letters: there is no topic {topic}") from error
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


def _told(row: dict[str, Any], output: str) -> dict[str, Any]:
    if output == "json":
        return row
    return {name: time_text(value) if name in {"newest", "stored"} else value for name, value in row.items()}
