"""Topics of a checkpoint that are loaded on demand: a reader usually needs one of ten thousand.

The changes that later entries make to a topic are queued and applied each time the topic is loaded. A loaded topic can
therefore be evicted, and an iteration over a whole archive holds a part of it at a time.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from neve.archive.catalog.topic_catalog import TopicCatalog
from neve.archive.catalog.topic_parts import decode_part, topic_of
from neve.archive.format.checkpoint import CheckpointHead, PackName, PartPlace, TopicRow
from neve.archive.format.envelope import Damaged

log = logging.getLogger(__name__)

#: Objects of the topics that stay loaded in one catalog: about 30 MB.
LOADED_OBJECTS = 100_000
#: Read-ahead for topics that are loaded in order of their names. Each pack keeps this many bytes in memory until the
#: last topic is loaded, or more if the parts of one topic are larger.
AHEAD_BYTES = 1 << 20
_NEAR_BYTES = 64 << 10  # reading a gap of this size costs less than another request

ReadRange = Callable[[PackName, int, int], bytes]
Change = Callable[[TopicCatalog], None]


class LazyTopics:
    """The topics of one checkpoint. Thread-safe."""

    def __init__(self, head: CheckpointHead, read: ReadRange, older: Callable[[str], TopicCatalog]) -> None:
        """Make lazily loaded topics.

        Args:
            head: the checkpoint.
            read: reads a range of a pack.
            older: rebuilds a topic from earlier checkpoints and entries; used if a part is damaged.
        """
        self._rows = {row.topic: row for row in head.rows()}
        self._names = sorted(self._rows)  # including forgotten topics: the order of the read-ahead
        self._sizes = head.sizes()
        self._read, self._older = read, older
        self._changes: dict[str, list[Change]] = {}
        self._loaded: dict[str, TopicCatalog] = {}  # oldest first
        self._objects = 0  # of the loaded topics
        self._ahead: dict[PackName, tuple[int, bytes]] = {}
        self._last = -1  # index of the last loaded topic in the order of names
        self._lock = threading.RLock()

    def __contains__(self, topic: str) -> bool:
        return topic in self._rows

    def names(self) -> list[str]:
        """Return the names of all topics, sorted."""
        return self._names if len(self._names) == len(self._rows) else [one for one in self._names if one in self._rows]

    def row(self, topic: str) -> TopicRow | None:
        """Return the checkpoint's row of a topic; None if an entry changed the topic since, or there is none."""
        return None if topic in self._changes else self._rows.get(topic)

    def change(self, topic: str, change: Change) -> None:
        """Queue the change that an entry makes to a topic."""
        with self._lock:
            self._changes.setdefault(topic, []).append(change)
            self._evict(topic)

    def forget(self, topic: str) -> None:
        """Remove a topic."""
        with self._lock:
            self._rows.pop(topic, None)
            self._changes.pop(topic, None)
            self._evict(topic)

    def get(self, topic: str) -> TopicCatalog | None:
        """Return a topic with all later changes, None if there is no such topic. Raises the store's errors."""
        of = self._loaded.get(topic)
        if of is None and topic in self._rows:
            with self._lock:
                of = self._loaded.get(topic) or self._load(self._rows[topic])
        return of

    def _load(self, row: TopicRow) -> TopicCatalog:
        try:
            of = topic_of(row, [decode_part(row.topic, part) for part in self._parts(row)])
        except (FileNotFoundError, Damaged) as error:
            log.warning(
                "checkpoint part unusable, falling back to an earlier checkpoint: topic=%s error=%s", row.topic, error
            )
            of = self._older(row.topic)
        for change in self._changes.get(row.topic, ()):
            change(of)
        self._loaded[row.topic] = of
        self._objects += of.count
        while self._objects > LOADED_OBJECTS and len(self._loaded) > 1:
            self._evict(next(iter(self._loaded)))
        return of

    def _parts(self, row: TopicRow) -> list[bytes]:
        """Read the parts of a topic, adjacent ones by one request. Raises Damaged, FileNotFoundError."""
        at = bisect_left(self._names, row.topic)
        is_next, self._last = at == self._last + 1, at
        if not is_next:
            self._ahead.clear()
        found: dict[PartPlace, bytes] = {}
        for places in _neighbours(row.places):
            pack, begin, end = places[0].pack, places[0].offset, places[-1].offset + places[-1].length
            held = self._ahead.get(pack)
            if held is None or begin < held[0] or end > held[0] + len(held[1]):
                more = max(end, min(begin + AHEAD_BYTES, self._sizes[pack])) if is_next else end
                held = begin, self._read(pack, begin, more - begin)
                if is_next:
                    self._ahead[pack] = held
            for place in places:
                at = place.offset - held[0]
                found[place] = place.checked(held[1][at : at + place.length])
        if self._last == len(self._names) - 1:
            self._ahead.clear()  # it was the last topic
        return [found[place] for place in row.places]

    def _evict(self, topic: str) -> None:
        of = self._loaded.pop(topic, None)
        if of is not None:
            self._objects -= of.count


def _neighbours(places: Iterable[PartPlace]) -> Iterator[list[PartPlace]]:
    """Group the places, ordered by pack and offset, that are read by one request."""
    near: list[PartPlace] = []
    for place in sorted(places):
        if near and (near[0].pack != place.pack or place.offset > near[-1].offset + near[-1].length + _NEAR_BYTES):
            yield near
            near = []
        near.append(place)
    if near:
        yield near
