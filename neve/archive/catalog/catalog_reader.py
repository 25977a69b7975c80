"""Queries of a catalog."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from neve.archive.catalog.entry_changes import keys_by_topic
from neve.archive.catalog.lazy_topics import LazyTopics
from neve.archive.catalog.name_blocks import NO_TIME, Block
from neve.archive.catalog.queue_runs import GapHit, Location, QueueRuns
from neve.archive.catalog.rounds import CatalogRounds
from neve.archive.catalog.topic_catalog import TopicCatalog
from neve.archive.format.checkpoint import TopicRow
from neve.archive.format.journal import NO_CHECKPOINT, CommittedObject, Erase, Gap, Topic


class ObjectTotals(NamedTuple):
    """The sums over all objects in the readers' view."""

    objects: int
    rows: int
    bytes: int
    end: int  # the highest end of their CommitLog ranges
    newest_ms: int  # the newest store time, -1 if none is known


class CatalogReader:
    """The objects, gaps and minimums of a broker's archive after an entry of its journal.

    Reads are thread-safe while one thread applies entries. Queries of one queue take no lock, because a broker's loop
    makes one at each pull. Queries of a whole topic or of all topics return a copy in log order.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.next_seq = 0
        self.epoch = 0
        self.owner = ""
        self.log_uuid = ""
        self.master_epoch = 0  # the highest of any EPOCH of this log; 0 outside a broker set
        self.checkpoint = NO_CHECKPOINT
        self.anchor = b""  # of the last applied entry
        self.rounds = CatalogRounds(self._lock)
        self._topics: dict[str, TopicCatalog] = {}
        self._object_count = 0
        self._gap_count = 0
        self._lazy: LazyTopics | None = None  # the topics of a checkpoint that load on demand

    # ---- one topic, one queue

    def _get(self, topic: str) -> TopicCatalog | None:
        found = self._topics.get(topic)
        return self._lazy.get(topic) if found is None and self._lazy is not None else found

    def topic(self, topic: str) -> TopicCatalog:
        """Return a topic to read from; an empty one if the catalog has no such topic."""
        return self._get(topic) or TopicCatalog(topic)

    def queue(self, topic: str, queue: int) -> QueueRuns:
        """Return a queue to read from; an empty one if the catalog has no such queue."""
        found = self._get(topic)
        return (None if found is None else found.queues.get(queue)) or QueueRuns(queue)

    def find(self, topic: str, queue: int, offset: int) -> Location | GapHit | None:
        """Return the location of an offset, or the gap that contains it.

        None if the offset is not in the archive: below the minimum, above the end, or still only local.
        """
        return self.queue(topic, queue).find(offset)

    def next_location(self, location: Location) -> Location | None:
        """Return the run that continues a run without a hole, possibly in another object."""
        found = self.find(location.name.topic, location.queue, location.last + 1)
        return found if isinstance(found, Location) else None

    def min_offset(self, topic: str, queue: int) -> int | None:
        """Return the lowest offset in the archive; None if the queue has none."""
        return self.queue(topic, queue).min_offset()

    def max_offset(self, topic: str, queue: int) -> int | None:
        """Return one above the highest offset in the archive; None if the queue has none."""
        return self.queue(topic, queue).max_offset()

    def recorded_minimum(self, topic: str, queue: int) -> int:
        """Return the offset below which the queue has expired or was deleted, even if the archive has nothing left."""
        return self.queue(topic, queue).minimum

    def queues(self, topic: str) -> list[int]:
        """Return the queues that any entry named."""
        return sorted(self.topic(topic).queues)

    def through(self, topic: str) -> int | None:
        """Return the CommitLog offset below which the topic is settled; None if no round has archived from it."""
        return self.topic(topic).through

    def topic_entry(self, topic: str) -> Topic | None:
        """Return the newest TOPIC entry."""
        return self.topic(topic).entry

    def named_offsets(self, topic: str) -> dict[int, int]:
        """Return for each queue the highest offset that any entry named; no offset is assigned twice."""
        return self.topic(topic).named_offsets()

    def next_uncovered(self, topic: str, offset: int) -> tuple[int, int | None]:
        """Return the first CommitLog offset from `offset` on that no object covered, and the start of the next object.

        Everything below `through` is covered. Objects exist beyond it only where an earlier planned object was aborted.
        """
        with self._lock:
            return self.topic(topic).next_uncovered(offset)

    # ---- topics

    def known_topics(self) -> list[str]:
        """Return all topics that any entry named, sorted."""
        with self._lock:
            return sorted(self._topics if self._lazy is None else {*self._topics, *self._lazy.names()})

    def topics(self) -> list[str]:
        """Return the topics with an object in the readers' view, a `through` or a TOPIC entry, sorted."""
        if self._lazy is None:
            return sorted(one.topic for one in self._each() if one.is_listed)
        return [topic for topic in self.known_topics() if self.has_topic(topic)]

    def has_topic(self, topic: str) -> bool:
        """Return whether `topics` lists the topic."""
        row = self._row(topic)
        if row is not None:
            return row.is_listed or row.objects > 0
        return self.topic(topic).is_listed

    def topics_with_objects(self) -> list[str]:
        """Return the topics with an object in the readers' view, sorted."""
        if self._lazy is None:
            return sorted(one.topic for one in self._each() if one.count)
        return [topic for topic in self.known_topics() if self._counts(topic)[0]]

    def named_topics(self) -> list[str]:
        """Return the topics of which an entry named an offset, sorted."""
        return sorted(one.topic for one in self._each() if one.is_named)

    def expiring_topics(self) -> list[str]:
        """Return the topics with an expired object that is not deleted yet, sorted; nothing is unpacked."""
        return sorted(one.topic for one in self._each() if one.expiring)

    def _each(self) -> Iterator[TopicCatalog]:
        """Yield all topics; a lazily loaded one may be evicted again afterwards."""
        if self._lazy is None:
            with self._lock:
                topics = list(self._topics.values())
            yield from topics
            return
        for topic in self.known_topics():
            if (found := self._get(topic)) is not None:
                yield found

    def _row(self, topic: str) -> TopicRow | None:
        """Return the checkpoint's row of a topic that has not changed since, without loading it."""
        return None if self._lazy is None else self._lazy.row(topic)

    def _counts(self, topic: str) -> tuple[int, int]:
        """Return the numbers of objects and gaps."""
        row = self._row(topic)
        if row is not None:
            return row.objects, row.gaps
        found = self.topic(topic)
        return found.count, len(found.gaps)

    # ---- objects

    @property
    def object_count(self) -> int:
        """The number of objects in the readers' view."""
        if self._lazy is None:
            return self._object_count
        return sum(self._counts(topic)[0] for topic in self.known_topics())

    def objects(self, topic: str | None = None) -> list[CommittedObject]:
        """Return the objects in the readers' view in log order; prefer `each_object` for a whole archive."""
        return list(self.each_object() if topic is None else self.topic(topic).names())

    def each_object(self) -> Iterator[CommittedObject]:
        """Yield all objects in the readers' view, topic by topic."""
        return (name for topic in self.known_topics() for name in self.topic(topic).names())

    def each_of(self, topic: str) -> Iterator[tuple[int | None, CommittedObject]]:
        """Yield a topic's objects in view, each with None, then the expired ones with their deletion time.

        The iteration is over one instant: an object that expires or returns meanwhile is not missed.
        """
        with self._lock:
            found = self.topic(topic)
            return chain(((None, name) for name in found.names()), found.expiring_names())

    def objects_at(self, physical_offset: int) -> Iterator[CommittedObject]:
        """Yield the objects whose CommitLog range contains an offset; only candidate blocks are unpacked."""
        return (name for one in self._each() for name in one.names_at(physical_offset))

    def from_highest(self, floor: Callable[[str], int], end: int) -> Iterator[CommittedObject]:
        """Yield the objects whose CommitLog range is within [floor(topic), end), the highest end first.

        Among equal ends, the object with fewer wire bytes is first. Blocks are unpacked one after another.
        """
        closed: list[tuple[int, int, int, Block]] = []
        for one in self._each():
            if one.blocks:
                low = floor(one.topic)
                closed += [(-block.end, id(block), low, block) for block in one.blocks_within(low, end)]
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

    def totals(self) -> ObjectTotals:
        """Return the sums over all objects in the readers' view."""
        objects = rows = size = end = 0
        newest = NO_TIME
        for one in self._each():
            for block in one.blocks:
                objects, rows, size = objects + block.count, rows + block.rows, size + block.bytes
                end, newest = max(end, block.end), max(newest, block.newest_time)
        return ObjectTotals(objects, rows, size, end, newest)

    def are_live(self, names: Iterable[CommittedObject]) -> bool:
        """Return whether all of these objects are in the readers' view."""
        with self._lock:
            return all(self.topic(one.topic).is_live(one.key, one.start) for one in names)

    def knows(self, key: str) -> bool:
        """Return whether an object is in view, expiring or open; a sweep keeps such an object."""
        with self._lock:
            return key in self.rounds or any(
                self.topic(topic).has(key, start)
                for topic, keys in self._keys_by_topic([key]).items()
                for start in keys.values()
            )

    def still_due(self, keys: Iterable[str], now_ms: int) -> dict[str, list[str]]:
        """Return, by topic, the keys among these whose objects may be deleted by now."""
        with self._lock:
            by_topic = self._keys_by_topic(keys)
            found = {topic: self.topic(topic).due_of(wanted, now_ms) for topic, wanted in by_topic.items()}
            return {topic: due for topic, due in found.items() if due}

    def lost_by(self, entry: Erase) -> list[str]:
        """Return the keys of objects in view of which an ERASE would lose rows: neither in an object nor in a gap."""
        with self._lock:
            return [
                key
                for topic, keys in self._keys_by_topic(entry.old).items()
                for key in self.topic(topic).lost_by(keys, entry.new, entry.rows)
            ]

    def _keys_by_topic(self, keys: Iterable[str]) -> dict[str, dict[str, int | None]]:
        def is_known(topic: str) -> bool:
            return topic in self._topics or (self._lazy is not None and topic in self._lazy)

        return keys_by_topic(keys, is_known, self.known_topics)

    # ---- gaps, deleted topics

    @property
    def gap_count(self) -> int:
        """The number of gaps."""
        if self._lazy is None:
            return self._gap_count
        return sum(self._counts(topic)[1] for topic in self.known_topics())

    def gaps(self, topic: str | None = None) -> list[Gap]:
        """Return the gaps of a topic, or of all topics."""
        if topic is None:
            return [gap for one in self.known_topics() for gap in self.gaps(one)]
        return list(self.topic(topic).gaps)

    def nothing_below(self, topic: str) -> dict[int, int]:
        """Return for each queue the offset below which it has expired and no live or expiring object remains."""
        with self._lock:
            return self.topic(topic).nothing_below()

    def forgettable(self) -> list[Topic]:
        """Return the tombstones of topics without any object in view, expiring or open."""
        with self._lock:
            open_topics = self.rounds.topics()
            return [
                one.entry
                for one in self._each()
                if one.entry is not None and one.entry.deleted and not one.blocks and not one.expiring
                if one.topic not in open_topics
            ]
