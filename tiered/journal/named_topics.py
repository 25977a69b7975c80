"""Which offsets the archive has named, or may soon: what an entry is about to name is known here before it is put.

None of them is given twice, so a deleted topic begins at offset 0 again only while nothing of it is named. A plan that
was made before a topic began again speaks of its former life and is refused. A tombstone is not remembered: what it
names is on the local disk before it is put, in the log or as a deleted queue's end.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import Expire, Intent

Lasts = dict[str, dict[int, int]]  # topic -> queue -> highest offset


class StalePlan(Exception):
    """A topic of the plan was deleted after the plan was made, and may begin at offset 0 again: plan anew."""


class NamedTopics:
    """Changed by one thread at a time, the journal's; what the broker's loop asks is safe from there.

    The lock that the loop takes is held for as long as one entry needs, and over no request.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._named: Lasts = {}  # by entries of this data directory, whether they stand or not
        self._marks = 0
        self._begun_again: dict[str, int] = {}  # topic -> the mark from which on plans know of it

    def load(self, named: Lasts) -> None:
        """What an earlier process remembered."""
        self._named = named

    def mark(self) -> int:
        """Taken before a plan is made; goes with it to `remember`."""
        with self._lock:
            return self._marks

    def __contains__(self, topic: str) -> bool:
        with self._lock:
            return self._has(topic)

    def begin_again(self, topic: str) -> bool:
        """False: the archive may know one of the topic's offsets."""
        with self._lock:
            if self._has(topic):
                return False
            self._marks += 1
            self._begun_again[topic] = self._marks
            return True

    def remember(self, entry: Intent | Expire, plan: int | None) -> Lasts:
        """An entry is about to be put, which names these. Raises StalePlan."""
        lasts = _lasts_of(entry)
        with self._lock:
            if plan is not None and any(self._begun_again.get(topic, 0) > plan for topic in lasts):
                raise StalePlan("a topic of the plan was deleted after it was made")
            for topic, queues in lasts.items():
                raise_lasts(self._named.setdefault(topic, {}), queues)
        return lasts

    def count_what_stands(self) -> bool:
        """Nothing that was remembered can still come to stand: what the catalog has is all. False: it was before."""
        with self._lock:
            is_news = bool(self._named.keys() - set(self._catalog.named_topics()))
            self._named = {}
            return is_news

    def everything(self) -> Lasts:
        """With what the catalog knows. On the journal's thread, without the lock: it is long."""
        named = {topic: dict(queues) for topic, queues in self._named.items()}
        for topic in self._catalog.named_topics():
            raise_lasts(named.setdefault(topic, {}), self._catalog.named_offsets(topic))
        return named

    def _has(self, topic: str) -> bool:
        catalog = self._catalog
        known = catalog.topic_entry(topic) is not None or catalog.through(topic) is not None
        return known or topic in self._named or bool(catalog.named_offsets(topic))


def _lasts_of(entry: Intent | Expire) -> Lasts:
    if isinstance(entry, Expire):
        return {topic: {queue: end - 1 for queue, end in ends.items()} for topic, ends in entry.minimums.items()}
    lasts: Lasts = {}
    for name in entry.names:
        raise_lasts(lasts.setdefault(name.topic, {}), {queue: last for queue, (_, last) in name.queues.items()})
    return lasts


def raise_lasts(known: dict[int, int], lasts: Mapping[int, int]) -> None:
    for queue, last in lasts.items():
        known[queue] = max(known.get(queue, -1), last)
