"""The offsets that the archive has named or may name soon: an entry's offsets are recorded here before it is put.

No offset is assigned twice, so a deleted topic restarts at offset 0 only if none of its offsets is named. A plan made
before the restart concerns the deleted topic and is refused. Tombstones are not recorded, because their offsets are on
the local disk before the entry is put, in the log or as a deleted queue's end.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import Expire, Intent

Lasts = dict[str, dict[int, int]]  # topic -> queue -> highest offset


class StalePlan(Exception):
    """A topic of the plan was deleted after the plan was made and may restart at offset 0; make a new plan."""


class NamedTopics:
    """Changed by the journal's thread only; the queries of the broker's loop are thread-safe.

    The lock that the loop takes is never held during a request.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._named: Lasts = {}  # by entries of this data directory, in the journal or not
        self._marks = 0
        self._restarted: dict[str, int] = {}  # topic -> the first mark whose plans take the restart into account

    def load(self, named: Lasts) -> None:
        """Take the offsets that an earlier process recorded."""
        self._named = named

    def mark(self) -> int:
        """Return a mark to take before a plan is made, and to pass to `remember`."""
        with self._lock:
            return self._marks

    def __contains__(self, topic: str) -> bool:
        with self._lock:
            return self._has(topic)

    def restart_at_zero(self, topic: str) -> bool:
        """Let a deleted topic restart at offset 0; return False if the archive may know one of its offsets."""
        with self._lock:
            if self._has(topic):
                return False
            self._marks += 1
            self._restarted[topic] = self._marks
            return True

    def remember(self, entry: Intent | Expire, plan: int | None) -> Lasts:
        """Record the offsets of an entry that is about to be put, and return them. Raises StalePlan."""
        lasts = _lasts_of(entry)
        with self._lock:
            if plan is not None and any(self._restarted.get(topic, 0) > plan for topic in lasts):
                raise StalePlan("a topic of the plan was deleted after it was made")
            for topic, queues in lasts.items():
                raise_lasts(self._named.setdefault(topic, {}), queues)
        return lasts

    def forget_pending(self) -> bool:
        """Forget recorded offsets that cannot reach the journal any longer; return whether a topic was forgotten."""
        with self._lock:
            is_new = bool(self._named.keys() - set(self._catalog.named_topics()))
            self._named = {}
            return is_new

    def everything(self) -> Lasts:
        """Return the recorded offsets and those of the catalog. For the journal's thread; it takes no lock."""
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
    """Raise the known last offsets of queues."""
    for queue, last in lasts.items():
        known[queue] = max(known.get(queue, -1), last)
