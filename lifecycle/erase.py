"""Erasure by key: delete all messages of a topic with a key from the archive, and report the remaining copies.

    1. Offload everything, after a roll of the active segment, because unarchived messages can't be found.
    2. Search each object that may have the key by its bloom filters. If rows match: INTENT, an object without them,
       ERASE. Matching objects that are out of view and not deleted yet never return to view. They are deleted at the
       same time as the replaced ones.
    3. Hide the erased rows in the local log. Their bytes remain until their segments are evicted.
    4. Search the local log for messages of deleted topics, which no round archived, and for waiting messages.
    5. Delete the records of quarantined messages.
    6. Return a certificate: what was searched, erased and hidden, where copies remain and until when.

Objects appear and disappear meanwhile, above all by compaction. So the search is repeated until a pass finds no object
that was not searched. If an erasure is interrupted, the rows erased so far remain erased, and the local log follows
within seconds (`hot_erasure`). A repetition with the same id erases the rest. The key itself is in no journal entry,
file or log line of the broker.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol

from infra import failpoint
from infra.clock import Clock
from infra.loop.threads import SYSTEM_THREADS, Threads
from infra.objects.store import ObjectStoreError
from lifecycle.compaction import settled_below
from lifecycle.hot_erasure import HotErasure
from lifecycle.hot_store import HotStore
from lifecycle.offload import Offload
from lifecycle.retention import RetentionPolicy
from lifecycle.retention_jobs import RetentionJobs
from lifecycle.sweep import orphan_objects
from lifecycle.unexpire import is_there
from neve.archive.catalog.queue_runs import Location, touching, united
from neve.archive.format.journal import ERASE, AnyEntry, CommittedObject, Erase, Gap
from neve.archive.format.keys import topic_component
from neve.archive.policy.erasure import (
    Verdict,
    erased_of,
    holds,
    is_meant,
    spans_of_rows,
    topics_to_search,
)
from neve.archive.policy.unexpiry import may_come_back, stays_out
from neve.record.codec import MalformedRecord, MessageRecord, decode_record
from neve.record.properties import PROPERTY_REAL_TOPIC
from neve.remoting.names import CHECK_MAX_TOPIC, HALF_TOPIC, SCHEDULE_TOPIC, WHEEL_TIMER_TOPIC
from tiered.journal.writer import JournalWriter
from tiered.worker.failed import WorkerFailed
from tiered.write.key_rows import GroupReader, KeyRows, rows_with_key
from tiered.write.merge import NOTHING, Merge, rows_left
from tiered.write.offload_plan import TopicUnreadable
from tiered.write.progress import Progress, report_event
from tiered.write.replacement import Fate, Merger, Outcome, Replacement, Swap

log = logging.getLogger(__name__)

_ID = re.compile(r"e\d+\.\d+")
# Failures that concern a single object; others are those of the store or of the worker.
_OF_ONE_OBJECT = frozenset({"DamagedObject", "NotFound"})
WITH_ITS_OBJECT = "expired, but in an object with erased messages"
_REPORT_EVERY_S = 5.0
_EVERYTHING = 1 << 62
# Topics whose records are messages for other topics: delayed, timer, half and abandoned half messages.
_WAITING = frozenset({SCHEDULE_TOPIC, WHEEL_TIMER_TOPIC, HALF_TOPIC, CHECK_MAX_TOPIC})
#: (topic, queue, first offset, last offset)
Row = tuple[str, int, int, int]
#: (topic, queue) -> (first, last), in order and disjoint.
Spans = dict[tuple[str, int], list[tuple[int, int]]]
#: Key of an object, and whether it was in view when it was searched.
Seen = set[tuple[str, bool]]


class Eraser(GroupReader, Merger, Protocol):
    """The worker that reads objects for an erasure and writes their replacements."""


def is_erase_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


class EraseRequest(NamedTuple):
    """An erasure request. `grace_ms`: how long replaced objects are kept; None: as long as expired ones."""

    topic: str
    key: str
    retries: bool = True
    grace_ms: int | None = None


class _LocalQueue(NamedTuple):
    """A queue of the local log: its offsets, and which of them requests return."""

    low: int
    shown_from: int
    end: int
    hidden: Sequence[tuple[int, int]]

    def shown_of(self, spans: Sequence[tuple[int, int]]) -> int:
        """Return how many offsets of disjoint spans requests return."""
        in_view = [(max(first, self.shown_from), min(last, self.end - 1)) for first, last in spans]
        in_view = [(first, last) for first, last in in_view if first <= last]
        return sum(last + 1 - first - _shared(self.hidden, [(first, last)], first) for first, last in in_view)


_NO_QUEUE = _LocalQueue(0, 0, 0, ())


class _Found(NamedTuple):
    """An object with matching rows, in view, or out of view and not deleted yet."""

    name: CommittedObject
    rows: KeyRows
    until_ms: int | None  # time of its deletion; None for an object in view
    failure: str = ""  # why its rows could not be searched


@dataclass(slots=True)
class _Erasure:
    """The state of a requested erasure of the log below `end`."""

    wanted: EraseRequest
    id: str
    end: int
    progress: Progress | None
    seen: Seen = field(default_factory=set)
    left: dict[str, list[str]] = field(default_factory=dict)  # object -> why it still has matching rows
    unsearched: list[str] = field(default_factory=list)  # other places that may have some, in words
    taken: Spans = field(default_factory=dict)  # erased rows
    holders: dict[str, list[Row]] = field(default_factory=dict)  # objects with matching rows, in view or not
    removed: list[Row] = field(default_factory=list)  # rows of objects that are out of view for good
    objects: int = 0  # number of searched objects
    former: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # rows of deleted topics, only in the log
    delivered: list[Row] = field(default_factory=list)  # copies in the log of messages that waited for delivery
    quarantined: list[str] = field(default_factory=list)  # deleted files of quarantined messages
    reported_at: float | None = None  # monotonic time of the last progress report

    def take(self, rows: Iterable[Row]) -> None:
        self.taken |= _by_queue(rows, self.taken)

    def searched(self, clock: Clock) -> None:
        """Count a searched object, and report progress."""
        self.objects += 1
        self.report_progress(clock)

    def report_progress(self, clock: Clock) -> None:
        """Report progress periodically: a client closes a connection on which it receives nothing."""
        now = clock.monotonic()
        if self.reported_at is None:
            self.reported_at = now
        elif now - self.reported_at >= _REPORT_EVERY_S:
            self.reported_at = now
            report_event(self.progress, event="searched", objects=self.objects)


class EraseKey:
    """Erasure on an operator's request, one at a time."""

    def __init__(  # noqa: PLR0917
        self,
        hot: HotStore,
        journal: JournalWriter,
        worker: Eraser,
        policy: Callable[[], RetentionPolicy],
        clock: Clock,
        retention: RetentionJobs,
        offload: Offload,
        hot_erasure: HotErasure,
        threads: Threads = SYSTEM_THREADS,
        *,
        cluster: str = "DefaultCluster",
        is_member: bool = False,
    ) -> None:
        """`is_member`: of a broker set, whose other members have the log, too."""
        self._hot, self._journal, self._worker, self._policy = hot, journal, worker, policy
        self._clock, self._safe_clock, self._turns = clock, retention.safe_clock, retention.turns
        self._expire, self._offload = retention.expire, offload
        self._hot_erasure, self._is_member = hot_erasure, is_member
        self._lock = threads.lock()
        self._replacement = Replacement(journal, worker, ERASE, retention.turns, cluster=cluster)

    def run(self) -> int:
        """Close replacements that an interrupted erasure left open; returns how many."""
        if not any(one.kind == ERASE for one in self._journal.catalog.rounds.open_rewrites().values()):
            return 0
        if not self._lock.acquire(blocking=False):
            return 0  # an erasure is in progress
        try:
            return self._begin()
        finally:
            self._lock.release()

    def now(
        self,
        wanted: EraseRequest,
        *,
        erase_id: str = "",
        dry_run: bool = False,
        evict: bool = False,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Erase and return the certificate, which is also reported last. Raises if the archive is unreachable."""
        assert not erase_id or is_erase_id(erase_id)
        with self._lock:
            if dry_run:
                with self._turns:
                    self._journal.ownership.follow()
                return self._dry_run(_Erasure(wanted, "", 1 << 62, progress))
            self._begin()
            self._delete_after_ms(wanted)  # raises if the clocks disagree
            erase_id = erase_id or f"e{self._journal.ownership.epoch}.{self._journal.catalog.next_seq}"
            report_event(progress, event="begun", id=erase_id)  # a repetition with this id continues the erasure
            # Records that are appended and not confirmed yet count too: their senders may have an acknowledgement.
            end = max((segment.end for segment in self._hot.segments()), default=0)
            reports = self._offload.run(roll=True, progress=progress)
            failed = [text for report in reports for text in report.failed.values()]
            catalog = self._journal.catalog
            end_of_all = max(end, catalog.rounds.intent_end, catalog.totals().end)  # includes objects out of view
            erasure = _Erasure(wanted, erase_id, end_of_all, progress)
            self._erase(erasure, lambda: self._not_archived(wanted, end, failed))
            # Taken now: once the objects are deleted, the journal drops gaps below everything that is left.
            erasure.take(erased_of(catalog.gaps(), erase_id))
            failpoint.hit("erase.before_hide")
            self._search_log(erasure)
            self._search_quarantine(erasure)
            self._hide(erasure)
            if evict:
                self._offload.run(evict=True, progress=progress)
            if wanted.grace_ms is not None:
                self._expire.run()
            certificate = self._certificate(erasure)
            report_event(progress, **certificate)
            return certificate

    def _begin(self) -> int:
        self._replacement.begin()
        with self._turns:
            self._journal.ownership.confirm()
            return self._replacement.close_open()

    # ---- search

    def _dry_run(self, erasure: _Erasure) -> dict[str, Any]:
        rows = objects = 0
        for found in self._search(erasure):
            rows, objects = rows + len(found.rows.meant), objects + 1
            report_event(erasure.progress, event="planned", **_described(found))
        summary = {"event": "done", "topic": erasure.wanted.topic, "rows": rows, "objects": objects}
        report_event(erasure.progress, **summary)
        return summary

    def _search(self, erasure: _Erasure) -> Iterator[_Found]:
        """Yield objects with matches that were not searched yet, those in view first. Raises WorkerFailed."""
        catalog, wanted, seen = self._journal.catalog, erasure.wanted, erasure.seen
        known = self._known_topics()
        judge = functools.partial(_judged, wanted, known)
        topics = topics_to_search(known, wanted.topic, retries=wanted.retries)
        for until_ms, name in chain.from_iterable(map(catalog.each_of, topics)):
            place = name.key, until_ms is None
            if place in seen or name.start >= erasure.end or self._turns.closed:
                continue
            seen.add(place)
            erasure.searched(self._clock)
            erasure.left.pop(name.key, None)  # reported again below if it still applies
            try:
                rows = rows_with_key(self._worker, self._journal.store.url, name, wanted.key, judge)
            except WorkerFailed as error:
                if not self._is_still(name, in_view=until_ms is None):
                    seen.discard(place)
                    continue
                if error.kind not in _OF_ONE_OBJECT:
                    raise
                yield _Found(name, KeyRows([], []), until_ms, str(error))
                continue
            if rows.meant or rows.unknown:
                yield _Found(name, rows, until_ms)

    def _known_topics(self) -> set[str]:
        """Return all topics that may have messages: for deleted ones the local log and objects out of view do."""
        catalog = self._journal.catalog
        hot = (topic for one in self._hot.segments() for topic in one.topics)
        return {*catalog.topics(), *catalog.expiring_topics(), *self._hot.topics(), *hot}

    def _is_still(self, name: CommittedObject, *, in_view: bool) -> bool:
        with self._turns:
            self._journal.ownership.follow()
            return self._journal.catalog.are_live([name]) if in_view else self._journal.catalog.knows(name.key)

    # ---- erasure

    def _erase(self, erasure: _Erasure, not_archived: Callable[[], list[str]]) -> None:
        """Search and erase until a pass finds no new object: objects may be made, moved or archived meanwhile."""
        searched = -1
        while erasure.objects != searched:
            searched = erasure.objects
            with self._turns:
                self._journal.ownership.follow()  # a broker that lost the archive must not certify its content
            erasure.unsearched = not_archived()  # before the search: it may miss what a round archives meanwhile
            try:
                for found in self._search(erasure):
                    self._erase_found(erasure, found)
            except WorkerFailed as error:
                erasure.unsearched.append(f"an object could not be searched: {error}")
                return
            if self._turns.closed:
                erasure.unsearched.append("the broker stops")
                return

    def _erase_found(self, erasure: _Erasure, found: _Found) -> None:
        name, seen, progress = found.name, erasure.seen, erasure.progress
        left = []
        if found.rows.unknown:
            left.append(f"{len(found.rows.unknown)} rows could not be checked")
        if found.failure:
            left.append(f"it can't be searched: {found.failure}")
        at = name.key
        if found.rows.meant:
            merge = Merge((name,), {}, spans_of_rows(found.rows.meant))
            erasure.holders[name.key] = _rows_of(merge)
            outcome = self._outcome(erasure, found, merge)
            if outcome.fate in {Fate.STANDS, Fate.NEEDLESS}:
                erasure.removed += erasure.holders[name.key]
            match outcome.fate:
                case Fate.OVERTAKEN:  # replaced by others: search the object again, and its replacement
                    seen -= {(name.key, True), (name.key, False)}
                    return
                case Fate.STANDS:
                    seen.add((name.key, False))
                    made = {}
                    if outcome.made is not None:
                        at = outcome.made.key
                        seen.add((at, True))
                        made = {"made": at}
                    report_event(progress, event="erased", **made, **_described(found))
                case Fate.FAILED:
                    left.append(outcome.reason)
                    report_event(progress, event="failed", reason=outcome.reason, **_described(found))
        if left:
            erasure.left[at] = left

    def _outcome(self, erasure: _Erasure, found: _Found, merge: Merge) -> Outcome:
        swap = functools.partial(self._swap, erasure.wanted, erasure.id)
        if found.until_ms is not None or not merge.queues:
            entries: list[AnyEntry] = []

            def decide() -> list[AnyEntry]:
                entries.extend(self._withdrawal(erasure.wanted, merge, swap))
                return entries

            outcome = self._replacement.withdraw(merge, decide)
            rows = [row for one in entries if isinstance(one, Erase) for row in one.rows]
        else:
            outcome, rows = self._replacement.run(merge, swap), _rows_of(merge)
        if outcome.fate is Fate.STANDS:
            erasure.take(rows)
        return outcome

    def _withdrawal(self, wanted: EraseRequest, merge: Merge, swap: Swap) -> list[AnyEntry]:
        """Return the entries for an object that gets no replacement, by the present state of the journal. In a turn.

        An object out of view is erased unless some of its rows were erased before. That includes replaced objects,
        because their replacement may be deleted before them. If an object already stays out of view, only its deletion
        may be moved forward.
        """
        catalog, (name,) = self._journal.catalog, merge.inputs
        if catalog.are_live([name]):
            return [swap(merge, [])]
        if not stays_out(catalog, name):
            rest = _rest_of(merge) if may_come_back(catalog, name) else None
            return [*([rest] if rest is not None else []), swap(merge, [])]
        goes_later = self._goes_later(wanted, catalog.topic(name.topic).stays_until(name) or 0)
        return [swap(merge._replace(erased=NOTHING), [])] if goes_later else []

    def _goes_later(self, wanted: EraseRequest, until_ms: int) -> bool:
        return wanted.grace_ms is not None and until_ms > self._delete_after_ms(wanted)

    def _swap(self, wanted: EraseRequest, erase_id: str, merge: Merge, made: list[CommittedObject]) -> AnyEntry:
        return Erase(
            id=erase_id,
            old=[one.key for one in merge.inputs],
            new=made,
            rows=_rows_of(merge),
            delete_after_ms=self._delete_after_ms(wanted),
        )

    def _hide(self, erasure: _Erasure) -> None:
        """Hide erased rows in the local log. A failure is in the certificate, and `hot_erasure` tries again."""
        try:
            with self._turns:
                self._hot_erasure.hide([*self._in_no_object(erasure.removed), *erasure.delivered])
        except OSError as error:
            erasure.unsearched.append(f"the local log could not save what to hide: {error}")
        if erasure.delivered:  # these rows were never in the archive, so the journal does not state their erasure
            try:
                self._hot.log_erased(erasure.delivered)
            except OSError as error:
                erasure.unsearched.append(f"other members may return copies that were delivered: {error}")

    # ---- the local log

    def _search_log(self, erasure: _Erasure) -> None:
        """Search the local log for messages of deleted topics and for copies in topics of waiting messages.

        No round archived the messages of deleted topics, and no request returns them. Their bytes remain until their
        segments are evicted. A copy that was delivered is hidden. A copy that may still wait is delivered later, and
        makes the certificate incomplete.
        """
        wanted, known = erasure.wanted, self._known_topics()
        former = self._hot.former_ends(topics_to_search(known, wanted.topic, retries=wanted.retries))
        ranges = {topic: (0, end) for topic, end in former.items()}
        ranges |= dict.fromkeys(_WAITING & known, (0, _EVERYTHING))
        undelivered = self._hot.undelivered_from()
        left: Counter[tuple[str, Verdict]] = Counter()
        try:
            for raw in self._hot.search_log(ranges, wanted.key.encode("utf-8", "surrogatepass")) if ranges else ():
                erasure.report_progress(self._clock)
                if raw is None:
                    continue
                record = decode_record(raw)
                verdict, place = _verdict_of(record, wanted, known), (record.topic, record.queue_id)
                if verdict is Verdict.YES and record.topic in former:
                    erasure.former.setdefault(place, []).append(record.queue_offset)
                elif verdict is Verdict.YES and (undelivered is None or record.physical_offset < undelivered):
                    erasure.delivered.append((*place, record.queue_offset, record.queue_offset))
                elif verdict is not Verdict.NO:
                    left[record.topic, verdict] += 1
        except (TopicUnreadable, MalformedRecord) as error:
            erasure.unsearched.append(f"the local log could not be searched: {error}")
        for (topic, verdict), count in sorted(left.items(), key=str):
            is_waiting = verdict is Verdict.YES
            why = "may wait for delivery: erase again later" if is_waiting else "in the local log are of unknown origin"
            erasure.unsearched.append(f"{count} messages of {topic} {why}")

    def _search_quarantine(self, erasure: _Erasure) -> None:
        """Delete the records of quarantined messages with the key, because no retention applies to them."""
        wanted, known = erasure.wanted, self._known_topics()
        try:
            for name, raw in self._hot.quarantined(wanted.key.encode("utf-8", "surrogatepass")):
                try:
                    verdict = _verdict_of(decode_record(raw), wanted, known)
                except MalformedRecord as error:
                    erasure.unsearched.append(f"the quarantined record {name} contains the key and is damaged: {error}")
                    continue
                if verdict is Verdict.YES:
                    self._hot.remove_quarantined(name)
                    erasure.quarantined.append(name)
                elif verdict is Verdict.UNKNOWN:
                    erasure.unsearched.append(f"the quarantined record {name} is of unknown origin")
        except OSError as error:
            erasure.unsearched.append(f"the quarantined records could not be searched or deleted: {error}")

    def _in_no_object(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows that are in no object in view; others are not erased yet, or their search has failed."""
        find = self._journal.catalog.find
        places = {(topic, queue, at) for topic, queue, first, last in rows for at in range(first, last + 1)}
        return [(*place, place[2]) for place in sorted(places) if not isinstance(find(*place), Location)]

    def _delete_after_ms(self, wanted: EraseRequest) -> int:
        grace = self._policy().grace_ms if wanted.grace_ms is None else wanted.grace_ms
        return self._safe_clock.now_ms(self._journal.store) + grace

    # ---- certificate

    def _not_archived(self, wanted: EraseRequest, end: int, failed: Collection[str]) -> list[str]:
        """Return why older messages of the topics are not archived, and thus were not searched."""
        catalog, policy = self._journal.catalog, self._policy()
        # Records of deleted topics are searched in the local log.
        topics = topics_to_search(self._hot.topics(), wanted.topic, retries=wanted.retries)
        left = []
        for topic in topics:
            settled = max(settled_below(catalog, topic), policy.deleted_up_to(topic))
            # The last record of each segment below `end`. It may be newer than `end`, but an earlier one may not be.
            places = [one.topics[topic][0] for one in self._hot.segments() if one.base < end and topic in one.topics]
            if not policy.archived(topic):
                places = [place for place in places if place >= policy.deleted_up_to(topic)]
                left += [f"{topic} is not archived: only the local log has it"] if places else []
            elif any(settled <= place for place in places):
                left.append(f"{topic} is not completely archived" + (f": {next(iter(failed))}" if failed else ""))
        return left

    def _certificate(self, erasure: _Erasure) -> dict[str, Any]:
        wanted, erased = erasure.wanted, erasure.taken
        topics = topics_to_search(self._known_topics(), wanted.topic, retries=wanted.retries)
        orphans = self._in_no_view(topics, erasure)
        local = self._local_copies(topics, erasure)
        left = self._left(erasure)
        return {
            "event": "certificate",
            "id": erasure.id,
            "broker": self._journal.broker,
            "topic": wanted.topic,
            "key_sha256": hashlib.sha256(f"{erasure.id}:{wanted.key}".encode("utf-8", "surrogatepass")).hexdigest(),
            "time_ms": self._clock.now_ms(),
            "complete": not left,
            "rows": sum(last - first + 1 for spans in erased.values() for first, last in spans),
            "erased": [
                {"topic": topic, "queue": queue, "offsets": spans} for (topic, queue), spans in sorted(erased.items())
            ],
            "quarantine": erasure.quarantined,
            "searched": {"topics": topics, "objects": erasure.objects},
            "remains": {
                "objects": self._objects_left(erasure),
                "in_no_view": orphans,
                "local_log": local,
                "other_members": self._is_member,
            },
            "not_erased": left,
        }

    def _left(self, erasure: _Erasure) -> list[str]:
        """Return the reasons why the erasure is incomplete, without objects that are deleted by now."""
        knows = self._journal.catalog.knows
        of_objects = [f"{key}: {'; '.join(why)}" for key, why in sorted(erasure.left.items()) if knows(key)]
        return [*of_objects, *erasure.unsearched]

    def _objects_left(self, erasure: _Erasure) -> list[dict[str, Any]]:
        """Return the objects out of view that still have erased rows, and when they are deleted."""
        of_topic: dict[str, dict[int, list[tuple[int, int]]]] = {}
        found = [row for rows in erasure.holders.values() for row in rows]
        for (topic, queue), spans in _by_queue(found, erasure.taken).items():
            of_topic.setdefault(topic, {})[queue] = spans
        return [
            {"key": name.key, "until_ms": until_ms}
            for topic, of_queue in sorted(of_topic.items())
            for until_ms, name in self._journal.catalog.topic(topic).expiring_near(of_queue)
            if holds(name, of_queue)
        ]

    def _in_no_view(self, topics: Collection[str], erasure: _Erasure) -> list[str]:
        """Return objects that may have erased rows without being visible to readers.

        These are unfinished rewrites of objects that had such rows, and orphan objects that were not deleted.
        """
        journal, exists = self._journal, is_there(self._journal.store)
        prefix = f"{journal.prefix.strip('/')}/" if journal.prefix.strip("/") else ""
        found = {
            name.key
            for rewrite in journal.catalog.rounds.open_rewrites().values()
            if not erasure.holders.keys().isdisjoint(rewrite.old)
            for name in rewrite.names
        }
        try:
            for topic in topics:
                keys = [info.key for info in orphan_objects(journal, f"{prefix}{topic_component(topic)}/")]
                found.update(key for key in keys if exists(key))  # without those that were deleted since the listing
        except ObjectStoreError as error:
            erasure.unsearched.append(f"orphan objects could not be listed: {error}")
        return sorted(found)

    def _local_copies(self, topics: Collection[str], erasure: _Erasure) -> list[dict[str, Any]]:
        """Return the erased rows that are still in the local log, and when their segments reach their retention.

        Segments with a waiting message stay longer. The counts include more than this erasure's rows:

        - All erased rows of these topics, because gaps do not record the key.
        - Rows below a minimum, of a deleted queue, and of objects that expired and are gone: they can't be searched.

        `hidden` counts the rows that no request returns. Rows of this erasure that a request still returns make the
        certificate incomplete, whatever the reason.
        """
        catalog = self._journal.catalog
        times: dict[str, list[int]] = {}
        for segment in self._hot.segments():
            for topic in segment.topics:
                times.setdefault(topic, []).append(segment.newest_store_time)
        here: dict[str, dict[int, _LocalQueue]] = {}
        taken = _by_queue(erasure.delivered, erasure.taken)
        for topic in sorted({*topics, *(topic for topic, _ in taken)}):
            if topic in times:
                try:
                    here[topic] = self._local_queues(topic)
                except TopicUnreadable as error:
                    erasure.unsearched.append(f"the visible messages of {topic} in the local log are unknown: {error}")
        gaps = (gap for topic in topics for gap in catalog.gaps(topic))
        rows = [(gap.topic, gap.queue, gap.first, gap.last) for gap in gaps if gap.is_erased]
        for topic, queues in here.items():
            below = catalog.nothing_below(topic)
            lows = {queue: one.low for queue, one in queues.items()}
            rows += [(topic, queue, low, below[queue] - 1) for queue, low in lows.items() if low < below.get(queue, 0)]
        spans_of = _by_queue(chain(rows, *erasure.holders.values()), taken)
        copies: dict[tuple[str, int], tuple[int, int]] = {}  # number of rows, and of those that no request returns
        for (topic, queue), spans in spans_of.items():
            if topic not in here:
                continue
            one = here[topic].get(queue, _NO_QUEUE)
            if hot := sum(max(0, last + 1 - max(first, one.low)) for first, last in spans):
                copies[topic, queue] = hot, hot - one.shown_of(spans)
            if shown := one.shown_of(taken.get((topic, queue), ())):
                why = self._hot_erasure.failed.get((topic, queue), "the log may have other messages at these offsets")
                erasure.unsearched.append(f"{shown} messages of {topic}, queue {queue} are not hidden: {why}")
        for place, former in self._former_copies(erasure, spans_of).items():
            rows_here, unseen = copies.get(place, (0, 0))
            copies[place] = rows_here + former, unseen + former
        reserved = self._policy().reserved_ms
        until = {topic: max(of_it) + reserved if min(of_it) >= 0 else None for topic, of_it in times.items()}
        return [
            {"topic": topic, "queue": queue, "rows": hot, "hidden": unseen, "until_ms": until[topic]}
            for (topic, queue), (hot, unseen) in sorted(copies.items())
            if topic in until
        ]

    def _local_queues(self, topic: str) -> dict[int, _LocalQueue]:
        """Return the queues of a topic in the local log. Raises TopicUnreadable."""
        hot, (begin, end) = self._hot, self._hot.confirmed_range()
        ends, hidden = hot.first_offsets(topic, end), hot.erased(topic)
        return {
            queue: _LocalQueue(low, max(low, hot.min_offset(topic, queue)), ends.get(queue, 0), hidden.get(queue, ()))
            for queue, low in hot.first_offsets(topic, begin).items()
        }

    def _former_copies(self, erasure: _Erasure, known: Spans) -> dict[tuple[str, int], int]:
        """Return how many messages of deleted topics the local log has, without rows whose offsets are in `known`.

        A topic that began again at offset 0 has other messages at the same offsets, so its old messages all count.
        """
        ended = self._hot.deleted_below()
        found: dict[tuple[str, int], int] = {}
        for (topic, queue), offsets in erasure.former.items():
            below, spans = ended.get(topic, {}).get(queue, 0), known.get((topic, queue), [])
            found[topic, queue] = sum(1 for at in offsets if at >= below or not touching(spans, at, at))
        return {place: count for place, count in found.items() if count}


def _judged(wanted: EraseRequest, topics: Collection[str], record: MessageRecord) -> Verdict:
    return is_meant(record, wanted.topic, wanted.key, topics)


def _verdict_of(record: MessageRecord, wanted: EraseRequest, topics: Collection[str]) -> Verdict:
    """Judge a record of the local log; one that waits for delivery is judged as a message of its real topic."""
    if record.topic in _WAITING:
        target = record.properties.get(PROPERTY_REAL_TOPIC, "")
        if not topics_to_search([target], wanted.topic, retries=wanted.retries):
            return Verdict.NO
        record = dataclasses.replace(record, topic=target)
    return is_meant(record, wanted.topic, wanted.key, topics)


def _rest_of(merge: Merge) -> Gap | None:
    """Return a gap for an object's other rows, which do not return to view: its neighbours may, without a hole."""
    (name,) = merge.inputs
    rest = [
        (name.topic, queue, *span)
        for queue, first, last in sorted(name.runs)
        for span in rows_left(first, last, 0, merge.erased.get(queue, ()))
    ]
    if not rest:
        return None
    (topic, queue, first, last), *more = rest
    return Gap(topic=topic, queue=queue, first=first, last=last, reason=WITH_ITS_OBJECT, more=more)


def _rows_of(merge: Merge) -> list[Row]:
    """Return the rows that the merge leaves out."""
    return [(merge.topic, queue, *span) for queue, spans in sorted(merge.erased.items()) for span in spans]


def _shared(held: Sequence[tuple[int, int]], spans: Iterable[tuple[int, int]], low: int) -> int:
    """Return how many offsets from `low` on are in both."""
    both = ((max(a, first, low), min(b, last)) for first, last in spans for a, b in touching(held, first, last))
    return sum(max(0, last + 1 - first) for first, last in both)


def _by_queue(rows: Iterable[Row], before: Spans) -> Spans:
    """Add rows to spans by queue. Returns the united spans."""
    spans = {place: list(held) for place, held in before.items()}
    for topic, queue, first, last in rows:
        spans.setdefault((topic, queue), []).append((first, last))
    return {place: united(held) for place, held in spans.items()}


def _described(found: _Found) -> dict[str, Any]:
    rows = found.rows
    return {
        "topic": found.name.topic,
        "key": found.name.key,
        "rows": len(rows.meant),
        **({"failure": found.failure} if found.failure else {}),
        **({"unknown": len(rows.unknown)} if rows.unknown else {}),
        **({"until_ms": found.until_ms} if found.until_ms is not None else {}),
    }
