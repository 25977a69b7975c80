"""`neve spark schema`: the fields of the bodies of an archived topic by month. Starts no Spark."""

from __future__ import annotations

from typing import Any

import click

from neve.cli.options import time_range_options
from neve.cli.output import emit, output_option, say, store_option

_COLUMNS = ["month", "change", "field", "type", "messages", "share", "first", "last"]


@click.command()
@click.argument("topic")
@store_option(required=True)
@time_range_options
@click.option("--broker", help="Only the archive of this broker.")
@click.option("--sample", type=click.IntRange(min=1), default=20_000, show_default=True,
              help="Approximate messages per month and broker, evenly spread.")  # fmt: skip
@click.option("--all", "whole", is_flag=True, help="Read every message, so that first and last are exact.")
@output_option
def schema(
    *, topic: str, store: str, start: int | None, end: int | None, broker: str | None, sample: int, whole: bool,
    output: str,
) -> None:  # fmt: skip
    """Show the fields and types of the JSON bodies of TOPIC by month, and the offsets of their first and last use.

    + marks a field that the previous month did not have, - a field that this month does not have. FIRST and LAST are
    BROKER/QUEUE@OFFSET by store time; for -, they are of the previous month.
    """
    from neve.archive.catalog.journal_reader import catalogs
    from neve.archive.read.body_fields import COLUMNS, BodyFields, sampled
    from neve.archive.read.selection import Selection, choose
    from neve.archive.read.topic_dataset import BodyForm, RowFilter, topic_dataset
    from neve.cli.store import open_source
    from neve.record.bodies import INFLATED_LENGTH_MAX

    known = catalogs(open_source(store), broker)
    if not any(catalog.has_topic(topic) for catalog in known.values()):
        raise FileNotFoundError(f"topic {topic} is not in this archive")
    selection = Selection(start, end)
    chosen = list(choose(known, topic, selection))
    rows = sum(one.name.row_groups[at].rows for one in chosen for at in one.groups)
    some = chosen if whole else sampled(chosen, sample)
    bodies = topic_dataset(some, topic, store, RowFilter(selection), BodyForm(True, False, INFLATED_LENGTH_MAX))
    found = BodyFields()
    for batch in bodies.to_batches(columns=list(COLUMNS)):
        found.add(batch.to_pylist())
    emit([_row(line) for line in found.lines()], _COLUMNS, output)
    examined = sum(found.messages.values())
    if len(some) < len(chosen) or sum(len(one.groups) for one in some) < sum(len(one.groups) for one in chosen):
        say(f"{examined} of about {rows} messages: a field may start earlier and end later; --all reads each")
    else:
        say(f"{examined} messages")


def _row(line: Any) -> dict[str, Any]:
    share = f"{100 * line.seen.messages / line.of:.1f}%" if line.of else ""
    return {
        "month": line.month, "change": line.change, "field": line.field.name, "type": line.field.type,
        "messages": line.seen.messages, "share": share, "first": line.seen.first.text(), "last": line.seen.last.text(),
    }  # fmt: skip
