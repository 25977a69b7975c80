"""Sends an export to a cluster, each queue to one queue.

import.CLUSTER.json stores the progress, and may be older than the last messages sent. Later messages in the target
queue are compared by id, so that none is sent twice.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.admin.admin import no_broker
from neve.admin.topics import TopicAt, queue_count
from neve.cli.cluster import administer, connect
from neve.cli.export_files import Export, lines_from, message_file, read_export, write_whole
from neve.cli.failures import CONFLICT, FAILED, NOT_FOUND, Failure
from neve.cli.message_lines import BadLine, from_line
from neve.cli.output import say
from neve.client.model import Message, MessageQueue
from neve.client.net.route import PERM_READ, PERM_WRITE
from neve.copy.engine import copy_range
from neve.copy.source import BrokerSource, Chunk
from neve.errors import BrokerError
from neve.record.properties import PROPERTY_UNIQUE_KEY
from neve.remoting.codes import ResponseCode

if TYPE_CHECKING:
    from neve.client import AsyncClient

_BATCH_MESSAGES = 256
_BATCH_BYTES = 256 * 1024
_CALL_S, _ATTEMPT_S = 60.0, 20.0
_READ_BYTES = 4 * _BATCH_BYTES  # of lines in memory at a time, plus one line
_SAVE_EVERY = 16  # batches


class MessageRun(NamedTuple):
    """Messages with consecutive offsets, from `source` on in the export and from `target` on in the target queue."""

    source: int
    target: int
    messages: int


class QueueImport:
    """The progress of one queue: the bytes of its file that are sent, and the offsets of its messages at the target."""

    def __init__(
        self, target: MessageQueue, begin: int, position: int = 0, runs: Sequence[MessageRun] = (), last_id: str = ""
    ) -> None:
        self.target, self.begin, self.position, self.runs = target, begin, position, list(runs)
        self.last_id = last_id

    @classmethod
    def of(cls, row: dict[str, Any]) -> QueueImport:
        """Return the progress that a row of the state file describes."""
        runs = [MessageRun(*run) for run in row["runs"]]
        return cls(MessageQueue(*row["target"]), row["begin"], row["position"], runs, row["last_id"])

    def row(self) -> dict[str, Any]:
        """Return the row for the state file."""
        return {
            "target": self.target,
            "begin": self.begin,
            "position": self.position,
            "runs": self.runs,
            "last_id": self.last_id,
        }

    @property
    def unknown_from(self) -> int:
        """The first offset of the target queue that may hold messages of this import that are not recorded."""
        return self.runs[-1].target + self.runs[-1].messages if self.runs else self.begin

    def record(self, source: int, target: int, msg_id: str) -> None:
        """Record that the message at `source` is stored at `target`."""
        self.last_id = msg_id
        last = self.runs[-1] if self.runs else None
        if last is not None and (last.source + last.messages, last.target + last.messages) == (source, target):
            self.runs[-1] = last._replace(messages=last.messages + 1)
        else:
            self.runs.append(MessageRun(source, target, 1))

    def translated(self, offset: int) -> int:
        """Return the offset at the target for a committed offset of the exported queue."""
        for run in self.runs:
            if offset < run.source + run.messages:
                return run.target + max(0, offset - run.source)
        return self.unknown_from


async def import_into(
    namesrv: str, directory: Path, topics: Sequence[str], *, with_groups: bool, overwrite_offsets: bool
) -> Counter[str]:
    """Import topics, all without `topics`; return the number of messages sent now, by topic."""
    export = read_export(directory)
    if unknown := sorted(set(topics) - export.topics.keys()):
        raise Failure(NOT_FOUND, f"{directory} has no {', '.join(unknown)}")
    wanted = [name for name in export.topics if not topics or name in topics]
    # A send without an answer may be stored: the next run checks, while a retry could store it twice.
    async with connect(namesrv, timeout=_CALL_S, attempt_timeout=_ATTEMPT_S, send_retries=0) as client:
        importing = _Importing(client, namesrv, directory, await _cluster(client))
        for name in wanted:
            await importing.topic(export, name)
        if with_groups:
            await importing.groups(export, set(wanted), overwrite=overwrite_offsets)
        return importing.sent


async def _cluster(client: AsyncClient) -> str:
    found = sorted({broker.cluster for broker in (await client.admin.cluster_info()).values()})
    if not found:
        raise no_broker()
    return "+".join(found)


class _Importing:
    def __init__(self, client: AsyncClient, namesrv: str, directory: Path, cluster: str) -> None:
        self._client, self._namesrv, self._directory = client, namesrv, directory
        self._state = directory / f"import.{cluster}.json"
        self._queues: dict[str, QueueImport] = {}
        if self._state.exists():
            row = json.loads(self._state.read_text("utf-8"))
            self._queues = {name: QueueImport.of(one) for name, one in row.items()}
        self.sent: Counter[str] = Counter()

    # ---- messages

    async def topic(self, export: Export, name: str) -> None:
        queues = [queue for queue in export.queues if queue.topic == name]
        targets = await self._targets(export, name)
        for at, queue in enumerate(queues):
            file = message_file(self._directory, queue)
            key = str(file.relative_to(self._directory))
            if key not in self._queues:
                target = targets[at % len(targets)]
                self._queues[key] = QueueImport(target, await self._client.max_offset(name, target))
                self._save()
            await self._queue(name, file, self._queues[key])
            self._save()

    async def _targets(self, export: Export, name: str) -> list[MessageQueue]:
        """Return the queues to send to, sorted; create the topic if it does not exist."""
        try:
            route = await self._client.admin.topic_route(name)
        except BrokerError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            await self._create(name, max(export.topics[name].values(), key=queue_count))
            route = await self._client.admin.topic_route(name)
        found = sorted(route.write_queues, key=lambda queue: (queue.broker_name, queue.queue_id))
        if not found:
            raise Failure(CONFLICT, f"topic {name} has no queue to write to: neve topic set {name} --perm rw")
        return found

    async def _create(self, name: str, settings: Mapping[str, Any]) -> None:
        """Create the topic with the settings of the export, at all brokers, and writable for the import."""
        perm = int(settings.get("perm", PERM_READ | PERM_WRITE))
        attributes = ((str(key).lstrip("+"), value) for key, value in (settings.get("attributes") or {}).items())
        changes = {
            "perm": str(perm | PERM_WRITE),
            "writeQueueNums": str(max(queue_count(settings), 1)),  # each exported queue gets a queue of its own
            "attributes": ",".join(f"+{key}={value}" for key, value in attributes),
        }
        async with administer(self._namesrv) as admin:
            for broker in admin.brokers.require(None):
                await admin.topics.change(name, TopicAt(broker, settings), changes)
        say(f"created {name} with {queue_count(settings)} queues")
        if not perm & PERM_WRITE:
            closed = "r" if perm & PERM_READ else "none"
            say(f"{name} is writable for the import; restore with: neve topic set {name} --perm {closed}")
        if (write := int(settings.get("writeQueueNums") or 0)) < queue_count(settings):
            say(f"{name} had {write} queues to write; restore with: neve topic set {name} --write-queues {write}")

    async def _queue(self, topic: str, file: Path, progress: QueueImport) -> None:
        await self._require_ours(progress)
        there = await self._ids_behind(progress, next_ids(topic, file, progress.position))
        lines = lines_from(file, progress.position)
        for number in range(1 << 62):
            batch = together(lines)
            if not batch:
                return
            await self._send(topic, file, batch, progress, there)
            if number % _SAVE_EVERY == 0:
                self._save()

    async def _require_ours(self, progress: QueueImport) -> None:
        """Check that the target has the last message sent; another cluster or a recreated topic does not."""
        if not progress.runs:
            return
        queue, last = progress.target, progress.unknown_from - 1
        found = await BrokerSource(self._client, queue.topic).read(queue, last, last + 1, 1)
        if progress.last_id not in [one.msg_id for one in found.messages]:
            raise Failure(
                CONFLICT,
                f"queue {queue.queue_id} of {queue.topic} at {queue.broker_name} lacks {progress.last_id} at offset "
                f"{last}, as {self._state} records: it is another cluster, or the topic was recreated. "
                "Delete that file to send everything again",
            )

    async def _ids_behind(self, progress: QueueImport, ours: frozenset[str]) -> dict[str, int]:
        """Return the offsets of messages of this import that are stored but not recorded, by id."""
        queue = progress.target
        found: dict[str, int] = {}

        async def look(chunk: Chunk) -> bool:
            found.update((one.msg_id, one.queue_offset) for one in chunk.messages if one.msg_id in ours)
            return True

        end = await self._client.max_offset(queue.topic, queue)
        await copy_range(BrokerSource(self._client, queue.topic), queue, progress.unknown_from, end, look)
        return found

    async def _send(
        self, topic: str, file: Path, batch: list[tuple[int, bytes]], progress: QueueImport, there: dict[str, int]
    ) -> None:
        waiting: list[tuple[int, int, Message]] = []  # position after its line, offset, message
        size = 0
        for position, line in batch:
            offset, message = _message(topic, file, line)
            msg_id = message.properties[PROPERTY_UNIQUE_KEY]
            known = there.get(msg_id)
            length = len(line)
            if waiting and (known is not None or size + length > _BATCH_BYTES):
                await self._send_together(topic, waiting, progress)
                waiting, size = [], 0
            if known is not None:
                progress.record(offset, known, msg_id)
                progress.position = position
                continue
            waiting.append((position, offset, message))
            size += length
        if waiting:
            await self._send_together(topic, waiting, progress)

    async def _send_together(self, topic: str, waiting: list[tuple[int, int, Message]], progress: QueueImport) -> None:
        messages = [message for _, _, message in waiting]
        result = await self._client.send_batch(topic, messages, queue=progress.target)
        for at, (position, offset, message) in enumerate(waiting):
            progress.record(offset, result.queue_offset + at, message.properties[PROPERTY_UNIQUE_KEY])
            progress.position = position
        self.sent[topic] += len(waiting)

    def _save(self) -> None:
        write_whole(self._state, {name: progress.row() for name, progress in self._queues.items()})

    # ---- groups

    async def groups(self, export: Export, topics: set[str], *, overwrite: bool) -> None:
        """Create missing groups, and commit their offsets in queues that they have not read here."""
        wanted = [one for one in export.offsets if one.queue.topic in topics]
        count = 0
        await self._make_groups({one.group: export.groups[one.group] for one in wanted})
        for one in wanted:
            key = str(message_file(self._directory, one.queue).relative_to(self._directory))
            progress = self._queues.get(key)
            if progress is None:
                continue
            target = progress.target
            # a broker returns 0 for a queue that the group has not read
            if overwrite or not await self._client.committed(one.group, target.topic, target):
                await self._client.commit(one.group, target.topic, target, progress.translated(one.offset))
                count += 1
        if wanted:
            say(f"committed offsets were imported in {count} queues; in {len(wanted) - count} the group has read on")

    async def _make_groups(self, groups: dict[str, Any]) -> None:
        async with administer(self._namesrv) as admin:
            present = await admin.groups.settings()
            masters = [name for name, info in admin.brokers.known.items() if info.master is not None]
            for group, settings in groups.items():
                for broker in masters:
                    if broker not in present.get(group, {}):
                        await admin.groups.change(broker, settings)


def next_ids(topic: str, file: Path, position: int) -> frozenset[str]:
    """Return the ids of messages that may have been sent since the state was saved at this position."""
    lines = itertools.islice(lines_from(file, position), (_SAVE_EVERY + 1) * _BATCH_MESSAGES)
    return frozenset(_message(topic, file, line)[1].properties[PROPERTY_UNIQUE_KEY] for _, line in lines)


def together(lines: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return the next lines of a batch, limited in number and in bytes."""
    found: list[tuple[int, bytes]] = []
    size = 0
    for position, line in lines:
        found.append((position, line))
        size += len(line)
        if len(found) == _BATCH_MESSAGES or size > _READ_BYTES:
            break
    return found


def _message(topic: str, file: Path, line: bytes) -> tuple[int, Message]:
    """Return the exported offset and the message to send, with its id and the properties of the application."""
    try:
        body, tags, keys, properties, flag = from_line(line)
        row = json.loads(line)
        offset = int(row["offset"])
    except (BadLine, KeyError, TypeError, ValueError) as error:
        raise Failure(FAILED, f"{file} has a line that is not a stored message: {error}") from error
    own = dict(properties)
    own[PROPERTY_UNIQUE_KEY] = str(row["msg_id"])
    return offset, Message(topic, body, tags, keys, own, flag)
