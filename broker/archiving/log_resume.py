"""Resuming a log above all offsets that its archive names, so that no offset is assigned twice.

    log       a checkpoint; then a new file, and another checkpoint: a crash before that leaves the former end
    queues    a checkpoint, above which recovery accepts no hole; then their new begins, and another checkpoint
    hidden    recorded minimums and erased rows; then the state file

Each step may be repeated after a crash. A slave that is being promoted resumes before it accepts own records. So a
crash leaves a slave's log: its recovery lowers the queues that no record raises, and the next promotion raises them
again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice, takewhile

from broker.archiving.environment import Environment
from broker.archiving.offsets import Queue, log_resume_offset, queues_to_raise
from broker.store import erased_rows
from broker.store.message_store import MessageStore
from broker.store.queue_raises import QUEUES_IN_A_TURN, pieces
from infra.loop.in_steps import run_beside
from infra.loop.parts import Parts, nothing
from lifecycle.recorded_minimums import minimums_to_raise
from neve.archive.catalog.catalog import Catalog
from neve.archive.policy.erasure import erased_rows as rows_of
from tiered.journal.ownership import ResumePoint

log = logging.getLogger(__name__)

Ends = dict[str, dict[int, int]]  # topic -> queue -> next offset


async def resume_log_above(
    store: MessageStore, resume_point: ResumePoint, catalog: Catalog, environment: Environment
) -> Ends:
    """Raise the log and its queues above the archive's offsets, before the first append; nothing is appended meanwhile.

    If the log resumes higher (`resume_at`), its content has to be archived already. Return the next offsets of all
    queues that resume above their last record, by topic and queue. Holders of copies of the log need them. Queues that
    an earlier start raised are included, because it may have crashed before notifying the holders.
    """
    in_thread = environment.threads.run
    is_hidden = await run_beside(_raise_parts(store, resume_point, catalog), in_thread)
    # A crash may have come between an ERASE and this. In the copy of another log, nothing is hidden before a promotion.
    # The job `erased` retries a queue that fails here, for the first time before requests are served.
    call = environment.ask_loop().call
    erased = await in_thread(lambda: erased_rows.hide(store, rows_of(catalog.gaps()), call))
    if is_hidden or erased.is_changed:
        await in_thread(store.queues.records.write, store.queue_changes.image())
    return await run_beside(_raised_parts(store, resume_point.queue_next), in_thread)


def _raise_parts(store: MessageStore, resume_point: ResumePoint, catalog: Catalog) -> Parts[bool]:
    """Raise log, queues and minimums; return whether minimums were raised, which are not saved yet."""
    if (position := log_resume_offset(store.max_physical_offset, resume_point.resume_at)) is not None:
        log.error(
            "log resumes above the archive: messages between and in no committed object are lost and become a GAP: "
            "log_end=%d archive_end=%d", store.max_physical_offset, position,
        )  # fmt: skip
        yield from store.restart_log_parts(position)
    raised: Ends = {}
    for chunk in _chunks(resume_point.queue_next):
        for (topic, queue), following in queues_to_raise(chunk, store.queues.next_offset).items():
            raised.setdefault(topic, {})[queue] = following
        yield nothing
    yield from store.queue_changes.create_queues_parts(raised)
    # Messages below are archived or lost. A read here would end at the gap.
    for piece in pieces(raised):
        for topic, ends in piece.items():
            raised[topic] |= {queue: store.queues.next_offset(topic, queue) for queue in ends}
        yield nothing
    yield from store.queue_changes.raise_queues_parts(raised)
    assert resume_point.resume_at is None or store.max_physical_offset >= resume_point.resume_at, (
        "the log ends below its archive"
    )
    for chunk in _chunks(resume_point.queue_next):
        assert not queues_to_raise(chunk, store.queues.next_offset), "an offset would be assigned twice"
        yield nothing
    is_hidden = False
    queues = ((topic, queue) for topic in store.queues.topics() for queue in store.queues.names_of(topic))
    while part := list(islice(queues, QUEUES_IN_A_TURN)):
        numbers: dict[str, list[int]] = {}
        for topic, queue in part:
            numbers.setdefault(topic, []).append(queue)
        for topic, minimums in minimums_to_raise(numbers, catalog.recorded_minimum, store.queues.min_offset).items():
            is_hidden |= store.queue_changes.hide_below(topic, minimums)
        yield nothing
    return is_hidden


def _raised_parts(store: MessageStore, queue_next: Mapping[Queue, int]) -> Parts[Ends]:
    """Return the next offsets of the queues that resume above their last record."""
    found: Ends = {}
    for chunk in _chunks(queue_next):
        for topic, queue in chunk:
            if store.queues.continues_higher(topic, queue):
                found.setdefault(topic, {})[queue] = store.queues.next_offset(topic, queue)
        yield nothing
    return found


def _chunks(queues: Mapping[Queue, int]) -> Iterator[dict[Queue, int]]:
    rest = iter(queues.items())
    while chunk := dict(islice(rest, QUEUES_IN_A_TURN)):
        yield chunk


def restarted_topics(store: MessageStore, queue_next: Mapping[Queue, int], catalog: Catalog) -> list[str]:
    """Return the topics that were deleted and created again while the archive has, or had, messages of before.

    Only the copy of an Apache master's log has such topics, because neve records its deletions before it assigns
    offsets. `resume_log_above` would hide their new messages. An archive can't hold two messages of one offset. On the
    event loop.
    """
    return [
        topic
        for topic in sorted(store.queues.topics())
        if store.queues.deleted_up_to(topic)
        and any(_has_restarted(store, topic, queue, queue_next, catalog) for queue in store.queues.names_of(topic))
    ]


def _has_restarted(
    store: MessageStore, topic: str, queue: int, queue_next: Mapping[Queue, int], catalog: Catalog
) -> bool:
    first, end = store.queues.min_offset(topic, queue), store.queues.next_offset(topic, queue)
    if first >= end:
        return False
    if end < queue_next.get((topic, queue), 0) or first < catalog.recorded_minimum(topic, queue):
        return True
    for run in takewhile(lambda run: run.first < end, catalog.queue(topic, queue).runs(first)):
        entry = store.reader.entry(topic, queue, max(run.first, first))
        if entry is not None and not run.name.start <= entry[0] < run.name.end:
            return True
    return False
