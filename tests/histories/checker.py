"""Check whether a history keeps the promises of a replication mode: a pure function from events to violations.

  kind          the promise that is broken
  lost          an acknowledged message is at its acknowledged offset; a delayed or committed one is in its topic
                (`async`: or it is in `diverged/`, in the archive, or in a GAP)
  two at one    no offset was assigned to two messages
  order         acknowledged messages of a sequential producer are in their queue in the order of sending, and an
                ordered group receives each queue's messages in order
  vanished      every message that was ever delivered still exists
  doubled       a message that was sent once is stored once
  hole          the offsets of a queue are contiguous, and a reader by offset misses none
  early         a delayed message is neither stored in its topic nor delivered before its time
  both ways     a rolled back message is never delivered
  topics        a created topic exists, a deleted one does not
  missed        a group received all stored messages
  restless      within `rest_within_ms` of the healing the set serves and groups have consumed everything, unless the
                machine stalls
  switched      if an answer reports a new master, that member is master
  kept          a message that a member truncated is not in the set; otherwise the truncation was wrong, or went too far
  archive       the archive has each offset once, with the message that the set has there
  logs          the members' logs are byte-identical
  blind         the history has the events that the checks need; otherwise it proves nothing

In `async`, acknowledged messages may be lost and their offsets assigned again: `vanished`, `two at one`, `missed` and
the order of delivery to readers are no promises there. A round that has only switchovers and broken connections keeps
them in every mode, if only the requested switchovers changed the master.

The verdict on a round is `held`; `broken`, with the broken promises; or `void`. It is void if the only violations are
that events were late, and the machine stalled or let a server wait for a processor meanwhile. A void round does not
count as held. An event is late if it may still occur; a message that was skipped, because a later one arrived, is lost.
An aborted round is judged by the events before the abort.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from enum import StrEnum
from itertools import pairwise
from math import inf
from typing import Any

import msgspec
from msgspec.structs import replace

from tests.histories.faults import HARMLESS
from tests.histories.history import (
    ALL_IS_ARCHIVED,
    Archived,
    Bounds,
    BrokenOff,
    Decision,
    Dropped,
    Event,
    Gap,
    Healed,
    Kept,
    Led,
    LogPart,
    Outcome,
    Replaced,
    ReportedStep,
    Rested,
    Seen,
    Sent,
    Serves,
    Stall,
    Stored,
    Switched,
    TopicDeleted,
    TopicMade,
    Topics,
    Unsettled,
    Waited,
)
from tests.histories.stalls import is_starved

Place = tuple[str, int, int]  # Topic, queue and offset.


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """The promises of a mode."""

    keeps_acknowledged: bool  # Whichever member dies.
    rest_within_ms: int = 30_000


class Violation(msgspec.Struct, frozen=True):
    """A broken promise; `kind` is in the table of this module."""

    kind: str
    text: str
    is_void: bool = False  # An event was merely late, and the machine stalled meanwhile.

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Verdict(StrEnum):
    """The verdict on a round, as this module defines it."""

    HELD = "held"
    BROKEN = "broken"
    VOID = "void"


class Report(msgspec.Struct, frozen=True):
    """The counts of a round and its violations."""

    violations: list[Violation]
    counts: Counter[str]
    elections: int
    faults: Counter[str]  # By kind.
    silent_ms: int  # The longest time without an acknowledged send.

    @property
    def verdict(self) -> Verdict:
        if not self.violations:
            return Verdict.HELD
        if all(violation.is_void for violation in self.violations):
            return Verdict.VOID
        return Verdict.BROKEN


def check(events: Iterable[Event], promise: Promise) -> Report:
    """Return all violations, the first of each kind first."""
    history = _History(events, promise)
    return Report(
        _violations(history, replace(promise, keeps_acknowledged=_owes(history, promise))),
        history.counts(),
        elections=history.elections,
        faults=Counter(one.kind for one in history.told if one.kind),
        silent_ms=_silent_ms(history),
    )


def owes(events: Iterable[Event], promise: Promise) -> bool:
    """Return whether the messages acknowledged so far must be kept."""
    return _owes(_History(events, promise), promise)


def _owes(history: _History, promise: Promise) -> bool:
    if promise.keeps_acknowledged:
        return True
    handed_over = sum(1 for one in history.switched if one.by and one.to)
    is_harmless = all(one.kind in HARMLESS for one in history.told if one.kind)
    is_known = bool(history.led) and all(one.epoch >= 0 for one in history.led)
    return is_harmless and is_known and history.elections <= handed_over


def _silent_ms(history: _History) -> int:
    began = [one.began for one in history.sent]
    ends = [one.ended for one in history.sent]
    times = [*began, *ends]
    edges = [min(times), *sorted(one.ended for one in history.acknowledged), max(times)] if times else []
    return max((after - before for before, after in pairwise(edges)), default=0)


def _violations(history: _History, promise: Promise) -> list[Violation]:
    if history.broken_off:
        return _proved(history, promise) + [
            Violation("blind", f"broken off: {one.why}", is_void=one.late and history.is_starved())
            for one in history.broken_off
        ]
    checks = [
        _blind(history, promise),
        _lost(history, promise),
        _order(history, promise),
        _doubled(history),
        _holes(history, promise),
        _skipped(history, promise),
        _early(history),
        _both_ways(history),
        _topics(history),
        _restless(history, promise),
        _switched(history),
        _archive(history, promise),
        _kept(history),
        _logs(history),
        _alone(history),
    ]
    if promise.keeps_acknowledged:
        checks += [_two_at_one(history), _vanished(history), _missed(history)]
    return [violation for found in checks for violation in found]


def _proved(history: _History, promise: Promise) -> list[Violation]:
    """Return the violations of an aborted round that no later event could have resolved."""
    checks = [
        _order(history, promise),
        _doubled(history),
        _skipped(history, promise),
        _early(history),
        _both_ways(history),
        _restless(history, promise),
        _switched(history),
        _kept(history),
        _logs(history),
    ]
    if promise.keeps_acknowledged:
        read = _of_read_queues(history)
        checks += [_two_at_one(history), _lost(read, promise), _holes(read, promise), _vanished(read), _missed(read)]
    if history.archived:  # The archive is read completely, after all queues.
        checks.append(_archive(history, promise))
    return [violation for found in checks for violation in found]


def _of_read_queues(history: _History) -> _History:
    """Return the part with completely read queues: the next one was begun. Groups are included if awaited."""
    part = copy(history)
    part.bounds = history.bounds[:-1]
    read = {(one.topic, one.queue) for one in part.bounds}
    waited_for = {one.group for one in history.rested}
    part.sent = [one for one in history.sent if _is_plain(one) and (one.topic, one.queue) in read]
    part.stored = [one for one in history.stored if (one.topic, one.queue) in read]
    part.seen = [one for one in history.seen if one.group in waited_for or (one.topic, one.queue) in read]
    return part


class _History:
    """The events of a history by kind."""

    def __init__(self, events: Iterable[Event], promise: Promise) -> None:
        self._within_ms = promise.rest_within_ms
        by_type: dict[type, list[Any]] = defaultdict(list)
        for event in events:
            by_type[type(event)].append(event)
        self.sent: list[Sent] = by_type[Sent]
        self.seen: list[Seen] = by_type[Seen]
        self.stored: list[Stored] = by_type[Stored]
        self.bounds: list[Bounds] = by_type[Bounds]
        self.made: list[TopicMade] = by_type[TopicMade]
        self.gone: list[TopicDeleted] = by_type[TopicDeleted]
        self.topics: list[Topics] = by_type[Topics]
        self.healed: list[Healed] = by_type[Healed]
        self.switched: list[Switched] = by_type[Switched]
        self.replaced: list[Replaced] = by_type[Replaced]
        self.stalls: list[Stall] = by_type[Stall]
        self.serves: list[Serves] = by_type[Serves]
        self.rested: list[Rested] = by_type[Rested]
        self.log: list[LogPart] = by_type[LogPart]
        self.kept: list[Kept] = by_type[Kept]
        self.gaps: list[Gap] = by_type[Gap]
        self.archived: list[Archived] = by_type[Archived]
        self.dropped: list[Dropped] = by_type[Dropped]
        self.led: list[Led] = by_type[Led]
        self.waits: list[Waited] = by_type[Waited]
        self.told: list[ReportedStep] = by_type[ReportedStep]
        self.unsettled: list[Unsettled] = by_type[Unsettled]
        self.broken_off: list[BrokenOff] = by_type[BrokenOff]
        self.at: dict[Place, str] = {(one.topic, one.queue, one.offset): one.key for one in self.stored}
        self.copies: Counter[tuple[str, str]] = Counter((one.topic, one.key) for one in self.stored)
        self.by_key: dict[str, Sent] = {one.key: one for one in self.sent}

    @property
    def healed_at(self) -> int:
        """Return the time of the healing, or 0 if it did not happen."""
        return max((one.at for one in self.healed), default=0)

    def is_starved(self, until: float = inf) -> bool:
        """Return whether the machine was too busy between the healing and `until`, when all events were due."""
        return is_starved(self.stalls, self.waits, self.healed_at, until, self._within_ms)

    @property
    def epochs(self) -> list[int]:
        return [one.epoch for one in self.led if one.epoch >= 0]

    @property
    def elections(self) -> int:
        """Return the number of known elections."""
        return self.epochs[-1] - self.epochs[0] if self.epochs else 0

    @property
    def has_archive(self) -> bool:
        """Return whether the round waited for the archive."""
        return any(one.what == ALL_IS_ARCHIVED for one in self.serves)

    @property
    def is_archived(self) -> bool:
        return any(one.what == ALL_IS_ARCHIVED and one.at for one in self.serves)

    @property
    def is_settled(self) -> bool:
        """Return whether all awaited events occurred."""
        return not self.unsettled and all(one.at for one in self.rested) and all(one.at for one in self.serves)

    @property
    def acknowledged(self) -> Iterator[Sent]:
        return (one for one in self.sent if one.outcome is Outcome.ACKNOWLEDGED)

    def counts(self) -> Counter[str]:
        counts = Counter(f"sent, {one.outcome}" for one in self.sent)
        counts["seen"] = len(self.seen)
        counts["stored"] = len(self.stored)
        counts["stored more than once"] = sum(1 for count in self.copies.values() if count > 1)
        for one in self.switched:
            counts[f"{'handed over' if one.by else 'designated'}, {'done' if one.to else 'refused'}"] += 1
        counts |= Counter({"replaced": len(self.replaced)} if self.replaced else {})
        counts |= Counter({"archived": len(self.archived)} if self.archived else {})
        counts |= Counter({"dropped below": max(one.below for one in self.dropped)} if self.dropped else {})
        counts["stood still ms"] = sum(stall.lasted for stall in self.stalls)
        counts["let servers wait ms"] = sum(one.lasted for one in self.waits)
        counts["kept elsewhere"] = len({one.key for one in self.kept})
        return counts


def _is_plain(sent: Sent) -> bool:
    """Return whether the offset in the answer is the offset in the message's topic."""
    return not sent.due and sent.decision is Decision.NONE


def _blind(history: _History, promise: Promise) -> Iterator[Violation]:
    """Detect a harness that loses its own records, because it would find no violation."""
    for what, events in (
        ("when the set was healed", history.healed),
        ("who led", history.epochs),
        ("that the set serves", history.serves),
        ("when groups were at rest", history.rested),
        ("what was seen", history.seen),
        ("what the members' logs hold", history.log),
    ):
        if not events:
            yield Violation("blind", f"nobody says {what}")
    if not promise.keeps_acknowledged and any(one.epoch < 0 for one in history.led):
        # Otherwise it is unknown whether only switchovers changed the master, and so which messages had to be kept.
        yield Violation("blind", "nobody could be asked who led", is_void=history.is_starved())
    for group in sorted({one.group for one in history.rested} - {one.group for one in history.seen}):
        yield Violation("blind", f"{group} was given nothing", is_void=history.is_starved())
    if not any(history.acknowledged):
        yield Violation("blind", "nothing was acknowledged", is_void=history.is_starved())
    if history.is_archived and not history.archived:
        yield Violation("blind", "all is archived, and nobody has read the archive")
    if len(history.by_key) != len(history.sent):
        yield Violation("blind", "two sends have one key")
    read = {(one.topic, one.queue) for one in history.bounds}
    for topic, queue in sorted({(one.topic, one.queue) for one in history.acknowledged if _is_plain(one)} - read):
        yield Violation("blind", f"{topic}/{queue} was written to, and nobody has read it")
    gone = {one.topic for one in history.gone}
    for topic in sorted({one.topic for one in history.acknowledged} - {topic for topic, _ in read} - gone):
        yield Violation("blind", f"{topic} was written to, and nobody has read it")


def _lost(history: _History, promise: Promise) -> Iterator[Violation]:
    elsewhere = set[str]()
    if not promise.keeps_acknowledged:
        elsewhere = {one.key for one in history.kept} | {one.key for one in history.archived}
    gaps = [] if promise.keeps_acknowledged else history.gaps
    last_come: dict[str, int] = {}
    for sent in history.acknowledged:
        if sent.due and history.copies[sent.topic, sent.key]:
            last_come[sent.producer] = max(last_come.get(sent.producer, 0), sent.due)
    for sent in history.acknowledged:
        if sent.decision is Decision.ROLLBACK:
            continue
        if _is_plain(sent):
            is_there = history.at.get((sent.topic, sent.queue, sent.offset)) == sent.key
        else:
            is_there = bool(history.copies[sent.topic, sent.key])
        if is_there or sent.key in elsewhere or any(_is_in(gap, sent) for gap in gaps):
            continue
        is_void = not _is_plain(sent) and not history.is_settled and history.is_starved()
        if sent.due and sent.due < last_come.get(sent.producer, 0):
            is_void = False  # Messages that were due later have been delivered.
        yield Violation("lost", f"{_told(sent)}; {_place_now(history, sent)}", is_void=is_void)


def _is_in(gap: Gap, sent: Sent) -> bool:
    return (gap.topic, gap.queue) == (sent.topic, sent.queue) and gap.first <= sent.offset <= gap.last


def _told(sent: Sent) -> str:
    place = f"{sent.topic}/{sent.queue} at {sent.offset}"
    return f"{sent.producer}'s {sent.key}, acknowledged {sent.ended} as {place} (physical {sent.physical})"


def _place_now(history: _History, sent: Sent) -> str:
    there = history.at.get((sent.topic, sent.queue, sent.offset))
    copies = [f"{one.queue} at {one.offset}" for one in history.stored if one.key == sent.key]
    return f"its place has {there or 'nothing'}, the message is {'in ' + ', '.join(copies) if copies else 'nowhere'}"


def _two_at_one(history: _History) -> Iterator[Violation]:
    claims: dict[Place, dict[str, str]] = defaultdict(dict)
    for sent in history.acknowledged:
        if _is_plain(sent):
            claims[sent.topic, sent.queue, sent.offset].setdefault(sent.key, f"acknowledged to {sent.producer}")
    for seen in history.seen:
        if not seen.again:
            claims[seen.topic, seen.queue, seen.offset].setdefault(seen.key, f"seen by {seen.who} {seen.at}")
    for stored in history.stored:
        claims[stored.topic, stored.queue, stored.offset].setdefault(stored.key, "stored")
    for (topic, queue, offset), keys in claims.items():
        if len(keys) > 1:
            told = ", ".join(f"{key} ({how})" for key, how in keys.items())
            yield Violation("two at one", f"{topic}/{queue} at {offset}: {told}")


def _order(history: _History, promise: Promise) -> Iterator[Violation]:
    sent_to: dict[tuple[str, str, int], list[Sent]] = defaultdict(list)
    for sent in history.acknowledged:
        if _is_plain(sent) and history.at.get((sent.topic, sent.queue, sent.offset)) == sent.key:
            sent_to[sent.producer, sent.topic, sent.queue].append(sent)
    for (producer, topic, queue), calls in sent_to.items():
        calls.sort(key=lambda one: one.number)
        for before, after in pairwise(calls):
            if after.offset <= before.offset:
                where = f"{producer} in {topic}/{queue}"
                yield Violation(
                    "order", f"{where}: {before.key} at {before.offset}, then {after.key} at {after.offset}"
                )
    given: dict[tuple[str, str, int], dict[int, None]] = defaultdict(dict)
    for seen in history.seen if promise.keeps_acknowledged else ():
        if seen.in_order:
            given[seen.group, seen.topic, seen.queue].setdefault(seen.offset)
    for (group, topic, queue), offsets in given.items():
        for first, second in pairwise(offsets):
            if second < first:
                yield Violation("order", f"{group} was given {topic}/{queue} at {first} before {second}")


def _vanished(history: _History) -> Iterator[Violation]:
    gone = {one.topic for one in history.gone}
    read = {(one.topic, one.queue) for one in history.bounds}
    for seen in history.seen:
        if seen.topic in gone or seen.again or (history.broken_off and (seen.topic, seen.queue) not in read):
            continue
        there = history.at.get((seen.topic, seen.queue, seen.offset))
        if there != seen.key:
            where = f"{seen.topic}/{seen.queue} at {seen.offset}"
            yield Violation(
                "vanished", f"{seen.who} saw {seen.key} in {where} {seen.at}, there is {there or 'nothing'}"
            )


def _doubled(history: _History) -> Iterator[Violation]:
    for (topic, key), count in history.copies.items():
        sent = history.by_key.get(key)
        if sent is None:
            yield Violation("doubled", f"{topic} holds {key}, which nobody has sent")
        elif count > 1 and _is_plain(sent) and not sent.may_repeat:
            yield Violation("doubled", f"{topic} holds {key} {count} times, it was sent once")


def _holes(history: _History, promise: Promise) -> Iterator[Violation]:
    for bounds in history.bounds:
        told = set[int]()
        for gap in history.gaps if not promise.keeps_acknowledged else ():
            if (gap.topic, gap.queue) == (bounds.topic, bounds.queue):
                told.update(range(gap.first, gap.last + 1))
        missing = [
            offset
            for offset in range(bounds.first, bounds.end)
            if (bounds.topic, bounds.queue, offset) not in history.at and offset not in told
        ]
        if missing:
            where = f"{bounds.topic}/{bounds.queue} from {bounds.first} to {bounds.end}"
            yield Violation("hole", f"{where} lacks {len(missing)}: {missing[:5]}")


def _skipped(history: _History, promise: Promise) -> Iterator[Violation]:
    """Return offsets that a reader skipped."""
    read: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for seen in history.seen if promise.keeps_acknowledged else ():
        if not seen.group:
            read[seen.who, seen.topic, seen.queue].append(seen.offset)
    for (who, topic, queue), offsets in read.items():
        for before, after in pairwise(offsets):
            if after != before + 1:
                yield Violation("hole", f"{who} read {topic}/{queue} at {before}, then at {after}")


def _early(history: _History) -> Iterator[Violation]:
    due = {one.key: one.due for one in history.sent if one.due}
    for stored in history.stored:
        if stored.key in due and stored.stored < due[stored.key]:
            wait = due[stored.key] - stored.stored
            yield Violation("early", f"{stored.key} was stored in {stored.topic} {wait} ms before its time")
    for seen in history.seen:
        if seen.key in due and seen.at < due[seen.key]:
            yield Violation("early", f"{seen.who} was given {seen.key} {due[seen.key] - seen.at} ms before its time")


def _both_ways(history: _History) -> Iterator[Violation]:
    dropped = {one.key for one in history.sent if one.decision is Decision.ROLLBACK}
    for seen in history.seen:
        if seen.key in dropped:
            yield Violation("both ways", f"{seen.who} was given {seen.key}, which was rolled back")
    for stored in history.stored:
        if stored.key in dropped:
            where = f"{stored.topic}/{stored.queue} at {stored.offset}"
            yield Violation("both ways", f"{where} is {stored.key}, which was rolled back")


def _topics(history: _History) -> Iterator[Violation]:
    if not history.topics and (history.made or history.gone):
        yield Violation("blind", "nobody says which topics there are")
        return
    gone = {one.topic for one in history.gone}
    for made in history.made:
        queues = history.topics[-1].queues.get(made.topic)
        if made.topic not in gone and queues != made.queues:
            yield Violation("topics", f"{made.topic} was made with {made.queues} queues and has {queues or 'none'}")
    for topic in sorted(gone & set(history.topics[-1].queues if history.topics else ())):
        yield Violation("topics", f"{topic} was deleted and is there")


def _missed(history: _History) -> Iterator[Violation]:
    given: dict[str, set[str]] = defaultdict(set)
    topics: dict[str, set[str]] = defaultdict(set)
    for seen in history.seen:
        if seen.group:
            given[seen.group].add(seen.key)
            topics[seen.group].add(seen.topic)
    restless = {one.group for one in history.rested if not one.at and not one.is_past}
    upto: dict[tuple[str, str, int], int] = {}  # The highest offset of a queue that a group received.
    for seen in history.seen:
        if not seen.again:
            queue = seen.group, seen.topic, seen.queue
            upto[queue] = max(upto.get(queue, -1), seen.offset)
    for stored in history.stored:
        for group, keys in given.items():
            if stored.topic in topics[group] and stored.key not in keys:
                where = f"{stored.topic}/{stored.queue} at {stored.offset}"
                is_passed_over = stored.offset < upto.get((group, stored.topic, stored.queue), -1)
                how = "was given what lies behind" if is_passed_over else "was never given"
                text = f"{group} {how} {stored.key}, {where}" + ", and not that" * is_passed_over
                is_void = group in restless and not is_passed_over and history.is_starved()
                yield Violation("missed", text, is_void=is_void)


def _restless(history: _History, promise: Promise) -> Iterator[Violation]:
    healed = history.healed_at
    ends = [(one.what, one.at, max(one.asked, healed), True) for one in history.serves] + [
        (f"{one.group} rests{one.lacks and ': it lacks ' + one.lacks}", one.at, healed, not one.is_past)
        for one in history.rested
    ]
    for what, at, since, may_come in ends:
        lost = sum(stall.lasted for stall in history.stalls if since <= stall.at < at)
        if not at:
            text = f"after the healing it never came about that {what}"
            yield Violation("restless", text, is_void=may_come and history.is_starved())
        elif at - since - lost > promise.rest_within_ms:
            after = "the healing" if since == healed else "it was asked for"
            text = f"{what}, but only {at - since} ms after {after}, {lost} ms stood still"
            yield Violation("restless", text, is_void=history.is_starved(at))


def _archive(history: _History, promise: Promise) -> Iterator[Violation]:
    rows: dict[Place, list[str]] = defaultdict(list)
    for row in history.archived:
        rows[row.topic, row.queue, row.offset].append(row.key)
    for place, keys in rows.items():
        topic, queue, offset = place
        there = history.at.get(place)
        if len(keys) > 1:
            yield Violation("archive", f"{topic}/{queue} at {offset} is there {len(keys)} times: {', '.join(keys)}")
        elif there != keys[0] and (there or promise.keeps_acknowledged):
            yield Violation("archive", f"{topic}/{queue} at {offset}: {keys[0]}, the set has {there or 'nothing'}")
    if history.archived or history.is_archived:
        for bounds in history.bounds:
            lacking = [
                offset
                for offset in range(bounds.first, bounds.end)
                if (bounds.topic, bounds.queue, offset) in history.at
                and (bounds.topic, bounds.queue, offset) not in rows
            ]
            if lacking:
                text = f"{bounds.topic}/{bounds.queue} lacks {len(lacking)}: {lacking[:5]}"
                upto = max(
                    (at for topic, queue, at in rows if (topic, queue) == (bounds.topic, bounds.queue)), default=-1
                )
                is_late = lacking[0] > upto  # Otherwise later offsets were archived and this one was not.
                is_void = is_late and history.has_archive and not history.is_archived and history.is_starved()
                yield Violation("archive", text, is_void=is_void)


def _kept(history: _History) -> Iterator[Violation]:
    for kept in history.kept:
        sent = history.by_key.get(kept.key)
        if sent is None or kept.cut_from != sent.topic or sent.may_repeat or not _is_plain(sent):
            continue  # A copy in a retry topic is another message.
        if history.copies[sent.topic, sent.key]:
            yield Violation("kept", f"{kept.where} has {kept.key}, and so has the set")


def _switched(history: _History) -> Iterator[Violation]:
    for one in history.switched:
        if one.to and -1 < one.then <= one.epoch:
            yield Violation("switched", f"to {one.to} {one.at}, but epoch {one.epoch} became {one.then}")


def _logs(history: _History) -> Iterator[Violation]:
    parts: dict[tuple[int, int], dict[str, str]] = defaultdict(dict)
    for part in history.log:
        parts[part.start, part.end][part.member] = part.digest
    for (start, end), digests in parts.items():
        if len(set(digests.values())) > 1:
            yield Violation("logs", f"from {start} to {end}: {digests}")


def _alone(history: _History) -> Iterator[Violation]:
    parts: dict[tuple[int, int], set[str]] = defaultdict(set)
    for part in history.log:
        parts[part.start, part.end].add(part.member)
    for (start, end), members in parts.items():
        if len(members) < 2:
            yield Violation("blind", f"only {', '.join(members)} showed its log from {start} to {end}")


def told(violations: Sequence[Violation], most: int = 20) -> str:
    """Return a readable summary: the count of each kind, and its first violation."""
    kinds = Counter(one.kind for one in violations)
    head = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    return "\n  ".join([head or "nothing is broken", *map(str, violations[:most])])
