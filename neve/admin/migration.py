"""Copies topics, consumer groups and committed offsets from brokers to other brokers, of one cluster or of two.

A committed offset belongs to one log. For another log it is translated to the message that the group reads next:

    same offset   the target's log is a copy: it has the same message at the same offset
    by message    the message was sent again and is found at the target by its id
    beginning     the target has none of the topic's messages: the group starts with the first one that arrives
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from neve.admin.admin import ClusterAdmin
from neve.admin.errors import NotFound
from neve.admin.topics import TopicAt, queue_count, user_topics
from neve.client import AsyncClient
from neve.client.model import Message, MessageQueue, message_from_record
from neve.record.codec import iter_records
from neve.remoting.names import DLQ_PREFIX, is_system_group

CREATED, CHANGED, SAME, DIFFERS = "created", "changed", "same", "differs"
KEPT, EQUAL, BY_MESSAGE, BEGINNING, UNKNOWN = "kept", "same offset", "by message", "beginning", "unknown"

_TOPIC_SETTINGS = ("readQueueNums", "writeQueueNums", "perm", "topicFilterType", "topicSysFlag", "order", "attributes")


class Copied(NamedTuple):
    """The result for a topic or a group at one target broker."""

    name: str
    broker: str
    state: str
    note: str = ""


class CopiedOffset(NamedTuple):
    """The result for a committed offset. `target` is None if the offset is unknown at the target."""

    group: str
    source: MessageQueue
    committed: int
    target: MessageQueue | None
    target_offset: int
    how: str


class Side(NamedTuple):
    """Brokers of a cluster: those that are read, or those that are written."""

    admin: ClusterAdmin
    brokers: Sequence[str]


class Migration:
    """A copy from the brokers of one side to those of the other. With `dry_run` nothing is written."""

    def __init__(self, source: Side, target: Side, *, dry_run: bool, overwrite: bool) -> None:
        self._source, self._target, self._dry_run, self._overwrite = source, target, dry_run, overwrite

    # ---- topics

    async def copy_topics(self, wanted: Iterable[str]) -> tuple[list[Copied], list[str]]:
        """Copy topics, all without `wanted`; return the results, and the dead-letter topics, which are not copied."""
        found: dict[str, dict[str, Any]] = {}
        dead_letters: set[str] = set()
        for name in self._source.brokers:
            table = await self._source.admin.topics.settings_at(name)
            dead_letters |= {topic for topic in table if topic.startswith(DLQ_PREFIX)}
            for topic in user_topics(table, self._source.admin.brokers.known.values()):
                # if brokers differ, the one with most queues decides
                if queue_count(table[topic]) > queue_count(found.get(topic, {})):
                    found[topic] = table[topic]
        chosen = _chosen(found, wanted, "topic")
        results = []
        for broker in self._target.brokers:
            present = await self._target.admin.topics.settings_at(broker)
            for topic in chosen:
                results.append(await self._copy_topic(broker, topic, found[topic], present.get(topic)))
        return results, sorted(dead_letters)

    async def _copy_topic(
        self, broker: str, topic: str, wanted: Mapping[str, Any], present: Mapping[str, Any] | None
    ) -> Copied:
        differing = {} if present is None else _differences(wanted, present, _TOPIC_SETTINGS)
        if present is not None and not differing:
            return Copied(topic, broker, SAME)
        if present is not None and not self._overwrite:
            return Copied(topic, broker, DIFFERS, _difference_text(differing))
        if present is not None and int(wanted.get("readQueueNums") or 0) < int(present.get("readQueueNums") or 0):
            hidden = "fewer queues to read would hide messages: use neve topic set"
            return Copied(topic, broker, DIFFERS, f"{_difference_text(differing)}; {hidden}")
        if not self._dry_run:
            pairs = [(str(key).lstrip("+"), value) for key, value in (wanted.get("attributes") or {}).items()]
            attributes = ",".join(f"+{key}={value}" for key, value in pairs)
            await self._target.admin.topics.change(topic, TopicAt(broker, wanted), {"attributes": attributes})
        note = "the order configuration of the name servers lists only the source" if wanted.get("order") else ""
        return Copied(topic, broker, CREATED if present is None else CHANGED, note)

    # ---- groups

    async def copy_groups(self, wanted: Iterable[str]) -> list[Copied]:
        """Copy groups and the topics that they pop, all without `wanted`."""
        found: dict[str, dict[str, Any]] = {}
        modes: dict[str, dict[str, dict[str, Any]]] = {}
        for name in self._source.brokers:
            for group, settings in (await self._source.admin.groups.settings_at(name)).items():
                if not is_system_group(group):
                    found.setdefault(group, settings)
            for topic, by_group in (await self._source.admin.groups.request_modes_at(name)).items():
                for group, mode in by_group.items():
                    modes.setdefault(group, {})[topic] = mode
        chosen = _chosen(found, wanted, "group")
        results = []
        groups = self._target.admin.groups
        for broker in self._target.brokers:
            present, present_modes = await asyncio.gather(groups.settings_at(broker), groups.request_modes_at(broker))
            for group in chosen:
                results.append(await self._copy_group(broker, group, found[group], present.get(group)))
                for topic, mode in modes.get(group, {}).items():
                    known = present_modes.get(topic, {}).get(group)
                    if results[-1].state != DIFFERS and (known is None or self._overwrite) and not self._dry_run:
                        await groups.set_request_mode(broker, topic, group, mode)
        return results

    async def _copy_group(
        self, broker: str, group: str, wanted: Mapping[str, Any], present: Mapping[str, Any] | None
    ) -> Copied:
        differing = {} if present is None else _differences(wanted, present, wanted.keys() & present.keys())
        if present is not None and not differing:
            return Copied(group, broker, SAME)
        if present is not None and not self._overwrite:
            return Copied(group, broker, DIFFERS, _difference_text(differing))
        if not self._dry_run:
            await self._target.admin.groups.change(broker, wanted)
        return Copied(group, broker, CREATED if present is None else CHANGED)

    # ---- committed offsets

    async def copy_offsets(self, groups: Iterable[str], topics: Iterable[str]) -> list[CopiedOffset]:
        """Copy committed offsets in users' topics, all without `groups` and `topics`.

        An offset that a group has at the target stays, unless `overwrite` is set.
        """
        groups, topics = frozenset(groups), frozenset(topics)
        committed: dict[tuple[str, str], list[tuple[MessageQueue, int]]] = {}
        source, target = self._source.admin, self._target.admin
        for name in self._source.brokers:
            own = set(user_topics(await source.topics.settings_at(name), source.brokers.known.values()))
            for pair, queues in (await source.groups.committed_at(name)).items():
                topic, _, group = pair.partition("@")
                if topic not in (own & topics if topics else own) or is_system_group(group):
                    continue
                if not groups or group in groups:
                    places = committed.setdefault((group, topic), [])
                    places += [(MessageQueue(topic, name, queue), at) for queue, at in sorted(queues.items())]
        offsets = {name: await target.groups.committed_at(name) for name in self._target.brokers}
        settings = {name: await target.topics.settings_at(name) for name in self._target.brokers}
        results = []
        for (group, topic), places in sorted(committed.items()):
            targets = [
                MessageQueue(topic, name, queue)
                for name in self._target.brokers
                for queue in range(queue_count(settings[name].get(topic, {})))
            ]
            kept = {
                queue: at
                for queue in targets
                if (at := offsets[queue.broker_name].get(f"{topic}@{group}", {}).get(queue.queue_id)) is not None
            }
            results += await self._copy_offsets_of(group, places, targets, {} if self._overwrite else kept)
        return results

    async def _copy_offsets_of(
        self,
        group: str,
        places: list[tuple[MessageQueue, int]],
        targets: list[MessageQueue],
        kept: Mapping[MessageQueue, int],
    ) -> list[CopiedOffset]:
        """Copy the offsets of one group in one topic."""
        found = [await self._translate(group, queue, committed, targets) for queue, committed in places]
        if not any(one.target is not None for one in found) and targets:
            found = await self._beginnings(group, places, targets)
        # if several queues became one, the lowest offset is committed, so that no message is skipped
        lowest: dict[MessageQueue, int] = {}
        for one in found:
            if one.target is not None:
                lowest[one.target] = min(one.target_offset, lowest.get(one.target, one.target_offset))
        for queue, offset in lowest.items():
            if queue not in kept and not self._dry_run:
                await self._target.admin.groups.commit(queue, group, offset)
        return [
            one
            if one.target is None
            else one._replace(target_offset=kept[one.target], how=KEPT)
            if one.target in kept
            else one._replace(target_offset=lowest[one.target])
            for one in found
        ]

    async def _beginnings(
        self, group: str, places: list[tuple[MessageQueue, int]], targets: list[MessageQueue]
    ) -> list[CopiedOffset]:
        """Start the group at the first message of each target queue, whatever its members would choose themselves."""
        sources = dict(places)
        first = places[0][0]
        found = []
        for queue in targets:
            lowest = await self._target.admin.client.min_offset(queue.topic, queue)
            source = MessageQueue(queue.topic, first.broker_name, queue.queue_id)
            found.append(CopiedOffset(group, source, sources.get(source, 0), queue, max(lowest, 0), BEGINNING))
        return found

    async def _translate(
        self, group: str, queue: MessageQueue, committed: int, targets: list[MessageQueue]
    ) -> CopiedOffset:
        """Find the message that is read next, or the last one that was read, in the target queues."""
        client = self._source.admin.client
        lowest, end = await _bounds(client, queue)
        unread, at = (True, max(committed, lowest)) if committed < end else (False, end - 1)
        message = await _message_at(client, queue, at) if lowest <= at < end else None
        unknown = CopiedOffset(group, queue, committed, None, 0, UNKNOWN)
        if message is None:
            return unknown  # the source queue holds no message to look for
        step = 0 if unread else 1
        for target in targets:
            if target.queue_id == queue.queue_id and await self._has(target, at, message):
                return CopiedOffset(group, queue, committed, target, at + step, EQUAL)
        for name in dict.fromkeys(target.broker_name for target in targets):
            for copy in await self._target.admin.topics.messages_by_id(name, queue.topic, message.msg_id):
                if copy.queue in targets:
                    return CopiedOffset(group, queue, committed, copy.queue, copy.queue_offset + step, BY_MESSAGE)
        return unknown

    async def _has(self, queue: MessageQueue, offset: int, message: Message) -> bool:
        client = self._target.admin.client
        lowest, end = await _bounds(client, queue)
        if not lowest <= offset < end:
            return False
        found = await _message_at(client, queue, offset)
        return found is not None and (found.queue_offset, found.msg_id) == (offset, message.msg_id)


async def _bounds(client: AsyncClient, queue: MessageQueue) -> tuple[int, int]:
    return await asyncio.gather(client.min_offset(queue.topic, queue), client.max_offset(queue.topic, queue))


async def _message_at(client: AsyncClient, queue: MessageQueue, offset: int) -> Message | None:
    """Return the first message at this offset or above."""
    pulled = await client.pull_records(queue, offset, 1)
    return next((message_from_record(one, queue.broker_name) for one in iter_records(pulled.records)), None)


def _chosen(found: Mapping[str, Any], wanted: Iterable[str], kind: str) -> list[str]:
    names = sorted(set(wanted))
    if missing := [name for name in names if name not in found]:
        raise NotFound(f"the source has no {kind} {', '.join(missing)}")
    return names or sorted(found)


def _differences(
    wanted: Mapping[str, Any], present: Mapping[str, Any], names: Iterable[str]
) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (_normalised(wanted.get(name)), _normalised(present.get(name))) for name in sorted(names)}
    return {name: (source, target) for name, (source, target) in pairs.items() if source != target}


def _normalised(value: Any) -> Any:
    """Return one value for a setting that is missing, empty or off: servers write it in different ways."""
    return {} if value in (None, "", {}, [], False, 0) else value


def _difference_text(differences: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(
        f"{name}: {source or 'nothing'}, at the target {target or 'nothing'}"
        for name, (source, target) in differences.items()
    )
