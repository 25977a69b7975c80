"""Loading of the queues at a start, and correction of their state after the log has lost its tail.

The files contain entries of records below the checkpoint. The recovery rebuilds entries above it from the log. Queues
of a deleted topic whose removal a stop has interrupted are not loaded, but passed to the removal again.
"""

from __future__ import annotations

from broker.store.config import StoreConfig
from broker.store.consume_queue import ConsumeQueue
from broker.store.queue_table import QueueTable, has_from
from infra.disk.filesystem import Disk


class QueueLoading:
    """Fills an empty table with the queues of a data directory."""

    def __init__(self, config: StoreConfig, disk: Disk, queues: QueueTable) -> None:
        self._disk, self._queues, self._records = disk, queues, queues.records
        self._root = config.root / "consumequeue"

    def load(self, below: int, *, scrub: bool, unsynced: bool) -> None:
        """Load the entries of records below a physical offset from the files.

        If `unsynced`, the content read may not be durable, so the next checkpoint syncs all queues.
        """
        queues = self._queues
        self._disk.make_dirs(self._root)
        queues.removal.load()
        queues.loaded_below = below
        for topic in self._disk.list_dir(self._root):
            deleted: set[str] = set()
            for name in self._disk.list_dir(self._root / topic):
                if name.isdigit() and self._load(topic, name, below, scrub=scrub, unsynced=unsynced):
                    deleted.add(name)
            if deleted:
                queues.removal.add(topic, deleted if queues.by_id(topic) else None, state=0)
        self._load_begins()

    def _load(self, topic: str, name: str, below: int, *, scrub: bool, unsynced: bool) -> bool:
        """Load one queue; return whether it was deleted and its removal was interrupted by a stop."""
        queue = self._queues.add(topic, int(name))
        queue.load(below, scrub=scrub)
        is_unsynced, queue.dirty = queue.dirty or unsynced, False
        is_deleted = self._is_left_over(queue)
        if is_deleted:
            if is_unsynced:  # cleared entries must not reappear below a later checkpoint after a power failure
                queue.sync()
            self._queues.discard(queue)
        elif not queue.files:
            self._queues.drop(queue)
        elif is_unsynced:
            self._queues.mark_dirty(queue)
        return is_deleted

    def _is_left_over(self, queue: ConsumeQueue) -> bool:
        """Return whether all loaded entries belong to a deleted topic; the log still has any that came since."""
        mark = self._records.deletion_marks.get(queue.topic)
        if mark is None:  # a mark may be 0, after the log has lost all records
            return False
        if queue.used_end:
            return not has_from(queue, mark)
        return queue.end <= self._records.ended_at(queue.topic, queue.queue_id)

    def _load_begins(self) -> None:
        """Add the queues without a file.

        A queue with entries from below the checkpoint no longer needs its `begins`.
        """
        kept: list[tuple[str, int]] = []
        for topic, queue_id, offset in self._records.begins():
            queue = self._queues.get(topic, queue_id)
            if queue is None:
                self._queues.add(topic, queue_id).begin_at(offset)
            if queue is None or not queue.used_end:
                kept.append((topic, queue_id))
        self._records.keep_begins(kept)

    def end_at(self, end: int, *, lower: bool) -> None:
        """Correct the state for a log that ends at a physical offset, perhaps below the end that it had.

        Deletion marks and raises above the end are lowered, because other records will come there. If `lower`, the lost
        records may be a master's: queues that they raised, and empty files, are lowered too.
        """
        if self._records.lower_marks(end):
            self._records.save()
        if lower:
            self._lower_queues()

    def _lower_queues(self) -> None:
        """Undo effects of a master's lost records: raised queues, empty files at high offsets, too high minimums.

        Where the record that raised a queue still exists, the queue stays raised.
        """
        is_lowered = False
        for queue in list(self._queues.by_name.values()):
            used_end = queue.used_end
            end = max(used_end, self._records.raised_to(queue.topic, queue.queue_id))
            if end > used_end:
                end += queue.would_seem_lost(end)
            if used_end and queue.end != end:
                queue.go_to(end)
                queue.visible = queue.end
                self._queues.mark_dirty(queue)
            if not used_end and end < queue.end == self._records.begin_of(queue.topic, queue.queue_id):
                self._lower_begin(queue, end)
                is_lowered = True
            if queue.floor > queue.end:
                self._queues.set_floor(queue, queue.end)
                is_lowered = True
        if is_lowered:
            self._records.save()

    def _lower_begin(self, queue: ConsumeQueue, to: int) -> None:
        """Lower the first offset of a queue: no remaining record justifies it, and its messages were truncated."""
        if queue.files:
            queue.go_to(to)
            self._queues.mark_dirty(queue)
        queue.end = queue.visible = to
        self._records.lower_begin(queue.topic, queue.queue_id, to)
        if not to and not queue.files:
            self._queues.drop(queue)
            self._records.drop_floor(queue.topic, queue.queue_id)
