"""Sends an export to a cluster, each queue into one queue.

How far it is stands in import.CLUSTER.json, and may be older than what was sent: the messages that lie in the queue
behind what it says are looked at, and those whose ids are there are not sent again.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.cli.broker_sets import new_pool
from neve.cli.brokers import TopicAt, brokers, queues_of
from neve.cli.cluster import connect, security_of_the_command
from neve.cli.export_files import Export, lines_from, message_file, read_export, write_whole
from neve.cli.failures import CONFLICT, FAILED, NOT_FOUND, UNREACHABLE, Failure
from neve.cli.message_lines import BadLine, from_line
from neve.cli.output import say
from neve.client.model import Message, MessageQueue
from neve.client.net.answers import require_success
from neve.client.net.route import PERM_READ, PERM_WRITE
from neve.copy.engine import copy_range
from neve.copy.source import BrokerSource, Chunk
from neve.errors import BrokerError
from neve.record.properties import PROPERTY_UNIQUE_KEY
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode, ResponseCode

if TYPE_CHECKING:
    from neve.client import AsyncClient

_BATCH_MESSAGES = 256
_BATCH_BYTES = 256 * 1024
_CALL_S, _ATTEMPT_S = 60.0, 20.0
_READ_BYTES = 4 * _BATCH_BYTES  # of lines that are held at a time, and one more
_SAVE_EVERY = 16  # batches


class Run(NamedTuple):
    """`messages` with offsets from `source` on lie from `target` on in the queue into which they went."""

    source: int
    target: int
    messages: int


class Progress:
    """Of one queue: how many bytes of its file are sent, and where its messages lie now."""

    def __init__(
        self, target: MessageQueue, begin: int, position: int = 0, runs: Sequence[Run] = (), last_id: str = ""
    ) -> None:
        self.target, self.begin, self.position, self.runs = target, begin, position, list(runs)
        self.last_id = last_id

    @classmethod
    def of(cls, row: dict[str, Any]) -> Progress:
        runs = [Run(*run) for run in row["runs"]]
        return cls(MessageQueue(*row["target"]), row["begin"], row["position"], runs, row["last_id"])

    def row(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "begin": self.begin,
            "position": self.position,
            "runs": self.runs,
            "last_id": self.last_id,
        }

    @property
    def unknown_from(self) -> int:
        """What lies in the target queue from here on may be ours."""
        return self.runs[-1].target + self.runs[-1].messages if self.runs else self.begin

    def note(self, source: int, target: int, msg_id: str) -> None:
        self.last_id = msg_id
        last = self.runs[-1] if self.runs else None
        if last is not None and (last.source + last.messages, last.target + last.messages) == (source, target):
            self.runs[-1] = last._replace(messages=last.messages + 1)
        else:
            self.runs.append(Run(source, target, 1))

    def translated(self, offset: int) -> int:
        """Where a group goes on that would read `offset` next in the queue that was exported."""
        for run in self.runs:
            if offset < run.source + run.messages:
                return run.target + max(0, offset - run.source)
        return self.unknown_from


async def import_into(
    namesrv: str, directory: Path, topics: Sequence[str], *, with_groups: bool, overwrite_positions: bool
) -> Counter[str]:
    """How many messages of each topic were sent now."""
    export = read_export(directory)
    if unknown := sorted(set(topics) - export.topics.keys()):
        raise Failure(NOT_FOUND, f"{directory} has no {', '.join(unknown)}")
    wanted = [name for name in export.topics if not topics or name in topics]
    # What got no answer may lie there: the next call looks, where another attempt would send it twice.
    async with connect(namesrv, timeout=_CALL_S, attempt_timeout=_ATTEMPT_S, send_retries=0) as client:
        importing = _Importing(client, namesrv, directory, await _cluster(client))
        for name in wanted:
            await importing.topic(export, name)
        if with_groups:
            await importing.groups(export, set(wanted), overwrite=overwrite_positions)
        return importing.sent


async def _cluster(client: AsyncClient) -> str:
    found = sorted({broker.cluster for broker in (await client.cluster_info()).values()})
    if not found:
        raise Failure(UNREACHABLE, "the name server knows no broker")
    return "+".join(found)


class _Importing:
    def __init__(self, client: AsyncClient, namesrv: str, directory: Path, cluster: str) -> None:
        self._client, self._namesrv, self._directory = client, namesrv, directory
        self._state = directory / f"import.{cluster}.json"
        self._queues: dict[str, Progress] = {}
        if self._state.exists():
            row = json.loads(self._state.read_text("utf-8"))
            self._queues = {name: Progress.of(one) for name, one in row.items()}
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
                self._queues[key] = Progress(target, await self._client.max_offset(name, target))
                self._save()
            await self._queue(name, file, self._queues[key])
            self._save()

    async def _targets(self, export: Export, name: str) -> list[MessageQueue]:
        """The queues to send to, by number and then by broker; the topic is made where it is missing."""
        try:
            route = await self._client.topic_route(name)
        except BrokerError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            await self._create(name, max(export.topics[name].values(), key=queues_of))
            route = await self._client.topic_route(name)
        found = sorted(route.write_queues, key=lambda queue: (queue.broker_name, queue.queue_id))
        if not found:
            raise Failure(CONFLICT, f"{name} has no queue to write to")
        return found

    async def _create(self, name: str, settings: Mapping[str, Any]) -> None:
        """Create the topic with the settings of the export, at all brokers, and writable for the import."""
        perm = int(settings.get("perm", PERM_READ | PERM_WRITE))
        attributes = ((str(key).lstrip("+"), value) for key, value in (settings.get("attributes") or {}).items())
        changes = {
            "perm": str(perm | PERM_WRITE),
            "writeQueueNums": str(max(queues_of(settings), 1)),  # each exported queue gets a queue of its own
            "attributes": ",".join(f"+{key}={value}" for key, value in attributes),
        }
        async with brokers(self._namesrv) as asked:
            for broker in asked.named(None):
                await asked.set_topic(name, TopicAt(broker, settings), changes)
        say(f"created {name} with {queues_of(settings)} queues")
        if not perm & PERM_WRITE:
            closed = "r" if perm & PERM_READ else "none"
            say(f"{name} is writable for the import; to close it again: neve topic alter {name} --perm {closed}")
        if (write := int(settings.get("writeQueueNums") or 0)) < queues_of(settings):
            say(f"{name} had {write} queues to write; to have so again: neve topic alter {name} --write-queues {write}")

    async def _queue(self, topic: str, file: Path, progress: Progress) -> None:
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

    async def _require_ours(self, progress: Progress) -> None:
        """Clusters may have the same name, and topics be deleted and made again: what was sent has to be there."""
        if not progress.runs:
            return
        queue, last = progress.target, progress.unknown_from - 1
        found = await BrokerSource(self._client, queue.topic).read(queue, last, last + 1, 1)
        if progress.last_id not in [one.msg_id for one in found.messages]:
            raise Failure(
                CONFLICT,
                f"{self._state} says that {progress.last_id} lies at {last} of queue {queue.queue_id} of {queue.topic} "
                f"at {queue.broker_name}: it is of another cluster of that name, or the topic is another one. "
                "Without that file all is sent again",
            )

    async def _ids_behind(self, progress: Progress, ours: frozenset[str]) -> dict[str, int]:
        """Where which of our ids lie in the queue, behind what is known of it; others write there, too."""
        queue = progress.target
        found: dict[str, int] = {}

        async def look(chunk: Chunk) -> bool:
            found.update((one.msg_id, one.queue_offset) for one in chunk.messages if one.msg_id in ours)
            return True

        end = await self._client.max_offset(queue.topic, queue)
        await copy_range(BrokerSource(self._client, queue.topic), queue, progress.unknown_from, end, look)
        return found

    async def _send(
        self, topic: str, file: Path, batch: list[tuple[int, bytes]], progress: Progress, there: dict[str, int]
    ) -> None:
        waiting: list[tuple[int, int, Message]] = []  # position behind it, offset, message
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
                progress.note(offset, known, msg_id)
                progress.position = position
                continue
            waiting.append((position, offset, message))
            size += length
        if waiting:
            await self._send_together(topic, waiting, progress)

    async def _send_together(self, topic: str, waiting: list[tuple[int, int, Message]], progress: Progress) -> None:
        messages = [message for _, _, message in waiting]
        result = await self._client.send_batch(topic, messages, queue=progress.target)
        for at, (position, offset, message) in enumerate(waiting):
            progress.note(offset, result.queue_offset + at, message.properties[PROPERTY_UNIQUE_KEY])
            progress.position = position
        self.sent[topic] += len(waiting)

    def _save(self) -> None:
        write_whole(self._state, {name: progress.row() for name, progress in self._queues.items()})

    # ---- groups

    async def groups(self, export: Export, topics: set[str], *, overwrite: bool) -> None:
        """Made where they are missing, and set to where they stood: in queues of which they have read nothing here."""
        meant = [one for one in export.standings if one.queue.topic in topics]
        count = 0
        await self._make_groups({one.group: export.groups[one.group] for one in meant})
        for one in meant:
            key = str(message_file(self._directory, one.queue).relative_to(self._directory))
            progress = self._queues.get(key)
            if progress is None:
                continue
            target = progress.target
            # a broker says 0 of a queue that a group has not begun
            if overwrite or not await self._client.committed(one.group, target.topic, target):
                await self._client.commit(one.group, target.topic, target, progress.translated(one.offset))
                count += 1
        if meant:
            say(f"groups were set to where they stood in {count} queues, in {len(meant) - count} they have read on")

    async def _make_groups(self, groups: dict[str, Any]) -> None:
        from neve.cli.consumer_groups import ConsumerGroups

        pool = new_pool(*security_of_the_command())
        try:
            known = {name: one for name, one in (await self._client.cluster_info()).items() if one.master is not None}
            there = await ConsumerGroups(self._client, pool, known).settings()
            for group, settings in groups.items():
                for name, broker in known.items():
                    if name in there.get(group, {}):
                        continue
                    assert broker.master is not None
                    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
                    require_success(
                        await pool.invoke(broker.master, code, {}, body=dumps(settings), timeout=_ATTEMPT_S)
                    )
        finally:
            await pool.close()


def next_ids(topic: str, file: Path, position: int) -> frozenset[str]:
    """Of the messages that may have been sent since the state was saved at this position."""
    lines = itertools.islice(lines_from(file, position), (_SAVE_EVERY + 1) * _BATCH_MESSAGES)
    return frozenset(_message(topic, file, line)[1].properties[PROPERTY_UNIQUE_KEY] for _, line in lines)


def together(lines: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The next lines, as many as are sent together and a few bodies of 4 MiB do not fill the memory with."""
    found: list[tuple[int, bytes]] = []
    size = 0
    for position, line in lines:
        found.append((position, line))
        size += len(line)
        if len(found) == _BATCH_MESSAGES or size > _READ_BYTES:
            break
    return found


def _message(topic: str, file: Path, line: bytes) -> tuple[int, Message]:
    """(offset where it was, message to send): with its id, and what else an application gave it."""
    try:
        body, tags, keys, properties, flag = from_line(line)
        row = json.loads(line)
        offset = int(row["offset"])
    except (BadLine, KeyError, TypeError, ValueError) as error:
        raise Failure(FAILED, f"{file} has a line that is no stored message: {error}") from error
    own = dict(properties)
    own[PROPERTY_UNIQUE_KEY] = str(row["msg_id"])
    return offset, Message(topic, body, tags, keys, own, flag)
