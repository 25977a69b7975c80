"""`neve archive`: through the broker's admin port, or straight from the store with --store and no broker."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from neve.cli.admin_address import find_admin
from neve.cli.aliases import AliasedGroup
from neve.cli.certificate import certificate
from neve.cli.cluster import cluster_options
from neve.cli.cost import cost
from neve.cli.failures import FAILED, Failure
from neve.cli.output import admin_option, chosen_store, emit, output_option, say, size_text, store_option, time_text

if TYPE_CHECKING:
    from neve.archive.format.journal import AnyEntry, CommittedObject

_LAST = ("certificate", "done")  # of an erasure
LS_COLUMNS = ("topic", "broker", "day", "rows", "size", "from", "to", "key")


@click.group(cls=AliasedGroup)
def archive() -> None:
    """Look into the archive, check it, offload into it."""


archive.add_command(cost)


@archive.command()
@click.argument("topic", required=False)
@click.option("--broker", help="Only the archive of this broker, or without a store: ask this one.")
@store_option()
@admin_option
@cluster_options
@output_option
def ls(
    *, topic: str | None, broker: str | None, store: str | None, admin: str | None, namesrv: str, output: str
) -> None:
    """List the objects that readers see now."""
    if (store := chosen_store(store)) is not None:
        rows: Iterable[Mapping[str, Any]] = _objects(store, topic, broker)
    else:
        from neve.cli.admin import get_json

        answer = _rows(
            get_json(find_admin(admin, broker, namesrv), "/archive/ls", **({"topic": topic} if topic else {}))
        )
        rows = [_as_listed(row) for row in answer]
    emit(rows, LS_COLUMNS, output)


@archive.command()
@click.option("--broker", help="Only the journal of this broker, or without a store: ask this one.")
@click.option("--from", "first", type=click.IntRange(0), default=0, help="Begin at this entry.")
@store_option()
@admin_option
@cluster_options
@output_option
def journal(*, broker: str | None, first: int, store: str | None, admin: str | None, namesrv: str, output: str) -> None:
    """Print the journal: what happened to the archive, in order."""
    if (store := chosen_store(store)) is not None:
        rows: Iterable[Mapping[str, Any]] = _entries(store, broker, first)
    else:
        from neve.cli.admin import get_json

        answer = _rows(get_json(find_admin(admin, broker, namesrv), "/archive/journal", **{"from": str(first)}))
        rows = [_as_journaled(row) for row in answer]
    emit(rows, ("broker", "seq", "type", "epoch", "time", "what"), output)


@archive.command()
@click.option("--roll", is_flag=True, help="End the active segment first, so that everything is offloaded.")
@click.option("--evict", is_flag=True, help="Then delete the local segments that are wholly archived.")
@click.option("--broker", help="Ask this broker.")
@admin_option
@cluster_options
def offload(roll: bool, evict: bool, broker: str | None, admin: str | None, namesrv: str) -> None:
    """Run an offload round now. Prints progress as JSON lines, or as a bar on a terminal. Exit code 1: not all went."""
    from neve.cli.admin import post_lines

    query = {name: "true" for name, wanted in (("roll", roll), ("evict", evict)) if wanted}
    lines = post_lines(find_admin(admin, broker, namesrv), "/archive/offload", **query)
    last: dict[str, Any] = {}
    if sys.stderr.isatty() and sys.stdout.isatty():
        last = _bar(lines)
    else:
        for last in lines:
            click.echo(json.dumps(last, ensure_ascii=False))
    if last.get("failed"):
        raise Failure(FAILED, f"{last['failed']} objects could not be made; the broker's log says why, it tries again")
    if aside := last.get("set_aside"):
        raise Failure(FAILED, "\n".join(f"not archived: {reason}" for reason in aside.values()))


def _bar(lines: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Steps as they come; the bar has a length once the round tells how many objects it makes."""
    last: dict[str, Any] = {}
    with click.progressbar(length=1, label="offload", file=sys.stderr, show_pos=True) as bar:
        for item in lines:
            last = item
            total, done = item.get("total"), item.get("done")
            if isinstance(total, int) and isinstance(done, int) and total > 0:
                bar.length = total
                bar.update(done - bar.pos)
        bar.update((bar.length or 1) - bar.pos)
    click.echo(json.dumps(last, ensure_ascii=False))
    return last


@archive.command()
@click.option("--deep", is_flag=True, help="Also read every object and compare checksums.")
@click.option("--broker", help="Only the archive of this broker, or without a store: ask this one.")
@store_option()
@admin_option
@cluster_options
@output_option
def verify(*, deep: bool, broker: str | None, store: str | None, admin: str | None, namesrv: str, output: str) -> None:
    """Check that journal and objects agree and that the queues have no hole. Exit code 1 when something is wrong."""
    if (store := chosen_store(store)) is not None:
        from neve.cli.verify import verify_store

        findings, summary = verify_store(store, broker, deep=deep)
    else:
        from neve.cli.admin import post_json

        answer = post_json(find_admin(admin, broker, namesrv), "/archive/verify", **({"deep": "true"} if deep else {}))
        if not isinstance(answer, dict):
            raise Failure(FAILED, f"the broker's answer to a verification is no report: {answer!r:.200}")
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
@click.option("--broker", help="Ask this broker.")
@admin_option
@cluster_options
def unexpire(broker: str | None, admin: str | None, namesrv: str) -> None:
    """Take back what has expired, as far as it has not by the TTL and the clock as they are now.

    Possible until the objects are deleted (expireGrace). Set the clock or the topic's TTL right first.
    """
    from neve.cli.admin import post_lines

    for item in post_lines(find_admin(admin, broker, namesrv), "/archive/unexpire"):
        say(f"{item.get('objects', 0)} objects are back, {item.get('local_queues', 0)} queues of the local log")


@archive.command()
@click.option("--repair", is_flag=True, help="Delete those that a sweep before has told of, too.")
@click.option("--broker", help="Ask this broker.")
@admin_option
@cluster_options
def sweep(repair: bool, broker: str | None, admin: str | None, namesrv: str) -> None:
    """Look for objects of this broker, older than 48 hours, that no entry of the journal names."""
    from neve.cli.admin import post_lines

    query = {"repair": "true"} if repair else {}
    for item in post_lines(find_admin(admin, broker, namesrv), "/archive/sweep", **query):
        for key in item.get("orphans", ()):
            click.echo(key)


@archive.command()
@click.argument("topic", required=False)
@click.option("--dry-run", is_flag=True, help="Only show what would become one object.")
@click.option("--broker", help="Ask this broker.")
@admin_option
@cluster_options
def compact(topic: str | None, dry_run: bool, broker: str | None, admin: str | None, namesrv: str) -> None:
    """Make few objects of a topic's small ones, or of all topics'. Prints progress as JSON lines.

    Objects of one day become one of 128 MB, also of a day that has not ended. The old ones are deleted after
    archiveReplacedGrace (1 h).
    As fast as archiveCompactionBytesPerSecond lets it. Exit code 1: some were not made.
    """
    from neve.cli.admin import post_lines

    query = {**({"topic": topic} if topic else {}), **({"dry-run": "true"} if dry_run else {})}
    last: dict[str, Any] = {}
    for last in post_lines(find_admin(admin, broker, namesrv), "/archive/compact", **query):
        click.echo(json.dumps(last, ensure_ascii=False))
    if last.get("failed"):
        raise Failure(FAILED, f"{last['failed']} objects were not made, the old ones stay: the broker's log says why")


@archive.command()
@click.argument("topic")
@click.option("--key", required=True, help="A word of the messages' keys, or a unique key.")
@click.option("--dry-run", is_flag=True, help="Only show which archived objects have such messages, and how many.")
@click.option("--no-retries", is_flag=True, help="Leave the groups' retry and dead-letter topics as they are.")
@click.option("--grace", help="Keep the replaced objects for this time, as 1h.  [default: 0s, delete them at once]")
@click.option("--evict", is_flag=True, help="Then delete the local segments that are wholly archived.")
@click.option("--id", "run", help="Go on with this erasure, that was broken off.")
@click.option("--broker", help="Ask this broker.")
@admin_option
@cluster_options
@output_option
def erase(
    *,
    topic: str,
    key: str,
    dry_run: bool,
    no_retries: bool,
    grace: str | None,
    evict: bool,
    run: str | None,
    broker: str | None,
    admin: str | None,
    namesrv: str,
    output: str,
) -> None:
    """Erase all messages of a topic that have a key, for good, and print a certificate of it.

    What is not archived yet is archived first. The objects that hold such messages are written again without them; the
    old ones are deleted at once, or after --grace. The certificate lists the remaining copies, and until when they
    remain. Exit code 1: the erasure is not complete.

    It is of one broker, or broker set: ask each that the topic is, or was, on.
    """
    from neve.cli.admin import post_lines

    flags = {"dry-run": dry_run, "no-retries": no_retries, "evict": evict}
    query = {"topic": topic, "key": key, **{name: "true" for name, wanted in flags.items() if wanted}}
    query |= {name: value for name, value in (("grace", grace), ("id", run)) if value is not None}
    told: dict[str, Any] = {}
    for told in post_lines(find_admin(admin, broker, namesrv), "/archive/erase", **query):
        if told.get("event") not in _LAST:
            say(json.dumps(told, ensure_ascii=False))
    if told.get("event") not in _LAST:
        raise Failure(FAILED, "the broker ended before the certificate: ask again, what was erased stays so")
    click.echo(json.dumps(told, ensure_ascii=False) if output == "json" else "\n".join(certificate(told)))
    if left := told.get("not_erased"):
        raise Failure(FAILED, "\n".join(f"not erased: {reason}" for reason in left))


@archive.command(name="confirm-clock")
@click.option("--broker", help="Ask this broker.")
@admin_option
@cluster_options
def confirm_clock(broker: str | None, admin: str | None, namesrv: str) -> None:
    """Say that the broker's wall clock is right: what expires goes by it again at once."""
    from neve.cli.admin import post_lines

    for item in post_lines(find_admin(admin, broker, namesrv), "/clock/confirm"):
        before = item.get("before", {})
        if before.get("trusted"):
            say("the clock was trusted already")
        else:
            say(f"trusted again ({before.get('why')}); expiries were {before.get('behind_ms', 0) // 1000} s behind it")


def _rows(answer: Any) -> list[Mapping[str, Any]]:
    """The rows of an answer of the admin port: a list, or an object that holds one."""
    if isinstance(answer, dict):
        answer = next((value for value in answer.values() if isinstance(value, list)), [])
    return list(answer)


def _as_listed(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The broker's row with size and times as people read them."""
    size = int(row.get("size", 0))
    times = {name: time_text(row.get(name)) for name in ("from", "to")}
    return {**row, "bytes": size, "size": size_text(size), **times}


def _as_journaled(row: Mapping[str, Any]) -> dict[str, Any]:
    """The broker's entry in the form in which the store's are shown."""
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
        raise FileNotFoundError("no archive here: nothing below _neve/")
    if broker is not None and broker not in known:
        raise FileNotFoundError(f"no archive of broker {broker} here")
    for name in known if broker is None else [broker]:
        for seq, entry in entries(source, name, first=first):
            row = msgspec.to_builtins(entry, str_keys=True)
            yield {**row, "broker": name, "seq": seq, "time": time_text(entry.time_ms), "what": _what(entry)}


def _what(entry: AnyEntry) -> str:
    """The entry's content in a few words."""
    rows_gone = getattr(entry, "rows", None)
    if rows_gone is not None:
        topics = sorted({topic for topic, *_ in rows_gone})
        count = sum(last - first + 1 for _, _, first, last in rows_gone)
        return f"{count} rows of {', '.join(topics)} are erased"
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
