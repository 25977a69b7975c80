"""What each group has consumed: topic@group → queue → next offset to consume. Written every few seconds, whole."""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from broker.tables.changes import Change, GroupGone, OffsetsCopied, OffsetsReset, TopicGone
from broker.tables.journal import NO_JOURNAL, Journal
from broker.tables.state_file import Rows, StateFile, SyncLog
from infra.disk.filesystem import Disk
from infra.loop.in_steps import SLICE, Steps, at_once
from infra.loop.parts import Parts, nothing, run_here
from infra.loop.threads import SYSTEM_THREADS, Threads
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode

SEPARATOR = "@"
# Consumer offsets that requests may add unless a limit is given; each takes about 100 bytes.
LIMIT = 2_000_000
# Rows taken for the file before others get their turn: some 0.3 ms, twice that where no cache has them any more.
_SLICE = 250
# Rows that are taken from the file in one turn of the event loop, about 1 ms.
_LOADED_SLICE = 500
_CLIPPED_AT_ONCE = 2_000  # offsets compared with the ends of their queues in one turn of the loop
_NOWHERE: Mapping[int, int] = {}


class ConsumerOffsetManager:
    """Commits are not monotonic: a client may set a group back.

    Where a group pops, the pop book is the truth and tells this table (`follow`); who sets such a group elsewhere tells
    the book first (`on_set`), or the book would put the old position back.

    Requests name groups, topics and queues in any combination: they add at most `limit` offsets. Offsets from the log,
    from a file or from another broker are always taken.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        sync_log: SyncLog,
        threads: Threads = SYSTEM_THREADS,
        journal: Journal = NO_JOURNAL,
        *,
        limit: Callable[[], int] = lambda: LIMIT,
    ) -> None:
        self._journal, self._limit = journal, limit
        # Offsets in `_offsets` and in `_pulls`.
        self.count = self.pull_count = 0
        self._offsets: dict[str, dict[int, int]] = {}
        # The names in `_offsets` from either side: who asks for one group or topic doesn't look at all of them.
        self._topics: dict[str, dict[str, None]] = {}
        self._groups: dict[str, dict[str, None]] = {}
        # Where the last pull of a group ended; only for statistics, not kept on disk.
        self._pulls: dict[str, dict[int, int]] = {}
        # Where an administrator sent a group; until its next pull hears it, the group's own commits are stale.
        self._resets: dict[str, dict[int, int]] = {}
        self.on_set: Callable[[str, str, int, int], object] = _nobody_pops
        self.file = StateFile(disk, path, self._snapshot, sync_log=sync_log, threads=threads, journal=journal)

    def load(self) -> None:
        """As the file has it, at a start."""
        run_here(self.load_parts())
        self.file.resume()

    def load_parts(self) -> Parts[None]:
        """As `load`, where a master becomes a slave: the file stays suspended."""
        value = yield from self.file.load_parts(offsetTable=dict[str, dict[int, int]])
        former, self._offsets = self._offsets, {}
        for part in (self._topics, self._groups, self._resets):
            part.clear()
        self.count = 0
        yield lambda: _drop(former)
        rows = iter(value.get("offsetTable", {}).items())
        while some := dict(islice(rows, _LOADED_SLICE)):
            self._take(some)
            yield nothing

    def _snapshot(self) -> Steps[Mapping[str, Any]]:
        """What a group begins or loses meanwhile is in it or not; it counts as a change that is not saved yet."""
        rows = Rows([{}])
        for topic, group in self.pairs():
            name = topic + SEPARATOR + group
            if (queues := self._offsets.get(name)) is not None:
                rows[-1][name] = queues
            if len(rows[-1]) == _SLICE:
                rows.append({})
                yield
        return {"offsetTable": rows}

    def table(self) -> dict[str, dict[int, int]]:
        """topic@group → queue → next offset to consume."""
        return {name: dict(queues) for name, queues in self._offsets.items()}

    def copied(self) -> Steps[dict[str, dict[int, int]]]:
        """As `table`; what changes between two steps is in it or not, each row whole."""
        table: dict[str, dict[int, int]] = {}
        for topic, group in self.pairs():
            name = topic + SEPARATOR + group
            if (queues := self._offsets.get(name)) is not None:
                table[name] = dict(queues)
                if len(table) % _SLICE == 0:
                    yield
        return table

    def restore(self, table: Mapping[str, Mapping[int, int]]) -> None:
        """Take a whole table, as `table` gave it."""
        self._take(table)
        self.file.touch()

    def install(self, table: Mapping[str, Mapping[int, int]], resets: Mapping[str, Mapping[int, int]]) -> None:
        """Take another's table in place of this one, and what running consumers are still to be told."""
        for part in (self._offsets, self._topics, self._groups, self._resets):
            part.clear()
        self.count = 0
        self._take(table)
        self._resets.update({name: dict(queues) for name, queues in resets.items()})
        self.file.touch()

    def resets(self) -> dict[str, dict[int, int]]:
        """topic@group → queue → where running consumers are still to be sent."""
        return {name: dict(queues) for name, queues in self._resets.items()}

    def _take(self, table: Mapping[str, Mapping[int, int]]) -> None:
        for name, queues in table.items():
            topic, _, group = name.partition(SEPARATOR)
            self._merge(self._queues(group, topic), queues)

    def _merge(self, queues: dict[int, int], more: Mapping[int, int]) -> None:
        before = len(queues)
        queues.update(more)
        self.count += len(queues) - before

    def _queues(self, group: str, topic: str) -> dict[int, int]:
        """Where the group stands in the topic, to be written to."""
        name = topic + SEPARATOR + group
        queues = self._offsets.get(name)
        if queues is None:
            queues = self._offsets[name] = {}
            self._topics.setdefault(group, {})[topic] = None
            self._groups.setdefault(topic, {})[group] = None
        return queues

    def commit(self, group: str, topic: str, queue: int, offset: int) -> None:
        name = topic + SEPARATOR + group
        if self._resets and queue in self._resets.get(name, ()):
            return
        queues = self._offsets.get(name)
        if queues is None or queue not in queues:
            self.require_room()
            queues = self._queues(group, topic)
            self.count += 1
        if queues.get(queue) != offset:
            self.on_set(group, topic, queue, offset)
            queues[queue] = offset
        self.file.touch()

    def require_room(self, more: int = 1) -> None:
        """Raise BrokerError SYSTEM_BUSY if a request may not add `more` offsets."""
        if self.count + more > (limit := self._limit()):
            raise BrokerError(
                ResponseCode.SYSTEM_BUSY,
                f"no room for {more} consumer offsets: the broker has {self.count} of maxConsumerOffsets={limit}",
            )

    def follow(self, group: str, topic: str, queue: int, offset: int) -> None:
        """Where the pop book says that the group stands."""
        self._merge(self._queues(group, topic), {queue: offset})
        self.file.touch()

    def reset(self, group: str, topic: str, queue: int, offset: int) -> None:
        """As `reset_all`, of one queue."""
        at_once(self.reset_all(group, topic, {queue: offset}))

    def reset_all(self, group: str, topic: str, offsets: Mapping[int, int]) -> Steps[None]:
        """Set a group to offsets, and its running consumers with their next pull or pop.

        The first step changes the table and the log; the others tell the pop book, which must not be left out.
        An offset that the group has already is set too: what it was given above comes again. Raises BrokerError in the
        first step if the log takes nothing now or there is no room for more offsets; nothing has changed then.
        """
        self._require_room_for(group, topic, offsets)
        change = OffsetsReset(group=group, topic=topic, offsets=dict(offsets))
        self._journal.record(change)
        self.apply(change)
        yield from self._tell_book(group, topic, offsets)

    def _tell_book(self, group: str, topic: str, offsets: Mapping[int, int]) -> Steps[None]:
        for number, (queue, offset) in enumerate(offsets.items(), 1):
            self.on_set(group, topic, queue, offset)
            if number % SLICE == 0:
                yield

    def take_reset(self, group: str, topic: str, queue: int) -> int | None:
        """Where this pull is to go on instead, told once; a pop goes on there by itself."""
        if not self._resets:
            return None
        name = topic + SEPARATOR + group
        queues = self._resets.get(name, {})
        target = queues.pop(queue, None)
        if not queues:
            self._resets.pop(name, None)
        return target

    def _require_room_for(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        if more := len(offsets.keys() - self.standing(group, topic).keys()):
            self.require_room(more)

    def clone(self, source: str, target: str, topic: str) -> Steps[None]:
        """Copy the offsets of a group in a topic to another group. Raises and takes steps as `reset_all`."""
        queues = self._offsets.get(topic + SEPARATOR + source)
        if queues is not None:
            self._require_room_for(target, topic, queues)
            change = OffsetsCopied(group=target, topic=topic, offsets=dict(queues))
            self._journal.record(change)
            self.apply(change)
            yield from self._tell_book(target, topic, change.offsets)

    def log_standing(self, group: str, topic: str) -> Mapping[int, int]:
        """Log the offsets of a group in a topic, and return them by queue.

        Slaves have them then without a poll, also on top of a poll that was answered before. Raises BrokerError if the
        log takes nothing now.
        """
        change = OffsetsCopied(group=group, topic=topic, offsets=self.queues_of(group, topic))
        self._journal.record(change)
        self.apply(change)
        return change.offsets

    def apply(self, change: Change) -> None:
        """What a change that is in the log makes of the table; what is popped is the book's to know."""
        match change:
            case OffsetsReset():
                self._merge(self._queues(change.group, change.topic), change.offsets)
                self._resets.setdefault(change.topic + SEPARATOR + change.group, {}).update(change.offsets)
            case OffsetsCopied():
                standing = self._queues(change.group, change.topic)
                self.count -= len(standing)
                standing.clear()
                self._merge(standing, change.offsets)
            case TopicGone():
                self.delete_topic(change.topic)
            case GroupGone(with_offsets=True):
                self.delete_group(change.group)
            case _:
                return
        self.file.touch_logged()

    def queues_of(self, group: str, topic: str) -> dict[int, int]:
        return dict(self._offsets.get(topic + SEPARATOR + group, {}))

    def standing(self, group: str, topic: str) -> Mapping[int, int]:
        """The same, as it is now: for who looks and keeps nothing."""
        return self._offsets.get(topic + SEPARATOR + group, _NOWHERE)

    def stands(self, group: str, topic: str) -> bool:
        """It has an offset in some queue of the topic."""
        return topic + SEPARATOR + group in self._offsets

    def query(self, group: str, topic: str, queue: int) -> int:
        """-1: the group has none."""
        queues = self._offsets.get(topic + SEPARATOR + group)
        return -1 if queues is None else queues.get(queue, -1)

    def commit_pull(self, group: str, topic: str, queue: int, offset: int) -> None:
        """Remember where a pull ended; a new queue only while there is room, because it is only for statistics."""
        queues = self._pulls.get(topic + SEPARATOR + group)
        if queues is None or queue not in queues:
            if self.pull_count >= self._limit():
                return
            queues = self._pulls.setdefault(topic + SEPARATOR + group, {})
            self.pull_count += 1
        queues[queue] = offset

    def query_pull(self, group: str, topic: str, queue: int) -> int:
        return self._pulls.get(topic + SEPARATOR + group, {}).get(queue, -1)

    def topics_of(self, group: str) -> list[str]:
        return list(self._topics.get(group, ()))

    def groups_of(self, topic: str) -> list[str]:
        return list(self._groups.get(topic, ()))

    def delete_topic(self, topic: str) -> None:
        for group in self.groups_of(topic):
            self._drop(group, topic)
        self._forget(lambda name: name.startswith(topic + SEPARATOR))

    def delete_group(self, group: str) -> None:
        for topic in self.topics_of(group):
            self._drop(group, topic)
        self._forget(lambda name: name.endswith(SEPARATOR + group))

    def clip(self, maximum: Callable[[str, int], int]) -> list[str]:
        """After an unclean stop no group may stand above its queue's end: it would miss what is sent next."""
        return at_once(self.clip_steps(maximum))

    def clip_steps(self, maximum: Callable[[str, int], int]) -> Steps[list[str]]:
        """As `clip`, while nothing changes an offset."""
        clipped, looked_at = [], 0
        for name, queues in list(self._offsets.items()):
            topic = name.partition(SEPARATOR)[0]
            for queue, offset in list(queues.items()):
                bound = maximum(topic, queue)
                if offset > bound:
                    queues[queue] = bound
                    clipped.append(f"{name} queue {queue}: {offset} → {bound}")
                looked_at += 1
                if looked_at % _CLIPPED_AT_ONCE == 0:
                    yield
        if clipped:
            self.file.touch()
        return clipped

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Topic and group wherever a group stands. There may be changes between two of them, seen or not."""
        for topic in list(self._groups):
            for group in self.groups_of(topic):
                yield topic, group

    def _drop(self, group: str, topic: str) -> None:
        self.count -= len(self._offsets.pop(topic + SEPARATOR + group))
        for index, key, value in ((self._topics, group, topic), (self._groups, topic, group)):
            del index[key][value]
            if not index[key]:
                del index[key]
        self.file.touch()

    def _forget(self, matches: Callable[[str], bool]) -> None:
        for name in [name for name in self._pulls if matches(name)]:
            self.pull_count -= len(self._pulls.pop(name))
        for name in [name for name in self._resets if matches(name)]:
            del self._resets[name]


def _nobody_pops(group: str, topic: str, queue: int, offset: int) -> None:
    """Until a pop book listens."""


def _drop(table: dict[str, dict[int, int]]) -> None:
    """Free a large table row by row, on a thread."""
    while table:
        table.popitem()
