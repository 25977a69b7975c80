"""`neve archive`: the archive of a broker, through its admin port, or read from the store without a broker."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from neve.cli.admin_address import find_admin
from neve.cli.aliases import VerbGroup, option
from neve.cli.certificate import certificate
from neve.cli.cluster import cluster_options
from neve.cli.cost import cost
from neve.cli.failures import FAILED, Failure
from neve.cli.options import DURATION
from neve.cli.output import (
    admin_option,
    chosen_store,
    emit,
    emit_one,
    output_option,
    say,
    size_text,
    store_option,
    time_text,
)
from neve.units import duration_text

if TYPE_CHECKING:
    from neve.archive.format.journal import AnyEntry, CommittedObject

_LAST_EVENTS = ("certificate", "done")  # of an erasure
broker_option = click.option("--broker", help="The broker to ask.")
LIST_COLUMNS = ("topic", "broker", "day", "rows", "size", "from", "to", "key")


@click.group(cls=VerbGroup)
def archive() -> None:
    """The archive: list, verify, offload, compact, erase."""


archive.add_command(cost)


@archive.command(name="list")
@click.argument("topic", required=False)
@click.option("--broker", help="Only the archive of this broker.")
@store_option()
@admin_option
@cluster_options
@output_option
def list_objects(
    *, topic: str | None, broker: str | None, store: str | None, admin: str | None, namesrv: str, output: str
) -> None:
    """List the objects that readers see now, of all topics or of one."""
    if (store := chosen_store(store)) is not None:
        rows: Iterable[Mapping[str, Any]] = _objects(store, topic, broker)
    else:
        from neve.cli.admin import get_json

        answer = _rows(
            get_json(find_admin(admin, broker, namesrv), "/archive/ls", **({"topic": topic} if topic else {}))
        )
        rows = [_object_of_broker(row) for row in answer]
    emit(rows, LIST_COLUMNS, output)


@archive.command()
@click.option("--broker", help="Only the journal of this broker.")
@option("--from-seq", "first", former=["--from"], type=click.IntRange(0), default=0, help="Start at this entry.")
@store_option()
@admin_option
@cluster_options
@output_option
def journal(*, broker: str | None, first: int, store: str | None, admin: str | None, namesrv: str, output: str) -> None:
    """Print the journal: all changes of the archive in order."""
    if (store := chosen_store(store)) is not None:
        rows: Iterable[Mapping[str, Any]] = _entries(store, broker, first)
    else:
        from neve.cli.admin import get_json

        answer = _rows(get_json(find_admin(admin, broker, namesrv), "/archive/journal", **{"from": str(first)}))
        rows = [_entry_of_broker(row) for row in answer]
    emit(rows, ("broker", "seq", "type", "epoch", "time", "what"), output)


@archive.command()
@click.option("--roll", is_flag=True, help="Seal the active segment first, so that everything is offloaded.")
@click.option("--evict", is_flag=True, help="Then delete the local segments that are completely archived.")
@broker_option
@admin_option
@cluster_options
@output_option
def offload(*, roll: bool, evict: bool, broker: str | None, admin: str | None, namesrv: str, output: str) -> None:
    """Run an offload round now. -o json prints progress as JSON lines. Exit code 1: not everything was archived."""
    from neve.cli.admin import post_lines

    query = {name: "true" for name, wanted in (("roll", roll), ("evict", evict)) if wanted}
    lines = post_lines(find_admin(admin, broker, namesrv), "/archive/offload", **query)
    is_terminal = sys.stderr.isatty() and sys.stdout.isatty()
    last = _bar(lines) if is_terminal and output == "table" else _print_events(lines, output)
    if last.get("failed"):
        raise Failure(FAILED, f"{last['failed']} objects were not written; the broker logs why, and retries")
    if quarantined := last.get("set_aside"):
        raise Failure(FAILED, "\n".join(f"not archived: {reason}" for reason in quarantined.values()))


def _print_events(lines: Iterator[dict[str, Any]], output: str) -> dict[str, Any]:
    """Print each event as a JSON line, or only the last one as a table; return the last one."""
    last: dict[str, Any] = {}
    for last in lines:
        if output == "json":
            click.echo(json.dumps(last, ensure_ascii=False))
    if output == "table":
        emit_one(last, output)
    return last


def _bar(lines: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Show a progress bar, whose length is known after the round has planned its objects; return the last event."""
    last: dict[str, Any] = {}
    with click.progressbar(length=1, label="offload", file=sys.stderr, show_pos=True) as bar:
        for item in lines:
            last = item
            total, done = item.get("total"), item.get("done")
            if isinstance(total, int) and isinstance(done, int) and total > 0:
                bar.length = total
                bar.update(done - bar.pos)
        bar.update((bar.length or 1) - bar.pos)
    emit_one(last, "table")
    return last


@archive.command()
@click.option("--deep", is_flag=True, help="Also read every object and compare checksums.")
@click.option("--broker", help="Only the archive of this broker.")
@store_option()
@admin_option
@cluster_options
@output_option
def verify(*, deep: bool, broker: str | None, store: str | None, admin: str | None, namesrv: str, output: str) -> None:
    """Check that the journal and the objects agree, and that queues have no holes. Exit code 1: something is wrong."""
    if (store := chosen_store(store)) is not None:
        from neve.cli.verify import verify_store

        findings, summary = verify_store(store, broker, deep=deep)
    else:
        from neve.cli.admin import post_json

        answer = post_json(find_admin(admin, broker, namesrv), "/archive/verify", **({"deep": "true"} if deep else {}))
        if not isinstance(answer, dict):
            raise Failure(FAILED, f"the broker's answer to a verification is not a report: {answer!r:.200}")
        findings = list(answer.get("findings") or answer.get("problems") or ())
        summary = {k: v for k, v in answer.items() if k not in {"findings", "problems"}}
    if output == "json":
        click.echo(json.dumps({**summary, "findings": findings}, ensure_ascii=False))
    else:
        for finding in findings:
            click.echo(str(finding))
    say(", ".join(f"{value} {name}" for name, value in summary.items()))
    if findings:
        raise Failure(FAILED, f"{len(findings)} findings")


@archive.command()
@broker_option
@admin_option
@cluster_options
@output_option
def unexpire(broker: str | None, admin: str | None, namesrv: str, output: str) -> None:
    """Restore expired messages that would not expire by the present TTL and clock.

    Possible until expireGrace is over and the objects are deleted. Correct the clock or the TTL of the topic first.
    """
    from neve.cli.admin import post_lines

    for item in post_lines(find_admin(admin, broker, namesrv), "/archive/unexpire"):
        objects, queues = item.get("objects", 0), item.get("local_queues", 0)
        emit_one({"objects": objects, "local_queues": queues}, output)
        say(f"restored {objects} objects, and {queues} queues of the local log")


@archive.command()
@click.option("--repair", is_flag=True, help="Delete orphans that an earlier sweep has listed already.")
@broker_option
@admin_option
@cluster_options
@output_option
def sweep(*, repair: bool, broker: str | None, admin: str | None, namesrv: str, output: str) -> None:
    """List orphan objects of a broker: older than 48 hours, and named by no entry of the journal."""
    from neve.cli.admin import post_lines

    query = {"repair": "true"} if repair else {}
    for item in post_lines(find_admin(admin, broker, namesrv), "/archive/sweep", **query):
        emit([{"key": key} for key in item.get("orphans", ())], ["key"], output)


@archive.command()
@click.argument("topic", required=False)
@click.option("--dry-run", is_flag=True, help="Show which objects would be merged, and change nothing.")
@broker_option
@admin_option
@cluster_options
@output_option
def compact(
    *, topic: str | None, dry_run: bool, broker: str | None, admin: str | None, namesrv: str, output: str
) -> None:
    """Compact the small objects of a topic, or of all topics. -o json prints progress as JSON lines.

    Objects of one day are merged up to 128 MB, also on the present day. The old objects are deleted after
    archiveReplacedGrace (1 h). archiveCompactionBytesPerSecond limits the rate. Exit code 1: some merges failed.
    """
    from neve.cli.admin import post_lines

    query = {**({"topic": topic} if topic else {}), **({"dry-run": "true"} if dry_run else {})}
    last = _print_events(post_lines(find_admin(admin, broker, namesrv), "/archive/compact", **query), output)
    if last.get("failed"):
        raise Failure(FAILED, f"{last['failed']} objects were not written, and their sources stay: the broker logs why")


@archive.command()
@click.argument("topic")
@click.option("--key", required=True, help="Erase messages with this key, or this unique key.")
@click.option("--dry-run", is_flag=True, help="Show which archived objects have such messages, and change nothing.")
@click.option("--no-retries", is_flag=True, help="Do not erase from retry and dead-letter topics.")
@click.option(
    "--grace",
    type=DURATION,
    metavar="DURATION",
    help="Delete the replaced objects after this time, as 1h.  [default: 0s]",
)
@click.option("--evict", is_flag=True, help="Then delete the local segments that are completely archived.")
@click.option("--id", "run", help="Resume this erasure, which was interrupted.")
@broker_option
@admin_option
@cluster_options
@output_option
def erase(
    *,
    topic: str,
    key: str,
    dry_run: bool,
    no_retries: bool,
    grace: float | None,
    evict: bool,
    run: str | None,
    broker: str | None,
    admin: str | None,
    namesrv: str,
    output: str,
) -> None:
    """Erase all messages of a topic that have a key, permanently, and print a certificate.

    Unarchived messages are archived first. Objects with such messages are rewritten without them; the old objects are
    deleted at once, or after --grace. The certificate lists the remaining copies and when each ends. Exit code 1: the
    erasure is not complete.

    An erasure covers one broker or broker set: repeat it for each that has, or had, the topic.
    """
    from neve.cli.admin import post_lines

    flags = {"dry-run": dry_run, "no-retries": no_retries, "evict": evict}
    query = {"topic": topic, "key": key, **{name: "true" for name, wanted in flags.items() if wanted}}
    if grace is not None:
        query["grace"] = duration_text(round(grace * 1000)) if grace else "0s"
    if run is not None:
        query["id"] = run
    event: dict[str, Any] = {}
    for event in post_lines(find_admin(admin, broker, namesrv), "/archive/erase", **query):
        if event.get("event") not in _LAST_EVENTS:
            say(json.dumps(event, ensure_ascii=False))
    if event.get("event") not in _LAST_EVENTS:
        raise Failure(
            FAILED,
            "the broker stopped before the certificate: repeat the command with --id; erased messages stay erased",
        )
    click.echo(json.dumps(event, ensure_ascii=False) if output == "json" else "\n".join(certificate(event)))
    if left := event.get("not_erased"):
        raise Failure(FAILED, "\n".join(f"not erased: {reason}" for reason in left))


@archive.command(name="confirm-clock")
@broker_option
@admin_option
@cluster_options
@output_option
def confirm_clock(broker: str | None, admin: str | None, namesrv: str, output: str) -> None:
    """Confirm that the broker's wall clock is right, so that messages expire by it again."""
    from neve.cli.admin import post_lines

    for item in post_lines(find_admin(admin, broker, namesrv), "/clock/confirm"):
        before = item.get("before", {})
        emit_one(before, output)
        if before.get("trusted"):
            say("the clock was trusted already")
        else:
            behind_s = before.get("behind_ms", 0) // 1000
            say(f"the clock is trusted again; expiry was {behind_s} s behind it: {before.get('why')}")


def _rows(answer: Any) -> list[Mapping[str, Any]]:
    """Return the rows of an answer of the admin port, which is a list or an object that holds one."""
    if isinstance(answer, dict):
        answer = next((value for value in answer.values() if isinstance(value, list)), [])
    return list(answer)


def _object_of_broker(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row of a broker with size and times as text."""
    size = int(row.get("size", 0))
    times = {name: time_text(row.get(name)) for name in ("from", "to")}
    return {**row, "bytes": size, "size": size_text(size), **times}


def _entry_of_broker(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a broker in the form of an entry that was read from the store."""
    fields = row.get("what")
    entry = {**fields, **row} if isinstance(fields, dict) else dict(row)
    topics = sorted({str(name["topic"]) for name in entry.get("names", ())})
    what = f"{len(entry['names'])} objects of {', '.join(topics)}" if topics else str(entry.get("topic", ""))
    return {**entry, "time": time_text(row.get("time")), "what": what}


def _objects(store: str, topic: str | None, broker: str | None) -> Iterator[dict[str, Any]]:
    from neve.archive.catalog.journal_reader import catalogs
    from neve.cli.store import open_source

    for name, catalog in sorted(catalogs(open_source(store), broker).items()):
        for one in catalog.each_object() if topic is None else catalog.topic(topic).names():
            yield _object_row(one, name)


def _object_row(one: CommittedObject, broker: str) -> dict[str, Any]:
    return {
        "topic": one.topic,
        "broker": broker,
        "day": one.day,
        "rows": one.rows,
        "size": size_text(one.size),
        "bytes": one.size,
        "wire_bytes": one.wire_bytes,
        "from": time_text(one.min_time),
        "to": time_text(one.max_time),
        "queues": {str(queue): [first, last] for queue, (first, last, _) in sorted(one.queues.items())},
        "row_groups": len(one.row_groups),
        "key": one.key,
    }


def _entries(store: str, broker: str | None, first: int) -> Iterator[dict[str, Any]]:
    import msgspec

    from neve.archive.catalog.journal_reader import brokers, entries
    from neve.cli.store import open_source

    source = open_source(store)
    known = brokers(source)
    if not known:
        raise FileNotFoundError(f"{store} holds no archive: it has nothing below _neve/")
    if broker is not None and broker not in known:
        raise FileNotFoundError(f"{store} holds no archive of broker {broker}")
    for name in known if broker is None else [broker]:
        for seq, entry in entries(source, name, first=first):
            row = msgspec.to_builtins(entry, str_keys=True)
            yield {**row, "broker": name, "seq": seq, "time": time_text(entry.time_ms), "what": _content_text(entry)}


def _content_text(entry: AnyEntry) -> str:
    """Return the content of an entry in a few words."""
    rows_deleted = getattr(entry, "rows", None)
    if rows_deleted is not None:
        topics = sorted({topic for topic, *_ in rows_deleted})
        count = sum(last - first + 1 for _, _, first, last in rows_deleted)
        return f"{count} rows of {', '.join(topics)} erased"
    names = getattr(entry, "names", None) or getattr(entry, "new", None)
    if names is not None:
        topics = sorted({name.topic for name in names})
        rows = sum(getattr(name, "rows", 0) for name in names)
        return f"{len(names)} objects of {', '.join(topics)}" + (f", {rows} rows" if rows else "")
    keys = getattr(entry, "keys", None)
    if keys is not None:
        return f"{len(keys)} objects"
    topic = getattr(entry, "topic", None)
    if topic is not None:
        queue = getattr(entry, "queue", None)
        return str(topic) if queue is None else f"{topic} queue {queue}"
    return ""
