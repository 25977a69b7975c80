"""The expected state, derived independently of the broker: messages, and the journal interpreted entry by entry.

A message is *live* until it is legitimately gone: its topic was deleted, its time has passed, or it was lost where that
is allowed (an unflushed tail; a disk that an operator replaced). `given` keeps all offsets that may be known outside
the local log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from neve.archive.format import keys
from neve.archive.format.journal import (
    Abort,
    AnyEntry,
    Commit,
    CommittedObject,
    Deleted,
    Epoch,
    Erase,
    Expire,
    Forget,
    Gap,
    Intent,
    PlannedObject,
    Replace,
    Topic,
    decode_entry,
)
from neve.record.codec import decode_record
from tests.kit.store.memory_store import MemoryStore

Place = tuple[str, int]  # topic, queue
#: The reason of a gap: an expired object had other messages beside erased ones.
WITH_ERASED = "expired, but in an object with erased messages"


@dataclass(slots=True)
class Message:
    number: int
    topic: str
    queue: int
    offset: int
    physical: int
    record: bytes
    stored_ms: int

    @property
    def end(self) -> int:
        return self.physical + len(self.record)

    @property
    def properties(self) -> bytes:
        return decode_record(self.record).properties_raw


class Span(NamedTuple):
    first: int
    last: int
    what: str


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same offsets in the fewest ordered spans: a restore leaves gaps of ten million."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


@dataclass
class JournalModel:
    """The content of the journal's entries, by an independent interpreter."""

    entries: list[AnyEntry] = field(default_factory=list)
    spans: dict[Place, list[Span]] = field(default_factory=dict)
    gaps: dict[Place, list[Span]] = field(default_factory=dict)
    minimums: dict[Place, int] = field(default_factory=dict)
    expired: dict[Place, int] = field(default_factory=dict)  # Minimums from EXPIRE entries only.
    named: dict[Place, int] = field(default_factory=dict)
    open: dict[str, PlannedObject] = field(default_factory=dict)
    # The compaction and the offsets it may write.
    rewrites: dict[int, dict[str, PlannedObject]] = field(default_factory=dict)
    live: dict[str, CommittedObject] = field(default_factory=dict)
    expiring: dict[str, int] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    ever: dict[str, CommittedObject] = field(default_factory=dict)
    tombstones: set[str] = field(default_factory=set)
    erased: set[tuple[str, int, int]] = field(default_factory=set)  # Topic, queue and offset that an ERASE removed.
    epoch: int = 0
    forgotten: Callable[[str], None] = field(default=lambda topic: None)  # Called at a FORGET.

    def follow(self, store: MemoryStore, broker: str) -> None:
        while (held := store.objects.get(keys.journal_key("", broker, len(self.entries)))) is not None:
            entry = decode_entry(held[0])
            self.entries.append(entry)
            self._read(entry)

    def knows(self, topic: str) -> bool:
        """Return whether entries mention the topic."""
        return topic in self.tombstones or any(place[0] == topic for place in self.named)

    def _read(self, entry: AnyEntry) -> None:
        assert entry.epoch >= self.epoch, f"entry {len(self.entries) - 1} is of a writer that was fenced: {entry}"
        if isinstance(entry, Epoch):
            assert entry.epoch == self.epoch + 1
            self.epoch = entry.epoch
        elif isinstance(entry, Intent) and entry.kind:
            assert all(key in self.live for key in entry.old or []), f"what is not live is to be compacted: {entry.old}"
            self.rewrites[entry.round] = {name.key: name for name in entry.names}
        elif isinstance(entry, Abort) and entry.kind:
            self.rewrites.pop(entry.round)
        elif isinstance(entry, Replace):
            self._replace(entry)
        elif isinstance(entry, Erase):
            self._erase(entry)
        elif isinstance(entry, Intent):
            for name in entry.names:
                self.open[name.key] = name
                for queue, (_, last) in name.queues.items():
                    self._note(name.topic, queue, last)
        elif isinstance(entry, Commit):
            for committed in entry.names:
                self._commit(committed)
        elif isinstance(entry, Abort):
            for key in entry.keys:
                self.open.pop(key, None)
        elif isinstance(entry, Gap):
            for topic, queue, first, last in [(entry.topic, entry.queue, entry.first, entry.last), *entry.more]:
                gap = Span(first, last, entry.reason)
                if entry.reason == WITH_ERASED:
                    self._cut_expired((topic, queue), gap)
                for span in self.spans.get((topic, queue), []):
                    disjoint = last < span.first or span.last < first
                    assert disjoint, f"{topic}/{queue}: {gap} is said to be nowhere, {span} has it"
                self.gaps.setdefault((topic, queue), []).append(gap)
                self._note(topic, queue, last)
        elif isinstance(entry, Expire):
            for key in entry.keys:
                self._expire(key, entry.delete_after_ms)
            for topic, ends in entry.minimums.items():
                self._raise(topic, ends)
                for queue, end in ends.items():
                    self._note(topic, queue, end - 1)
                    self.expired[topic, queue] = max(self.expired.get((topic, queue), 0), end)
        elif isinstance(entry, Deleted):
            for key in entry.keys:
                assert self.expiring.pop(key, None) is not None, f"{key} was deleted and had not expired"
                self.deleted.add(key)
        elif isinstance(entry, Topic):
            (self.tombstones.add if entry.deleted else self.tombstones.discard)(entry.topic)
            self._raise(entry.topic, entry.minimums)
            for queue, end in entry.minimums.items():
                self._note(entry.topic, queue, end - 1)
        elif isinstance(entry, Forget):
            for topic in entry.topics:
                self._forget(topic)

    def _forget(self, topic: str) -> None:
        """Apply a FORGET; a topic created again begins at 0, so no data of the former one may exist or appear."""
        assert topic in self.tombstones, f"{topic} is forgotten and was not deleted"
        held: list[CommittedObject | PlannedObject] = [*self.live.values(), *self.open.values()]
        held += [self.ever[key] for key in self.expiring]
        held += [name for names in self.rewrites.values() for name in names.values()]
        left = [name.key for name in held if name.topic == topic]
        assert not left, f"{topic} is forgotten while there is, or may be, {left}"
        self.tombstones.remove(topic)
        of_queues: list[dict[Place, Any]] = [self.spans, self.gaps, self.minimums, self.expired, self.named]
        for table in of_queues:
            for place in [place for place in table if place[0] == topic]:
                del table[place]
        self.ever = {key: name for key, name in self.ever.items() if name.topic != topic}
        self.erased = {place for place in self.erased if place[0] != topic}
        self.forgotten(topic)

    def _commit(self, name: CommittedObject) -> None:
        assert name.key in self.open, f"{name.key} is committed and no intent names it"
        assert name.key not in self.ever, f"{name.key} is committed twice"
        del self.open[name.key]
        self.live[name.key] = self.ever[name.key] = name
        for queue, (_, last, _) in name.queues.items():
            self._note(name.topic, queue, last)
        self._hold(name)

    def _replace(self, entry: Replace) -> None:
        old = [self.live.pop(key) for key in entry.old]  # Each is live, otherwise this fails.
        self.expiring |= dict.fromkeys(entry.old, entry.delete_after_ms)
        (number,) = [number for number, names in self.rewrites.items() if set(names) == {one.key for one in entry.new}]
        del self.rewrites[number]
        for name in old:
            self._let_go(name)
        for name in entry.new:
            assert name.key not in self.ever, f"{name.key} is made twice"
            self.live[name.key] = self.ever[name.key] = name
            self._hold(name)
        kept = _places(entry.new)
        for topic, queue, offset in _places(old) - kept:
            hidden = self.minimums.get((topic, queue), 0)
            assert offset < hidden, f"{topic}, queue {queue}: {offset} was left out, and {hidden} is the lowest offset"
        assert kept <= _places(old)

    def _erase(self, entry: Erase) -> None:
        """Apply an ERASE like a replacement without its rows; an object that is out of view has no successor."""
        old, viewed = [self.ever[key] for key in entry.old], [key for key in entry.old if key in self.live]
        erased = {(topic, queue, at) for topic, queue, first, last in entry.rows for at in range(first, last + 1)}
        kept, lost = _places(entry.new), _places(self.live[key] for key in viewed)
        assert erased <= _places(old) and not erased & kept and kept <= lost
        for topic, queue, offset in lost - kept - erased:
            hidden = self.minimums.get((topic, queue), 0)
            assert offset < hidden, f"{topic}, queue {queue}: {offset} went with what was erased, and is in view"
        for name in old:
            later = self.expiring.get(name.key, entry.delete_after_ms)
            self.live.pop(name.key, None)
            if name.key not in self.deleted:
                self.expiring[name.key] = min(later, entry.delete_after_ms)
            self._let_go(name)
        if entry.new:
            made = {one.key for one in entry.new}
            (number,) = [number for number, names in self.rewrites.items() if set(names) == made]
            del self.rewrites[number]
        for name in entry.new:
            assert name.key not in self.ever, f"{name.key} is made twice"
            self.live[name.key] = self.ever[name.key] = name
            self._hold(name)
        for topic, queue, first, last in entry.rows:
            gap = Span(first, last, entry.reason)
            self._cut_expired((topic, queue), gap)
            self.gaps.setdefault((topic, queue), []).append(gap)
            self._note(topic, queue, last)
        self.erased |= erased - _places(self.live.values())

    def _cut_expired(self, place: Place, gap: Span) -> None:
        """Mark offsets of an expired object that were erased, or had expired beside erased ones, as nowhere."""
        left = []
        for span in self.spans.get(place, []):
            if span.what in self.live or span.last < gap.first or gap.last < span.first:
                left.append(span)
                continue
            left += [Span(span.first, gap.first - 1, span.what), Span(gap.last + 1, span.last, span.what)]
        self.spans[place] = [span for span in left if span.first <= span.last]

    def _hold(self, name: CommittedObject) -> None:
        for queue, first, last in name.runs:
            self.spans.setdefault((name.topic, queue), []).append(Span(first, last, name.key))

    def _let_go(self, name: CommittedObject) -> None:
        for queue in name.queues:
            spans = self.spans.get((name.topic, queue), [])
            self.spans[name.topic, queue] = [span for span in spans if span.what != name.key]

    def _expire(self, key: str, after: int) -> None:
        name = self.live.pop(key, None)
        if name is not None:
            self.expiring[key] = after
            self._raise(name.topic, {queue: last + 1 for queue, (_, last, _) in name.queues.items()})

    def _raise(self, topic: str, ends: dict[int, int]) -> None:
        for queue, end in ends.items():
            self.minimums[topic, queue] = max(self.minimums.get((topic, queue), 0), end)

    def _note(self, topic: str, queue: int, last: int) -> None:
        self.named[topic, queue] = max(self.named.get((topic, queue), -1), last)

    def archived(self) -> set[tuple[str, int, int]]:
        """Return all offsets that were ever in an object."""
        return _places(self.ever.values())

    def check_tiles(self) -> None:
        """Check that no queue has an offset twice, or a hole without a gap."""
        for place, spans in self.spans.items():
            settled = 0
            topic, queue = place
            coming = [name for name in self.open.values() if name.topic == topic and queue in name.queues]
            pending = [Span(*name.queues[queue], name.key) for name in coming]
            known = sorted([*spans, *self.gaps.get(place, []), *pending])
            if not known:
                continue  # All of its messages had expired, and were left out when the object was compacted.
            expected = known[0].first
            for span in sorted(spans):
                assert span.first >= settled, f"{place}: {span} overlaps what ends at {settled - 1}"
                settled = span.last + 1
            for span in known:
                first = max(expected, min(self.minimums.get(place, 0), span.first))
                assert span.first <= first, f"{place}: nothing says what became of {first}-{span.first - 1}, {known}"
                expected = max(expected, span.last + 1)

    def lowest(self, place: Place) -> int:
        """Return the offset below which no offset is requested again: lower ones are hidden and cannot come back."""
        topic, queue = place
        held = [name for name in self.live.values() if name.topic == topic]
        held += [self.ever[key] for key in self.expiring if self.ever[key].topic == topic]
        begins = [name.queues[queue][0] for name in held if queue in name.queues]
        return min([self.minimums.get(place, 0), *begins])

    def nowhere(self, place: Place) -> list[tuple[int, int]]:
        """Return the offsets in gaps that no object ever has or had: an existing message beats a gap."""
        left = []
        for start, last in joined((gap.first, gap.last) for gap in self.gaps.get(place, [])):
            first = start
            for span in sorted(self.spans.get(place, [])):
                if first <= span.last and span.first <= last:
                    left.append((first, span.first - 1))
                    first = span.last + 1
            left.append((first, last))
        return [(first, last) for first, last in left if first <= last]

    def came_back(self, place: Place, offset: int) -> bool:
        """Return whether an object has an offset of a gap: an older copy of the disk had the message."""
        told, held = self.gaps.get(place, []), self.spans.get(place, [])
        return all(any(span.first <= offset <= span.last for span in spans) for spans in (told, held))

    def may_delete(self, key: str, now_ms: int) -> None:
        """Raise if an object must be kept: by the earlier clock its grace period is not over, or it is in use."""
        if keys.parse_data_key(key) is None:
            return
        assert key not in self.open, f"{key} is deleted while an open intent names it"
        assert not any(key in names for names in self.rewrites.values()), f"{key} is deleted while it is being made"
        assert key not in self.live, f"{key} is deleted while the catalog has it"
        if key in self.ever:
            assert key in self.deleted or self.expiring[key] <= now_ms, f"{key} is deleted before its grace has passed"


def _places(names: Iterable[CommittedObject]) -> set[tuple[str, int, int]]:
    """Return topic, queue and offset of each row."""
    return {
        (name.topic, queue, offset)
        for name in names
        for queue, first, last in name.runs
        for offset in range(first, last + 1)
    }


class StorageModel:
    def __init__(self) -> None:
        self.live: dict[Place, dict[int, Message]] = {}
        self.given: dict[tuple[str, int, int], int] = {}  # (topic, queue, offset) -> number
        self.by_number: dict[int, Message] = {}
        self.told: dict[Place, int] = {}
        self.certified: set[tuple[str, int, int]] = set()  # Topic, queue and offset that a certificate named.
        self.unreadable: set[int] = set()  # Numbers of messages that a complete certificate covers, archived or not.
        self.deleted_at: dict[str, int] = {}  # topic -> number of the newest message at its last deletion
        self.uncertain: dict[Place, int] = {}  # An incomplete deletion: no message below this is promised.
        self.log_end = 0
        self.promised_end = 0
        self.number = 0

    def put(self, message: Message) -> None:
        place = (message.topic, message.queue, message.offset)
        assert place not in self.given, f"{place} is given to {message.number} and was to {self.given[place]}"
        assert message.physical >= self.log_end, f"CommitLog offset {message.physical} lies below {self.log_end}"
        self.given[place] = message.number
        self.by_number[message.number] = message
        self.live.setdefault(place[:2], {})[message.offset] = message
        self.log_end = message.end

    def messages(self) -> Iterator[Message]:
        for held in self.live.values():
            yield from held.values()

    def newest_of(self, topic: str) -> int:
        return max((m.number for m in self.by_number.values() if m.topic == topic), default=0)

    def saw(self, topic: str, queue: int, offset: int, record: bytes) -> None:
        """Record that a tier returned this record."""
        number = self.given.get((topic, queue, offset))
        assert number is not None, f"{topic}/{queue}/{offset} holds what nobody was told of"
        message = self.by_number[number]
        assert record == message.record, f"{topic}/{queue}/{offset} is not message {number} byte for byte"
        assert (topic, queue, offset) not in self.certified, f"{topic}/{queue}/{offset}: what was erased is returned"
        assert number not in self.unreadable, (
            f"{topic}/{queue}/{offset}: a complete certificate covers message {number}"
        )
        assert number > self.deleted_at.get(topic, 0), f"{topic}/{queue}/{offset}: deleted message {number} is back"

    def lose(self, end: int, bucket: JournalModel, *, keep_names: bool) -> list[Message]:
        """Record that the local log ends at `end` now; with `keep_names` the lost offsets must not be reused."""
        archived = bucket.archived()
        lost = []
        for (topic, queue), held in self.live.items():
            for offset, message in list(held.items()):
                if message.end <= end or (topic, queue, offset) in archived:
                    continue
                lost.append(message)
                del held[offset]
        for (topic, queue, offset), number in list(self.given.items()):
            named = keep_names or offset <= bucket.named.get((topic, queue), -1)
            if not named and self.by_number[number].end > end:
                del self.given[topic, queue, offset]
        return lost

    def erase(self, erased: Iterable[tuple[str, int, int]], key: bytes) -> None:
        """Record erased messages, certified or not: they are no longer promised."""
        for topic, queue, offset in erased:
            message = self.live.get((topic, queue), {}).pop(offset, None)
            assert message is None or key in message.record, f"{topic}/{queue}/{offset} had not the key"

    def with_key(self, topic: str, key: str) -> set[int]:
        """Return the numbers of all messages of a topic that have a key, including deleted ones."""
        word = key.encode()  # No other property of this traffic contains it.
        of_topic = (message for message in self.by_number.values() if message.topic == topic)
        return {message.number for message in of_topic if word in message.properties}

    def certify(self, told: Iterable[tuple[str, int, int]]) -> None:
        self.certified |= set(told)

    def evicted(self, below: int, bucket: JournalModel, expired: Callable[[Message], bool]) -> None:
        """Record that the local log begins there now: messages below must be archived or expired."""
        archived = bucket.archived()
        for place, held in self.live.items():
            for offset, message in list(held.items()):
                if message.physical < below and (*place, offset) not in archived:
                    allowed = expired(message) or offset < self.uncertain.get(place, 0)
                    assert allowed, f"{place}: message {message.number} at {offset} is evicted and not archived"
                    del held[offset]

    def delete(self, topic: str, ends: dict[int, int], *, again: bool) -> None:
        for place in [place for place in self.live if place[0] == topic]:
            del self.live[place]
        self.deleted_at[topic] = self.newest_of(topic)
        if again:
            assert not any(place[0] == topic for place in self.certified), f"{topic} begins again, it was archived"
            self.given = {place: number for place, number in self.given.items() if place[0] != topic}
            self.told = {place: minimum for place, minimum in self.told.items() if place[0] != topic}
        for queue, end in ends.items():
            self.uncertain.pop((topic, queue), None)
            if not again:
                self.told[topic, queue] = max(self.told.get((topic, queue), 0), end)

    def forget(self, topic: str, is_in_log: Callable[[Message], bool]) -> None:
        """Record that offsets of former lives may be assigned again; a recreated topic may exist above them."""
        last = self.deleted_at.get(topic, 0)
        for place in [place for place in self.live if place[0] == topic]:
            sure = [m for m in self.live[place].values() if m.offset >= self.uncertain.get(place, 0)]
            left = [message.number for message in sure if message.number <= last]
            assert not left, f"{place} is forgotten, and nobody deleted {left}"
        former = [m for m in self.by_number.values() if m.topic == topic and m.number <= last]
        there = [message.number for message in former if is_in_log(message)]
        assert not there, f"{topic} is forgotten while the log has its messages {there}"
        self.given = {place: number for place, number in self.given.items() if place[0] != topic or number > last}
        self.certified = {place for place in self.certified if place[0] != topic or place in self.given}
        for place in [place for place in self.told if place[0] == topic and not self.live.get(place)]:
            del self.told[place]

    def unsure(self, topic: str, ends: dict[int, int]) -> None:
        for queue, end in ends.items():
            self.uncertain[topic, queue] = max(end, self.uncertain.get((topic, queue), 0))

    def forget_all_but(self, known: set[Place]) -> None:
        """Record that offsets of other queues may be assigned again."""
        self.given = {place: number for place, number in self.given.items() if place[:2] in known}
        self.told = {place: minimum for place, minimum in self.told.items() if place in known}
        self.certified = {place for place in self.certified if place[:2] in known}

    def tell_minimum(
        self, place: Place, minimum: int, bucket: JournalModel, expired: Callable[[Message], bool]
    ) -> None:
        before = self.told.get(place, 0)
        assert minimum >= before or bucket.came_back(place, minimum), (
            f"{place}: the minimum went back from {before} to {minimum}"
        )
        self.told[place] = minimum
        self.record_minimum(place, minimum, expired)

    def record_minimum(self, place: Place, minimum: int, expired: Callable[[Message], bool]) -> None:
        """Record that lower messages may be hidden now or later: an EXPIRE was written, whatever the TTL becomes."""
        held = self.live.get(place, {})
        for offset in [offset for offset in held if offset < minimum]:
            message = held.pop(offset)
            allowed = offset < self.uncertain.get(place, 0) or expired(message)
            what = f"message {message.number} of {message.stored_ms} at {offset}"
            assert allowed, f"{place}: the minimum is {minimum}, and {what} has not expired"
