"""Which messages an erasure means: those of a topic that have a key, and what came of them in groups' retry topics.

A key is one in RocketMQ's sense: a word of KEYS, or the unique key. Of a group's retry and dead-letter topics those
rows are meant whose origin is the topic: a sent back message says so in a property, one that was popped and not
acknowledged in the name of the topic that it is in. The broker replaces an origin that a client stated in an ordinary
topic when it makes such a copy. Where a name may mean another topic, too, or contradicts the stated origin, the verdict
is unknown. Pure.
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
    """Whether a message is meant."""

    YES = auto()
    NO = auto()
    UNKNOWN = auto()


def topics_to_search(topics: Collection[str], topic: str, *, retries: bool) -> list[str]:
    """Of those that an archive has: the topic, and what may hold copies of its messages."""
    return [one for one in sorted(topics) if one == topic or (retries and one.startswith((_RETRY, _DEAD_LETTERS)))]


def is_meant(record: MessageRecord, topic: str, key: str, topics: Collection[str]) -> Verdict:
    """`topics`: all that are known."""
    properties = record.properties
    words = properties.get(PROPERTY_KEYS, "").split(" ")
    if key not in words and properties.get(PROPERTY_UNIQUE_KEY) != key:
        return Verdict.NO
    if record.topic == topic:
        return Verdict.YES
    by_name = _comes_from(record.topic, topic, topics)
    origins = [properties[name] for name in (PROPERTY_RETRY_TOPIC, PROPERTY_DLQ_ORIGIN_TOPIC) if name in properties]
    if not origins or (record.topic.startswith(_RETRY) and "+" in record.topic):
        return by_name  # the name is the broker's; a property may be a client's
    stated = {_comes_from(origin, topic, topics) for origin in origins}
    if Verdict.YES in stated:
        return Verdict.YES
    # A pop hands out what is in %RETRY%group_topic as a message of that topic, whatever origin it states. The name may
    # also be that of the retry topic of a group `group_topic`, where the stated origin counts.
    return Verdict.NO if stated == {by_name} == {Verdict.NO} else Verdict.UNKNOWN


def _comes_from(origin: str, topic: str, topics: Collection[str]) -> Verdict:
    """The topic itself, or what a group popped from it: %RETRY%group+topic, or %RETRY%group_topic in the older form."""
    if origin == topic:
        return Verdict.YES
    if not origin.startswith(_RETRY):
        return Verdict.NO
    pair = origin.removeprefix(_RETRY)
    if "+" in pair:
        return Verdict.YES if pair.partition("+")[2] == topic else Verdict.NO
    cuts = [at for at, letter in enumerate(pair) if letter == "_"]
    meant = {pair[at + 1 :] for at in cuts if pair[:at] and pair[at + 1 :] in {*topics, topic}}
    if topic not in meant:
        return Verdict.NO
    return Verdict.YES if len(meant) == 1 else Verdict.UNKNOWN


def erased_of(gaps: Iterable[Gap], erase_id: str) -> list[tuple[str, int, int, int]]:
    """(topic, queue, first, last) of what an erasure took, as far as it has come."""
    reason = f"{ERASED}{erase_id}"
    found = [(gap.topic, gap.queue, gap.first, gap.last) for gap in gaps if gap.reason == reason]
    return sorted(found)


def erased_rows(gaps: Iterable[Gap]) -> list[tuple[str, int, int, int]]:
    """(topic, queue, first, last) of what any erasure took."""
    return [(gap.topic, gap.queue, gap.first, gap.last) for gap in gaps if gap.is_erased]


def spans_of_rows(rows: Collection[tuple[int, int]]) -> dict[int, list[tuple[int, int]]]:
    """queue -> (first, last) of offsets that follow one another, in order."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for queue, offset in sorted(set(rows)):
        held = spans.setdefault(queue, [])
        if held and held[-1][1] + 1 == offset:
            held[-1] = held[-1][0], offset
        else:
            held.append((offset, offset))
    return spans


def holds(name: CommittedObject, spans: Mapping[int, Sequence[tuple[int, int]]]) -> bool:
    """Whether an object has a row of these, which lie apart in order, by queue."""
    return any(touching(spans.get(queue, ()), first, last) for queue, first, last in name.runs)
