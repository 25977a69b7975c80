"""`neve export` and `neve import`: topics with messages, groups and committed offsets, through a directory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from neve.cli import completed
from neve.cli.aliases import option
from neve.cli.cluster import cluster_options
from neve.cli.output import say

_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.command(name="export")
@click.argument("directory", type=_DIRECTORY)
@click.option(
    "-t", "--topic", "topics", multiple=True, shell_complete=completed.topics, help="A topic; may be repeated."
)
@click.option("--all", "everything", is_flag=True, help="All topics except those of servers.")
@cluster_options
def export_topics(directory: Path, topics: tuple[str, ...], everything: bool, namesrv: str) -> None:
    """Write topics to DIRECTORY: settings, all present messages including archived ones, groups, committed offsets.

    A repeated command continues after the last exported message of each queue, also after a kill. See
    docs/reference/command-line.md.
    """
    if bool(topics) == everything:
        raise click.UsageError("give --topic or --all")
    from neve.cli.exporting import export

    counts = asyncio.run(export(namesrv, directory, None if everything else topics))
    say(f"{sum(counts.values())} messages of {len(counts)} topics were added to {directory}")


@click.command(name="import")
@click.argument("directory", type=_DIRECTORY)
@click.option(
    "-t", "--topic", "topics", multiple=True, help="Only this topic; may be repeated.  [default: all of the export]"
)
@click.option("--no-groups", is_flag=True, help="Import no groups and no committed offsets.")
@option(
    "--overwrite-offsets",
    former=["--overwrite-positions"],
    is_flag=True,
    help="Also replace committed offsets of groups that have read here already.",
)
@cluster_options
def import_topics(
    directory: Path, topics: tuple[str, ...], no_groups: bool, overwrite_offsets: bool, namesrv: str
) -> None:
    """Send an export to this cluster: create missing topics, send messages, then commit offsets of groups.

    Messages of a queue go to one queue, in order and with their ids. Their offsets are new, and committed offsets are
    translated. After a kill the command continues, and sends no message twice.
    """
    from neve.cli.importing import import_into

    if no_groups and overwrite_offsets:
        raise click.UsageError("--no-groups and --overwrite-offsets exclude each other")
    counts = asyncio.run(
        import_into(namesrv, directory, topics, with_groups=not no_groups, overwrite_offsets=overwrite_offsets)
    )
    say(f"{sum(counts.values())} messages of {len(counts)} topics were sent")
