"""`neve replay`: options and output of `neve.copy.replay`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neve.cli.aliases import AliasedGroup
from neve.cli.cluster import cluster_options, connect
from neve.cli.failures import CONFLICT, FAILED, Failure
from neve.cli.output import emit, emit_one, output_option, say, size_text, time_text
from neve.cli.times import to_ms

if TYPE_CHECKING:
    from neve.client import AsyncClient
    from neve.copy.replay import Asked
    from neve.copy.source import Source
    from neve.copy.task import Range, Task
    from neve.copy.task_files import TaskBook

Command = TypeVar("Command", bound=Callable[..., Any])

_TELL_S = 5.0  # between two lines of progress


@click.group(cls=AliasedGroup)
def replay() -> None:
    """Send the messages of a topic again, into a topic of this cluster or another."""


def tasks_option(command: Command) -> Command:
    """`--tasks DIR`, where tasks are kept."""
    return click.option(
        "--tasks",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="NEVE_REPLAYS",
        show_envvar=True,
        default="~/.neve/replays",
        show_default=True,
        help="Directory of the replays.",
    )(command)


def range_options(command: Command) -> Command:
    """What of a topic is meant, how fast, and whether only to count."""
    for option in reversed(
        (
            click.option("--from", "start", help="Stored at or after this ISO 8601 time."),
            click.option("--to", "end", help="Stored before this ISO 8601 time."),
            click.option("--offsets", metavar="FIRST:LAST", help="Of each queue, both included; one may be left out."),
            click.option("--queue", type=click.IntRange(0), help="Only this queue, of each broker."),
            click.option("--broker", help="Only the queues of this broker."),
            click.option("--tag", help='Only these tags: "A || B".'),
            click.option("--key", help="Only messages with this key."),
            click.option("--rate", metavar="N[/s]", help="Send no more than so many messages a second."),
            click.option("--dry-run", is_flag=True, help="Read and count; send and note nothing."),
        )
    ):
        command = option(command)
    return command


@replay.command("run")
@click.argument("name")
@click.argument("source")
@click.option("--into", required=True, metavar="TOPIC", help="Send into this topic, which has to be there.")
@click.option("--to-namesrv", metavar="HOST:PORT", help="Name servers of the cluster to send to.  [default: --namesrv]")
@click.option("--store", metavar="URL", help="Read from this archive instead of the brokers.")
@click.option("--keep-queues", is_flag=True, help="Each message into the queue of its number, in its order.")
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
    """Send what SOURCE has now into another topic, as the replay NAME.

    It ends where the queues end when it begins. Killed or stopped, `neve replay resume NAME` goes on: at most the
    thousand messages that were under way are sent twice. Each says where it comes from, in the property NEVE_REPLAY.
    """
    from neve.copy.task import Target, Task

    task = Task(
        name=name,
        source=source,
        target=Target(topic=into, keeps_queues=keep_queues),
        namesrv=namesrv,
        to_namesrv=to_namesrv or namesrv,
        store=store,
        filters=filters_of(wanted),
        rate=rate_of(wanted["rate"]),
    )
    begin(task, asked_of(wanted), tasks=tasks, dry_run=dry_run, output=output)


@replay.command()
@click.argument("name")
@tasks_option
@output_option
@cluster_options
def resume(*, name: str, tasks: Path, output: str, namesrv: str) -> None:
    """Go on with a replay that was stopped, killed, cancelled or failed.

    Its name servers are those that it began with; who signs is told anew.
    """
    from neve.copy.task import DONE

    del namesrv  # the task has its own
    book = _book(tasks)
    with book.locked(name):
        task = book.load(name)
        book.settle_cancel(name)
        if task.left or task.state != DONE:  # who was killed after its last message has only to note its end
            asyncio.run(_carry_out(task, book))
    emit_one(_shown(task, task.state, output), output)


@replay.command("ls")
@tasks_option
@output_option
def list_verb(*, tasks: Path, output: str) -> None:
    """All replays, and how far they are."""
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
    """One replay: its report."""
    book = _book(tasks)
    task = book.load(name)
    emit_one(_shown(task, _state(task, is_locked=book.is_locked(name)), output), output)


@replay.command()
@click.argument("name")
@tasks_option
def cancel(*, name: str, tasks: Path) -> None:
    """End a replay after what it is sending now; what it has sent stays sent."""
    task = _book(tasks).cancel(name)
    say(f"replay {name} ends now" if task.state == "running" else f"replay {name} is {task.state}")


@replay.command()
@click.argument("name")
@tasks_option
def forget(*, name: str, tasks: Path) -> None:
    """Remove a replay from the list; its name is free again."""
    _book(tasks).forget(name)


# ---- what `neve dlq redrive` does as well


def begin(
    task: Task,
    asked: Asked,
    *,
    tasks: Path,
    dry_run: bool,
    output: str,
    before: list[Range] | None = None,
    from_first: bool = True,
) -> None:
    """A new task from its ranges to its end, or only counted. `before`: of the one that it takes the place of."""
    book = _book(tasks)
    if dry_run:
        asyncio.run(_count(task, asked, before or [], output, from_first=from_first))
        return
    with book.locked(task.name):
        book.settle_cancel(task.name)  # of one that had ended before it saw the mark
        if before is None and book.has(task.name):
            raise Failure(CONFLICT, f"there is a replay {task.name}: resume it, forget it, or take another name")
        asyncio.run(_carry_out(task, book, asked, before or [], from_first=from_first))
    emit_one(_shown(task, task.state, output), output)


def filters_of(wanted: dict[str, Any]) -> Any:
    """Of the options of a range."""
    from neve.copy.task import Filters

    tags = tuple(tag.strip() for tag in wanted["tag"].split("||")) if wanted["tag"] else ()
    since, until = (None if text is None else to_ms(text) for text in (wanted["start"], wanted["end"]))
    return Filters(tags, wanted["key"], since, until, wanted.get("origin"))


def asked_of(wanted: dict[str, Any]) -> Asked:
    """Of the options of a range."""
    from neve.copy.replay import Asked

    first: int | None = None
    last: int | None = None
    if wanted["offsets"] is not None:
        found = re.fullmatch(r"(\d*):(\d*)", wanted["offsets"])
        if found is None:
            raise click.BadParameter("FIRST:LAST, both numbers, one may be left out", param_hint="--offsets")
        first, last = (int(text) if text else None for text in found.groups())
    return Asked(first, last, wanted["queue"], wanted["broker"])


def rate_of(text: str | None) -> float:
    """Messages a second; 0 for as many as can be."""
    if text is None:
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/s)?", text)
    if found is None or not float(found[1]):
        raise click.BadParameter(f"{text!r} is no number of messages a second, such as 500/s", param_hint="--rate")
    return float(found[1])


async def _count(task: Task, asked: Asked, before: list[Range], output: str, *, from_first: bool) -> None:
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
    say(f"{sum(one.selected for one in counts.values())} messages would be sent; nothing was")


async def _carry_out(
    task: Task,
    book: TaskBook,
    asked: Asked | None = None,
    before: Sequence[Range] = (),
    *,
    from_first: bool = True,
) -> None:
    """`asked` of a task that begins."""
    from neve.clock import system_now_ms
    from neve.copy.replay import Replay

    loop = asyncio.get_running_loop()
    told_at, sent_before = loop.time(), task.sent

    def tell(now: Task) -> None:
        nonlocal told_at, sent_before
        passed = loop.time() - told_at
        if passed >= _TELL_S:
            say(f"{now.sent} sent, {now.left} offsets left, {(now.sent - sent_before) / passed:.0f} messages/s")
            told_at, sent_before = loop.time(), now.sent

    async with connect(task.namesrv) as client, connect(task.to_namesrv) as target:
        source = await _source(task, client)
        if asked is not None:
            await _settle_ranges(task, source, asked, before, from_first=from_first)
            task.created = system_now_ms()
        try:
            await Replay(task, source, target, book, system_now_ms).run(tell)
            if task.expired:
                say(f"{task.expired} offsets expired before they were read")
        except Exception as error:
            say(f"{task.sent} messages were sent; `neve replay resume {task.name}` goes on where it was")
            if isinstance(error, ValueError):
                raise Failure(FAILED, str(error)) from error
            raise


async def _settle_ranges(
    task: Task, source: Source, asked: Asked, before: Sequence[Range], *, from_first: bool
) -> None:
    from neve.copy.replay import continued, ranges

    task.ranges = continued(await ranges(source, asked, task.filters), before, asked, from_first=from_first)


async def _source(task: Task, client: AsyncClient) -> Source:
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
    """What runs but nobody carries out was killed."""
    return "stopped" if task.state == "running" and not is_locked else task.state


def _shown(task: Task, state: str, output: str) -> dict[str, Any]:
    row = task.report() | {"state": state}
    if output == "json":
        return row
    row["queues"] = json.dumps({f"{one.broker}/{one.queue}": [one.position, one.end] for one in task.ranges})
    return row | {"created": time_text(task.created), "changed": time_text(task.changed)}
