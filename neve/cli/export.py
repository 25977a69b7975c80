"""`neve export` and `neve import`: topics with their messages, groups and positions, by way of a directory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from neve.cli import completed
from neve.cli.cluster import cluster_options
from neve.cli.output import say

_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.command(name="export")
@click.argument("directory", type=_DIRECTORY)
@click.option(
    "-t", "--topic", "topics", multiple=True, shell_complete=completed.topics, help="A topic; may be repeated."
)
@click.option("--all", "everything", is_flag=True, help="All topics but the servers' own.")
@cluster_options
def export_topics(directory: Path, topics: tuple[str, ...], everything: bool, namesrv: str) -> None:
    """Write topics into DIRECTORY: settings, messages up to now, archived ones too, their groups and where these stand.

    Called again after a kill, or later, it goes on behind the last message of each queue. See docs/command-line.md.
    """
    if bool(topics) == everything:
        raise click.UsageError("which topics? --topic or --all")
    from neve.cli.exporting import export

    counts = asyncio.run(export(namesrv, directory, None if everything else topics))
    say(f"{sum(counts.values())} messages of {len(counts)} topics are new in {directory}")


@click.command(name="import")
@click.argument("directory", type=_DIRECTORY)
@click.option(
    "-t", "--topic", "topics", multiple=True, help="Of the export only this; may be repeated.  [default: all]"
)
@click.option("--no-groups", is_flag=True, help="Leave groups and their positions out.")
@click.option("--overwrite-positions", is_flag=True, help="Also of groups that have read here meanwhile.")
@cluster_options
def import_topics(
    directory: Path, topics: tuple[str, ...], no_groups: bool, overwrite_positions: bool, namesrv: str
) -> None:
    """Send what `neve export` wrote to this cluster: topics that are missing are made, then messages, then positions.

    Messages of a queue stay in one queue, in their order, with their ids; they get new offsets, to which groups'
    positions are translated. After a kill it goes on where it was, and sends nothing twice.
    """
    from neve.cli.importing import import_into

    if no_groups and overwrite_positions:
        raise click.UsageError("--no-groups and --overwrite-positions exclude each other")
    counts = asyncio.run(
        import_into(namesrv, directory, topics, with_groups=not no_groups, overwrite_positions=overwrite_positions)
    )
    say(f"{sum(counts.values())} messages of {len(counts)} topics were sent")
