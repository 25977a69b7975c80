"""Topics of a checkpoint that are taken when somebody asks for them: a reader wants one of ten thousand.

What entries say of a topic after the checkpoint waits beside it, and is done each time it is taken. So what was taken
may be let go again: who goes through all of an archive holds a part of it at a time.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from neve.archive.catalog.topic_catalog import TopicCatalog
from neve.archive.catalog.topic_parts import decode_part, topic_of
from neve.archive.format.checkpoint import CheckpointHead, PackName, Place, TopicRow
from neve.archive.format.envelope import Damaged

log = logging.getLogger(__name__)

#: Objects of the topics that stay taken, of one catalog: some 30 MB.
TAKEN_OBJECTS = 100_000
#: Bytes that are read at once of a pack by who takes topic after topic; of each pack as many are held until the last
#: topic is taken, or more where the parts of one topic are.
AHEAD_BYTES = 1 << 20
_NEAR_BYTES = 64 << 10  # less than a question of its own costs

ReadRange = Callable[[PackName, int, int], bytes]
Change = Callable[[TopicCatalog], None]


class LazyTopics:
    """Thread-safe. `older`: the topic as it was at the checkpoint, from what is before that."""

    def __init__(self, head: CheckpointHead, read: ReadRange, older: Callable[[str], TopicCatalog | None]) -> None:
        self._rows = {row.topic: row for row in head.rows()}
        self._names = sorted(self._rows)  # forgotten ones too: the order in which they are taken ahead
        self._sizes = head.sizes()
        self._read, self._older = read, older
        self._waiting: dict[str, list[Change]] = {}
        self._taken: dict[str, TopicCatalog] = {}  # by when they were taken
        self._objects = 0  # of those
        self._ahead: dict[PackName, tuple[int, bytes]] = {}
        self._last = -1  # the place of the topic taken last in the order of names
        self._lock = threading.RLock()

    def __contains__(self, topic: str) -> bool:
        return topic in self._rows

    def names(self) -> list[str]:
        """In order."""
        return self._names if len(self._names) == len(self._rows) else [one for one in self._names if one in self._rows]

    def row(self, topic: str) -> TopicRow | None:
        """What the checkpoint says; None: entries have spoken of it since, or it has no such topic."""
        return None if topic in self._waiting else self._rows.get(topic)

    def change(self, topic: str, change: Change) -> None:
        """An entry speaks of it."""
        with self._lock:
            self._waiting.setdefault(topic, []).append(change)
            self._let_go(topic)

    def forget(self, topic: str) -> None:
        """As if the checkpoint had no such topic."""
        with self._lock:
            self._rows.pop(topic, None)
            self._waiting.pop(topic, None)
            self._let_go(topic)

    def get(self, topic: str) -> TopicCatalog | None:
        """With all that entries have said of it. None: the checkpoint has no such topic. Raises the store's errors."""
        of = self._taken.get(topic)
        if of is None and topic in self._rows:
            with self._lock:
                of = self._taken.get(topic) or self._take(self._rows[topic])
        return of

    def _take(self, row: TopicRow) -> TopicCatalog:
        try:
            of = topic_of(row, [decode_part(row.topic, part) for part in self._parts(row)])
        except (FileNotFoundError, Damaged) as error:
            log.warning("topic %s: what the checkpoint has can't be used, one before it serves: %s", row.topic, error)
            of = self._older(row.topic) or TopicCatalog(row.topic)
        for change in self._waiting.get(row.topic, ()):
            change(of)
        self._taken[row.topic] = of
        self._objects += of.count
        while self._objects > TAKEN_OBJECTS and len(self._taken) > 1:
            self._let_go(next(iter(self._taken)))
        return of

    def _parts(self, row: TopicRow) -> list[bytes]:
        """Neighbours in a pack are read at once. Raises Damaged, FileNotFoundError."""
        at = bisect_left(self._names, row.topic)
        is_next, self._last = at == self._last + 1, at
        if not is_next:
            self._ahead.clear()
        found: dict[Place, bytes] = {}
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
            self._ahead.clear()  # nothing follows
        return [found[place] for place in row.places]

    def _let_go(self, topic: str) -> None:
        of = self._taken.pop(topic, None)
        if of is not None:
            self._objects -= of.count


def _neighbours(places: Iterable[Place]) -> Iterator[list[Place]]:
    """In the order of their packs, those together that lie near each other."""
    near: list[Place] = []
    for place in sorted(places):
        if near and (near[0].pack != place.pack or place.offset > near[-1].offset + near[-1].length + _NEAR_BYTES):
            yield near
            near = []
        near.append(place)
    if near:
        yield near
