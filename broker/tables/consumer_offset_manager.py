"""Committed offsets of groups: topic@group → queue → next offset to consume. The whole table is saved periodically."""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from broker.tables.changes import Change, GroupDeleted, OffsetsCopied, OffsetsReset, TopicDeleted
from broker.tables.journal import NO_JOURNAL, Journal
from broker.tables.state_file import Rows, StateFile, SyncLog
from infra.disk.filesystem import Disk
from infra.loop.in_steps import SLICE, Steps, at_once
from infra.loop.parts import Parts, nothing, run_here
from infra.loop.threads import SYSTEM_THREADS, Threads
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode

SEPARATOR = "@"
# Default limit of the offsets that requests may add; each takes about 100 bytes.
LIMIT = 2_000_000
# Rows copied for the file in one step of the event loop: about 0.3 ms, twice that without cache hits.
_SLICE = 250
# Rows that are taken from the file in one turn of the event loop, about 1 ms.
_LOADED_SLICE = 500
_CLIPPED_AT_ONCE = 2_000  # offsets compared with the ends of their queues in one turn of the loop
_NOWHERE: Mapping[int, int] = {}


class ConsumerOffsetManager:
    """Table of committed offsets (RocketMQ's ConsumerOffsetManager).

    Commits are not monotonic: a client may move a group back.

    For groups that pop, the pop book is authoritative and updates this table (`follow`). Code that moves such a group
    notifies the book first (`subscribe`), because the book would otherwise restore the old offset.

    Requests may name any combination of groups, topics and queues, so they add at most `limit` offsets. Offsets from
    the log, a file or another broker are always accepted.
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
        # Number of offsets in `_offsets` and in `_pulls`.
        self.count = self.pull_count = 0
        self._offsets: dict[str, dict[int, int]] = {}
        # Index of the names in `_offsets`, so that a query for one group or topic does not scan all of them.
        self._topics: dict[str, dict[str, None]] = {}
        self._groups: dict[str, dict[str, None]] = {}
        # Offset where the last pull of a group ended; for statistics only, not saved.
        self._pulls: dict[str, dict[int, int]] = {}
        # Offsets of resets by an administrator. Until the next pull receives one, the group's own commits are stale.
        self._resets: dict[str, dict[int, int]] = {}
        self._on_set: Callable[[str, str, int, int], object] = _no_pops
        self.file = StateFile(disk, path, self._snapshot, sync_log=sync_log, threads=threads, journal=journal)

    def subscribe(self, on_set: Callable[[str, str, int, int], object]) -> None:
        """Call `on_set(group, topic, queue, offset)` before each change of an offset that the pop book did not make."""
        self._on_set = on_set

    def load(self) -> None:
        """Load the file at a start."""
        run_here(self.load_parts())
        self.file.resume()

    def load_parts(self) -> Parts[None]:
        """Run `load` in parts when a master becomes a slave; the file stays suspended."""
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
        """Return the table for its file, in steps; concurrent changes are included or not, and are saved once more."""
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
        """Return a copy: topic@group → queue → next offset to consume."""
        return {name: dict(queues) for name, queues in self._offsets.items()}

    def copied(self) -> Steps[dict[str, dict[int, int]]]:
        """Return a copy in steps; concurrent changes are included or not, each row as a whole."""
        table: dict[str, dict[int, int]] = {}
        for topic, group in self.pairs():
            name = topic + SEPARATOR + group
            if (queues := self._offsets.get(name)) is not None:
                table[name] = dict(queues)
                if len(table) % _SLICE == 0:
                    yield
        return table

    def restore(self, table: Mapping[str, Mapping[int, int]]) -> None:
        """Merge a whole table, as returned by `table`."""
        self._take(table)
        self.file.touch()

    def install(self, table: Mapping[str, Mapping[int, int]], resets: Mapping[str, Mapping[int, int]]) -> None:
        """Replace the table by that of another broker, with the resets that running consumers have not received yet."""
        for part in (self._offsets, self._topics, self._groups, self._resets):
            part.clear()
        self.count = 0
        self._take(table)
        self._resets.update({name: dict(queues) for name, queues in resets.items()})
        self.file.touch()

    def resets(self) -> dict[str, dict[int, int]]:
        """Return the resets that running consumers have not received yet: topic@group → queue → offset."""
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
        """Return the writable row of a group in a topic."""
        name = topic + SEPARATOR + group
        queues = self._offsets.get(name)
        if queues is None:
            queues = self._offsets[name] = {}
            self._topics.setdefault(group, {})[topic] = None
            self._groups.setdefault(topic, {})[group] = None
        return queues

    def commit(self, group: str, topic: str, queue: int, offset: int) -> None:
        """Commit an offset of a client; ignored while a reset of the queue is pending.

        Raises BrokerError if the offset is new and there is no room.
        """
        name = topic + SEPARATOR + group
        if self._resets and queue in self._resets.get(name, ()):
            return
        queues = self._offsets.get(name)
        if queues is None or queue not in queues:
            self.require_room()
            queues = self._queues(group, topic)
            self.count += 1
        if queues.get(queue) != offset:
            self._on_set(group, topic, queue, offset)
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
        """Set the offset that the pop book reports."""
        self._merge(self._queues(group, topic), {queue: offset})
        self.file.touch()

    def reset(self, group: str, topic: str, queue: int, offset: int) -> None:
        """Reset the offset of one queue; see `reset_all`."""
        at_once(self.reset_all(group, topic, {queue: offset}))

    def reset_all(self, group: str, topic: str, offsets: Mapping[int, int]) -> Steps[None]:
        """Reset committed offsets of a group; running consumers receive them with their next pull or pop.

        The first step changes the log and the table. The other steps notify the pop book and must not be skipped.
        Offsets that are equal to the committed ones are set as well: messages in flight above them are then
        redelivered. Raises BrokerError in the first step if the log refuses the record or there is no room for more
        offsets. Nothing has changed then.
        """
        self._require_room_for(group, topic, offsets)
        change = OffsetsReset(group=group, topic=topic, offsets=dict(offsets))
        self._journal.record(change)
        self.apply(change)
        yield from self._report_to_book(group, topic, offsets)

    def _report_to_book(self, group: str, topic: str, offsets: Mapping[int, int]) -> Steps[None]:
        for number, (queue, offset) in enumerate(offsets.items(), 1):
            self._on_set(group, topic, queue, offset)
            if number % SLICE == 0:
                yield

    def take_reset(self, group: str, topic: str, queue: int) -> int | None:
        """Return the reset offset for this pull once, None without a reset. Pops start at the reset offset anyway."""
        if not self._resets:
            return None
        name = topic + SEPARATOR + group
        queues = self._resets.get(name, {})
        target = queues.pop(queue, None)
        if not queues:
            self._resets.pop(name, None)
        return target

    def _require_room_for(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        if more := len(offsets.keys() - self.committed_offsets(group, topic).keys()):
            self.require_room(more)

    def clone(self, source: str, target: str, topic: str) -> Steps[None]:
        """Copy the offsets of a group in a topic to another group, in steps and with the errors of `reset_all`."""
        queues = self._offsets.get(topic + SEPARATOR + source)
        if queues is not None:
            self._require_room_for(target, topic, queues)
            change = OffsetsCopied(group=target, topic=topic, offsets=dict(queues))
            self._journal.record(change)
            self.apply(change)
            yield from self._report_to_book(target, topic, change.offsets)

    def log_committed(self, group: str, topic: str) -> Mapping[int, int]:
        """Log the offsets of a group in a topic, and return them by queue.

        Slaves then have them without a poll. The record also overrides the answer to an earlier poll. Raises
        BrokerError if the log refuses the record.
        """
        change = OffsetsCopied(group=group, topic=topic, offsets=self.queues_of(group, topic))
        self._journal.record(change)
        self.apply(change)
        return change.offsets

    def apply(self, change: Change) -> None:
        """Apply a change that is in the log; the pop book applies its own changes."""
        match change:
            case OffsetsReset():
                self._merge(self._queues(change.group, change.topic), change.offsets)
                self._resets.setdefault(change.topic + SEPARATOR + change.group, {}).update(change.offsets)
            case OffsetsCopied():
                committed_offsets = self._queues(change.group, change.topic)
                self.count -= len(committed_offsets)
                committed_offsets.clear()
                self._merge(committed_offsets, change.offsets)
            case TopicDeleted():
                self.delete_topic(change.topic)
            case GroupDeleted(with_offsets=True):
                self.delete_group(change.group)
            case _:
                return
        self.file.touch_logged()

    def queues_of(self, group: str, topic: str) -> dict[int, int]:
        """Return a copy of a group's committed offsets in a topic, by queue."""
        return dict(self._offsets.get(topic + SEPARATOR + group, {}))

    def committed_offsets(self, group: str, topic: str) -> Mapping[int, int]:
        """Return the live row of a group in a topic, for callers that do not keep it."""
        return self._offsets.get(topic + SEPARATOR + group, _NOWHERE)

    def has_offsets(self, group: str, topic: str) -> bool:
        """Return whether a group has a committed offset in any queue of a topic."""
        return topic + SEPARATOR + group in self._offsets

    def query(self, group: str, topic: str, queue: int) -> int:
        """Return the committed offset, -1 without one."""
        queues = self._offsets.get(topic + SEPARATOR + group)
        return -1 if queues is None else queues.get(queue, -1)

    def commit_pull(self, group: str, topic: str, queue: int, offset: int) -> None:
        """Remember where a pull ended. A new queue is dropped without room, because this is only for statistics."""
        queues = self._pulls.get(topic + SEPARATOR + group)
        if queues is None or queue not in queues:
            if self.pull_count >= self._limit():
                return
            queues = self._pulls.setdefault(topic + SEPARATOR + group, {})
            self.pull_count += 1
        queues[queue] = offset

    def query_pull(self, group: str, topic: str, queue: int) -> int:
        """Return the offset where the last pull ended, -1 if unknown."""
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
        """Limit all offsets to the ends of their queues after an unclean stop; return a text for each change.

        A group above the end would miss the next messages.
        """
        return at_once(self.clip_steps(maximum))

    def clip_steps(self, maximum: Callable[[str, int], int]) -> Steps[list[str]]:
        """Run `clip` in steps; no offset may change meanwhile."""
        clipped, examined = [], 0
        for name, queues in list(self._offsets.items()):
            topic = name.partition(SEPARATOR)[0]
            for queue, offset in list(queues.items()):
                bound = maximum(topic, queue)
                if offset > bound:
                    queues[queue] = bound
                    clipped.append(f"{name} queue {queue}: {offset} → {bound}")
                examined += 1
                if examined % _CLIPPED_AT_ONCE == 0:
                    yield
        if clipped:
            self.file.touch()
        return clipped

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield topic and group of all rows; rows that change during the iteration may be included or not."""
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


def _no_pops(group: str, topic: str, queue: int, offset: int) -> None:
    """Ignore a change of an offset: no pop book listens."""


def _drop(table: dict[str, dict[int, int]]) -> None:
    """Free a large table row by row, on a thread."""
    while table:
        table.popitem()
