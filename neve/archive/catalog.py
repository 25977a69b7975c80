"""The catalog: what a broker's journal adds up to. Pure memory; safe to read from threads while one applies entries."""

import threading
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from neve.archive.checkpoint import CatalogState
from neve.archive.journal import (
    NO_CHECKPOINT,
    Abort,
    AnyEntry,
    Checkpoint,
    Commit,
    CommittedName,
    Deleted,
    Epoch,
    Expire,
    Gap,
    Intent,
    IntentName,
    Replace,
    RowGroup,
    Topic,
)


class OutOfOrder(ValueError):
    """An entry was applied at a number that does not follow the last one."""


class Location(NamedTuple):
    """The run of one queue inside one row group."""

    name: CommittedName
    row_group: int
    queue: int
    first: int
    last: int

    @property
    def group(self) -> RowGroup:
        return self.name.row_groups[self.row_group]


class GapHit(NamedTuple):
    """The offset exists nowhere; reading goes on at `next_offset`."""

    first: int
    next_offset: int


class _Queue:
    """Runs and gaps of one queue, each sorted by first offset."""

    __slots__ = ("gaps", "minimum", "runs")

    def __init__(self) -> None:
        self.runs: list[tuple[int, int, str, int]] = []  # first, last, key, row group
        self.gaps: list[tuple[int, int]] = []
        self.minimum = 0  # recorded: never moves back


class Catalog:
    """Apply a journal's entries in order; then ask. `through(topic)`: below it, everything is settled."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.next_seq = 0
        self.epoch = 0
        self.owner = ""
        self.log_uuid = ""
        self.last_round = 0
        self.checkpoint = NO_CHECKPOINT
        self._names: dict[str, CommittedName] = {}  # in the readers' view
        self._expiring: dict[str, tuple[CommittedName, int]] = {}
        self._deleted: set[str] = set()
        self._by_topic: dict[str, set[str]] = {}
        self._queues: dict[tuple[str, int], _Queue] = {}
        self._through: dict[str, int] = {}
        # Ranges above `through` that an object covers, or covered: it may expire and be deleted before those below it
        # are committed, and must not be archived again then.
        self._covered: dict[str, set[tuple[int, int]]] = {}
        self._open: dict[int, dict[str, IntentName]] = {}
        self._intent_end = 0
        self._named: dict[str, dict[int, int]] = {}  # topic -> queue -> highest offset that any entry named
        self._topics: dict[str, Topic] = {}
        self._gaps: list[Gap] = []

    # ---- applying

    def apply(self, seq: int, entry: AnyEntry) -> None:
        with self._lock:
            if seq != self.next_seq:
                raise OutOfOrder(f"entry {seq} does not follow {self.next_seq - 1}")
            self.next_seq = seq + 1
            self._dispatch(entry)

    def state(self, broker: str) -> CatalogState:
        """All of it, for a checkpoint after the last entry that was applied."""
        with self._lock:
            return CatalogState(
                broker=broker,
                through_seq=self.next_seq - 1,
                epoch=self.epoch,
                owner=self.owner,
                log_uuid=self.log_uuid,
                last_round=self.last_round,
                checkpoint=self.checkpoint,
                names=list(self._names.values()),
                expiring=list(self._expiring.values()),
                deleted=sorted(self._deleted),
                queues=[(topic, queue, held.minimum) for (topic, queue), held in sorted(self._queues.items())],
                through=dict(self._through),
                covered={topic: sorted(ranges) for topic, ranges in self._covered.items() if ranges},
                open={number: list(names.values()) for number, names in self._open.items()},
                intent_end=self._intent_end,
                named={topic: dict(queues) for topic, queues in self._named.items()},
                topics=list(self._topics.values()),
                gaps=list(self._gaps),
            )

    def restore(self, state: CatalogState) -> None:
        """Become what a checkpoint says; whoever holds this catalog sees it in one step."""
        with self._lock:
            if state.through_seq < self.next_seq - 1:
                raise OutOfOrder(f"checkpoint {state.through_seq} is older than entry {self.next_seq - 1}")
            self.next_seq = state.through_seq + 1
            self.epoch, self.owner, self.log_uuid = state.epoch, state.owner, state.log_uuid
            self.last_round, self.checkpoint = state.last_round, state.checkpoint
            self._expiring = {name.key: (name, after) for name, after in state.expiring}
            self._deleted, self._gaps = set(state.deleted), list(state.gaps)
            self._through, self._intent_end = dict(state.through), state.intent_end
            self._covered = {topic: set(ranges) for topic, ranges in state.covered.items()}
            for name, _ in state.expiring:
                self._cover(name)
            self._open = {number: {name.key: name for name in names} for number, names in state.open.items()}
            self._named = {topic: dict(queues) for topic, queues in state.named.items()}
            self._topics = {entry.topic: entry for entry in state.topics}
            self._names, self._by_topic, self._queues = {}, {}, {}
            for topic, queue, minimum in state.queues:
                self._queue(topic, queue).minimum = minimum
            for gap in state.gaps:
                insort(self._queue(gap.topic, gap.queue).gaps, (gap.first, gap.last))
            for name in state.names:
                self._enter(name)

    def _dispatch(self, entry: AnyEntry) -> None:
        match entry:
            case Epoch():
                self.epoch, self.owner, self.log_uuid = entry.epoch, entry.owner, entry.log_uuid
            case Intent():
                self._apply_intent(entry)
            case Commit():
                self._apply_commit(entry)
            case Abort():
                self._close(entry.round, entry.keys or list(self._open.get(entry.round, {})))
            case Gap():
                self._apply_gap(entry)
            case Expire():
                self._apply_expire(entry)
            case Deleted():
                self._expiring = {key: held for key, held in self._expiring.items() if key not in entry.keys}
                self._deleted.update(entry.keys)
            case Topic():
                self._apply_topic(entry)
            case Checkpoint():
                self.checkpoint = entry.through_seq
            case Replace():
                self._apply_replace(entry)

    def _apply_intent(self, entry: Intent) -> None:
        self.last_round = max(self.last_round, entry.round)
        self._open[entry.round] = {name.key: name for name in entry.names}
        for name in entry.names:
            self._intent_end = max(self._intent_end, name.end)
            self._note_offsets(name.topic, {queue: last for queue, (_, last) in name.queues.items()})

    def _apply_commit(self, entry: Commit) -> None:
        for name in entry.names:
            self._enter(name)
            self._note_offsets(name.topic, {queue: run[1] for queue, run in name.queues.items()})
        self._close(entry.round, [name.key for name in entry.names])
        still_open = self._open.get(entry.round, {}).values()
        for topic in {name.topic for name in entry.names}:
            # Of an intent's names a later one may have been committed before this one.
            covered = self._covered.get(topic, set())
            settled = max((end for _, end in covered), default=self._through.get(topic, 0))
            # A name that stays open holds its topic back, even when a later day's object is already there.
            lowest_open = min((name.start for name in still_open if name.topic == topic), default=settled)
            self._advance(topic, entry.through.get(topic, min(settled, lowest_open)))
        for topic, offset in entry.through.items():
            self._advance(topic, offset)

    def _apply_gap(self, entry: Gap) -> None:
        if entry.more:
            self._apply_gap(msgspec.structs.replace(entry, more=[]))
            for topic, queue, first, last in entry.more:
                self._apply_gap(Gap(topic=topic, queue=queue, first=first, last=last, reason=entry.reason))
            return
        self._gaps.append(entry)
        insort(self._queue(entry.topic, entry.queue).gaps, (entry.first, entry.last))
        self._note_offsets(entry.topic, {entry.queue: entry.last})
        if entry.through >= 0:
            self._advance(entry.topic, entry.through)

    def _apply_topic(self, entry: Topic) -> None:
        self._topics[entry.topic] = entry
        if entry.minimums:
            self._raise_minimums(entry.topic, entry.minimums)
            self._note_offsets(entry.topic, {queue: offset - 1 for queue, offset in entry.minimums.items()})

    def _apply_expire(self, entry: Expire) -> None:
        withdrawn = self._withdraw(entry.keys, entry.delete_after_ms)
        for name in withdrawn:
            for queue, (_, last, _) in name.queues.items():
                # What was the lowest must not come back as a minimum when everything has gone.
                if not self._queue(name.topic, queue).runs:
                    self._raise_minimums(name.topic, {queue: last + 1})
        for topic, minimums in entry.minimums.items():
            self._raise_minimums(topic, minimums)
            # of a queue that no round has taken yet, this is all that the archive knows
            self._note_offsets(topic, {queue: offset - 1 for queue, offset in minimums.items()})

    def _apply_replace(self, entry: Replace) -> None:
        self._withdraw(entry.old, entry.delete_after_ms)
        for name in entry.new:
            self._enter(name)

    def _enter(self, name: CommittedName) -> None:
        if name.key in self._names or name.key in self._deleted:
            return
        self._names[name.key] = name
        self._by_topic.setdefault(name.topic, set()).add(name.key)
        self._cover(name)
        for index, group in enumerate(name.row_groups):
            for queue, first, last in group.runs:
                insort(self._queue(name.topic, queue).runs, (first, last, name.key, index))

    def _cover(self, name: CommittedName) -> None:
        if name.end > self._through.get(name.topic, 0):
            self._covered.setdefault(name.topic, set()).add((name.start, name.end))

    def _withdraw(self, keys: Iterable[str], delete_after_ms: int) -> list[CommittedName]:
        withdrawn = [self._names.pop(key) for key in keys if key in self._names]
        gone = {name.key for name in withdrawn}
        for name in withdrawn:
            self._expiring[name.key] = (name, delete_after_ms)
            self._by_topic[name.topic].discard(name.key)
        for topic, queue in {(name.topic, queue) for name in withdrawn for queue in name.queues}:
            held = self._queue(topic, queue)
            held.runs = [run for run in held.runs if run[2] not in gone]
        return withdrawn

    def _close(self, round_number: int, keys: Iterable[str]) -> None:
        names = self._open.get(round_number, {})
        for key in keys:
            names.pop(key, None)
        if not names:
            self._open.pop(round_number, None)

    def _advance(self, topic: str, offset: int) -> None:
        through = self._through[topic] = max(self._through.get(topic, 0), offset)
        covered = self._covered.get(topic)
        if covered:
            self._covered[topic] = {(start, end) for start, end in covered if end > through}

    def _raise_minimums(self, topic: str, minimums: dict[int, int]) -> None:
        for queue, offset in minimums.items():
            held = self._queue(topic, queue)
            held.minimum = max(held.minimum, offset)

    def _note_offsets(self, topic: str, lasts: dict[int, int]) -> None:
        named = self._named.setdefault(topic, {})
        for queue, last in lasts.items():
            named[queue] = max(named.get(queue, -1), last)

    def _queue(self, topic: str, queue: int) -> _Queue:
        return self._queues.setdefault((topic, queue), _Queue())

    # ---- asking: offsets

    def find(self, topic: str, queue: int, offset: int) -> Location | GapHit | None:
        """Where an offset is; None: not in the archive (below its minimum, above its end, or still only local)."""
        with self._lock:
            held = self._queues.get((topic, queue))
            if held is None or offset < held.minimum:
                return None
            index = bisect_right(held.runs, (offset, 1 << 63)) - 1
            if index >= 0 and held.runs[index][1] >= offset:
                return self._location(queue, held.runs[index])
            index = bisect_right(held.gaps, (offset, 1 << 63)) - 1
            if index >= 0 and held.gaps[index][1] >= offset:
                return GapHit(held.gaps[index][0], held.gaps[index][1] + 1)
            return None

    def next_location(self, location: Location) -> Location | None:
        """The run that follows without a hole, perhaps in another object."""
        found = self.find(location.name.topic, location.queue, location.last + 1)
        return found if isinstance(found, Location) else None

    def by_time(self, topic: str, queue: int, time_ms: int) -> Location | None:
        """The first run whose row group holds a store time at or above `time_ms`."""
        with self._lock:
            held = self._queues.get((topic, queue))
            if held is None:
                return None
            # Not a binary search: a group whose records are all damaged has no time (-1) and would mislead it.
            for run in held.runs:
                if run[1] >= held.minimum and self._newest(run[2], run[3]) >= time_ms:
                    return self._location(queue, run)
            return None

    def min_offset(self, topic: str, queue: int) -> int | None:
        """The lowest offset that the archive has; None: it has none of this queue."""
        with self._lock:
            held = self._queues.get((topic, queue))
            if held is None or not held.runs or held.runs[-1][1] < held.minimum:
                return None
            index = bisect_right(held.runs, (held.minimum, 1 << 63)) - 1
            if index >= 0 and held.runs[index][1] >= held.minimum:
                return held.minimum
            return held.runs[index + 1][0]  # not the recorded minimum, where that lies in a gap

    def recorded_minimum(self, topic: str, queue: int) -> int:
        """Below this a queue has expired or was deleted: it holds even when the archive has nothing left."""
        with self._lock:
            held = self._queues.get((topic, queue))
            return held.minimum if held is not None else 0

    def max_offset(self, topic: str, queue: int) -> int | None:
        """One above the highest offset that the archive has."""
        with self._lock:
            held = self._queues.get((topic, queue))
            return held.runs[-1][1] + 1 if held is not None and held.runs else None

    def has_all(self, topic: str, queue: int, first: int, end: int) -> bool:
        """Whether every offset of [first, end) is in the archive."""
        with self._lock:
            held = self._queues.get((topic, queue))
            runs = held.runs if held is not None else []
            index = bisect_right(runs, (first, 1 << 63)) - 1
            while first < end:
                if not 0 <= index < len(runs) or not runs[index][0] <= first <= runs[index][1]:
                    return False
                first, index = runs[index][1] + 1, index + 1
            return True

    def queues(self, topic: str) -> list[int]:
        """Queues of which anything is known."""
        with self._lock:
            known = {queue for of, queue in self._queues if of == topic}
            return sorted(known | set(self._named.get(topic, {})))

    def _location(self, queue: int, run: tuple[int, int, str, int]) -> Location:
        return Location(self._names[run[2]], run[3], queue, run[0], run[1])

    def _newest(self, key: str, row_group: int) -> int:
        return self._names[key].row_groups[row_group].newest_ms

    # ---- asking: objects and rounds

    def through(self, topic: str) -> int | None:
        """The CommitLog offset below which the topic is settled; None: no round has touched it."""
        with self._lock:
            return self._through.get(topic)

    def topics(self) -> list[str]:
        """Topics with an object in the readers' view, a gap, a mark or a tombstone."""
        with self._lock:
            return sorted(
                {topic for topic, keys in self._by_topic.items() if keys} | set(self._through) | set(self._topics)
            )

    def topic_entry(self, topic: str) -> Topic | None:
        with self._lock:
            return self._topics.get(topic)

    def objects(self, topic: str | None = None) -> list[CommittedName]:
        """Objects in the readers' view, in log order."""
        with self._lock:
            keys = self._names.keys() if topic is None else self._by_topic.get(topic, set())
            return sorted((self._names[key] for key in keys), key=lambda name: (name.topic, name.start, name.key))

    def next_uncovered(self, topic: str, offset: int) -> tuple[int, int | None]:
        """(first CommitLog offset from `offset` on that no object of the topic covered, where the next one began).

        Below `through` all is covered; beyond it there are objects only where a name before them was closed without.
        """
        with self._lock:
            offset = max(offset, self._through.get(topic, 0))
            ranges = sorted(self._covered.get(topic, ()))
        for start, end in ranges:
            if start > offset:
                return offset, start
            offset = max(offset, end)
        return offset, None

    def expiring(self) -> dict[str, int]:
        """Names out of view that are not deleted yet -> the time after which they may be."""
        with self._lock:
            return {key: delete_after for key, (_, delete_after) in self._expiring.items()}

    def knows(self, key: str) -> bool:
        """Whether an object is anyone's: live, expiring, or in an open intent. The sweep keeps what is."""
        with self._lock:
            return key in self._names or key in self._expiring or any(key in names for names in self._open.values())

    def open_intents(self) -> dict[int, list[IntentName]]:
        with self._lock:
            return {number: list(names.values()) for number, names in sorted(self._open.items())}

    def gaps(self) -> list[Gap]:
        with self._lock:
            return list(self._gaps)

    @property
    def intent_end(self) -> int:
        """The highest CommitLog offset of any intent: the local log must never restart below it."""
        with self._lock:
            return self._intent_end

    def named_offsets(self, topic: str) -> dict[int, int]:
        """queue -> the highest offset that any entry ever named; none is given twice."""
        with self._lock:
            return dict(self._named.get(topic, {}))

    def named_topics(self) -> list[str]:
        with self._lock:
            return sorted(self._named)

    def runs(self, topic: str, queue: int) -> Iterator[Location]:
        """The queue's runs in offset order, as they stand now."""
        with self._lock:
            held = self._queues.get((topic, queue))
            locations = [self._location(queue, run) for run in held.runs] if held is not None else []
        return iter(locations)
