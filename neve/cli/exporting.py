"""Writes topics of a cluster into a directory; see `export_files`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neve.cli.brokers import brokers
from neve.cli.cluster import connect
from neve.cli.consumer_groups import consumer_groups
from neve.cli.export_files import (
    UNSYNCED_BYTES,
    Export,
    Last,
    Standing,
    cut_to_whole_lines,
    joined,
    message_file,
    read_export,
    sync,
    sync_directory,
    write_export,
)
from neve.cli.failures import CONFLICT, Failure
from neve.cli.message_lines import to_line
from neve.cli.topic_names import topic_names
from neve.client.model import MessageQueue
from neve.copy.engine import copy_range
from neve.copy.source import BrokerSource, Chunk
from neve.remoting.names import is_system_group

if TYPE_CHECKING:
    from neve.client import AsyncClient

_CALL_S = 60.0


async def export(namesrv: str, directory: Path, topics: Sequence[str] | None) -> Counter[str]:
    """How many messages of each topic came to what was there; None: all topics.

    Positions are looked up before the messages: what a group reads meanwhile it may read again.
    """
    counts: Counter[str] = Counter()
    async with connect(namesrv, timeout=_CALL_S) as client:
        names = list(topics) if topics is not None else await topic_names(client, everything=False)
        found = await _described(client, namesrv, names)
        begun = {queue: cut_to_whole_lines(message_file(directory, queue)) for queue in found.queues}
        for queue, last in begun.items():
            if last is not None:
                await _require_same(client, queue, last, message_file(directory, queue))
        is_first = not (directory / "export.json").exists()
        write_export(directory, found if is_first else joined(read_export(directory), found))
        for queue, last in begun.items():
            counts[queue.topic] += await _export_queue(client, queue, last, message_file(directory, queue))
    return counts


async def _described(client: AsyncClient, namesrv: str, names: Sequence[str]) -> Export:
    topics = {}
    async with brokers(namesrv) as asked:
        for name in names:
            topics[name] = {at.broker: dict(at.settings) for at in await asked.topic(name, None)}
    queues = [queue for name in names for queue in await client.queues(name)]
    wanted = set(names)
    groups, standings = {}, []
    async with consumer_groups(namesrv) as known:
        for group, settings in (await known.settings()).items():
            if is_system_group(group):
                continue
            own = [one for one in await known.standings(group) if one.queue.topic in wanted]
            if own:
                groups[group] = dict(next(iter(settings.values())))
                standings += [Standing(group, one.queue, one.position) for one in own]
    return Export(topics, tuple(queues), groups, tuple(standings))


async def _require_same(client: AsyncClient, queue: MessageQueue, last: Last, file: Path) -> None:
    """Raise Failure if the queue does not have the last message of the file: it is of another cluster or topic."""
    other = Failure(CONFLICT, f"{file} has {last.msg_id} at {last.offset}, {queue} has not: it is of another topic")
    source = BrokerSource(client, queue.topic)
    begin, end = await source.bounds_of(queue)
    if last.offset >= end:
        raise other
    if begin <= last.offset:  # else it has expired
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
