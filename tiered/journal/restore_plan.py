"""Plan a restore of a broker on an empty disk, from its archive and its last state slot. Pure.

Every queue resumes above the highest offset known from any source, plus a margin for offsets assigned after the last
state slot, whose exact number is unknown. The log resumes likewise. The offsets in between are lost or were never
assigned, and are recorded as a GAP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import JournalSource, entries
from neve.archive.format.broker_state import BrokerState, read_state
from neve.archive.format.journal import Gap, Topic

# Far more than a broker assigns between two state slots, or during hours without its store.
QUEUE_MARGIN = 10_000_000
LOG_MARGIN = 1 << 40
GAPS_IN_ENTRY = 10_000
GAP_REASON = "restored from the archive: not archived, or never assigned"

Queues = dict[str, dict[int, int]]


class Basis(msgspec.Struct):
    """The input of a plan besides the catalog."""

    state: BrokerState | None
    deleted: list[str]  # topics whose tombstone is younger than the state


class RestorePlan(msgspec.Struct, kw_only=True):
    """The initial log, queues, tables and offsets; `report` lists what was found and lost, for an operator."""

    log_start: int
    newest_ms: int  # the newest store time; a slightly slow clock of the new machine continues from it
    queues: Queues  # topic -> queue -> next offset
    ended: Queues  # the same for topics that do not exist, in case they are created again
    topics: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    forbidden: dict[str, list[str]]
    offsets: Queues  # topic@group -> queue -> next offset to consume
    report: dict[str, Any]


def read_basis(source: JournalSource, broker: str, prefix: str = "") -> Basis:
    """Read the newest state slot, and the topics deleted after it."""
    state = read_state(source, broker, prefix)
    deleted: dict[str, bool] = {}
    if state is not None:
        for _, entry in entries(source, broker, prefix, state.next_seq):
            if isinstance(entry, Topic):
                deleted[entry.topic] = entry.deleted
    return Basis(state, sorted(topic for topic, is_deleted in deleted.items() if is_deleted))


def plan_restore(
    catalog: Catalog, basis: Basis, broker: str, *, segment: int, archived: Callable[[str], bool]
) -> RestorePlan:
    """Plan the restore of a broker.

    Args:
        catalog: the catalog of its archive.
        basis: the state slot, and the topics deleted since.
        broker: its name.
        segment: the size of a CommitLog file in bytes; the log starts at a multiple of it.
        archived: returns whether a topic is a user's; records of the broker's own topics are not counted as messages.
    """
    state = basis.state or BrokerState(broker=broker)
    topics = _topics(catalog, state, set(basis.deleted))
    alive = {str(topic["topicName"]) for topic in topics}
    known = _known(catalog, state)
    for topic in topics:
        if archived(name := str(topic["topicName"])):
            # A queue that was empty in the state slot may have received its first messages since.
            ends = known.setdefault(name, {})
            for queue in range(max(int(topic.get("readQueueNums", 0)), int(topic.get("writeQueueNums", 0)))):
                ends.setdefault(queue, 0)
    for name, ends in known.items():
        if archived(name):  # the queues of a deleted topic, or of one newer than the state slot, have no holes
            ends.update({queue: 0 for queue in range(max(ends, default=0)) if queue not in ends})
    following = {topic: {queue: end + QUEUE_MARGIN for queue, end in ends.items()} for topic, ends in known.items()}
    everything = catalog.totals()
    high = max(catalog.rounds.intent_end, state.log_end, everything.end)
    return RestorePlan(
        log_start=-(-(high + LOG_MARGIN) // segment) * segment,
        newest_ms=everything.newest_ms if everything.objects else 0,
        queues={topic: ends for topic, ends in following.items() if topic in alive},
        ended={topic: ends for topic, ends in following.items() if topic not in alive},
        topics=topics,
        groups=state.groups,
        forbidden=state.forbidden,
        offsets=_offsets(catalog, state, following, alive),
        report=_report(catalog, basis.state, set(filter(archived, alive))),
    )


def gaps_of(catalog: Catalog, queues: Queues) -> list[Gap]:
    """Return GAP entries for the offsets of each queue that do not exist and are not recorded yet."""
    spans = []
    for topic, ends in sorted(queues.items()):
        named = catalog.named_offsets(topic)
        for queue, following in sorted(ends.items()):
            first = max(named.get(queue, -1) + 1, catalog.recorded_minimum(topic, queue))
            if first < following:
                spans.append((topic, queue, first, following - 1))
    found = []
    for position in range(0, len(spans), GAPS_IN_ENTRY):
        (topic, queue, first, last), *more = spans[position : position + GAPS_IN_ENTRY]
        found.append(Gap(topic=topic, queue=queue, first=first, last=last, reason=GAP_REASON, more=more))
    return found


def _topics(catalog: Catalog, state: BrokerState, deleted: set[str]) -> list[dict[str, Any]]:
    """Return the topics of the state slot, and those with archived messages that are newer than it."""
    found = {str(topic["topicName"]): topic for topic in state.topics if topic["topicName"] not in deleted}
    for topic in catalog.topics():
        queues = [queue for queue in catalog.queues(topic) if catalog.min_offset(topic, queue) is not None]
        if queues and topic not in found:  # a deleted topic has such queues only if it was created again
            count = max(queues) + 1
            found[topic] = {"topicName": topic, "readQueueNums": count, "writeQueueNums": count}
    return [found[name] for name in sorted(found)]


def _known(catalog: Catalog, state: BrokerState) -> Queues:
    """Return topic -> queue -> one above the highest offset known from any source."""
    known: Queues = {}

    def note(topic: str, queue: int, following: int) -> None:
        ends = known.setdefault(topic, {})
        ends[queue] = max(ends.get(queue, 0), following)

    for topic in {*catalog.topics(), *catalog.named_topics()}:
        for queue in catalog.queues(topic):
            note(topic, queue, catalog.recorded_minimum(topic, queue))
            note(topic, queue, catalog.max_offset(topic, queue) or 0)
        for queue, last in catalog.named_offsets(topic).items():
            note(topic, queue, last + 1)
    for topic, ends in state.queues.items():
        for queue, following in ends.items():
            note(topic, queue, following)
    for topic, _, queue, offset in _commits(state):
        note(topic, queue, offset)
    return known


def _commits(state: BrokerState) -> Iterator[tuple[str, str, int, int]]:
    for name, queues in state.offsets.items():
        topic = name.partition("@")[0]
        for queue, offset in queues.items():
            yield topic, name, queue, offset


def _archived_end(catalog: Catalog, topic: str, queue: int) -> int:
    """Return one above the last readable message."""
    return max(catalog.max_offset(topic, queue) or 0, catalog.recorded_minimum(topic, queue))


def _offsets(catalog: Catalog, state: BrokerState, following: Queues, alive: set[str]) -> Queues:
    """Return the committed offsets; a group that has read all archived messages resumes behind the gap."""
    found: Queues = {}
    for topic, name, queue, offset in _commits(state):
        if topic in alive:
            caught_up = offset >= _archived_end(catalog, topic, queue)
            found.setdefault(name, {})[queue] = following[topic][queue] if caught_up else offset
    return found


def _report(catalog: Catalog, state: BrokerState | None, archived: set[str]) -> dict[str, Any]:
    totals = catalog.totals()
    lost = _lost(catalog, state, archived) if state is not None else {}
    return {
        "topics": len(archived),
        "groups": len(state.groups) if state is not None else 0,
        "group_offsets": sum(map(len, state.offsets.values())) if state is not None else 0,
        "objects": totals.objects,
        "messages": totals.rows,
        "bytes": totals.bytes,
        "state": None if state is None else {"time_ms": state.time_ms, "clean_stop": state.clean},
        "lost": {"messages": sum(lost.values()), "by_topic": lost, **(state.pending if state is not None else {})},
    }


def _lost(catalog: Catalog, state: BrokerState, topics: set[str]) -> dict[str, int]:
    """Return by topic the number of messages that the broker had at its last state slot and the archive lacks."""
    lost: dict[str, int] = {}
    for topic in sorted(topics & state.queues.keys()):
        missing = 0
        for queue, following in state.queues[topic].items():
            missing += max(following - _archived_end(catalog, topic, queue), 0)
        if missing:
            lost[topic] = missing
    return lost
