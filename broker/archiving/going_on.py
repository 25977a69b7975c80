"""A log goes on above all that its archive names: no offset is given twice, whatever the local log has lost."""

from __future__ import annotations

from broker.archiving.offsets import log_goes_on_at, queues_to_raise
from broker.store.message_store import MessageStore
from lifecycle.recorded_minimums import minimums_to_raise
from neve.archive.catalog import Catalog
from tiered.journal.writer import GoOnFrom


def go_on_above(store: MessageStore, go_on: GoOnFrom, catalog: Catalog) -> None:
    """What the log has is archived where it goes on higher (`resume_at`). On the loop, before an own append."""
    if (position := log_goes_on_at(store.max_physical_offset, go_on.resume_at)) is not None:
        store.restart_log_at(position)
    for (topic, queue), following in queues_to_raise(go_on.queue_next, store.next_offset).items():
        store.create_queue_at(topic, queue, following)
        # What lies below is in the archive or lost; read here, it would end in a hole.
        store.set_min_offset(topic, queue, store.max_offset(topic, queue))
    assert not queues_to_raise(go_on.queue_next, store.next_offset), "an offset would be given twice"
    assert go_on.resume_at is None or store.max_physical_offset >= go_on.resume_at, "the log lies below its archive"
    rising = minimums_to_raise(store.queues(), catalog.recorded_minimum, store.min_offset)
    hidden = [store.hide_below(topic, minimums) for topic, minimums in rising.items()]
    if any(hidden):
        store.save_queue_state()
