"""The catalog: what a broker's journal adds up to. Pure memory; safe to read from threads while one applies entries.

What a pull asks takes no lock (`queue_runs`), and each entry costs what it changes: a broker's loop asks while an entry
of fifty thousand names is applied. What is asked of a whole topic or of all is a copy, in log order as it is kept.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Concatenate, NamedTuple, ParamSpec, assert_never

import msgspec

from neve.archive.checkpoint import CatalogState, encode_checkpoint
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
from neve.archive.keys import fits_key, parse_data_key, topic_component
from neve.archive.name_blocks import NEVER, NO_TIME
from neve.archive.queue_runs import GapHit, Location, QueueRuns
from neve.archive.topic_catalog import TopicCatalog

__all__ = ["Catalog", "GapHit", "Location", "OutOfOrder", "Totals"]

P = ParamSpec("P")


class OutOfOrder(ValueError):
    """An entry was applied at a number that does not follow the last one."""


class Totals(NamedTuple):
    """Of the objects in the readers' view: how many, what they hold, where and when the last of it lies."""

    objects: int
    rows: int
    bytes: int
    end: int  # of their CommitLog ranges
    newest_ms: int  # -1: no time is known


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
        self._topics: dict[str, TopicCatalog] = {}
        self._object_count = 0
        self._gap_count = 0
        self._open: dict[int, dict[str, IntentName]] = {}
        self._intent_end = 0
        self._rewrites: dict[int, OpenRewrite] = {}
        self.last_rewrite = 0  # the highest number of an INTENT with a kind

    # ---- applying

    def apply(self, seq: int, entry: AnyEntry) -> None:
        with self._lock:
            if seq != self.next_seq:
                raise OutOfOrder(f"entry {seq} does not follow {self.next_seq - 1}")
            self.next_seq = seq + 1
            self._dispatch(entry)

    def state(self, broker: str) -> CatalogState:
        """All of it, each name unpacked, after the last entry that was applied."""
        with self._lock:
            state = self._state(broker)
            topics = [self._topics[topic] for topic in sorted(self._topics)]
            state.names = [name for of in topics for name in of.names()]
            state.expiring = [(name, after) for of in topics for after, name in of.expiring_names()]
            return state

    def encoded(self, broker: str) -> bytes:
        """A checkpoint after the last entry that was applied. Few names are unpacked at a time."""
        with self._lock:
            state = self._state(broker)
            topics = [self._topics[topic] for topic in sorted(self._topics)]
            names = [of.names() for of in topics]
            expiring = [of.expiring_names() for of in topics]
        out_of_view = ((name, after) for of in expiring for after, name in of)
        return encode_checkpoint(state, (name for of in names for name in of), out_of_view)

    def _state(self, broker: str) -> CatalogState:
        """Without the names."""
        topics = [self._topics[topic] for topic in sorted(self._topics)]
        return CatalogState(
            broker=broker,
            through_seq=self.next_seq - 1,
            epoch=self.epoch,
            owner=self.owner,
            log_uuid=self.log_uuid,
            master_epoch=self.master_epoch or msgspec.UNSET,
            last_round=self.last_round,
            checkpoint=self.checkpoint,
            queues=[(of.topic, queue, held.minimum) for of in topics for queue, held in sorted(of.queues.items())],
            through={of.topic: of.through for of in topics if of.through is not None},
            covered={of.topic: sorted(of.covered) for of in topics if of.covered},
            open={number: list(names.values()) for number, names in self._open.items()},
            intent_end=self._intent_end,
            rewrites=dict(sorted(self._rewrites.items())) or msgspec.UNSET,
            last_rewrite=self.last_rewrite or msgspec.UNSET,
            named={of.topic: of.named_offsets() for of in topics if of.is_named},
            topics=[of.entry for of in topics if of.entry is not None],
            gaps=[gap for of in topics for gap in of.gaps],
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
        self._intent_end = state.intent_end
        self._open = {number: {name.key: name for name in names} for number, names in state.open.items()}
        self._rewrites, self.last_rewrite = dict(state.rewrites or {}), state.last_rewrite or 0
        for topic, through in state.through.items():
            self._of(topic).through = through
        for topic, ranges in state.covered.items():
            self._of(topic).covered = set(ranges) or None
        for topic, after, names in state.expiring_by_topic():
            self._of(topic).restore_expiring(names, after)
        for topic, lasts in state.named.items():
            self._of(topic).note_offsets(lasts)
        for entry in state.topics:
            self._of(entry.topic).entry = entry
        for topic, queue, minimum in state.queues:
            self._of(topic).queue(queue).minimum = minimum
        for gap in state.gaps:
            self._do(gap.topic, TopicCatalog.note_gap, gap)
        for topic, names in state.names_by_topic():
            self._do(topic, TopicCatalog.enter, names)

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
                for topic, keys in self._by_topic(entry.keys).items():
                    self._do(topic, TopicCatalog.unexpire, keys)
                for topic, minimums in entry.minimums.items():
                    self._do(topic, TopicCatalog.set_minimums, minimums)
            case Deleted():
                for topic, keys in self._by_topic(entry.keys).items():
                    self._do(topic, TopicCatalog.forget, keys)
            case Topic():
                self._do(entry.topic, TopicCatalog.tell, entry)
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
            self._do(name.topic, TopicCatalog.note_offsets, {queue: last for queue, (_, last) in name.queues.items()})

    def _apply_rewrite(self, kind: str, entry: Intent) -> None:
        """Its rows have been named by a round: no mark of the log moves."""
        self.last_rewrite = max(self.last_rewrite, entry.round)
        if entry.names:
            self._rewrites[entry.round] = OpenRewrite(kind, entry.old or [], entry.names)

    def _apply_commit(self, entry: Commit) -> None:
        named = _by_topic(entry.names)
        self._close(entry.round, [name.key for name in entry.names])
        lowest: dict[str, int] = {}
        for name in self._open.get(entry.round, {}).values():
            lowest[name.topic] = min(lowest.get(name.topic, name.start), name.start)
        for topic in named | entry.through:
            self._do(topic, TopicCatalog.commit, named.get(topic, []), entry.through.get(topic), lowest.get(topic))

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
        self._do(entry.topic, TopicCatalog.note_gap, entry)
        self._do(entry.topic, TopicCatalog.note_offsets, {entry.queue: entry.last})
        if entry.through >= 0:
            self._do(entry.topic, TopicCatalog.advance, entry.through)

    def _apply_expire(self, entry: Expire) -> None:
        for topic, keys in self._by_topic(entry.keys).items():
            self._do(topic, TopicCatalog.expire, keys, entry.delete_after_ms)
        for topic, minimums in entry.minimums.items():
            self._do(topic, TopicCatalog.raise_minimums, minimums)

    def _apply_replace(self, entry: Replace) -> None:
        old, new = self._by_topic(entry.old), _by_topic(entry.new)
        for topic in old | new:
            self._do(topic, TopicCatalog.replace, old.get(topic, {}), new.get(topic, []), entry.delete_after_ms)
        self._close_rewrites([name.key for name in entry.new], list(self._rewrites))

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

    def _by_topic(self, keys: Iterable[str]) -> dict[str, dict[str, int | None]]:
        """topic -> key -> where it says that its object begins. One of another grammar may be any topic's."""
        found: dict[str, dict[str, int | None]] = {}
        cut: dict[str, str] | None = None
        for key in keys:
            parts = parse_data_key(key)
            if parts is None:
                for topic in self._topics:
                    found.setdefault(topic, {})[key] = None
                continue
            topic = parts.topic or ""
            if parts.topic is None:
                if cut is None:
                    cut = {topic_component(one): one for one in self._topics if not fits_key(one)}
                component = key.removeprefix(f"{parts.prefix}/").partition("/")[0]
                topic = cut.get(component, "")
            if topic in self._topics:
                found.setdefault(topic, {})[key] = parts.start
        return found

    def _do(
        self, topic: str, change: Callable[Concatenate[TopicCatalog, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        of = self._of(topic)
        objects, gaps = of.count, len(of.gaps)
        change(of, *args, **kwargs)
        self._object_count += of.count - objects
        self._gap_count += len(of.gaps) - gaps

    def _of(self, topic: str) -> TopicCatalog:
        """For an entry that names it; who asks takes it out of `_topics`."""
        of = self._topics.get(topic)
        if of is None:
            of = self._topics[topic] = TopicCatalog(topic)
        return of

    # ---- asking: offsets; no lock

    def _held(self, topic: str, queue: int) -> QueueRuns | None:
        of = self._topics.get(topic)
        return None if of is None else of.queues.get(queue)

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
        return iter(()) if held is None else held.locations_from(0)

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
        of = self._topics.get(topic)
        return [] if of is None else sorted(of.queues)

    def through(self, topic: str) -> int | None:
        """The CommitLog offset below which the topic is settled; None: no round has touched it."""
        of = self._topics.get(topic)
        return None if of is None else of.through

    def topic_entry(self, topic: str) -> Topic | None:
        of = self._topics.get(topic)
        return None if of is None else of.entry

    def named_offsets(self, topic: str) -> dict[int, int]:
        """queue -> the highest offset that any entry ever named; none is given twice."""
        of = self._topics.get(topic)
        return {} if of is None else of.named_offsets()

    # ---- asking: objects and rounds

    def topics(self) -> list[str]:
        """Topics with an object in the readers' view, a gap, a mark or a tombstone."""
        with self._lock:
            return sorted(topic for topic, of in self._topics.items() if of.is_told)

    def topics_with_objects(self) -> list[str]:
        with self._lock:
            return sorted(topic for topic, of in self._topics.items() if of.count)

    @property
    def object_count(self) -> int:
        """How many objects are in the readers' view."""
        return self._object_count

    def objects(self, topic: str | None = None) -> list[CommittedName]:
        """Objects in the readers' view, in log order. Of a topic: all of an archive are too many to hold at once."""
        return list(self.each_object() if topic is None else self.from_oldest(topic))

    def each_object(self) -> Iterator[CommittedName]:
        """All objects in the readers' view, topic by topic."""
        return (name for topic in self.topics_with_objects() for name in self.from_oldest(topic))

    def from_oldest(self, topic: str) -> Iterator[CommittedName]:
        """The objects of a topic in log order, for who stops early."""
        of = self._topics.get(topic)
        return iter(()) if of is None else of.names()

    def objects_at(self, physical_offset: int) -> Iterator[CommittedName]:
        """Those whose range of the CommitLog holds it; what can't is not unpacked."""
        with self._lock:
            topics = list(self._topics.values())
        return (name for of in topics for name in of.names_at(physical_offset))

    def may_expire(self, topic: str, newest_ms: int) -> bool:
        """False: no row group of the topic's oldest objects is of that time or older. Nothing is unpacked for it."""
        of = self._topics.get(topic)
        return of is not None and of.may_expire(newest_ms)

    def totals(self) -> Totals:
        with self._lock:
            blocks = [block for of in self._topics.values() for block in of.blocks]
        return Totals(
            objects=sum(block.count for block in blocks),
            rows=sum(block.rows for block in blocks),
            bytes=sum(block.bytes for block in blocks),
            end=max((block.end for block in blocks), default=0),
            newest_ms=max((block.newest_time for block in blocks), default=NO_TIME),
        )

    def next_uncovered(self, topic: str, offset: int) -> tuple[int, int | None]:
        """(first CommitLog offset from `offset` on that no object of the topic covered, where the next one began).

        Below `through` all is covered; beyond it there are objects only where a name before them was closed without.
        """
        with self._lock:
            of = self._topics.get(topic)
            return (offset, None) if of is None else of.next_uncovered(offset)

    def expiring(self) -> dict[str, int]:
        """Names out of view that are not deleted yet -> the time after which they may be."""
        return {name.key: after for after, name in self._expiring()}

    def due_names(self, now_ms: int) -> list[str]:
        """Keys out of view whose time has come: their objects may be deleted."""
        return sorted(name.key for after, name in self._expiring(now_ms))

    def expiring_names(self) -> list[CommittedName]:
        """Names out of view whose objects are not deleted yet."""
        return [name for _, name in self._expiring()]

    def _expiring(self, until_ms: int = NEVER) -> Iterator[tuple[int, CommittedName]]:
        with self._lock:
            topics = [of.expiring_names(until_ms) for of in self._topics.values()]
        return (one for names in topics for one in names)

    def are_live(self, names: Iterable[CommittedName]) -> bool:
        """Whether all of them are in the readers' view."""
        with self._lock:
            return all((of := self._topics.get(one.topic)) and of.is_live(one.key, one.start) for one in names)

    def knows(self, key: str) -> bool:
        """Whether an object is anyone's: live, expiring, or in an open intent. The sweep keeps what is."""
        with self._lock:
            return (
                any(
                    self._topics[topic].has(key, start)
                    for topic, keys in self._by_topic([key]).items()
                    for start in keys.values()
                )
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
        return self._gap_count

    def gaps(self, topic: str | None = None) -> list[Gap]:
        if topic is None:
            with self._lock:
                return [gap for one in sorted(self._topics) for gap in self._topics[one].gaps]
        of = self._topics.get(topic)
        return [] if of is None else list(of.gaps)

    @property
    def intent_end(self) -> int:
        """The highest CommitLog offset of any intent: the local log must never restart below it."""
        return self._intent_end

    def named_topics(self) -> list[str]:
        with self._lock:
            return sorted(topic for topic, of in self._topics.items() if of.is_named)


def _by_topic(names: Iterable[CommittedName]) -> dict[str, list[CommittedName]]:
    found: dict[str, list[CommittedName]] = {}
    for name in names:
        found.setdefault(name.topic, []).append(name)
    return found
