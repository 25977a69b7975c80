"""`neve spark verify`: options, progress and output of `neve.spark.verify`."""

from __future__ import annotations

import json

import click

from neve.cli.failures import FAILED, UNREACHABLE, Failure
from neve.cli.output import json_option, say, size_text, store_option

_SHOWN = 50  # findings that are printed to a terminal


@click.command()
@click.option("-t", "--topic", "topics", multiple=True, help="Only this topic; may be repeated.")
@click.option("--broker", help="Only the archive of this broker.")
@click.option("--quick", is_flag=True, help="Read no object: compare sizes, and find holes and overlaps of offsets.")
@click.option("--resume", type=click.Path(dir_okay=False), help="Write checked objects to this file; an interrupted "
              "check resumes from it. It is deleted when the check is complete.")  # fmt: skip
@store_option(required=True)
@click.option("--master", help="Spark master.  [default: spark-submit's, or local[*]]")
@json_option("The result as one JSON object, progress as JSON lines.")
def verify(
    *, topics: tuple[str, ...], broker: str | None, quick: bool, resume: str | None, store: str, master: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Decode all archived objects on all cores and compare them with the journal.

    Finds damaged, truncated, missing and swapped objects, wrong checksums of bodies, and holes and overlaps of offsets.
    Exit code 1: there are faults, each with its object and offsets. Exit code 6: some objects could not be read.
    """
    from neve.cli.store import open_source
    from neve.spark import session
    from neve.spark.verify import VerifyProgress
    from neve.spark.verify import verify as run

    def progress(done: VerifyProgress) -> None:
        sizes = f"{size_text(done.bytes)} of {size_text(done.of_bytes)}"
        line = f"{done.objects} of {done.of_objects} objects, {sizes}, {done.faults} faults"
        say(json.dumps(done._asdict()) if as_json else line)

    open_source(store)  # reports a wrong URL before a JVM starts
    conf = {"spark.log.level": "ERROR", "spark.ui.enabled": "false"}
    spark = session(store, master=master, app_name="neve spark verify", conf=conf)
    try:
        done = run(
            spark, store=store, broker=broker, topics=topics or None, deep=not quick, resume=resume, progress=progress
        )
    finally:
        spark.stop()
    if as_json:
        click.echo(json.dumps(done.as_json(), ensure_ascii=False))
    else:
        for name, fault in done.faults[:_SHOWN]:
            offsets = (
                "" if fault.queue is None or not fault.key else f" (queue {fault.queue}, {fault.first}…{fault.last})"
            )
            click.echo(f"broker {name}: {fault.message()}{offsets}")
        for name, key, reason in done.unread[:_SHOWN]:
            click.echo(f"broker {name}: {key}: not read: {reason}")
        if done.resumed:
            say(f"{done.resumed} objects were checked before, according to {resume}")
        say(f"{done.objects} objects, {done.rows} rows, {size_text(done.bytes)}, {done.gaps} gaps")
    if done.faults:
        raise Failure(FAILED, f"{len(done.faults)} faults")
    if done.unread:
        raise Failure(UNREACHABLE, f"{len(done.unread)} objects were not read")
