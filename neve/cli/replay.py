"""`neve replay`: options and output of `neve.copy.replay`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neve.cli.aliases import VerbGroup
from neve.cli.cluster import cluster_options, connect
from neve.cli.failures import CONFLICT, FAILED, Failure
from neve.cli.options import broker_option, key_option, offsets_option, queue_option, tags_option, time_range_options
from neve.cli.output import emit, emit_one, output_option, say, size_text, time_text

if TYPE_CHECKING:
    from neve.client import AsyncClient
    from neve.copy.replay import RequestedRange
    from neve.copy.source import TopicSource
    from neve.copy.task import Filters, Range, Task
    from neve.copy.task_files import TaskBook

Command = TypeVar("Command", bound=Callable[..., Any])

_PROGRESS_S = 5.0


@click.group(cls=VerbGroup)
def replay() -> None:
    """Send the messages of a topic again, to a topic of this cluster or of another one."""


def tasks_option(command: Command) -> Command:
    """Add `--tasks`."""
    return click.option(
        "--tasks",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="NEVE_REPLAYS",
        show_envvar=True,
        default="~/.neve/replays",
        show_default=True,
        help="Directory with the state of all replays.",
    )(command)


def range_options(command: Command) -> Command:
    """Add the options that choose messages, limit the rate, or only count."""
    own = (
        click.option("--rate", metavar="N[/s]", help="Send at most this many messages per second."),
        click.option("--dry-run", is_flag=True, help="Read and count messages, and send none."),
    )
    chosen = (time_range_options, offsets_option, queue_option, broker_option, tags_option(), key_option, *own)
    for one in reversed(chosen):
        command = one(command)
    return command


@replay.command("run")
@click.argument("name")
@click.argument("source")
@click.option("--into", required=True, metavar="TOPIC", help="Send to this topic, which must exist.")
@click.option("--to-namesrv", metavar="HOST:PORT", help="Name servers of the target cluster.  [default: --namesrv]")
@click.option("--store", metavar="URL", help="Read from this archive instead of the brokers.")
@click.option("--keep-queues", is_flag=True, help="Send each message to the queue with its queue number, in order.")
@range_options
@tasks_option
@output_option
@cluster_options
def run_verb(
    *,
    name: str,
    source: str,
    into: str,
    to_namesrv: str | None,
    store: str | None,
    keep_queues: bool,
    dry_run: bool,
    tasks: Path,
    output: str,
    namesrv: str,
    **wanted: Any,
) -> None:
    """Send the present messages of topic SOURCE to another topic, as the replay NAME.

    It ends at the end that each queue has at the start. After a kill or Ctrl-C, `neve replay resume NAME` continues; at
    most 1,000 messages are sent twice. The property NEVE_REPLAY of each message names its origin.
    """
    from neve.copy.task import CopyTarget, Task

    task = Task(
        name=name,
        source=source,
        target=CopyTarget(topic=into, keeps_queues=keep_queues),
        namesrv=namesrv,
        to_namesrv=to_namesrv or namesrv,
        store=store,
        filters=filters_of(wanted),
        rate=rate_of(wanted["rate"]),
    )
    begin(task, requested_part(wanted), tasks=tasks, dry_run=dry_run, output=output)


@replay.command()
@click.argument("name")
@tasks_option
@output_option
@cluster_options
def resume(*, name: str, tasks: Path, output: str, namesrv: str) -> None:
    """Resume a replay that was stopped, killed or cancelled, or that failed.

    It uses the name servers that it was started with, and the credentials of this command.
    """
    from neve.copy.task import DONE

    del namesrv  # the task has stored its own
    book = _book(tasks)
    with book.locked(name):
        task = book.load(name)
        book.settle_cancel(name)
        if task.left or task.state != DONE:  # a replay killed after its last message has only to store its end
            asyncio.run(_carry_out(task, book))
    emit_one(_shown(task, task.state, output), output)


@replay.command("list")
@tasks_option
@output_option
def list_verb(*, tasks: Path, output: str) -> None:
    """List all replays with their progress."""
    book = _book(tasks)
    rows = []
    for name in book.names():
        task = book.load(name)
        rows.append(_shown(task, _state(task, is_locked=book.is_locked(name)), output))
    emit(rows, ["name", "state", "source", "target", "read", "sent", "left_offsets", "changed"], output)


@replay.command()
@click.argument("name")
@tasks_option
@output_option
def show(*, name: str, tasks: Path, output: str) -> None:
    """Show the report of a replay."""
    book = _book(tasks)
    task = book.load(name)
    emit_one(_shown(task, _state(task, is_locked=book.is_locked(name)), output), output)


@replay.command()
@click.argument("name")
@tasks_option
def cancel(*, name: str, tasks: Path) -> None:
    """Stop a replay after the messages in flight; messages that were sent stay sent."""
    task = _book(tasks).cancel(name)
    say(f"replay {name} is stopping" if task.state == "running" else f"replay {name} is {task.state}")


@replay.command()
@click.argument("name")
@tasks_option
def delete(*, name: str, tasks: Path) -> None:
    """Delete the state of a replay, so that its name can be used again."""
    _book(tasks).forget(name)


# ---- shared with `neve dlq redrive`


def begin(
    task: Task,
    asked: RequestedRange,
    *,
    tasks: Path,
    dry_run: bool,
    output: str,
    before: list[Range] | None = None,
    from_first: bool = True,
) -> None:
    """Run a new task to its end, or only count its messages. `before` has the ranges of the task that it replaces."""
    book = _book(tasks)
    if dry_run:
        asyncio.run(_count(task, asked, before or [], output, from_first=from_first))
        return
    with book.locked(task.name):
        book.settle_cancel(task.name)  # a cancellation of an earlier task that had ended already
        if before is None and book.has(task.name):
            raise Failure(CONFLICT, f"replay {task.name} exists already: resume it, delete it, or use another name")
        asyncio.run(_carry_out(task, book, asked, before or [], from_first=from_first))
    emit_one(_shown(task, task.state, output), output)


def filters_of(wanted: dict[str, Any]) -> Filters:
    """Return the filters that the options of `range_options` describe."""
    from neve.copy.task import Filters

    tags = tuple(tag.strip() for tag in wanted["tags"].split("||")) if wanted["tags"] else ()
    return Filters(tags, wanted["key"], wanted["start"], wanted["end"], wanted.get("origin"))


def requested_part(wanted: dict[str, Any]) -> RequestedRange:
    """Return the offsets and queues that the options of `range_options` describe."""
    from neve.copy.replay import RequestedRange

    first, end = wanted["offsets"] or (None, None)
    return RequestedRange(first, end, wanted["queue"], wanted["broker"])


def rate_of(text: str | None) -> float:
    """Return messages per second; 0 is no limit."""
    if text is None:
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/s)?", text)
    if found is None or not float(found[1]):
        raise click.BadParameter(f"{text!r} is not a rate: write 500 or 500/s", param_hint="--rate")
    return float(found[1])


async def _count(task: Task, asked: RequestedRange, before: list[Range], output: str, *, from_first: bool) -> None:
    from neve.copy.replay import count

    async with connect(task.namesrv) as client:
        source = await _source(task, client)
        await _settle_ranges(task, source, asked, before, from_first=from_first)
        counts = await count(source, task)
    rows = [
        {
            "broker": one.broker,
            "queue": one.queue,
            "first": one.begin,
            "end": one.end,
            "read": counted.read,
            "would_send": counted.selected,
            "bytes": counted.size if output == "json" else size_text(counted.size),
        }
        for one in task.ranges
        for counted in (counts[one.broker, one.queue],)
    ]
    emit(rows, ["broker", "queue", "first", "end", "read", "would_send", "bytes"], output)
    say(f"{sum(one.selected for one in counts.values())} messages would be sent; none was")


async def _carry_out(
    task: Task,
    book: TaskBook,
    asked: RequestedRange | None = None,
    before: Sequence[Range] = (),
    *,
    from_first: bool = True,
) -> None:
    """Run a task to its end; `asked` is given for a new task only."""
    from neve.clock import system_now_ms
    from neve.copy.replay import Replay

    loop = asyncio.get_running_loop()
    reported_at, sent_before = loop.time(), task.sent

    def report(now: Task) -> None:
        nonlocal reported_at, sent_before
        passed = loop.time() - reported_at
        if passed >= _PROGRESS_S:
            say(f"{now.sent} sent, {now.left} offsets left, {(now.sent - sent_before) / passed:.0f} messages/s")
            reported_at, sent_before = loop.time(), now.sent

    async with connect(task.namesrv) as client, connect(task.to_namesrv) as target:
        source = await _source(task, client)
        if asked is not None:
            await _settle_ranges(task, source, asked, before, from_first=from_first)
            task.created = system_now_ms()
        try:
            await Replay(task, source, target, book, system_now_ms).run(report)
            if task.expired:
                say(f"{task.expired} offsets expired before they were read")
        except Exception as error:
            say(f"{task.sent} messages were sent; `neve replay resume {task.name}` continues")
            if isinstance(error, ValueError):
                raise Failure(FAILED, str(error)) from error
            raise


async def _settle_ranges(
    task: Task, source: TopicSource, asked: RequestedRange, before: Sequence[Range], *, from_first: bool
) -> None:
    from neve.copy.replay import continued, ranges

    task.ranges = continued(await ranges(source, asked, task.filters), before, asked, from_first=from_first)


async def _source(task: Task, client: AsyncClient) -> TopicSource:
    from neve.copy.source import BrokerSource

    if task.store is None:
        return BrokerSource(client, task.source)
    import neve.archive
    from neve.copy.archive_source import ArchiveSource

    return ArchiveSource(await asyncio.to_thread(neve.archive.open, task.store), task.source)


def _book(directory: Path) -> TaskBook:
    from neve.copy.task_files import TaskBook

    return TaskBook(directory.expanduser())


def _state(task: Task, *, is_locked: bool) -> str:
    """Return the state; a running task without a process was killed."""
    return "stopped" if task.state == "running" and not is_locked else task.state


def _shown(task: Task, state: str, output: str) -> dict[str, Any]:
    row = task.report() | {"state": state}
    if output == "json":
        return row
    row["queues"] = json.dumps({f"{one.broker}/{one.queue}": [one.position, one.end] for one in task.ranges})
    return row | {"created": time_text(task.created), "changed": time_text(task.changed)}
