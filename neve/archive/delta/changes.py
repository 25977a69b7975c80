"""The changes that each journal entry makes to the Delta tables of some topics. Pure.

The files of a table are the topic's objects in view; rows below the minimum of their queue are hidden. So an entry
changes the files that it names, and those with offsets between a queue's old and new minimum. Both are compared before
and after the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from neve.archive.catalog.entry_changes import TopicChange, keys_by_topic, topic_changes
from neve.archive.catalog.topic_catalog import Keys, TopicCatalog
from neve.archive.delta.table import VisibleFile, visible_file
from neve.archive.format.journal import AnyEntry, Commit, Forget


class Change(NamedTuple):
    """The change of one table by one entry."""

    removed: list[VisibleFile]
    added: list[VisibleFile]  # a file in both lists has other hidden rows than before
    is_new: bool  # whether the added rows were in no file before


class MirroredTopics:
    """The `wanted` topics of a broker, as of journal entry `next_seq` - 1."""

    def __init__(
        self, wanted: Callable[[str], bool], next_seq: int, topics: Iterable[TopicCatalog], anchor: bytes
    ) -> None:
        self._wanted = wanted
        self.next_seq, self.anchor = next_seq, anchor
        self._topics = {one.topic: one for one in topics}

    def topics(self) -> list[str]:
        """Return the topics that have, or had, objects or minimums, sorted."""
        return sorted(self._topics)

    def files(self, topic: str) -> Iterator[VisibleFile]:
        """Yield all files of a table in log order."""
        found = self._topics.get(topic)
        if found is None:
            return iter(())
        minimums = _minimums(found)
        return (file for name in found.names() if (file := visible_file(name, minimums)) is not None)

    def apply(self, seq: int, entry: AnyEntry, anchor: bytes) -> dict[str, Change]:
        """Apply an entry; return its changes by topic, without topics whose files stay the same."""
        assert seq == self.next_seq, f"entry {seq} does not follow {self.next_seq - 1}"
        self.next_seq, self.anchor = seq + 1, anchor
        by_topic: dict[str, list[TopicChange]] = {}
        for change in topic_changes(entry, self._keys_by_topic):
            if self._wanted(change.topic):
                by_topic.setdefault(change.topic, []).append(change)
        found = {}
        for topic, changes in by_topic.items():
            difference = self._apply(topic, changes, is_new=isinstance(entry, Commit))
            if difference is not None:
                found[topic] = difference
        if isinstance(entry, Forget):
            for topic in entry.topics:
                self._topics.pop(topic, None)
        return found

    def _apply(self, topic: str, changes: Iterable[TopicChange], *, is_new: bool) -> Change | None:
        found = self._topics.setdefault(topic, TopicCatalog(topic))
        before = found.copy() if any(change.is_visible for change in changes) else None
        keys: dict[str, int | None] = {}
        for change in changes:
            change.apply(found)
            keys.update(change.keys)
        if before is None:
            return None
        difference = _difference(before, found, keys, is_new=is_new)
        return difference if difference.removed or difference.added else None

    def _keys_by_topic(self, keys: Iterable[str]) -> dict[str, dict[str, int | None]]:
        return keys_by_topic(keys, self._wanted, self.topics)


def _difference(before: TopicCatalog, after: TopicCatalog, touched: Keys, *, is_new: bool) -> Change:
    old, new = _minimums(before), _minimums(after)
    ends = {queue: (old.get(queue, 0), new.get(queue, 0)) for queue in {*old, *new}}
    moved = {queue: (min(of), max(of)) for queue, of in ends.items() if of[0] != of[1]}
    was = {file.name.key: file for file in _candidates(before, old, touched, moved)}
    now = {file.name.key: file for file in _candidates(after, new, touched, moved)}
    removed = [file for key, file in was.items() if now.get(key) != file]
    added = [file for key, file in now.items() if was.get(key) != file]
    return Change(removed, added, is_new)


def _candidates(
    topic: TopicCatalog, minimums: Mapping[int, int], keys: Keys, moved: Mapping[int, tuple[int, int]]
) -> Iterator[VisibleFile]:
    """Yield the files with these keys, and those with offsets in a range that a minimum crossed; some twice."""
    starts = {start for start in keys.values() if start is not None}
    names = [name for start in starts for name in topic.names_at(start) if name.key in keys]
    for queue, (low, high) in moved.items():
        held = topic.queues.get(queue)
        for run in () if held is None else held.runs(low):
            if run.first >= high:
                break
            names.append(run.name)
    return (file for name in names if (file := visible_file(name, minimums)) is not None)


def _minimums(topic: TopicCatalog) -> dict[int, int]:
    return {queue: held.minimum for queue, held in topic.queues.items() if held.minimum}
