"""Decide which messages an erasure by key concerns: those of a topic with the key, and copies in retry topics. Pure.

A key is RocketMQ's: a word of KEYS, or the unique key. A row of a group's retry or dead-letter topic belongs to the
erasure if its origin is the topic. The origin of a message that a consumer sent back is in a property; that of a popped
message that was not acknowledged is in the name of its retry topic. A client may set an origin property in an ordinary
topic, but the broker replaces it in copies. If a name could also mean another topic, or contradicts the stated origin,
the verdict is UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, auto

from neve.archive.catalog.queue_runs import touching
from neve.archive.format.journal import ERASED, CommittedObject, Gap
from neve.record.codec import MessageRecord
from neve.record.properties import (
    PROPERTY_DLQ_ORIGIN_TOPIC,
    PROPERTY_KEYS,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_UNIQUE_KEY,
)

_RETRY, _DEAD_LETTERS = "%RETRY%", "%DLQ%"


class Verdict(Enum):
    """Whether a message belongs to an erasure."""

    YES = auto()
    NO = auto()
    UNKNOWN = auto()


def topics_to_search(topics: Collection[str], topic: str, *, retries: bool) -> list[str]:
    """Return the topics to search among those of an archive: the topic, and with `retries` all retry topics."""
    return [one for one in sorted(topics) if one == topic or (retries and one.startswith((_RETRY, _DEAD_LETTERS)))]


def is_meant(record: MessageRecord, topic: str, key: str, topics: Collection[str]) -> Verdict:
    """Decide whether a record belongs to the erasure of a key.

    Args:
        record: the record.
        topic: the topic of the erasure.
        key: the key.
        topics: all known topics, to detect ambiguous names.
    """
    properties = record.properties
    words = properties.get(PROPERTY_KEYS, "").split(" ")
    if key not in words and properties.get(PROPERTY_UNIQUE_KEY) != key:
        return Verdict.NO
    if record.topic == topic:
        return Verdict.YES
    by_name = _comes_from(record.topic, topic, topics)
    origins = [properties[name] for name in (PROPERTY_RETRY_TOPIC, PROPERTY_DLQ_ORIGIN_TOPIC) if name in properties]
    if not origins or (record.topic.startswith(_RETRY) and "+" in record.topic):
        return by_name  # the broker chose this name; a client may set a property
    stated = {_comes_from(origin, topic, topics) for origin in origins}
    if Verdict.YES in stated:
        return Verdict.YES
    # A pop returns a record of %RETRY%group_topic as a message of that topic, whatever its origin property. The name
    # may also be the retry topic of a group `group_topic`, for which the origin property counts.
    return Verdict.NO if stated == {by_name} == {Verdict.NO} else Verdict.UNKNOWN


def _comes_from(origin: str, topic: str, topics: Collection[str]) -> Verdict:
    """Match an origin: the topic itself, or its pop-retry topic %RETRY%group+topic or, in V1, %RETRY%group_topic."""
    if origin == topic:
        return Verdict.YES
    if not origin.startswith(_RETRY):
        return Verdict.NO
    pair = origin.removeprefix(_RETRY)
    if "+" in pair:
        return Verdict.YES if pair.partition("+")[2] == topic else Verdict.NO
    splits = [at for at, letter in enumerate(pair) if letter == "_"]
    meant = {pair[at + 1 :] for at in splits if pair[:at] and pair[at + 1 :] in {*topics, topic}}
    if topic not in meant:
        return Verdict.NO
    return Verdict.YES if len(meant) == 1 else Verdict.UNKNOWN


def erased_of(gaps: Iterable[Gap], erase_id: str) -> list[tuple[str, int, int, int]]:
    """Return (topic, queue, first, last) of the rows that an erasure has removed so far."""
    reason = f"{ERASED}{erase_id}"
    found = [(gap.topic, gap.queue, gap.first, gap.last) for gap in gaps if gap.reason == reason]
    return sorted(found)


def erased_rows(gaps: Iterable[Gap]) -> list[tuple[str, int, int, int]]:
    """Return (topic, queue, first, last) of the rows that any erasure removed."""
    return [(gap.topic, gap.queue, gap.first, gap.last) for gap in gaps if gap.is_erased]


def spans_of_rows(rows: Collection[tuple[int, int]]) -> dict[int, list[tuple[int, int]]]:
    """Group (queue, offset) rows: queue -> ordered (first, last) of consecutive offsets."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for queue, offset in sorted(set(rows)):
        held = spans.setdefault(queue, [])
        if held and held[-1][1] + 1 == offset:
            held[-1] = held[-1][0], offset
        else:
            held.append((offset, offset))
    return spans


def holds(name: CommittedObject, spans: Mapping[int, Sequence[tuple[int, int]]]) -> bool:
    """Return whether an object has a row in these spans: queue -> ordered, disjoint (first, last)."""
    return any(touching(spans.get(queue, ()), first, last) for queue, first, last in name.runs)
