"""`neve migrate`: what was told a broker by hand, told to the one that comes after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neve.cli import completed
from neve.cli.aliases import AliasedGroup
from neve.cli.cluster import cluster_options
from neve.cli.failures import CONFLICT, FAILED, Failure
from neve.cli.output import emit, output_option, say

if TYPE_CHECKING:
    from neve.cli.migrating import Placed, Taken

Command = TypeVar("Command", bound=Callable[..., Any])

_STATES = ("made", "changed", "same", "differs")


def _options(command: Command) -> Command:
    chosen = (
        click.option("--from", "source", metavar="BROKER", shell_complete=completed.brokers,
                     help="Copy from this broker; otherwise from all but the target."),
        click.option("--to", "target", metavar="BROKER", help="Copy to this broker; otherwise to all of --to-namesrv."),
        click.option("--to-namesrv", metavar="ADDRESSES", help="Name servers of the target, of another cluster."),
        click.option("--dry-run", is_flag=True, help="Only show what would be done."),
    )  # fmt: skip
    for option in reversed(chosen):
        command = option(command)
    return output_option(cluster_options(command))


@click.group(cls=AliasedGroup)
def migrate() -> None:
    """Copy topics, groups and positions to another broker, of this cluster or of another one.

    No messages are copied: `neve export` and `neve import` do that, `neve broker --import-from` takes a directory.
    Each may be called again, and changes nothing that is there already. Either side may be Apache RocketMQ's.
    """


@migrate.command()
@click.option("-t", "--topic", "wanted", multiple=True, help="Only this one; may be repeated.")
@click.option("--overwrite", is_flag=True, help="Also change those that are there with other settings.")
@_options
def topics(  # noqa: PLR0917 - the command line's own
    wanted: tuple[str, ...],
    overwrite: bool,
    source: str | None,
    target: str | None,
    to_namesrv: str | None,
    dry_run: bool,
    namesrv: str,
    output: str,
) -> None:
    """Make topics with their queues, permissions and attributes. Exit code 5: some are there with other settings."""

    async def main() -> tuple[list[Taken], list[str]]:
        from neve.cli.migrating import migration

        async with migration(namesrv, to_namesrv, source, target, dry_run, overwrite) as found:
            return await found.topics(wanted)

    taken, dead = asyncio.run(main())
    _tell(taken, "topic", dry_run=dry_run, output=output)
    say("not taken over: the servers' own topics, and those of groups, which these make themselves")
    if dead:
        say(f"dead letters stay where they are (neve dlq ls, redrive; neve export -t): {', '.join(dead)}")
    _refuse_differences(taken)


@migrate.command()
@click.option("-g", "--group", "wanted", multiple=True, help="Only this one; may be repeated.")
@click.option("--overwrite", is_flag=True, help="Also change those that are there with other settings.")
@_options
def groups(  # noqa: PLR0917 - the command line's own
    wanted: tuple[str, ...],
    overwrite: bool,
    source: str | None,
    target: str | None,
    to_namesrv: str | None,
    dry_run: bool,
    namesrv: str,
    output: str,
) -> None:
    """Make consumer groups with their settings, and where they pop. Exit code 5: some are there with other settings."""

    async def main() -> list[Taken]:
        from neve.cli.migrating import migration

        async with migration(namesrv, to_namesrv, source, target, dry_run, overwrite) as found:
            return await found.groups(wanted)

    taken = asyncio.run(main())
    _tell(taken, "group", dry_run=dry_run, output=output)
    say("not taken over: the servers' own groups; positions (neve migrate offsets); users and policies")
    _refuse_differences(taken)


@migrate.command()
@click.option("-g", "--group", "wanted", multiple=True, help="Only this one; may be repeated.")
@click.option("-t", "--topic", "only", multiple=True, help="Only in this topic; may be repeated.")
@click.option("--overwrite", is_flag=True, help="Also where a group has a position at the target.")
@_options
def offsets(  # noqa: PLR0917 - the command line's own
    wanted: tuple[str, ...],
    only: tuple[str, ...],
    overwrite: bool,
    source: str | None,
    target: str | None,
    to_namesrv: str | None,
    dry_run: bool,
    namesrv: str,
    output: str,
) -> None:
    """Set groups at the target to the message that comes next for them at the source.

    HOW: `same offset`, the target's log is a copy; `by message`, the message was sent there again (neve import) and is
    found by its id; `beginning`, the target has none of the messages: the group reads what is left where it lies, and
    misses nothing that comes to the target; `kept`, the group has a position there; `unknown`, none of these: nothing
    was set, exit code 1. Members that are connected read on from where they are: set positions before they begin.
    """

    async def main() -> list[Placed]:
        from neve.cli.migrating import migration

        async with migration(namesrv, to_namesrv, source, target, dry_run, overwrite) as found:
            return await found.offsets(wanted, only)

    placed = asyncio.run(main())
    columns = ["group", "topic", "from", "queue", "position", "to", "to_queue", "to_position", "how"]
    emit([one.row() for one in placed], columns, output)
    if dry_run:
        say("nothing was written")
    say("not taken over: retries and dead letters, which stay with the source; positions that clients keep themselves")
    if unknown := [one for one in placed if one.target is None]:
        where = ", ".join(f"{one.group} in queue {one.source.queue_id} of {one.source.topic}" for one in unknown[:5])
        raise Failure(
            FAILED, f"{len(unknown)} positions are unknown at the target, among them {where}: neve group reset"
        )


def _tell(taken: Sequence[Taken], kind: str, *, dry_run: bool, output: str) -> None:
    emit([{kind: one.name, **one._asdict()} for one in taken], [kind, "broker", "state", "note"], output)
    counts = {state: sum(one.state == state for one in taken) for state in _STATES}
    say(", ".join(f"{count} {state}" for state, count in counts.items() if count) or "nothing to do")
    if dry_run:
        say("nothing was written")


def _refuse_differences(taken: Sequence[Taken]) -> None:
    if names := [one.name for one in taken if one.state == "differs"]:
        raise Failure(CONFLICT, f"there with other settings, and left so without --overwrite: {', '.join(names)}")
