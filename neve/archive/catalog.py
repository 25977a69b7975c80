"""The catalog: what a broker's journal adds up to. Pure memory; safe to read from threads while one applies entries.

What a pull asks takes no lock (`queue_runs`), and each entry costs what it changes: a broker's loop asks while an entry
of fifty thousand names is applied. What is asked of a whole topic or of all is a copy, in log order as it is kept.
"""

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import assert_never

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
    OpenRewrite,
    Replace,
    Topic,
    Unexpire,
)
from neve.archive.queue_runs import GapHit, Location, QueueRuns, Run, without

__all__ = ["Catalog", "GapHit", "Location", "OutOfOrder"]


class OutOfOrder(ValueError):
    """An entry was applied at a number that does not follow the last one."""


Placed = tuple[int, str, CommittedName]  # start, key, object


class Catalog:
    """Apply a journal's entries in order; then ask. `through(topic)`: below it, everything is settled."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.next_seq = 0
        self.epoch = 0
        self.owner = ""
        self.log_uuid = ""
        self.master_epoch = 0  # the highest of any EPOCH of this log; 0: its brokers were in no set
        self.last_round = 0
        self.checkpoint = NO_CHECKPOINT
        self._names: dict[str, CommittedName] = {}  # in the readers' view
        self._expiring: dict[str, tuple[CommittedName, int]] = {}
        self._by_topic: dict[str, list[Placed]] = {}  # in log order; grows at its end, any other change is a new list
        self._queues: dict[str, dict[int, QueueRuns]] = {}
        self._through: dict[str, int] = {}
        # Ranges above `through` that an object covers, or covered: it may expire and be deleted before those below it
        # are committed, and must not be archived again then.
        self._covered: dict[str, set[tuple[int, int]]] = {}
        self._open: dict[int, dict[str, IntentName]] = {}
        self._intent_end = 0
        self._rewrites: dict[int, OpenRewrite] = {}
        self.last_rewrite = 0  # the highest number of an INTENT with a kind
        self._named: dict[str, dict[int, int]] = {}  # topic -> queue -> highest offset that any entry named
        self._topics: dict[str, Topic] = {}
        self._gaps: list[Gap] = []
        self._gaps_of: dict[str, list[Gap]] = {}

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
                master_epoch=self.master_epoch or msgspec.UNSET,
                last_round=self.last_round,
                checkpoint=self.checkpoint,
                names=list(self._names.values()),
                expiring=list(self._expiring.values()),
                queues=[
                    (topic, queue, held.minimum)
                    for topic, queues in sorted(self._queues.items())
                    for queue, held in sorted(queues.items())
                ],
                through=dict(self._through),
                covered={topic: sorted(ranges) for topic, ranges in self._covered.items() if ranges},
                open={number: list(names.values()) for number, names in self._open.items()},
                intent_end=self._intent_end,
                rewrites=dict(sorted(self._rewrites.items())) or msgspec.UNSET,
                last_rewrite=self.last_rewrite or msgspec.UNSET,
                named={topic: dict(queues) for topic, queues in self._named.items()},
                topics=list(self._topics.values()),
                gaps=list(self._gaps),
            )

    def restore(self, state: CatalogState) -> None:
        """Become what a checkpoint says; whoever holds this catalog sees it in one step."""
        made = Catalog()
        made._fill(state)
        del made._lock
        with self._lock:
            if state.through_seq < self.next_seq - 1:
                raise OutOfOrder(f"checkpoint {state.through_seq} is older than entry {self.next_seq - 1}")
            vars(self).update(vars(made))

    def _fill(self, state: CatalogState) -> None:
        self.next_seq = state.through_seq + 1
        self.epoch, self.owner, self.log_uuid = state.epoch, state.owner, state.log_uuid
        self.master_epoch = state.master_epoch or 0
        self.last_round, self.checkpoint = state.last_round, state.checkpoint
        self._through, self._intent_end = dict(state.through), state.intent_end
        self._covered = {topic: set(ranges) for topic, ranges in state.covered.items()}
        for name, after in state.expiring:
            self._expiring[name.key] = (name, after)
            self._cover(name)
        self._open = {number: {name.key: name for name in names} for number, names in state.open.items()}
        self._rewrites, self.last_rewrite = dict(state.rewrites or {}), state.last_rewrite or 0
        self._named = {topic: dict(queues) for topic, queues in state.named.items()}
        self._topics = {entry.topic: entry for entry in state.topics}
        for topic, queue, minimum in state.queues:
            self._queue(topic, queue).minimum = minimum
        for gap in state.gaps:
            self._note_gap(gap)
        for name in state.names:
            self._enter(name)

    def _dispatch(self, entry: AnyEntry) -> None:  # noqa: PLR0912 - a case for each kind of entry
        match entry:
            case Epoch():
                self._apply_epoch(entry)
            case Intent():
                self._apply_intent(entry)
            case Commit():
                self._apply_commit(entry)
            case Abort():
                self._apply_abort(entry)
            case Gap():
                self._apply_gap(entry)
            case Expire():
                self._apply_expire(entry)
            case Unexpire():
                self._apply_unexpire(entry)
            case Deleted():
                for key in entry.keys:
                    self._expiring.pop(key, None)
            case Topic():
                self._apply_topic(entry)
            case Checkpoint():
                self.checkpoint = entry.through_seq
            case Replace():
                self._apply_replace(entry)
            case _:
                assert_never(entry)

    def _apply_epoch(self, entry: Epoch) -> None:
        known = (
            self.master_epoch if entry.log_uuid == self.log_uuid else 0
        )  # another log's masters are of no set of this
        self.epoch, self.owner, self.log_uuid = entry.epoch, entry.owner, entry.log_uuid
        self.master_epoch = max(known, entry.master_epoch or 0)

    def _apply_intent(self, entry: Intent) -> None:
        if entry.kind is not msgspec.UNSET:
            self._apply_rewrite(entry.kind, entry)
            return
        self.last_round = max(self.last_round, entry.round)
        self._open[entry.round] = {name.key: name for name in entry.names}
        for name in entry.names:
            self._intent_end = max(self._intent_end, name.end)
            self._note_offsets(name.topic, {queue: last for queue, (_, last) in name.queues.items()})

    def _apply_rewrite(self, kind: str, entry: Intent) -> None:
        """Its rows have been named by a round: no mark of the log moves."""
        self.last_rewrite = max(self.last_rewrite, entry.round)
        if entry.names:
            self._rewrites[entry.round] = OpenRewrite(kind, entry.old or [], entry.names)

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

    def _apply_abort(self, entry: Abort) -> None:
        keys = self.closed_by(entry)
        if entry.kind:
            self._close_rewrites(keys, [entry.round])
        else:
            self._close(entry.round, keys)

    def _apply_gap(self, entry: Gap) -> None:
        if entry.more:
            self._apply_gap(msgspec.structs.replace(entry, more=[]))
            for topic, queue, first, last in entry.more:
                self._apply_gap(Gap(topic=topic, queue=queue, first=first, last=last, reason=entry.reason))
            return
        self._note_gap(entry)
        self._note_offsets(entry.topic, {entry.queue: entry.last})
        if entry.through >= 0:
            self._advance(entry.topic, entry.through)

    def _note_gap(self, gap: Gap) -> None:
        for first, last in self._queue(gap.topic, gap.queue).add_gap(gap.first, gap.last):
            told = (
                gap if (first, last) == (gap.first, gap.last) else msgspec.structs.replace(gap, first=first, last=last)
            )
            self._gaps.append(told)
            self._gaps_of.setdefault(gap.topic, []).append(told)

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

    def _apply_unexpire(self, entry: Unexpire) -> None:
        for key in entry.keys:
            if key in self._expiring:
                self._enter(self._expiring.pop(key)[0])
        for topic, minimums in entry.minimums.items():
            tombstone = self._topics.get(topic)
            for queue, offset in minimums.items():
                # What was deleted meanwhile stays so.
                hidden = tombstone.minimums.get(queue, 0) if tombstone is not None else 0
                self._queue(topic, queue).minimum = max(offset, hidden)

    def _apply_replace(self, entry: Replace) -> None:
        """A reader between any two steps of this finds each row once: in a queue, and in the objects of a topic."""
        old = [self._names[key] for key in entry.old if key in self._names]
        new = [name for name in entry.new if name.key not in self._names]
        gone = {name.key for name in old}
        for name in new:
            self._names[name.key] = name
        for topic in {name.topic for name in (*old, *new)}:
            placed = [one for one in self._by_topic.get(topic, ()) if one[1] not in gone]
            placed += [(name.start, name.key, name) for name in new if name.topic == topic]
            self._by_topic[topic] = sorted(placed, key=_place)
        runs: dict[tuple[str, int], list[Run]] = {}
        for name in old:
            for queue in name.queues:
                runs.setdefault((name.topic, queue), [])
        for name in new:
            for index, group in enumerate(name.row_groups):
                for queue, first, last in group.runs:
                    runs.setdefault((name.topic, queue), []).append((first, last, name, index))
        for (topic, queue), entered in runs.items():
            self._queue(topic, queue).swap(gone, entered)
        for name in old:
            del self._names[name.key]
            self._expiring[name.key] = (name, entry.delete_after_ms)
        self._close_rewrites([name.key for name in entry.new], list(self._rewrites))

    def _enter(self, name: CommittedName) -> None:
        """Once: a COMMIT whose answer was lost may stand twice, and then nothing stands between the two."""
        if name.key in self._names:
            return
        self._names[name.key] = name
        placed = (name.start, name.key, name)
        held = self._by_topic.setdefault(name.topic, [])
        if not held or held[-1][:2] <= placed[:2]:
            held.append(placed)
        else:
            index = bisect_right(held, placed[:2], key=_place)
            self._by_topic[name.topic] = [*held[:index], placed, *held[index:]]
        self._cover(name)
        for index, group in enumerate(name.row_groups):
            for queue, first, last in group.runs:
                if self._queue(name.topic, queue).enter(first, last, name, index):
                    self._cut_gaps(name.topic, queue, first, last)

    def _cut_gaps(self, topic: str, queue: int, first: int, last: int) -> None:
        """A message that exists beats a gap; for good, also when its time has passed."""
        left = [
            rest
            for gap in self._gaps
            for rest in (_cut(gap, first, last) if (gap.topic, gap.queue) == (topic, queue) else (gap,))
        ]
        self._gaps = left
        self._gaps_of[topic] = [gap for gap in left if gap.topic == topic]

    def _cover(self, name: CommittedName) -> None:
        if name.end > self._through.get(name.topic, 0):
            self._covered.setdefault(name.topic, set()).add((name.start, name.end))

    def _withdraw(self, keys: Iterable[str], delete_after_ms: int) -> list[CommittedName]:
        withdrawn = [self._names.pop(key) for key in keys if key in self._names]
        gone: dict[str, set[str]] = {}
        runs: Counter[tuple[str, int]] = Counter()
        for name in withdrawn:
            self._expiring[name.key] = (name, delete_after_ms)
            gone.setdefault(name.topic, set()).add(name.key)
            runs.update((name.topic, queue) for group in name.row_groups for queue, _, _ in group.runs)
        for topic, gone_keys in gone.items():
            held, lowest = self._by_topic[topic], 0
            while lowest < len(held) and held[lowest][1] in gone_keys:
                lowest += 1
            rest = held[lowest:]
            if lowest < len(gone_keys):  # as a rule it is the oldest that go
                rest = [placed for placed in rest if placed[1] not in gone_keys]
            self._by_topic[topic] = rest
        for (topic, queue), count in runs.items():
            self._queue(topic, queue).drop(gone[topic], count)
        return withdrawn

    def _close(self, round_number: int, keys: Iterable[str]) -> None:
        names = self._open.get(round_number, {})
        for key in keys:
            names.pop(key, None)
        if not names:
            self._open.pop(round_number, None)

    def _close_rewrites(self, keys: Iterable[str], numbers: Iterable[int]) -> None:
        closed = set(keys)
        for number in numbers:
            held = self._rewrites.get(number)
            if held is not None and any(name.key in closed for name in held.names):
                names = [name for name in held.names if name.key not in closed]
                self._rewrites[number] = msgspec.structs.replace(held, names=names)
                if not names:
                    del self._rewrites[number]

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

    def _queue(self, topic: str, queue: int) -> QueueRuns:
        """For an entry that names it; who asks takes `_held`."""
        queues = self._queues.setdefault(topic, {})
        held = queues.get(queue)
        if held is None:
            held = queues[queue] = QueueRuns(queue)
        return held

    # ---- asking: offsets; no lock

    def _held(self, topic: str, queue: int) -> QueueRuns | None:
        queues = self._queues.get(topic)
        return None if queues is None else queues.get(queue)

    def find(self, topic: str, queue: int, offset: int) -> Location | GapHit | None:
        """Where an offset is; None: not in the archive (below its minimum, above its end, or still only local)."""
        held = self._held(topic, queue)
        return None if held is None else held.find(offset)

    def next_location(self, location: Location) -> Location | None:
        """The run that follows without a hole, perhaps in another object."""
        found = self.find(location.name.topic, location.queue, location.last + 1)
        return found if isinstance(found, Location) else None

    def by_time(self, topic: str, queue: int, time_ms: int) -> Location | None:
        """The first run whose row group holds a store time at or above `time_ms`."""
        held = self._held(topic, queue)
        return None if held is None else held.by_time(time_ms)

    def min_offset(self, topic: str, queue: int) -> int | None:
        """The lowest offset that the archive has; None: it has none of this queue."""
        held = self._held(topic, queue)
        return None if held is None else held.min_offset()

    def recorded_minimum(self, topic: str, queue: int) -> int:
        """Below this a queue has expired or was deleted: it holds even when the archive has nothing left."""
        held = self._held(topic, queue)
        return 0 if held is None else held.minimum

    def max_offset(self, topic: str, queue: int) -> int | None:
        """One above the highest offset that the archive has."""
        held = self._held(topic, queue)
        return None if held is None else held.max_offset()

    def has_all(self, topic: str, queue: int, first: int, end: int) -> bool:
        """Whether every offset of [first, end) is in the archive."""
        held = self._held(topic, queue)
        return first >= end if held is None else held.has_all(first, end)

    def count_existing(self, topic: str, queue: int, first: int, end: int) -> int:
        """How many offsets of [first, end) are in no gap: messages, wherever they are."""
        held = self._held(topic, queue)
        return max(0, end - first) if held is None else held.count_existing(first, end)

    def gap_spans(self, topic: str, queue: int) -> list[tuple[int, int]]:
        """(first, last) of a queue's gaps, in order."""
        held = self._held(topic, queue)
        return [] if held is None else list(held.gaps)

    def runs(self, topic: str, queue: int) -> Iterator[Location]:
        """The queue's runs in offset order, as they stand now."""
        held = self._held(topic, queue)
        return iter(()) if held is None else held.locations()

    def runs_in_view(self, topic: str, queue: int) -> Iterator[Location]:
        """The queue's runs from its recorded minimum on, for who stops early."""
        held = self._held(topic, queue)
        return iter(()) if held is None else held.locations_from(held.minimum)

    def runs_from(self, topic: str, queue: int, offset: int) -> Iterator[Location]:
        """Those that hold an offset from this one on."""
        held = self._held(topic, queue)
        return iter(()) if held is None else held.locations_from(offset)

    def queues(self, topic: str) -> list[int]:
        """Queues of which anything is known."""
        with self._lock:
            return sorted({*self._queues.get(topic, ()), *self._named.get(topic, ())})

    def through(self, topic: str) -> int | None:
        """The CommitLog offset below which the topic is settled; None: no round has touched it."""
        return self._through.get(topic)

    def topic_entry(self, topic: str) -> Topic | None:
        return self._topics.get(topic)

    def named_offsets(self, topic: str) -> dict[int, int]:
        """queue -> the highest offset that any entry ever named; none is given twice."""
        return dict(self._named.get(topic, ()))

    # ---- asking: objects and rounds

    def topics(self) -> list[str]:
        """Topics with an object in the readers' view, a gap, a mark or a tombstone."""
        with self._lock:
            return sorted(
                {topic for topic, placed in self._by_topic.items() if placed} | set(self._through) | set(self._topics)
            )

    def topics_with_objects(self) -> list[str]:
        with self._lock:
            return sorted(topic for topic, placed in self._by_topic.items() if placed)

    @property
    def object_count(self) -> int:
        """How many objects are in the readers' view."""
        return len(self._names)

    def objects(self, topic: str | None = None) -> list[CommittedName]:
        """Objects in the readers' view, in log order."""
        topics = self.topics_with_objects() if topic is None else [topic]
        return [placed[2] for one in topics for placed in self._by_topic.get(one, ())]

    def from_oldest(self, topic: str) -> Iterator[CommittedName]:
        """The objects of a topic in log order, for who stops early."""
        for placed in self._by_topic.get(topic, ()):
            yield placed[2]

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

    def expiring_names(self) -> list[CommittedName]:
        """Names out of view whose objects are not deleted yet."""
        with self._lock:
            return [name for name, _ in self._expiring.values()]

    def knows(self, key: str) -> bool:
        """Whether an object is anyone's: live, expiring, or in an open intent. The sweep keeps what is."""
        with self._lock:
            return (
                key in self._names
                or key in self._expiring
                or any(key in names for names in self._open.values())
                or any(key == name.key for held in self._rewrites.values() for name in held.names)
            )

    def closed_by(self, entry: Abort) -> list[str]:
        """The keys that an ABORT closes, before it is applied."""
        with self._lock:
            if entry.keys:
                return entry.keys
            if entry.kind:
                held = self._rewrites.get(entry.round)
                return [] if held is None else [name.key for name in held.names]
            return list(self._open.get(entry.round, ()))

    def open_rewrites(self) -> dict[int, OpenRewrite]:
        """What an INTENT with a kind left open, by its number; an offload round has no part in it."""
        with self._lock:
            return dict(sorted(self._rewrites.items()))

    def open_intents(self) -> dict[int, list[IntentName]]:
        """Names of offload rounds."""
        with self._lock:
            return {number: list(names.values()) for number, names in sorted(self._open.items())}

    @property
    def gap_count(self) -> int:
        return len(self._gaps)

    def gaps(self, topic: str | None = None) -> list[Gap]:
        return list(self._gaps if topic is None else self._gaps_of.get(topic, ()))

    @property
    def intent_end(self) -> int:
        """The highest CommitLog offset of any intent: the local log must never restart below it."""
        return self._intent_end

    def named_topics(self) -> list[str]:
        with self._lock:
            return sorted(self._named)


def _cut(gap: Gap, first: int, last: int) -> list[Gap]:
    rest = without(gap.first, gap.last, [(first, last)])
    return [msgspec.structs.replace(gap, first=low, last=high) for low, high in rest]


def _place(placed: Placed) -> tuple[int, str]:
    return placed[:2]
