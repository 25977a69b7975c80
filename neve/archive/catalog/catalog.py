"""The catalog: what a broker's journal adds up to. Pure memory; safe to read from threads while one applies entries.

What a pull asks takes no lock (`queue_runs`), and each entry costs what it changes: a broker's loop asks while an entry
of fifty thousand names is applied. What is asked of a whole topic or of all is a copy, in log order as it is kept.
"""

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Concatenate, NamedTuple, ParamSpec, assert_never

import msgspec

from neve.archive.catalog.lazy_topics import LazyTopics
from neve.archive.catalog.name_blocks import NO_TIME, Block
from neve.archive.catalog.queue_runs import GapHit, Location, QueueRuns
from neve.archive.catalog.topic_catalog import TopicCatalog
from neve.archive.catalog.topic_parts import Packed, pack, packed_already
from neve.archive.format.checkpoint import (
    CheckpointHead,
    JournalMarks,
    PackName,
    TopicRow,
    encode_head,
)
from neve.archive.format.journal import (
    NO_CHECKPOINT,
    Abort,
    AnyEntry,
    Checkpoint,
    Commit,
    CommittedObject,
    Deleted,
    Epoch,
    Erase,
    Expire,
    Forget,
    Gap,
    Intent,
    OpenRewrite,
    PlannedObject,
    Replace,
    Topic,
    Unexpire,
)
from neve.archive.format.keys import fits_key, parse_data_key, parse_start, topic_component

__all__ = ["Catalog", "GapHit", "Location", "OutOfOrder", "Totals", "Written"]

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


class Written(NamedTuple):
    """A checkpoint whose packs are put: its content, and what it names."""

    through_seq: int
    content: bytes
    made: Packed


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
        self.anchor = b""  # of the last applied entry
        self._topics: dict[str, TopicCatalog] = {}
        self._object_count = 0
        self._gap_count = 0
        self._open: dict[int, dict[str, PlannedObject]] = {}
        self._intent_end = 0
        self._rewrites: dict[int, OpenRewrite] = {}
        self.last_rewrite = 0  # the highest number of an INTENT with a kind
        # What topics know of where they are written counts only in a checkpoint that follows the one they know it from.
        self._packed_at = NO_CHECKPOINT
        self._packs: dict[PackName, int] = {}
        self._stored: LazyTopics | None = None  # a reader's: topics that are taken when somebody asks

    # ---- applying

    def apply(self, seq: int, entry: AnyEntry, anchor: bytes = b"") -> None:
        """Apply entry `seq`, whose object has this anchor. Raises OutOfOrder."""
        with self._lock:
            if seq != self.next_seq:
                raise OutOfOrder(f"entry {seq} does not follow {self.next_seq - 1}")
            self.next_seq = seq + 1
            self.anchor = anchor
            self._dispatch(entry)

    # ---- written down

    def packed(self, broker: str, put: Callable[[int, bytes], None]) -> Written:
        """A checkpoint after the last entry that was applied: `put` gets its packs, with their numbers.

        By the thread that applies entries. What has not changed since the newest checkpoint stays where that has it.
        """
        assert self._stored is None, "a reader's"
        topics = [self._topics[topic] for topic in sorted(self._topics)]
        if self._packed_at == self.next_seq - 1:
            made = packed_already(topics, self._packs)  # all of it stands but the entry that says so
        else:
            known = self._packs if self.checkpoint == self._packed_at else {}
            made = pack(topics, known, self.next_seq - 1, put)
        rows = (one.row() for one in made.topics)
        content = encode_head(self._marks(broker), made.sizes.items(), rows, self.anchor)
        return Written(self.next_seq - 1, content, made)

    def stands(self, written: Written) -> None:
        """The checkpoint is in the store, and nothing was applied since; the next one may refer to it."""
        assert written.through_seq == self.next_seq - 1, "as it was written"
        written.made.adopt()
        self._packed_at, self._packs = written.through_seq, written.made.sizes

    def _marks(self, broker: str) -> JournalMarks:
        return JournalMarks(
            broker=broker,
            through_seq=self.next_seq - 1,
            epoch=self.epoch,
            owner=self.owner,
            log_uuid=self.log_uuid,
            master_epoch=self.master_epoch,
            last_round=self.last_round,
            checkpoint=self.checkpoint,
            open={number: list(names.values()) for number, names in self._open.items()},
            intent_end=self._intent_end,
            rewrites=dict(sorted(self._rewrites.items())),
            last_rewrite=self.last_rewrite,
        )

    def restore(self, head: CheckpointHead, topics: Iterable[TopicCatalog] | LazyTopics = ()) -> None:
        """Replace the content with that of a checkpoint; concurrent readers see it change in one step.

        Args:
            head: the checkpoint.
            topics: all topics of the head; or LazyTopics, which load a topic when a reader asks for it and then raise
                the store's errors to that reader.

        Raises:
            OutOfOrder: the checkpoint is older than the catalog.
            Damaged: a topic is damaged; the catalog is unchanged. So it is if loading a topic fails otherwise.
        """
        made = Catalog()
        made._take_marks(head)
        made.anchor = head.entry
        if isinstance(topics, LazyTopics):
            made._stored = topics
        else:
            made._take_topics(topics)
            made._packed_at, made._packs = head.through_seq, head.sizes()
        del made._lock
        with self._lock:
            if head.through_seq < self.next_seq - 1:
                raise OutOfOrder(f"checkpoint {head.through_seq} is older than entry {self.next_seq - 1}")
            vars(self).update(vars(made))

    def _take_marks(self, marks: JournalMarks) -> None:
        self.next_seq = marks.through_seq + 1
        self.epoch, self.owner, self.log_uuid = marks.epoch, marks.owner, marks.log_uuid
        self.master_epoch = marks.master_epoch
        self.last_round, self.checkpoint = marks.last_round, marks.checkpoint
        self._intent_end = marks.intent_end
        self._open = {number: {name.key: name for name in names} for number, names in marks.open.items()}
        self._rewrites, self.last_rewrite = dict(marks.rewrites), marks.last_rewrite

    def _take_topics(self, topics: Iterable[TopicCatalog]) -> None:
        for of in topics:
            self._topics[of.topic] = of
            self._object_count += of.count
            self._gap_count += len(of.gaps)

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
            case Erase():
                self._apply_erase(entry)
            case Forget():
                self._apply_forget(entry)
            case _:
                assert_never(entry)

    def _apply_epoch(self, entry: Epoch) -> None:
        # Master epochs of different logs are not comparable.
        known = self.master_epoch if entry.log_uuid == self.log_uuid else 0
        self.epoch, self.owner, self.log_uuid = entry.epoch, entry.owner, entry.log_uuid
        self.master_epoch = max(known, entry.master_epoch)

    def _apply_intent(self, entry: Intent) -> None:
        if entry.kind:
            self._apply_rewrite(entry)
            return
        self.last_round = max(self.last_round, entry.round)
        self._open[entry.round] = {name.key: name for name in entry.names}
        for name in entry.names:
            self._intent_end = max(self._intent_end, name.end)
            self._do(name.topic, TopicCatalog.note_offsets, {queue: last for queue, (_, last) in name.queues.items()})

    def _apply_rewrite(self, entry: Intent) -> None:
        """Its rows have been named by a round: no mark of the log moves."""
        self.last_rewrite = max(self.last_rewrite, entry.round)
        if entry.names:
            self._rewrites[entry.round] = OpenRewrite(entry.kind, entry.old, entry.names)

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

    def _apply_erase(self, entry: Erase) -> None:
        old, new = self._by_topic(entry.old), _by_topic(entry.new)
        gaps: dict[str, list[Gap]] = {}
        for topic, queue, first, last in entry.rows:
            gap = Gap(topic=topic, queue=queue, first=first, last=last, reason=entry.reason)
            gaps.setdefault(topic, []).append(gap)
        for topic in old | new | gaps:
            of_topic = old.get(topic, {}), new.get(topic, []), gaps.get(topic, [])
            self._do(topic, TopicCatalog.erase, *of_topic, entry.delete_after_ms)
        self._close_rewrites([name.key for name in entry.new], list(self._rewrites))

    def _apply_forget(self, entry: Forget) -> None:
        """Who wrote it has seen that nothing is left of them; every follower has applied the same entries by now."""
        for topic in entry.topics:
            of = self._topics.pop(topic, None)
            if of is not None:
                self._object_count -= of.count
                self._gap_count -= len(of.gaps)
            if self._stored is not None:
                self._stored.forget(topic)

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
        folders: dict[str, str | None] = {}  # many keys have the same: of which topic, None: of one that is not known
        for key in keys:
            folder, _, file = key.rpartition("/")
            start = parse_start(file)
            if folder in folders and start is not None:
                if (known := folders[folder]) is not None:
                    found.setdefault(known, {})[key] = start
                continue
            parts = parse_data_key(key)
            if parts is None:
                for topic in self._names():
                    found.setdefault(topic, {})[key] = None
                continue
            topic = parts.topic or ""
            if parts.topic is None:
                if cut is None:
                    cut = {topic_component(one): one for one in self._names() if not fits_key(one)}
                component = key.removeprefix(f"{parts.prefix}/").partition("/")[0]
                topic = cut.get(component, "")
            is_known = topic in self._topics or (self._stored is not None and topic in self._stored)
            folders[folder] = topic if is_known else None
            if is_known:
                found.setdefault(topic, {})[key] = parts.start
        return found

    def _do(
        self, topic: str, change: Callable[Concatenate[TopicCatalog, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        if self._stored is not None and topic in self._stored:
            self._stored.change(topic, lambda of: change(of, *args, **kwargs))
            return
        of = self._of(topic)
        objects, gaps = of.count, len(of.gaps)
        of.own = None  # what a checkpoint says of it is not so any more
        change(of, *args, **kwargs)
        self._object_count += of.count - objects
        self._gap_count += len(of.gaps) - gaps

    def _of(self, topic: str) -> TopicCatalog:
        """For an entry that names it; who asks takes it out of `_topics`."""
        of = self._topics.get(topic)
        if of is None:
            of = self._topics[topic] = TopicCatalog(topic)
        return of

    # ---- topics

    def _asked(self, topic: str) -> TopicCatalog | None:
        of = self._topics.get(topic)
        return self._stored.get(topic) if of is None and self._stored is not None else of

    def copy_of(self, topic: str) -> TopicCatalog | None:
        """What is known of a topic, for who goes on from there."""
        of = self._asked(topic)
        return None if of is None else of.copy()

    def _names(self) -> list[str]:
        """Of all topics, in order."""
        with self._lock:
            return sorted(self._topics if self._stored is None else {*self._topics, *self._stored.names()})

    def _each(self) -> Iterator[TopicCatalog]:
        """All topics; what is taken for that may be let go again."""
        if self._stored is None:
            with self._lock:
                topics = list(self._topics.values())
            yield from topics
            return
        for topic in self._names():
            if (of := self._asked(topic)) is not None:
                yield of

    def _row(self, topic: str) -> TopicRow | None:
        """Of a topic that is as its checkpoint says, without taking it."""
        return None if self._stored is None else self._stored.row(topic)

    # ---- asking: offsets; no lock

    def _held(self, topic: str, queue: int) -> QueueRuns | None:
        of = self._asked(topic)
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
        of = self._asked(topic)
        return [] if of is None else sorted(of.queues)

    def through(self, topic: str) -> int | None:
        """The CommitLog offset below which the topic is settled; None: no round has touched it."""
        of = self._asked(topic)
        return None if of is None else of.through

    def topic_entry(self, topic: str) -> Topic | None:
        of = self._asked(topic)
        return None if of is None else of.entry

    def named_offsets(self, topic: str) -> dict[int, int]:
        """queue -> the highest offset that any entry ever named; none is given twice."""
        of = self._asked(topic)
        return {} if of is None else of.named_offsets()

    # ---- asking: objects and rounds

    def known_topics(self) -> list[str]:
        """Of which any entry said anything."""
        return self._names()

    def topics(self) -> list[str]:
        """Topics with an object in the readers' view, a mark or a tombstone."""
        if self._stored is None:
            return sorted(of.topic for of in self._each() if of.is_listed)
        return [topic for topic in self._names() if self.has_topic(topic)]

    def has_topic(self, topic: str) -> bool:
        """Whether `topics` lists the topic."""
        row = self._row(topic)
        if row is not None:
            return row.is_listed or row.objects > 0
        of = self._asked(topic)
        return of is not None and of.is_listed

    def topics_with_objects(self) -> list[str]:
        if self._stored is None:
            return sorted(of.topic for of in self._each() if of.count)
        return [topic for topic in self._names() if self._count(topic)[0]]

    @property
    def object_count(self) -> int:
        """How many objects are in the readers' view."""
        return self._object_count if self._stored is None else sum(self._count(topic)[0] for topic in self._names())

    def _count(self, topic: str) -> tuple[int, int]:
        """(objects, gaps)"""
        row = self._row(topic)
        if row is not None:
            return row.objects, row.gaps
        of = self._asked(topic)
        return (0, 0) if of is None else (of.count, len(of.gaps))

    def objects(self, topic: str | None = None) -> list[CommittedObject]:
        """Objects in the readers' view, in log order. Of a topic: all of an archive are too many to hold at once."""
        return list(self.each_object() if topic is None else self.from_oldest(topic))

    def each_object(self) -> Iterator[CommittedObject]:
        """All objects in the readers' view, topic by topic."""
        return (name for topic in self._names() for name in self.from_oldest(topic))

    def from_oldest(self, topic: str) -> Iterator[CommittedObject]:
        """The objects of a topic in log order, for who stops early."""
        of = self._asked(topic)
        return iter(()) if of is None else of.names()

    def each_of(self, topic: str) -> Iterator[tuple[int | None, CommittedObject]]:
        """Of a topic what is in view (None), in log order, then what is not and isn't deleted yet, with its time.

        As they are at this instant: none is missed that leaves the view, or comes back, while they are gone through.
        """
        with self._lock:
            of = self._asked(topic)
            return iter(()) if of is None else chain(((None, name) for name in of.names()), of.expiring_names())

    def blocks_from_oldest(self, topic: str) -> tuple[Block, ...]:
        """The same, packed, as they are at this instant."""
        of = self._asked(topic)
        return () if of is None else of.blocks

    def stored_since(self, topic: str, time_ms: int) -> Iterator[CommittedObject]:
        """The objects of a topic in log order but for some that have no row group as young; few are held at a time."""
        of = self._asked(topic)
        return iter(()) if of is None else of.names_since(time_ms)

    def stored_within(self, topic: str, start: int | None, end: int | None) -> Iterator[CommittedObject]:
        """The objects of a topic in log order but for some that have no row group of [start, end)."""
        of = self._asked(topic)
        return iter(()) if of is None else of.names_of(start, end)

    def objects_at(self, physical_offset: int) -> Iterator[CommittedObject]:
        """Those whose range of the CommitLog holds it; what can't is not unpacked."""
        return (name for of in self._each() for name in of.names_at(physical_offset))

    def around(self, name: CommittedObject) -> list[CommittedObject]:
        """The objects of its topic, in view or not deleted yet, whose range of the CommitLog has its begin; it too."""
        of = self._asked(name.topic)
        return [] if of is None else [*of.names_at(name.start), *of.expiring_at(name.start)]

    def from_highest(self, floor: Callable[[str], int], end: int) -> Iterator[CommittedObject]:
        """Objects whose range of the CommitLog lies at or above their topic's floor and ends by `end`.

        The highest end first; of equal ones the one of fewer wire bytes. For who stops early: few are unpacked.
        """
        closed: list[tuple[int, int, int, Block]] = []
        for of in self._each():
            if of.blocks:
                low = floor(of.topic)
                closed += [(-block.end, id(block), low, block) for block in of.blocks_within(low, end)]
        heapq.heapify(closed)
        names: list[tuple[int, int, str, CommittedObject]] = []
        while closed or names:
            if closed and (not names or closed[0][0] <= names[0][0]):
                _, _, low, block = heapq.heappop(closed)
                for name in block.names():
                    if low <= name.start and name.end <= end:
                        heapq.heappush(names, (-name.end, name.wire_bytes, name.key, name))
            else:
                yield heapq.heappop(names)[3]

    def may_expire(self, topic: str, newest_ms: int) -> bool:
        """False: no row group of the topic's oldest objects is of that time or older. Nothing is unpacked for it."""
        of = self._asked(topic)
        return of is not None and of.may_expire(newest_ms)

    def totals(self) -> Totals:
        objects = rows = size = end = 0
        newest = NO_TIME
        for of in self._each():
            for block in of.blocks:
                objects, rows, size = objects + block.count, rows + block.rows, size + block.bytes
                end, newest = max(end, block.end), max(newest, block.newest_time)
        return Totals(objects, rows, size, end, newest)

    def next_uncovered(self, topic: str, offset: int) -> tuple[int, int | None]:
        """(first CommitLog offset from `offset` on that no object of the topic covered, where the next one began).

        Below `through` all is covered; beyond it there are objects only where a name before them was closed without.
        """
        with self._lock:
            of = self._asked(topic)
            return (offset, None) if of is None else of.next_uncovered(offset)

    def expiring(self) -> dict[str, int]:
        """Names out of view that are not deleted yet -> the time after which they may be."""
        return {name.key: after for after, name in self._expiring()}

    def due_names(self, topic: str, now_ms: int) -> list[str]:
        """Keys of a topic out of view whose time has come: their objects may be deleted."""
        of = self._asked(topic)
        return [] if of is None else of.due(now_ms)

    def still_due(self, keys: Iterable[str], now_ms: int) -> dict[str, list[str]]:
        """Topic -> those of these keys whose objects may be deleted; no topic is looked at but theirs."""
        with self._lock:
            by_topic = self._by_topic(keys)
            found = {
                topic: of.due_of(wanted, now_ms)
                for topic, wanted in by_topic.items()
                if (of := self._asked(topic)) is not None
            }
            return {topic: due for topic, due in found.items() if due}

    def expiring_topics(self) -> list[str]:
        """Topics with an object out of view that is not deleted yet; nothing is unpacked for it."""
        return sorted(of.topic for of in self._each() if of.expiring)

    def expiring_of(self, topic: str) -> list[tuple[int, CommittedObject]]:
        """(after which time it may be deleted, name) of a topic's objects out of view that are not deleted yet."""
        of = self._asked(topic)
        return [] if of is None else list(of.expiring_names())

    def expiring_near(
        self, topic: str, spans: Mapping[int, Sequence[tuple[int, int]]]
    ) -> Iterator[tuple[int, CommittedObject]]:
        """Those of them that may have a row of these spans, which lie apart in order, by queue; few are unpacked."""
        of = self._asked(topic)
        return iter(()) if of is None else of.expiring_near(spans)

    def nothing_below(self, topic: str) -> dict[int, int]:
        """Queue -> below which offset it has expired, and all objects that had any are deleted."""
        with self._lock:
            of = self._asked(topic)
            return {} if of is None else of.nothing_below()

    def stays_until(self, name: CommittedObject) -> int | None:
        """The time after which an object out of view may be deleted; None: it is in view, or deleted."""
        of = self._asked(name.topic)
        return None if of is None else of.stays_until(name)

    def _expiring(self) -> Iterator[tuple[int, CommittedObject]]:
        return (one for of in self._each() for one in of.expiring_names())

    def are_live(self, names: Iterable[CommittedObject]) -> bool:
        """Whether all of them are in the readers' view."""
        with self._lock:
            return all((of := self._asked(one.topic)) and of.is_live(one.key, one.start) for one in names)

    def lost_by(self, entry: Erase) -> list[str]:
        """Keys of those in view of which rows would be nowhere after it: in no object, and in no gap."""
        with self._lock:
            return [
                key
                for topic, keys in self._by_topic(entry.old).items()
                if (of := self._asked(topic)) is not None
                for key in of.lost_by(keys, entry.new, entry.rows)
            ]

    def knows(self, key: str) -> bool:
        """Whether an object is anyone's: live, expiring, or in an open intent. The sweep keeps what is."""
        with self._lock:
            return (
                any(
                    of.has(key, start)
                    for topic, keys in self._by_topic([key]).items()
                    for start in keys.values()
                    if (of := self._asked(topic)) is not None
                )
                or any(key in names for names in self._open.values())
                or any(key == name.key for held in self._rewrites.values() for name in held.names)
            )

    def forgettable(self) -> list[Topic]:
        """Tombstones of topics of which the archive has no object, whether in view, expiring or in an open intent."""
        with self._lock:
            open_topics = {name.topic for names in self._open.values() for name in names.values()}
            open_topics.update(name.topic for held in self._rewrites.values() for name in held.names)
            return [
                of.entry
                for of in self._each()
                if of.entry is not None and of.entry.deleted and not of.blocks and not of.expiring
                if of.topic not in open_topics
            ]

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

    def open_intents(self) -> dict[int, list[PlannedObject]]:
        """Names of offload rounds."""
        with self._lock:
            return {number: list(names.values()) for number, names in sorted(self._open.items())}

    @property
    def gap_count(self) -> int:
        return self._gap_count if self._stored is None else sum(self._count(topic)[1] for topic in self._names())

    def gaps(self, topic: str | None = None) -> list[Gap]:
        if topic is None:
            return [gap for one in self._names() for gap in self.gaps(one)]
        of = self._asked(topic)
        return [] if of is None else list(of.gaps)

    @property
    def intent_end(self) -> int:
        """The highest CommitLog offset of any intent: the local log must never restart below it."""
        return self._intent_end

    def named_topics(self) -> list[str]:
        return sorted(of.topic for of in self._each() if of.is_named)


def _by_topic(names: Iterable[CommittedObject]) -> dict[str, list[CommittedObject]]:
    found: dict[str, list[CommittedObject]] = {}
    for name in names:
        found.setdefault(name.topic, []).append(name)
    return found


def _topic(of: TopicCatalog) -> str:
    return of.topic
