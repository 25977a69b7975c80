"""What each entry of a journal changes in the Delta tables of some of its topics. Pure memory.

A table's files are the topic's objects in view, with the rows hidden that lie below their queue's minimum. So an entry
changes what it names, and what lies between a queue's old minimum and its new one; that is looked at before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from neve.archive.catalog.topic_catalog import TopicCatalog
from neve.archive.delta.table import Shown, shown
from neve.archive.format.journal import (
    AnyEntry,
    Commit,
    CommittedObject,
    Deleted,
    Erase,
    Expire,
    Forget,
    Replace,
    Topic,
    Unexpire,
)
from neve.archive.format.keys import fits_key, parse_data_key, topic_component

Keys = dict[str, int | None]


class Change(NamedTuple):
    """Of one topic by one entry."""

    gone: list[Shown]
    came: list[Shown]  # what is in both has other rows hidden
    is_new: bool  # the rows that came were in no file before


class MirroredTopics:
    """The topics of a broker that are `wanted`, as its journal has them after entry `next_seq` - 1."""

    def __init__(
        self, wanted: Callable[[str], bool], next_seq: int, topics: Iterable[TopicCatalog], anchor: bytes
    ) -> None:
        self._wanted = wanted
        self.next_seq, self.anchor = next_seq, anchor
        self._topics = {of.topic: of for of in topics}
        self._cut = {topic_component(one): one for one in self._topics if not fits_key(one)}

    def topics(self) -> list[str]:
        """Those that have, or had, anything."""
        return sorted(self._topics)

    def shown(self, topic: str) -> Iterator[Shown]:
        """All files of a table, in log order."""
        of = self._topics.get(topic)
        if of is None:
            return iter(())
        minimums = _minimums(of)
        return (file for name in of.names() if (file := shown(name, minimums)) is not None)

    def apply(self, seq: int, entry: AnyEntry, anchor: bytes) -> dict[str, Change]:
        """What it changes, by topic; topics of which it changes nothing that is shown are not there."""
        assert seq == self.next_seq, f"entry {seq} does not follow {self.next_seq - 1}"
        self.next_seq, self.anchor = seq + 1, anchor
        found = {}
        for topic, touched in self._touched(entry).items():
            of = self._of(topic)
            before = of.copy()
            self._do(of, entry, touched)
            change = _difference(before, of, touched, is_new=isinstance(entry, Commit))
            if change.gone or change.came:
                found[topic] = change
        if isinstance(entry, Forget):
            for topic in entry.topics:
                self._topics.pop(topic, None)
        return found

    def _do(self, of: TopicCatalog, entry: AnyEntry, touched: Keys) -> None:
        match entry:
            case Commit():
                of.enter(_of_topic(entry.names, of.topic))
            case Replace() | Erase():
                made = {name.key for name in entry.new}
                of.replace(
                    {key: start for key, start in touched.items() if key not in made},
                    _of_topic(entry.new, of.topic),
                    entry.delete_after_ms,
                )
            case Expire():
                of.expire(touched, entry.delete_after_ms)
                of.raise_minimums(entry.minimums.get(of.topic, {}))
            case Unexpire():
                of.unexpire(touched)
                of.set_minimums(entry.minimums.get(of.topic, {}))
            case Deleted():
                of.forget(touched)
            case Topic():
                of.tell(entry)
            case _:
                pass  # nothing that a reader sees

    def _touched(self, entry: AnyEntry) -> dict[str, Keys]:
        """topic -> keys that it names there, none where it speaks of the topic alone."""
        match entry:
            case Commit():
                return self._by_topic([], entry.names)
            case Replace() | Erase():
                return self._by_topic(entry.old, entry.new)
            case Expire() | Unexpire():
                found = self._by_topic(entry.keys, [])
                for topic in entry.minimums:
                    if self._wanted(topic):
                        found.setdefault(topic, {})
                return found
            case Deleted():
                return self._by_topic(entry.keys, [])
            case Topic():
                return {entry.topic: {}} if self._wanted(entry.topic) else {}
            case _:
                return {}

    def _by_topic(self, keys: Iterable[str], names: Iterable[CommittedObject]) -> dict[str, Keys]:
        found: dict[str, Keys] = {}
        for key in keys:
            parts = parse_data_key(key)
            if parts is None:
                continue  # no object of a topic
            component = key.removeprefix(f"{parts.prefix}/" if parts.prefix else "").partition("/")[0]
            topic = self._cut.get(component) if parts.topic is None else parts.topic
            if topic is not None and self._wanted(topic):
                found.setdefault(topic, {})[key] = parts.start
        for name in names:
            if self._wanted(name.topic):
                found.setdefault(name.topic, {})[name.key] = name.start
        return found

    def _of(self, topic: str) -> TopicCatalog:
        of = self._topics.get(topic)
        if of is None:
            of = self._topics[topic] = TopicCatalog(topic)
            if not fits_key(topic):
                self._cut[topic_component(topic)] = topic
        return of


def _difference(before: TopicCatalog, after: TopicCatalog, touched: Keys, *, is_new: bool) -> Change:
    old, new = _minimums(before), _minimums(after)
    ends = {queue: (old.get(queue, 0), new.get(queue, 0)) for queue in {*old, *new}}
    moved = {queue: (min(of), max(of)) for queue, of in ends.items() if of[0] != of[1]}
    was = {file.name.key: file for file in _looked_at(before, old, touched, moved)}
    now = {file.name.key: file for file in _looked_at(after, new, touched, moved)}
    gone = [file for key, file in was.items() if now.get(key) != file]
    came = [file for key, file in now.items() if was.get(key) != file]
    return Change(gone, came, is_new)


def _looked_at(
    of: TopicCatalog, minimums: Mapping[int, int], keys: Keys, moved: Mapping[int, tuple[int, int]]
) -> Iterator[Shown]:
    """What is shown of these keys, and of what has offsets where a minimum moved; a name may come twice."""
    names = [name for start in {*keys.values()} if start is not None for name in of.names_at(start) if name.key in keys]
    for queue, (low, high) in moved.items():
        held = of.queues.get(queue)
        for run in () if held is None else held.locations_from(low):
            if run.first >= high:
                break
            names.append(run.name)
    return (file for name in names if (file := shown(name, minimums)) is not None)


def _minimums(of: TopicCatalog) -> dict[int, int]:
    return {queue: held.minimum for queue, held in of.queues.items() if held.minimum}


def _of_topic(names: Iterable[CommittedObject], topic: str) -> list[CommittedObject]:
    return [name for name in names if name.topic == topic]
