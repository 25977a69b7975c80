"""Writes topics of a cluster to a directory; `export_files` defines its format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neve.cli.cluster import administer
from neve.cli.export_files import (
    UNSYNCED_BYTES,
    Export,
    GroupOffset,
    Last,
    joined,
    message_file,
    read_export,
    sync,
    sync_directory,
    truncate_to_whole_lines,
    write_export,
)
from neve.cli.failures import CONFLICT, Failure
from neve.cli.message_lines import to_line
from neve.client.model import MessageQueue
from neve.copy.engine import copy_range
from neve.copy.source import BrokerSource, Chunk
from neve.remoting.names import is_system_group

if TYPE_CHECKING:
    from neve.admin import ClusterAdmin
    from neve.client import AsyncClient

_CALL_S = 60.0


async def export(namesrv: str, directory: Path, topics: Sequence[str] | None) -> Counter[str]:
    """Export topics, all if None; return the number of new messages by topic.

    Committed offsets are read before messages, so a group may read some messages again after an import.
    """
    counts: Counter[str] = Counter()
    async with administer(namesrv, timeout=_CALL_S) as admin:
        client = admin.client
        found = await _described(admin, list(topics) if topics is not None else await admin.topics.names())
        last_lines = {queue: truncate_to_whole_lines(message_file(directory, queue)) for queue in found.queues}
        for queue, last in last_lines.items():
            if last is not None:
                await _require_same(client, queue, last, message_file(directory, queue))
        is_new = not (directory / "export.json").exists()
        write_export(directory, found if is_new else joined(read_export(directory), found))
        for queue, last in last_lines.items():
            counts[queue.topic] += await _export_queue(client, queue, last, message_file(directory, queue))
    return counts


async def _described(admin: ClusterAdmin, names: Sequence[str]) -> Export:
    topics = {}
    for name in names:
        topics[name] = {at.broker: dict(at.settings) for at in await admin.topics.settings_of(name)}
    queues = [queue for name in names for queue in await admin.client.queues(name)]
    wanted = set(names)
    groups, offsets = {}, []
    for group, settings in (await admin.groups.settings()).items():
        if is_system_group(group):
            continue
        own = [one for one in await admin.groups.progress(group) if one.queue.topic in wanted]
        if own:
            groups[group] = dict(next(iter(settings.values())))
            offsets += [GroupOffset(group, one.queue, one.committed) for one in own]
    return Export(topics, tuple(queues), groups, tuple(offsets))


async def _require_same(client: AsyncClient, queue: MessageQueue, last: Last, file: Path) -> None:
    """Check that the queue has the last exported message; another cluster or a recreated topic does not."""
    other = Failure(
        CONFLICT,
        f"{file} has {last.msg_id} at offset {last.offset}, not so queue {queue.queue_id} of {queue.broker_name}: "
        "the file is of another cluster, or the topic was recreated",
    )
    source = BrokerSource(client, queue.topic)
    begin, end = await source.bounds_of(queue)
    if last.offset >= end:
        raise other
    if begin <= last.offset:  # otherwise it has expired since
        found = await source.read(queue, last.offset, last.offset + 1, 1)
        if any(one.msg_id != last.msg_id for one in found.messages):
            raise other


async def _export_queue(client: AsyncClient, queue: MessageQueue, last: Last | None, file: Path) -> int:
    file.parent.mkdir(parents=True, exist_ok=True)
    source = BrokerSource(client, queue.topic)
    begin, end = await source.bounds_of(queue)
    count = unsynced = 0
    with file.open("ab") as lines:

        async def write(chunk: Chunk) -> bool:
            nonlocal count, unsynced
            for one in chunk.messages:
                line = to_line(one, "auto").encode() + b"\n"
                if unsynced + len(line) > UNSYNCED_BYTES:
                    sync(lines)
                    unsynced = 0
                lines.write(line)
                unsynced += len(line)
            count += len(chunk.messages)
            return True

        await copy_range(source, queue, begin if last is None else max(begin, last.offset + 1), end, write)
        sync(lines)
    sync_directory(file.parent)
    return count
