"""`neve spark schema`: which fields the bodies of an archived topic had by month. No Spark is started for that."""

from __future__ import annotations

from typing import Any

import click

from neve.cli.output import emit, output_option, say, store_option
from neve.cli.times import to_ms

_COLUMNS = ["month", "change", "field", "type", "messages", "share", "first", "last"]


@click.command()
@click.argument("topic")
@store_option(required=True)
@click.option("--from", "start", help="Stored at or after this ISO 8601 time.")
@click.option("--to", "end", help="Stored before this ISO 8601 time.")
@click.option("--broker", help="Of this broker's archive alone.")
@click.option("--sample", type=click.IntRange(min=1), default=20_000, show_default=True,
              help="About so many messages of each month and broker, spread over it.")  # fmt: skip
@click.option("--all", "whole", is_flag=True, help="Look at every message: first and last are exact then.")
@output_option
def schema(
    *, topic: str, store: str, start: str | None, end: str | None, broker: str | None, sample: int, whole: bool,
    output: str,
) -> None:  # fmt: skip
    """Fields and types of the JSON bodies of TOPIC by month, and from which offset on each came and went.

    + marks a field that the month before had not, - one that this month has no more; first and last are
    BROKER/QUEUE@OFFSET by store time, of a field that went those of the month before.
    """
    from neve.archive.catalog.journal_reader import catalogs
    from neve.archive.read.body_fields import COLUMNS, BodyFields, sampled
    from neve.archive.read.selection import Selection, choose
    from neve.archive.read.topic_dataset import Bodies, RowFilter, topic_dataset
    from neve.cli.store import open_source
    from neve.record.bodies import INFLATED_LENGTH_MAX

    known = catalogs(open_source(store), broker)
    if not any(catalog.has_topic(topic) for catalog in known.values()):
        raise FileNotFoundError(f"topic {topic} is not in this archive")
    selection = Selection(None if start is None else to_ms(start), None if end is None else to_ms(end))
    chosen = list(choose(known, topic, selection))
    rows = sum(one.name.row_groups[at].rows for one in chosen for at in one.groups)
    some = chosen if whole else sampled(chosen, sample)
    bodies = topic_dataset(some, topic, store, RowFilter(selection), Bodies(True, False, INFLATED_LENGTH_MAX))
    found = BodyFields()
    for batch in bodies.to_batches(columns=list(COLUMNS)):
        found.add(batch.to_pylist())
    emit([_row(line) for line in found.lines()], _COLUMNS, output)
    looked_at = sum(found.messages.values())
    if len(some) < len(chosen) or sum(len(one.groups) for one in some) < sum(len(one.groups) for one in chosen):
        say(f"{looked_at} of about {rows} messages: a field may have come earlier and gone later; --all looks at each")
    else:
        say(f"{looked_at} messages")


def _row(line: Any) -> dict[str, Any]:
    share = f"{100 * line.seen.messages / line.of:.1f}%" if line.of else ""
    return {
        "month": line.month, "change": line.change, "field": line.field.name, "type": line.field.type,
        "messages": line.seen.messages, "share": share, "first": line.seen.first.text(), "last": line.seen.last.text(),
    }  # fmt: skip
