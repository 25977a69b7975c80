"""`neve migrate`: topics, consumer groups and committed offsets for another broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from neve.cli import completed
from neve.cli.aliases import VerbGroup, option
from neve.cli.cluster import administer, cluster_options
from neve.cli.failures import CONFLICT, FAILED, USAGE, Failure
from neve.cli.output import emit, output_option, say

if TYPE_CHECKING:
    from neve.admin.migration import Copied, CopiedOffset, Migration

Command = TypeVar("Command", bound=Callable[..., Any])

_CALL_S = 30.0
_OFFSET_COLUMNS = ("group", "topic", "from", "queue", "committed", "to", "to_queue", "to_offset", "how")

_topics = click.option("-t", "--topic", "topics_", multiple=True, help="Only this topic; may be repeated.")
_groups = click.option("-g", "--group", "groups_", multiple=True, help="Only this group; may be repeated.")


class _Sides(NamedTuple):
    namesrv: str
    to_namesrv: str | None
    source: str | None
    target: str | None
    dry_run: bool
    overwrite: bool


def _options(overwrite_help: str) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        chosen = (
            option("--from-broker", "source", former=["--from"], metavar="BROKER", shell_complete=completed.brokers,
                   help="Copy from this broker.  [default: all but the target]"),
            option("--to-broker", "target", former=["--to"], metavar="BROKER",
                   help="Copy to this broker.  [default: all of --to-namesrv]"),
            click.option("--to-namesrv", metavar="ADDRESSES", help="Name servers of a target in another cluster."),
            click.option("--overwrite", is_flag=True, help=overwrite_help),
            click.option("--dry-run", is_flag=True, help="Show what would be done, and change nothing."),
        )  # fmt: skip
        for one in reversed(chosen):
            command = one(command)
        return output_option(cluster_options(command))

    return add


@click.group(cls=VerbGroup)
def migrate() -> None:
    """Copy topics, groups and committed offsets to another broker, of this cluster or of another one.

    No messages are copied: `neve export` and `neve import` do that, and `neve broker --import-from` takes over a data
    directory. A repeated command changes nothing that is there already. Either side may be Apache RocketMQ.
    """


@migrate.command()
@_topics
@_options("Also change topics that exist with other settings.")
def topics(*, topics_: tuple[str, ...], output: str, **sides: Any) -> None:
    """Create topics with their queues, permissions and attributes. Exit code 5: some exist with other settings."""

    async def work(migration: Migration) -> tuple[list[Copied], list[str]]:
        return await migration.copy_topics(topics_)

    copied, dead_letters = asyncio.run(_carry_out(_Sides(**sides), work))
    _print(copied, "topic", dry_run=sides["dry_run"], output=output)
    say("not copied: the topics of servers, and those of groups, which the groups create")
    if dead_letters:
        say(f"dead letters stay at the source (neve dlq redrive, neve export -t): {', '.join(dead_letters)}")
    _refuse_differences(copied)


@migrate.command()
@_groups
@_options("Also change groups that exist with other settings.")
def groups(*, groups_: tuple[str, ...], output: str, **sides: Any) -> None:
    """Create consumer groups with their settings and pop modes. Exit code 5: some exist with other settings."""

    async def work(migration: Migration) -> list[Copied]:
        return await migration.copy_groups(groups_)

    copied = asyncio.run(_carry_out(_Sides(**sides), work))
    _print(copied, "group", dry_run=sides["dry_run"], output=output)
    say("not copied: the groups of servers; committed offsets (neve migrate offsets); users and policies")
    _refuse_differences(copied)


@migrate.command()
@_groups
@_topics
@_options("Also where a group has a committed offset at the target.")
def offsets(*, groups_: tuple[str, ...], topics_: tuple[str, ...], output: str, **sides: Any) -> None:
    """Commit at the target the offset of the message that each group reads next at the source.

    HOW: `same offset`: the target's log is a copy. `by message`: the message was sent again (neve import) and is found
    by its id. `beginning`: the target has none of the messages; the group reads the rest at the source, and misses
    nothing that arrives at the target. `kept`: the group has an offset there. `unknown`: none of these; nothing is
    committed, and the exit code is 1.

    Connected members continue from their own offsets: migrate before they start.
    """

    async def work(migration: Migration) -> list[CopiedOffset]:
        return await migration.copy_offsets(groups_, topics_)

    copied = asyncio.run(_carry_out(_Sides(**sides), work))
    emit([_offset_row(one) for one in copied], _OFFSET_COLUMNS, output)
    if sides["dry_run"]:
        say("nothing was changed")
    say("not copied: retries and dead letters, which stay at the source; offsets that clients keep themselves")
    if unknown := [one for one in copied if one.target is None]:
        where = ", ".join(f"{one.group} in queue {one.source.queue_id} of {one.source.topic}" for one in unknown[:5])
        raise Failure(
            FAILED,
            f"{len(unknown)} committed offsets are unknown at the target, among them {where}: use neve group reset",
        )


async def _carry_out(sides: _Sides, work: Callable[[Migration], Any]) -> Any:
    async with _migration(sides) as migration:
        return await work(migration)


@asynccontextmanager
async def _migration(sides: _Sides) -> AsyncGenerator[Migration]:
    """Yield the migration between two sides.

    Raises:
        Failure: no target is named, or the target is the only source.
    """
    from neve.admin.migration import Migration, Side

    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(administer(sides.namesrv, timeout=_CALL_S))
        target = source
        if sides.to_namesrv is not None:
            target = await stack.enter_async_context(administer(sides.to_namesrv, timeout=_CALL_S))
        elif sides.target is None:
            raise Failure(USAGE, "name the target: --to-broker BROKER, or --to-namesrv for another cluster")
        targets = target.brokers.require(sides.target)
        sources = source.brokers.require(sides.source)
        if sides.to_namesrv is None:
            sources = [name for name in sources if name not in targets]
        if not sources:
            raise Failure(USAGE, f"{', '.join(targets)} is the source itself: name another --to-broker")
        yield Migration(Side(source, sources), Side(target, targets), dry_run=sides.dry_run, overwrite=sides.overwrite)


def _offset_row(one: CopiedOffset) -> dict[str, Any]:
    target = one.target
    return {
        "group": one.group,
        "topic": one.source.topic,
        "from": one.source.broker_name,
        "queue": one.source.queue_id,
        "committed": one.committed,
        "to": None if target is None else target.broker_name,
        "to_queue": None if target is None else target.queue_id,
        "to_offset": None if target is None else one.target_offset,
        "how": one.how,
    }


def _print(copied: Sequence[Copied], kind: str, *, dry_run: bool, output: str) -> None:
    emit([{kind: one.name, **one._asdict()} for one in copied], [kind, "broker", "state", "note"], output)
    counts = {state: sum(one.state == state for one in copied) for state in dict.fromkeys(one.state for one in copied)}
    say(", ".join(f"{count} {state}" for state, count in counts.items()) or "nothing to do")
    if dry_run:
        say("nothing was changed")


def _refuse_differences(copied: Sequence[Copied]) -> None:
    from neve.admin.migration import DIFFERS

    if names := [one.name for one in copied if one.state == DIFFERS]:
        raise Failure(
            CONFLICT,
            f"these exist with other settings, and were not changed: {', '.join(names)}; --overwrite changes them",
        )
