"""Where the messages of a topic are: on the disks of brokers, in the archive, or in both tiers.

offset:  min ........ hot ........ archived ........ max
         └─ archive only ┘└── both ──┘└─ broker only ──┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click

from neve.cli.cluster import administer
from neve.cli.failures import NOT_FOUND, Failure
from neve.cli.lag import behind_text
from neve.cli.output import emit, emit_one, size_text, time_text
from neve.clock import system_now_ms


class Tiers(NamedTuple):
    """The tiers of a topic. A broker without an archive, as Apache's, has no row in `sizes` and `syncs`."""

    summary: dict[str, Any]
    offsets: Sequence[dict[str, Any]]
    sizes: Sequence[dict[str, Any]]
    syncs: Sequence[dict[str, Any]]


async def described(namesrv: str, topic: str) -> Tiers:
    """Return the tiers of a topic, as its brokers report them.

    Raises:
        Failure: there is no such topic.
    """
    async with administer(namesrv) as admin:
        answers = await admin.topics.offsets(topic)
    if not answers:
        raise Failure(NOT_FOUND, f"there is no topic {topic}")
    return tiers_of(topic, answers, system_now_ms())


def tiers_of(topic: str, answers: Mapping[str, Mapping[str, Any]], now_ms: int) -> Tiers:
    """Return the tiers that these answers to GET_TOPIC_STATS_INFO describe, by broker."""
    offsets: list[dict[str, Any]] = []
    sizes: list[dict[str, Any]] = []
    syncs: list[dict[str, Any]] = []
    for broker, answer in sorted(answers.items()):
        archived = answer.get("archived")
        queues = sorted((answer.get("offsetTable") or {}).items())
        own = [_queue(broker, queue.queue_id, entry, has_archive=archived is not None) for queue, entry in queues]
        offsets += own
        if archived is None:
            continue
        sizes.append(
            {
                "broker": broker,
                "objects": int(archived["objects"]),
                "rows": int(archived["rows"]),
                "bytes": int(archived["bytes"]),
            }
        )
        unarchived = sum(
            int(entry.get("notArchived", row["max"] - row["archived"]))
            for row, (_, entry) in zip(own, queues, strict=True)
        )
        since = [int(entry["notArchivedSince"]) for _, entry in queues if entry.get("notArchivedSince")]
        syncs.append(
            {
                "broker": broker,
                "newest_archived_ms": int(archived["newest_ms"]) or None,
                "not_archived": unarchived,
                "behind_ms": max(now_ms - min(since), 0) if unarchived and since else None,
            }
        )
    cold = sum(row["cold"] or 0 for row in offsets)
    messages = sum(row["messages"] for row in offsets)
    summary = {
        "topic": topic,
        "queues": len(offsets),
        "messages": messages,
        "on_brokers": messages - cold,
        "in_archive_alone": cold if sizes else None,
        "not_archived": sum(row["not_archived"] for row in syncs) if sizes else None,
        "archived_objects": sum(row["objects"] for row in sizes) if sizes else None,
        "archived_bytes": sum(row["bytes"] for row in sizes) if sizes else None,
    }
    return Tiers(summary, offsets, sizes, syncs)


def _queue(broker: str, queue: int, entry: Mapping[str, Any], *, has_archive: bool) -> dict[str, Any]:
    low, high = int(entry["minOffset"]), int(entry["maxOffset"])
    messages = int(entry.get("messages", high - low))
    hot = min(int(entry.get("localMinOffset", low)), high)
    archived = int(entry.get("archivedOffset", low)) if has_archive else None
    cold = min(int(entry.get("coldMessages", max(hot - low, 0))), messages) if has_archive else None
    return {
        "broker": broker,
        "queue": queue,
        "min": low,
        "hot": hot,
        "archived": archived,
        "max": high,
        "messages": messages,
        "cold": cold,
    }


def emit_tiers(tiers: Tiers, output: str) -> None:
    """Print four sections, or one JSON object of them."""
    if output == "json":
        emit_one(tiers._asdict(), output)
        return
    size = tiers.summary["archived_bytes"]
    click.echo("SUMMARY")
    emit_one({**tiers.summary, "archived_bytes": None if size is None else size_text(size)}, output)
    click.echo("\nOFFSET")
    has_archive = bool(tiers.sizes)
    columns = ["broker", "queue", "min", "hot", "archived", "max", "messages", "cold"]
    emit(tiers.offsets, columns if has_archive else [name for name in columns if name not in _OF_AN_ARCHIVE], output)
    if not has_archive:
        click.echo("\nNo broker with this topic has an archive.")
        return
    click.echo("\nSIZE")
    rows = [{**row, "bytes": size_text(row["bytes"])} for row in tiers.sizes]
    emit(rows, ["broker", "objects", "rows", "bytes"], output)
    click.echo("\nSYNC")
    rows = [
        {
            **row,
            "newest_archived": time_text(row["newest_archived_ms"]),
            "behind": behind_text(row["behind_ms"]),
        }
        for row in tiers.syncs
    ]
    emit(rows, ["broker", "newest_archived", "not_archived", "behind"], output)


_OF_AN_ARCHIVE = frozenset({"hot", "archived", "cold"})
