"""One round on a set: clients at work, faults, healing, rest, and reading back all stored messages.

begin ──▶ faults, healed at their end ──▶ the set serves ──▶ sends stop ──▶ groups rest ──▶ the set is read ──▶ check
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import msgspec

from neve import NeveError
from neve.cli.diverged import records
from neve.cli.failures import Failure
from neve.client import PullStatus
from neve.errors import BrokerError, ClientError, ConnectionFailed, UnknownOutcome
from neve.remoting.codes import ResponseCode
from tests.histories.archive import ArchiveReader
from tests.histories.checker import Promise, owes
from tests.histories.clients import QUEUES, RoundClients, key_of, now_ms
from tests.histories.faults import Fault
from tests.histories.history import (
    ALL_IS_ARCHIVED,
    Bounds,
    BrokenOff,
    Decision,
    Dropped,
    Event,
    Healed,
    Kept,
    Led,
    LogPart,
    Outcome,
    Replaced,
    ReportedStep,
    Rested,
    Seen,
    Sent,
    Serves,
    Stored,
    TopicDeleted,
    TopicMade,
    Topics,
    Unsettled,
)
from tests.histories.injector import Injector
from tests.histories.java_workers import JavaWorkers
from tests.histories.links import Links
from tests.histories.servers import MEMBERS, NEVE_CLIENTS, FaultySet, log_file_paths, log_start
from tests.histories.stalls import stalls_noted, stood_still_ms, waits_noted
from tests.kit.clock.waiting import NotWithin, until

T = TypeVar("T")
#: Errors of a missing answer; a wrong answer is not among them.
LATE = (ConnectionFailed, ClientError, UnknownOutcome, TimeoutError, NotWithin)
_KEYS = re.compile(rb"KEYS\x01([^\x01\x02]+)")
_CHUNK = 1 << 20


class Place(msgspec.Struct):
    """The set on which rounds are run, one after the other."""

    brokers: FaultySet
    links: Links
    java: JavaWorkers | None
    patience: float  # Seconds from the healing until everything has to rest; afterwards the missing rest is recorded.
    log_read_to: int = 0  # The members' logs are compared up to here.


async def run_round(place: Place, name: str, plan: Iterable[Fault], seed: int, promise: Promise) -> list[Event]:
    """Run a round; return its history. The events that the mode promises are awaited."""
    chance = random.Random(seed)
    history: list[Event] = []
    work = RoundClients(place.brokers.name_servers[NEVE_CLIENTS], name, history, chance)

    def tell(what: str, kind: str) -> None:
        history.append(ReportedStep(at=now_ms(), what=what, kind=kind))

    async def note_leader() -> None:
        history.append(Led(at=now_ms(), epoch=await epoch_told(place.brokers.epoch, place.patience)))

    def servers() -> dict[str, list[int]]:
        return {name: server.pids for name, server in place.brokers.servers.items()}

    with stalls_noted(history), waits_noted(history, servers):
        try:
            await note_leader()
            await work.begin()
            if place.java is not None:
                await place.java.begin(work.topics, name, seed, history)
            await Injector(place.brokers, place.links, chance, tell, history.append).carry_out(plan)
            work.failed()
            healed = now_ms()
            history.append(Healed(at=healed))
            rest = _Rest(place, work, history, healed)
            await rest.serves()
            await work.join_late()
            await work.stop()
            if place.java is not None:
                await place.java.stop()
            await note_leader()
            await rest.rested(keeps=owes(history, promise))
            work.failed()
            await _Reading(place, work, history, rest).read()
            await note_leader()
        except (NeveError, TimeoutError, NotWithin, Failure) as error:
            history.append(BrokenOff(why=f"{type(error).__name__}: {error}", late=isinstance(error, LATE)))
        finally:
            await work.close()
            if place.java is not None:
                await place.java.end()
    return history


async def epoch_told(ask: Callable[[], Awaitable[int]], patience: float) -> int:
    """Return the controller's epoch while no fault is active, or −1 if it does not answer within the time limit."""
    epoch = -1

    async def is_request_in_flight() -> bool:
        nonlocal epoch
        epoch = await ask()
        return epoch >= 0

    with suppress(NotWithin):
        await until(is_request_in_flight, "who leads", patience)
    return epoch


class _Rest:
    """Waits within the time limit, and records when each condition was met."""

    def __init__(self, place: Place, work: RoundClients, history: list[Event], healed: int) -> None:
        self._place, self._work, self._history, self._healed = place, work, history, healed
        self._come: set[str] = set()
        self._read_to: dict[tuple[str, int], int] = defaultdict(int)

    async def when(self, condition: Callable[[], bool | Awaitable[bool]]) -> int:
        while True:
            left = self._left()
            try:
                await until(condition, timeout=max(left, 0.1))
            except NotWithin:
                if left > 0 and self._left() > 0:
                    continue  # The machine stalled meanwhile.
                return 0
            return now_ms()

    def _left(self) -> float:
        """Return the remaining time."""
        return self._place.patience - (now_ms() - self._healed - stood_still_ms(self._history, self._healed)) / 1000

    async def serves(self) -> None:
        at = await self.when(self._is_whole)
        self._history.append(Serves(what="all members are in sync", at=at))
        producers = {one.producer for one in self._history if isinstance(one, Sent)}
        for producer in sorted(producers):
            at = await self.when(partial(self._is_acknowledged, producer))
            self._history.append(Serves(what=f"{producer} is acknowledged", at=at))

    async def _is_whole(self) -> bool:
        """Return whether all members are in sync; a member that was away too long is replaced, as by an operator."""
        brokers = self._place.brokers
        for name in await brokers.away_too_long():
            await brokers.replace(name, lambda member: self._history.append(Replaced(at=now_ms(), member=member)))
        return await brokers.is_whole()

    def _is_acknowledged(self, producer: str) -> bool:
        java = self._place.java
        by_java = 0 if java is None else java.last_acknowledged.get(producer, 0)
        return max(by_java, self._work.last_acknowledged.get(producer, 0)) > self._healed

    async def rested(self, *, keeps: bool) -> None:
        """Wait for the groups. `keeps`: acknowledged messages exist, so the groups must receive them."""
        java = self._place.java
        groups = self._work.groups | (java.groups if java is not None else {})
        if not keeps and not await self.when(self._has_come):
            self._history.append(Unsettled(what="not all delayed and committed messages are in their topics"))
        # In `async`, acknowledged messages may be lost, and the offset of a pop group is internal to its broker.
        popping = {group: topics for group, topics in groups.items() if group.endswith("_pop")}
        await asyncio.gather(
            *(
                self._group(group, topics, self._wanted(topics) if keeps else set())
                for group, topics in groups.items()
                if group not in popping
            )
        )
        if keeps:
            await asyncio.gather(
                *(
                    self._group(group, topics, self._wanted(topics) | self._seen(topics), pops=True)
                    for group, topics in popping.items()
                )
            )

    async def _group(self, group: str, topics: tuple[str, ...], wanted: set[str], *, pops: bool = False) -> None:
        """Wait until the group has received and committed the wanted messages; a pop group's offsets are unknown."""
        asked = () if pops else topics
        lacks, is_past = "", False

        async def is_at_rest() -> bool:
            nonlocal lacks, is_past
            lacks, is_past = await self._lacks(group, asked, wanted)
            return not lacks

        at = await self.when(is_at_rest)
        self._history.append(Rested(group=group, at=at, lacks=lacks, is_past=is_past))

    async def _has_come(self) -> bool:
        """Return whether all delayed and committed messages are in their topics, except those lost with a master."""
        client, topics = self._work.client, (self._work.topics.later, self._work.topics.halves)
        try:
            for topic, queue in itertools.product(topics, range(QUEUES)):
                end = await client.max_offset(topic, queue)
                while (offset := self._read_to[topic, queue]) < end:
                    result = await client.pull(topic, queue, offset)
                    self._come |= {key_of(message.body) for message in result.messages}
                    self._read_to[topic, queue] = result.next_offset
            lacking = self._wanted(topics) - self._come
            return lacking <= {kept.key for kept in diverged(self._place.brokers)}
        except (NeveError, Failure):
            return False

    def _wanted(self, topics: tuple[str, ...]) -> set[str]:
        return {
            one.key
            for one in self._history
            if isinstance(one, Sent)
            and one.topic in topics
            and one.outcome is Outcome.ACKNOWLEDGED
            and one.decision is not Decision.ROLLBACK
        }

    def _seen(self, topics: tuple[str, ...]) -> set[str]:
        """Return the delivered messages: they exist, whatever their producer was answered."""
        return {one.key for one in self._history if isinstance(one, Seen) and one.topic in topics}

    async def _lacks(self, group: str, topics: tuple[str, ...], wanted: set[str]) -> tuple[str, bool]:
        """Return what keeps the group from rest, "" if nothing, and whether its offsets are at the end nevertheless."""
        offsets = await self._behind(group, topics)
        given = {one.key for one in self._history if isinstance(one, Seen) and one.group == group}
        missing = sorted(wanted - given)
        if not missing:
            return offsets, False
        is_past = bool(topics) and not offsets
        passed = ", and its offsets are past them" if is_past else ""
        return f"{len(missing)} messages: {', '.join(missing[:3])}{passed}", is_past

    async def _behind(self, group: str, topics: tuple[str, ...]) -> str:
        """Return the queues in which its offsets are not at the end."""
        try:
            for topic in topics:
                stats = await self._work.client.admin.consume_stats(group, topic)
                lags = {queue.queue_id: one.lag for queue, one in stats.items() if one.lag}
                if lags or len(stats) != QUEUES:
                    return f"offsets of {topic}: {lags or 'not all queues'}"
        except NeveError as error:
            return f"an answer: {error}"
        return ""


class _Reading:
    """Reads the content of the healed set."""

    def __init__(self, place: Place, work: RoundClients, history: list[Event], rest: _Rest) -> None:
        self._place, self._work, self._history, self._rest = place, work, history, rest
        url = place.brokers.store_url
        self._archive = ArchiveReader(url) if url else None

    async def read(self) -> None:
        if self._archive is not None:
            await self._all_is_archived(self._archive)
        for topic in self._work.topics.all:
            for queue in range(QUEUES):
                await self._queue(topic, queue)
        if self._archive is not None:
            self._history += await asyncio.to_thread(self._archive.rows, self._work.topics.all)
        await self._topics()
        await self._logs()
        self._diverged()
        for disk in self._place.brokers.put_away:
            shutil.rmtree(disk)
        self._place.brokers.put_away.clear()

    async def _queue(self, topic: str, queue: int) -> None:
        client = self._work.client
        first = await self._answered(lambda: client.min_offset(topic, queue))
        end = await self._answered(lambda: client.max_offset(topic, queue))
        self._history.append(Bounds(topic=topic, queue=queue, first=first, end=end))
        offset = first
        while offset < end:
            result = await self._answered(partial(client.pull, topic, queue, offset, wait=1.0))
            for message in result.messages:
                stored = Stored(
                    topic=topic,
                    queue=queue,
                    offset=message.queue_offset,
                    key=key_of(message.body),
                    stored=message.store_timestamp,
                )
                self._history.append(stored)
            if result.status is not PullStatus.FOUND and result.next_offset <= offset:
                return  # The checker finds what is missing.
            offset = result.next_offset

    async def _answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Repeat a request within the time limit, because a busy machine may delay an answer."""
        found, failed = list[T](), list[NeveError]()

        async def is_answered() -> bool:
            try:
                found.append(await ask())
            except NeveError as error:
                failed.append(error)
            return bool(found)

        if not await self._rest.when(is_answered):
            raise failed[-1] if failed else TimeoutError("no answer")
        return found[-1]

    async def _all_is_archived(self, archive: ArchiveReader) -> None:
        """Wait for the archive, and evict local messages, so that most of the following reads are cold."""
        client, brokers = self._work.client, self._place.brokers
        queues = list(itertools.product(self._work.topics.all, range(QUEUES)))
        ends = {each: await self._answered(partial(client.max_offset, *each)) for each in queues}
        asked = now_ms()  # Messages arrived until the groups were at rest, so the time begins here.
        await brokers.offload(await brokers.master())
        at = await self._rest.when(lambda: asyncio.to_thread(archive.has_all, ends))
        self._history.append(Serves(what=ALL_IS_ARCHIVED, at=at, asked=asked))
        for member in MEMBERS:
            await brokers.offload(member)
            self._history.append(Dropped(member=member, below=log_start(brokers.log_files[member])))

    async def _topics(self) -> None:
        topics = {one.topic for one in self._history if isinstance(one, (TopicMade, TopicDeleted))}
        found = {topic: await self._answered(partial(self._queues, topic)) for topic in sorted(topics)}
        self._history.append(Topics(queues={topic: queues for topic, queues in found.items() if queues}))

    async def _queues(self, topic: str) -> int:
        """Return the number of queues; 0: the topic does not exist."""
        try:
            return (await self._work.client.admin.topic_config(topic)).write_queues
        except BrokerError as error:
            if error.code == ResponseCode.TOPIC_NOT_EXIST:
                return 0
            raise

    async def _logs(self) -> None:
        """Record the logs of all members, from the end of the last round."""
        brokers = self._place.brokers
        ends = {name: await brokers.log_end(name) for name in MEMBERS}
        starts = [log_start(directory) for directory in brokers.log_files.values()]
        start, end = max(self._place.log_read_to, *starts), min(ends.values())
        for name in MEMBERS:
            digest = await asyncio.to_thread(digest_of, brokers.log_files[name], start, end)
            self._history.append(LogPart(member=name, start=start, end=end, digest=digest))
        self._place.log_read_to = end

    def _diverged(self) -> None:
        self._history += diverged(self._place.brokers)


def diverged(brokers: FaultySet) -> list[Kept]:
    """Return the messages that members truncated or took with them, and their location."""
    found: list[Kept] = []
    for member in MEMBERS:
        for path in sorted((brokers.data(member) / "diverged").glob("*.log")):
            where = f"{member}'s {path.name}"
            found += [Kept(key=key, where=where, cut_from=topic) for topic, key in _cut_off(path, path.stat().st_size)]
    for disk in brokers.put_away:
        for path in [*log_file_paths(disk / "commitlog"), *disk.glob("diverged/*.log")]:
            found += [Kept(key=key, where=disk.name) for key in _keys_in(path)]
    return found


@cache
def _cut_off(path: Path, _size: int) -> list[tuple[str, str]]:
    """Return topic and key of each message in the file; it is called often, and the files do not change."""
    return [(record.topic, key) for record in records(path) if (key := record.properties.get("KEYS"))]


@cache
def _keys_in(path: Path) -> list[str]:
    """Return the keys in a log with an arbitrary end."""
    return [key.decode(errors="replace") for key in _KEYS.findall(path.read_bytes())]


def digest_of(directory: Path, start: int, end: int) -> str:
    """Return a digest of the log between two offsets; a file's name is the offset at which it begins."""
    digest = hashlib.blake2b(digest_size=16)
    at = start
    for path in log_file_paths(directory):
        begin, size = int(path.name), path.stat().st_size
        upto = min(begin + size, end)
        if not begin <= at < upto:
            continue
        with path.open("rb") as file:
            file.seek(at - begin)
            while at < upto:
                data = file.read(min(_CHUNK, upto - at))
                digest.update(data)
                at += len(data)
    assert at >= end, f"{directory} ends at {at}, before {end}"
    return digest.hexdigest()
