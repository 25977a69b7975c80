"""The interpreter of the journal: the changes that each entry makes to the topics it names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, assert_never

import msgspec

from neve.archive.catalog.topic_catalog import Keys, TopicCatalog
from neve.archive.format.journal import (
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
    Replace,
    Topic,
    Unexpire,
)
from neve.archive.format.keys import fits_key, parse_data_key, parse_start, topic_component

KeysByTopic = Callable[[Iterable[str]], Mapping[str, Keys]]
_NO_KEYS: Keys = {}


class TopicChange(NamedTuple):
    """One change of one topic."""

    topic: str
    apply: Callable[[TopicCatalog], None]
    keys: Keys = _NO_KEYS  # of the objects that the entry names
    is_visible: bool = True  # False if it cannot change the objects or rows that readers see


def topic_changes(  # noqa: PLR0912 - a case for each kind of entry
    entry: AnyEntry, keys_of: KeysByTopic, lowest_open: Mapping[str, int] = {}
) -> Iterator[TopicChange]:
    """Yield the changes of an entry in the order in which they apply.

    FORGET yields nothing: the caller removes its topics.

    Args:
        entry: the entry.
        keys_of: groups object keys by topic (`keys_by_topic`).
        lowest_open: for a COMMIT, by topic the lowest start of the objects that its round leaves open.
    """
    match entry:
        case Intent():
            if not entry.kind:  # a round noted the offsets of a rewrite before
                for name in entry.names:
                    lasts = {queue: last for queue, (_, last) in name.queues.items()}
                    yield _hidden(name.topic, partial(TopicCatalog.note_offsets, lasts=lasts))
        case Commit():
            yield from _commit(entry, lowest_open)
        case Gap():
            yield from _gap(entry)
        case Expire():
            for topic, keys in keys_of(entry.keys).items():
                yield TopicChange(
                    topic, partial(TopicCatalog.expire, keys=keys, delete_after_ms=entry.delete_after_ms), keys
                )
            for topic, minimums in entry.minimums.items():
                yield TopicChange(topic, partial(TopicCatalog.raise_minimums, minimums=minimums))
        case Unexpire():
            for topic, keys in keys_of(entry.keys).items():
                yield TopicChange(topic, partial(TopicCatalog.unexpire, keys=keys), keys)
            for topic, minimums in entry.minimums.items():
                yield TopicChange(topic, partial(TopicCatalog.set_minimums, minimums=minimums))
        case Deleted():
            for topic, keys in keys_of(entry.keys).items():
                yield _hidden(topic, partial(TopicCatalog.forget, keys=keys))
        case Topic():
            yield TopicChange(entry.topic, partial(TopicCatalog.set_entry, entry=entry))
        case Replace():
            yield from _replace(entry, keys_of)
        case Erase():
            yield from _erase(entry, keys_of)
        case Epoch() | Abort() | Checkpoint() | Forget():
            return
        case _:
            assert_never(entry)


def _hidden(topic: str, change: Callable[[TopicCatalog], None]) -> TopicChange:
    return TopicChange(topic, change, is_visible=False)


def _commit(entry: Commit, lowest_open: Mapping[str, int]) -> Iterator[TopicChange]:
    names = _names_by_topic(entry.names)
    for topic in names | entry.through:
        published = names.get(topic, [])
        change = partial(
            TopicCatalog.commit,
            names=published,
            through=entry.through.get(topic),
            lowest_open=lowest_open.get(topic),
        )
        yield TopicChange(topic, change, {name.key: name.start for name in published})


def _gap(entry: Gap) -> Iterator[TopicChange]:
    first = msgspec.structs.replace(entry, more=[]) if entry.more else entry
    further = (
        Gap(topic=of, queue=queue, first=low, last=high, reason=entry.reason) for of, queue, low, high in entry.more
    )
    for gap in (first, *further):
        yield _hidden(gap.topic, partial(TopicCatalog.note_gap, gap=gap))
        yield _hidden(gap.topic, partial(TopicCatalog.note_offsets, lasts={gap.queue: gap.last}))
        if gap.through >= 0:
            yield _hidden(gap.topic, partial(TopicCatalog.advance, offset=gap.through))


def _replace(entry: Replace, keys_of: KeysByTopic) -> Iterator[TopicChange]:
    old, new = keys_of(entry.old), _names_by_topic(entry.new)
    for topic in {**old, **new}:
        keys, names = old.get(topic, _NO_KEYS), new.get(topic, [])
        change = partial(TopicCatalog.replace, keys=keys, names=names, delete_after_ms=entry.delete_after_ms)
        yield TopicChange(topic, change, _with_names(keys, names))


def _erase(entry: Erase, keys_of: KeysByTopic) -> Iterator[TopicChange]:
    old, new = keys_of(entry.old), _names_by_topic(entry.new)
    gaps: dict[str, list[Gap]] = {}
    for topic, queue, first, last in entry.rows:
        gap = Gap(topic=topic, queue=queue, first=first, last=last, reason=entry.reason)
        gaps.setdefault(topic, []).append(gap)
    for topic in {**old, **new, **gaps}:
        keys, names = old.get(topic, _NO_KEYS), new.get(topic, [])
        change = partial(
            TopicCatalog.erase,
            keys=keys,
            names=names,
            gaps=gaps.get(topic, []),
            delete_after_ms=entry.delete_after_ms,
        )
        yield TopicChange(topic, change, _with_names(keys, names))


def _with_names(keys: Keys, names: Iterable[CommittedObject]) -> Keys:
    return {**keys, **{name.key: name.start for name in names}}


def _names_by_topic(names: Iterable[CommittedObject]) -> dict[str, list[CommittedObject]]:
    found: dict[str, list[CommittedObject]] = {}
    for name in names:
        found.setdefault(name.topic, []).append(name)
    return found


def keys_by_topic(
    keys: Iterable[str], is_known: Callable[[str], bool], topics: Callable[[], Iterable[str]]
) -> dict[str, dict[str, int | None]]:
    """Group object keys by topic, each with the CommitLog offset at which its object starts.

    A key that is not a data key may belong to any topic, so it is listed under all topics, without a start.

    Args:
        keys: the keys.
        is_known: whether a topic is known; keys of other topics are left out.
        topics: returns all known topics; called only for keys that do not contain a complete topic name.
    """
    found: dict[str, dict[str, int | None]] = {}
    truncated: dict[str, str] | None = None  # component -> topic
    folders: dict[str, str | None] = {}  # many keys share a folder: its topic, None if it is not known
    for key in keys:
        folder, _, file = key.rpartition("/")
        start = parse_start(file)
        if folder in folders and start is not None:
            if (known := folders[folder]) is not None:
                found.setdefault(known, {})[key] = start
            continue
        parts = parse_data_key(key)
        if parts is None:
            for topic in topics():
                found.setdefault(topic, {})[key] = None
            continue
        topic = parts.topic or ""
        if parts.topic is None:
            if truncated is None:
                truncated = {topic_component(one): one for one in topics() if not fits_key(one)}
            component = key.removeprefix(f"{parts.prefix}/" if parts.prefix else "").partition("/")[0]
            topic = truncated.get(component, "")
        folders[folder] = topic if topic and is_known(topic) else None
        if folders[folder] is not None:
            found.setdefault(topic, {})[key] = parts.start
    return found
