"""What a broker was told by hand, told to another one: topics, groups, and where groups go on.

Read at the source, written at the target, each asked for itself:

     21  all topics of a broker          17  a topic is made, or changed
    201  all groups                     200  a group is made, or changed
    402  which groups pop               401  a group pops from a topic
     43  all positions                   15  a position        12  messages by their id

A position is a number of one log. In another one it stands at the message that comes next for the group: where that has
the same offset there, the log is a copy; where it is found by its id, it was sent there again; where the target has
none of the topic's messages the group begins with the first one to come, and reads the rest where it lies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.cli.brokers import Brokers, TopicAt, brokers, queues_of
from neve.cli.cluster import connect
from neve.cli.failures import USAGE, Failure
from neve.cli.topic_names import of_users
from neve.client.model import Message, MessageQueue, message_from_record
from neve.record.codec import iter_records
from neve.remoting.names import DLQ_PREFIX, is_system_group

if TYPE_CHECKING:
    from neve.client import AsyncClient

MADE, CHANGED, SAME, DIFFERS = "made", "changed", "same", "differs"
#: How a position was found at the target; KEPT: the group has one there.
KEPT, EQUAL, BY_MESSAGE, BEGINNING, UNKNOWN = "kept", "same offset", "by message", "beginning", "unknown"

_OF_TOPICS = ("readQueueNums", "writeQueueNums", "perm", "topicFilterType", "topicSysFlag", "order", "attributes")
_CALL_S = 30.0


class Taken(NamedTuple):
    """A topic or a group, and what became of it at a target."""

    name: str
    broker: str
    state: str
    note: str = ""


class Placed(NamedTuple):
    """Where a group goes on at a target that stood at `position` in a queue of the source."""

    group: str
    source: MessageQueue
    position: int
    target: MessageQueue | None
    offset: int
    how: str

    def row(self) -> dict[str, Any]:
        target = self.target
        return {
            "group": self.group,
            "topic": self.source.topic,
            "from": self.source.broker_name,
            "queue": self.source.queue_id,
            "position": self.position,
            "to": None if target is None else target.broker_name,
            "to_queue": None if target is None else target.queue_id,
            "to_position": None if target is None else self.offset,
            "how": self.how,
        }


class Side(NamedTuple):
    """Brokers of a cluster that are read from, or written to."""

    client: AsyncClient
    asked: Brokers
    names: Sequence[str]


class Migration:
    """From the brokers of one side to those of the other. With `dry_run` nothing is written."""

    def __init__(self, source: Side, target: Side, *, dry_run: bool, overwrite: bool) -> None:
        self._source, self._target, self._dry_run, self._overwrite = source, target, dry_run, overwrite

    # ---- topics

    async def topics(self, wanted: Iterable[str]) -> tuple[list[Taken], list[str]]:
        """What became of each; and topics with dead letters, which stay where they are."""
        found: dict[str, dict[str, Any]] = {}
        dead: set[str] = set()
        for name in self._source.names:
            table = await self._source.asked.all_topics(name)
            dead |= {topic for topic in table if topic.startswith(DLQ_PREFIX)}
            for topic in of_users(table, self._source.asked.known.values()):
                # of several brokers the one that has most queues speaks for all
                if queues_of(table[topic]) > queues_of(found.get(topic, {})):
                    found[topic] = table[topic]
        chosen = _chosen(found, wanted, "topic")
        taken = []
        for broker in self._target.names:
            there = await self._target.asked.all_topics(broker)
            for topic in chosen:
                taken.append(await self._topic(broker, topic, found[topic], there.get(topic)))
        return taken, sorted(dead)

    async def _topic(self, broker: str, topic: str, meant: Mapping[str, Any], there: Mapping[str, Any] | None) -> Taken:
        other = {} if there is None else _differences(meant, there, _OF_TOPICS)
        if there is not None and not other:
            return Taken(topic, broker, SAME)
        if there is not None and not self._overwrite:
            return Taken(topic, broker, DIFFERS, _told(other))
        if there is not None and int(meant.get("readQueueNums") or 0) < int(there.get("readQueueNums") or 0):
            hidden = "fewer queues to read would hide messages: use neve topic alter"
            return Taken(topic, broker, DIFFERS, f"{_told(other)}; {hidden}")
        if not self._dry_run:
            pairs = [(str(key).lstrip("+"), value) for key, value in (meant.get("attributes") or {}).items()]
            attributes = ",".join(f"+{key}={value}" for key, value in pairs)
            await self._target.asked.set_topic(topic, TopicAt(broker, meant), {"attributes": attributes})
        note = "the name servers' order configuration names the other broker alone" if meant.get("order") else ""
        return Taken(topic, broker, MADE if there is None else CHANGED, note)

    # ---- groups

    async def groups(self, wanted: Iterable[str]) -> list[Taken]:
        """With the topics from which they pop."""
        found: dict[str, dict[str, Any]] = {}
        modes: dict[str, dict[str, dict[str, Any]]] = {}
        for name in self._source.names:
            for group, settings in (await self._source.asked.all_groups(name)).items():
                if not is_system_group(group):
                    found.setdefault(group, settings)
            for topic, by_group in (await self._source.asked.request_modes(name)).items():
                for group, mode in by_group.items():
                    modes.setdefault(group, {})[topic] = mode
        chosen = _chosen(found, wanted, "group")
        taken = []
        for broker in self._target.names:
            there, modes_there = await asyncio.gather(
                self._target.asked.all_groups(broker), self._target.asked.request_modes(broker)
            )
            for group in chosen:
                taken.append(await self._group(broker, group, found[group], there.get(group)))
                for topic, mode in modes.get(group, {}).items():
                    known = modes_there.get(topic, {}).get(group)
                    if taken[-1].state != DIFFERS and (known is None or self._overwrite) and not self._dry_run:
                        await self._target.asked.set_request_mode(broker, topic, group, mode)
        return taken

    async def _group(self, broker: str, group: str, meant: Mapping[str, Any], there: Mapping[str, Any] | None) -> Taken:
        other = {} if there is None else _differences(meant, there, meant.keys() & there.keys())
        if there is not None and not other:
            return Taken(group, broker, SAME)
        if there is not None and not self._overwrite:
            return Taken(group, broker, DIFFERS, _told(other))
        if not self._dry_run:
            await self._target.asked.set_group(broker, meant)
        return Taken(group, broker, MADE if there is None else CHANGED)

    # ---- positions

    async def offsets(self, wanted: Iterable[str], topics: Iterable[str]) -> list[Placed]:
        """In the users' topics; a position that a group has at the target stays."""
        wanted, topics = frozenset(wanted), frozenset(topics)
        standing: dict[tuple[str, str], list[tuple[MessageQueue, int]]] = {}
        for name in self._source.names:
            own = set(of_users(await self._source.asked.all_topics(name), self._source.asked.known.values()))
            for pair, queues in (await self._source.asked.positions(name)).items():
                topic, _, group = pair.partition("@")
                if topic not in (own & topics if topics else own) or is_system_group(group):
                    continue
                if not wanted or group in wanted:
                    places = standing.setdefault((group, topic), [])
                    places += [(MessageQueue(topic, name, queue), at) for queue, at in sorted(queues.items())]
        known = {name: await self._target.asked.positions(name) for name in self._target.names}
        there = {name: await self._target.asked.all_topics(name) for name in self._target.names}
        placed = []
        for (group, topic), places in sorted(standing.items()):
            targets = [
                MessageQueue(topic, name, queue)
                for name in self._target.names
                for queue in range(queues_of(there[name].get(topic, {})))
            ]
            kept = {
                q: at
                for q in targets
                if (at := known[q.broker_name].get(f"{topic}@{group}", {}).get(q.queue_id)) is not None
            }
            placed += await self._placed(group, places, targets, {} if self._overwrite else kept)
        return placed

    async def _placed(
        self,
        group: str,
        places: list[tuple[MessageQueue, int]],
        targets: list[MessageQueue],
        kept: Mapping[MessageQueue, int],
    ) -> list[Placed]:
        """Of one group in one topic."""
        found = [await self._place(group, queue, position, targets) for queue, position in places]
        if not any(one.target is not None for one in found) and targets:
            found = await self._beginnings(group, places, targets)
        # queues that became one: from the lowest on, so that nothing is left out
        lowest: dict[MessageQueue, int] = {}
        for one in found:
            if one.target is not None:
                lowest[one.target] = min(one.offset, lowest.get(one.target, one.offset))
        for queue, offset in lowest.items():
            if queue not in kept and not self._dry_run:
                await self._target.asked.set_position(queue, group, offset)
        return [
            one
            if one.target is None
            else one._replace(offset=kept[one.target], how=KEPT)
            if one.target in kept
            else one._replace(offset=lowest[one.target])
            for one in found
        ]

    async def _beginnings(
        self, group: str, places: list[tuple[MessageQueue, int]], targets: list[MessageQueue]
    ) -> list[Placed]:
        """A group that has read nothing here begins with what comes first, whatever its members would choose."""
        sources = dict(places)
        first = places[0][0]
        found = []
        for queue in targets:
            lowest = await self._target.client.min_offset(queue.topic, queue)
            beside = MessageQueue(queue.topic, first.broker_name, queue.queue_id)
            found.append(Placed(group, beside, sources.get(beside, 0), queue, max(lowest, 0), BEGINNING))
        return found

    async def _place(self, group: str, queue: MessageQueue, position: int, targets: list[MessageQueue]) -> Placed:
        """By the message that is read next, or the last one that was."""
        client = self._source.client
        lowest, end = await asyncio.gather(client.min_offset(queue.topic, queue), client.max_offset(queue.topic, queue))
        unread, at = (True, max(position, lowest)) if position < end else (False, end - 1)
        message = await _message_at(client, queue, at) if lowest <= at < end else None
        missing = Placed(group, queue, position, None, 0, UNKNOWN)
        if message is None:
            return missing  # nothing of the queue is there to go by
        step = 0 if unread else 1
        for target in targets:
            if target.queue_id == queue.queue_id and await self._has(target, at, message):
                return Placed(group, queue, position, target, at + step, EQUAL)
        for name in dict.fromkeys(target.broker_name for target in targets):
            for copy in await self._target.asked.by_id(name, queue.topic, message.msg_id):
                if copy.queue in targets:
                    return Placed(group, queue, position, copy.queue, copy.queue_offset + step, BY_MESSAGE)
        return missing

    async def _has(self, queue: MessageQueue, offset: int, message: Message) -> bool:
        lowest, end = await asyncio.gather(
            self._target.client.min_offset(queue.topic, queue), self._target.client.max_offset(queue.topic, queue)
        )
        if not lowest <= offset < end:
            return False
        found = await _message_at(self._target.client, queue, offset)
        return found is not None and (found.queue_offset, found.msg_id) == (offset, message.msg_id)


async def _message_at(client: AsyncClient, queue: MessageQueue, offset: int) -> Message | None:
    """The first from an offset on."""
    pulled = await client.pull_records(queue, offset, 1)
    return next((message_from_record(one, queue.broker_name) for one in iter_records(pulled.records)), None)


def _chosen(found: Mapping[str, Any], wanted: Iterable[str], kind: str) -> list[str]:
    names = sorted(set(wanted))
    if missing := [name for name in names if name not in found]:
        raise Failure(USAGE, f"the source has no {kind} {', '.join(missing)}")
    return names or sorted(found)


def _differences(
    meant: Mapping[str, Any], there: Mapping[str, Any], names: Iterable[str]
) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (_plain(meant.get(name)), _plain(there.get(name))) for name in sorted(names)}
    return {name: (here, other) for name, (here, other) in pairs.items() if here != other}


def _plain(value: Any) -> Any:
    """What is left out, empty or said as a text is the same."""
    return {} if value in (None, "", {}, [], False, 0) else value


def _told(differences: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(
        f"{name}: {meant or 'nothing'}, there {there or 'nothing'}" for name, (meant, there) in differences.items()
    )


@asynccontextmanager
async def migration(  # noqa: PLR0917
    namesrv: str,
    to_namesrv: str | None,
    source: str | None,
    target: str | None,
    dry_run: bool,
    overwrite: bool = False,
) -> AsyncGenerator[Migration]:
    """Raises Failure where the two sides are not told apart."""
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(brokers(namesrv))
        client = await stack.enter_async_context(connect(namesrv, timeout=_CALL_S))
        there, there_client = here, client
        if to_namesrv is not None:
            there = await stack.enter_async_context(brokers(to_namesrv))
            there_client = await stack.enter_async_context(connect(to_namesrv, timeout=_CALL_S))
        elif target is None:
            raise Failure(USAGE, "where to? --to BROKER, or --to-namesrv for another cluster")
        targets = there.named(target)
        sources = [name for name in here.named(source) if to_namesrv is not None or name not in targets]
        if not sources:
            raise Failure(USAGE, f"{', '.join(targets)} is the source itself")
        yield Migration(
            Side(client, here, sources), Side(there_client, there, targets), dry_run=dry_run, overwrite=overwrite
        )
