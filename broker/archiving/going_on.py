"""Resuming a log above all offsets that its archive names, so that no offset is assigned twice."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from broker.archiving.offsets import Queue, log_goes_on_at, queues_to_raise
from broker.store import erased_rows
from broker.store.message_store import MessageStore
from lifecycle.recorded_minimums import minimums_to_raise
from neve.archive.catalog.catalog import Catalog
from neve.archive.policy.erasure import erased_rows as rows_of
from tiered.journal.writer import ResumePoint


def go_on_above(store: MessageStore, go_on: ResumePoint, catalog: Catalog) -> dict[str, dict[int, int]]:
    """Raise the log and its queues above the archive's offsets, on the event loop before the first append.

    If the log resumes higher (`resume_at`), its content has to be archived already. Return the next offsets of all
    queues that resume above their last record, by topic and queue. Holders of copies of the log need them. Queues that
    an earlier start raised are included, because it may have crashed before notifying the holders.
    """
    if (position := log_goes_on_at(store.max_physical_offset, go_on.resume_at)) is not None:
        store.restart_log_at(position)
    raised: dict[str, dict[int, int]] = {}
    for (topic, queue), following in queues_to_raise(go_on.queue_next, store.next_offset).items():
        raised.setdefault(topic, {})[queue] = following
    store.create_queues_at(raised)
    # Messages below are archived or lost. A read here would end at the gap.
    store.raise_queues({t: {q: store.next_offset(t, q) for q in queues} for t, queues in raised.items()})
    assert not queues_to_raise(go_on.queue_next, store.next_offset), "an offset would be given twice"
    assert go_on.resume_at is None or store.max_physical_offset >= go_on.resume_at, "the log lies below its archive"
    rising = minimums_to_raise(store.queues(), catalog.recorded_minimum, store.min_offset)
    hidden = [store.hide_below(topic, minimums) for topic, minimums in rising.items()]
    # A crash may have come between an ERASE and this. In the copy of another log, nothing is hidden before a promotion.
    # The job `erased` retries a queue that fails here, for the first time before requests are served.
    erased = erased_rows.hide(store, rows_of(catalog.gaps()), erased_rows.at_once)
    if any(hidden) or erased.is_changed:
        store.save_queue_state()
    unsaid: dict[str, dict[int, int]] = {}
    for topic, queue in go_on.queue_next:
        if store.goes_on_higher(topic, queue):
            unsaid.setdefault(topic, {})[queue] = store.next_offset(topic, queue)
    return unsaid


def begun_again(store: MessageStore, queue_next: Mapping[Queue, int], catalog: Catalog) -> list[str]:
    """Return the topics that were deleted and created again while the archive has, or had, messages of before.

    Only the copy of an Apache master's log has such topics, because neve records its deletions before it assigns
    offsets. `go_on_above` would hide their new messages. An archive can't hold two messages of one offset. On the event
    loop.
    """
    return [
        topic
        for topic in sorted(store.topics())
        if store.gone_below(topic)
        and any(_has_begun_again(store, topic, queue, queue_next, catalog) for queue in store.queues_of(topic))
    ]


def _has_begun_again(
    store: MessageStore, topic: str, queue: int, queue_next: Mapping[Queue, int], catalog: Catalog
) -> bool:
    first, end = store.min_offset(topic, queue), store.next_offset(topic, queue)
    if first >= end:
        return False
    if end < queue_next.get((topic, queue), 0) or first < catalog.recorded_minimum(topic, queue):
        return True
    for run in takewhile(lambda run: run.first < end, catalog.queue(topic, queue).runs(first)):
        entry = store.entry(topic, queue, max(run.first, first))
        if entry is not None and not run.name.start <= entry[0] < run.name.end:
            return True
    return False
