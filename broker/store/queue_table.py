"""Table of the store's queues: lookup, creation, deletion, and the offsets that readers may get.

    queue_records    the state of queues that their files do not contain, and its file
    queue_loading    the files at a start
    queue_raises     queues that continue at higher offsets
    queue_removal    the files of deleted queues
    erased_offsets   offsets that no request returns

Invariants: `by_name` and the table by topic contain the same queues. A queue that was appended to since the last
`take_dirty` is dirty. Erased offsets of a queue are below its end.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping

from broker.store import erased
from broker.store.commit_log import CommitLog
from broker.store.config import StoreConfig
from broker.store.consume_queue import ConsumeQueue, MappedFiles
from broker.store.errors import MessageIllegal, StoreFull
from broker.store.layout import QUEUE_ENTRY_SIZE
from broker.store.queue_records import QueueRecords
from broker.store.queue_removal import QueueRemoval
from broker.store.queue_state import QueueStateFile, StateImage
from broker.store.topic_tails import TopicTails
from infra.disk.filesystem import Disk
from infra.loop.locks import NewLock, new_lock


class QueueTable:
    """Queues of one store, with their persistent state."""

    def __init__(
        self,
        config: StoreConfig,
        disk: Disk,
        log: CommitLog,
        tails: TopicTails,
        new_lock: NewLock = new_lock,
        *,
        file: QueueStateFile | None = None,
    ) -> None:
        """`file`: the state file of another table of this directory, so that writes of the two are serialized."""
        self._config, self._disk, self._log, self._tails = config, disk, log, tails
        self._root = config.root / "consumequeue"
        self.removal = QueueRemoval(config, disk, new_lock)
        self._maps = MappedFiles(config.mapped_queue_files, disk, self.removal)
        self.file_budget = self._maps.file_budget
        self.records = QueueRecords(file or QueueStateFile(config.root, disk, new_lock))
        #: As in `records`; each read calls them.
        self.deleted_up_to, self.ended_at = self.records.deleted_up_to, self.records.ended_at
        self.loaded_below = 0  # the records of all topics without a known tail are below this physical offset
        self._by_topic: dict[str, dict[int, ConsumeQueue]] = {}
        self._dirty: list[ConsumeQueue] = []
        self.by_name: dict[tuple[str, int], ConsumeQueue] = {}

    # -- start

    def take_maps(self) -> list[mmap.mmap]:
        """Remove and return all maps, so that a thread can unmap them before another table maps the files."""
        return self._maps.take_all()

    def exchange(self, other: QueueTable) -> None:
        """Exchange the queues with a table that has loaded the same directory.

        Queue objects obtained before become invalid.
        """
        self.removal, other.removal = other.removal, self.removal
        self._maps, other._maps = other._maps, self._maps
        self._maps.file_budget = self.file_budget
        self.records.adopt(other.records)
        self.loaded_below = other.loaded_below
        self.by_name, other.by_name = other.by_name, self.by_name
        self._by_topic, other._by_topic = other._by_topic, self._by_topic
        self._dirty, other._dirty = other._dirty, self._dirty

    def close(self) -> None:
        """Close all queues, on a thread, after the table is no longer used."""
        self._by_topic.clear()
        self._dirty.clear()
        while self.by_name:
            _, queue = self.by_name.popitem()
            queue.close()

    # -- lookup

    def get(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return the queue; None if there is none."""
        return self.by_name.get((topic, queue_id))

    def names(self) -> dict[str, list[int]]:
        """Return the queue ids of each topic."""
        return {topic: self.names_of(topic) for topic in sorted(self._by_topic)}

    def topics(self) -> list[str]:
        """Return the topics that have queues."""
        return list(self._by_topic)

    def names_of(self, topic: str) -> list[int]:
        """Return the queue ids of one topic, sorted."""
        return sorted(self._by_topic.get(topic, ()))

    def by_id(self, topic: str) -> Mapping[int, ConsumeQueue]:
        """Return a view of a topic's queues; it may become stale when a queue is created or deleted."""
        return self._by_topic.get(topic, {})

    def of_topic(self, topic: str) -> list[ConsumeQueue]:
        """Return the queues of a topic as a list."""
        return list(self._by_topic.get(topic, {}).values())

    # -- end offsets

    def next_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of the queue's next message; for a deleted queue, the one it would get if created again."""
        queue = self.get(topic, queue_id)
        return queue.end if queue is not None else self.ended_at(topic, queue_id)

    def continues_higher(self, topic: str, queue_id: int) -> bool:
        """Return whether a queue continues above its last record: raised or restored, without a message since."""
        queue = self.get(topic, queue_id)
        return queue is not None and queue.used_end < queue.end

    def ends(self) -> dict[str, dict[int, int]]:
        """Return topic -> queue -> the offset of the next message, for existing queues."""
        return {
            topic: {queue_id: queue.end for queue_id, queue in queues.items()}
            for topic, queues in self._by_topic.items()
        }

    def following_topics(self) -> list[str]:
        """Return the topics that have or had queues here."""
        return list(self.records.ended_topics() | self._by_topic.keys())

    def following_of(self, topic: str) -> dict[int, int]:
        """Return queue -> the offset of the next message, confirmed or not; includes deleted queues."""
        ends = {queue_id: queue.end for queue_id, queue in self._by_topic.get(topic, {}).items()}
        return self.records.ended_of(topic) | ends

    def following(self) -> dict[str, dict[int, int]]:
        """Return `following_of` of each of the `following_topics`."""
        return {topic: self.following_of(topic) for topic in self.following_topics()}

    # -- creation

    def create(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Create the queue of a first message, above the end of a deleted one. Raises as a put does, or NotThisTurn."""
        self.file_budget.take()
        self.records.keep(topic)  # the queue continues above its former end, so the disk must know that end
        self._save_deletion_of(topic)
        first = self.ended_at(topic, queue_id)
        queue = self.add(topic, queue_id)
        try:
            queue.create(first)
        except StoreFull:
            self.drop(queue)
            raise
        queue.visible = first
        return queue

    def add(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Add an empty queue without a file to the table."""
        check_name(topic, queue_id)
        assert (topic, queue_id) not in self.by_name
        queue = ConsumeQueue(self._config, self._maps, topic, queue_id, self._tails.of(topic))
        queue.floor = self.records.floor_of(topic, queue_id)
        queue.erased = self.records.erased_of(topic, queue_id)
        self.by_name[topic, queue_id] = queue
        self._by_topic.setdefault(topic, {})[queue_id] = queue
        return queue

    def go_to(self, topic: str, queue_id: int, offset: int) -> ConsumeQueue | None:
        """Return the queue of a record with an offset set by its master; None if it has that offset already.

        Raises as a put does.
        """
        queue = self.get(topic, queue_id)
        if queue is None:
            self._save_deletion_of(topic)
            queue = self.add(topic, queue_id)
            try:
                queue.create(offset)
            except StoreFull:
                self.drop(queue)
                raise
            queue.visible = offset
        elif queue.end != offset:
            if offset < queue.used_end:
                return None
            queue.go_to(offset)
        return queue

    def restart_at_zero(self, topic: str, queue_id: int) -> None:
        """Drop the queues of a topic that an Apache master deleted, after this queue's last record, and created again.

        Other queues of the topic are dropped too, unless they have records from above that one. Those restart on their
        own, or have done so already, because no record of a new topic is below one of the deleted topic.
        """
        queue = self.by_name[topic, queue_id]
        last = queue.entry(queue.used_end - 1)
        assert last is not None, "a queue that ends above 0 has a last entry"
        self.delete(topic, max(last[0] + last[1], self.deleted_up_to(topic)), restart_at_zero=True)

    # -- deletion

    def delete(self, topic: str, below: int, *, restart_at_zero: bool) -> None:
        """Drop the queues of a topic, whose records below a physical offset no longer belong to it.

        Queues with messages from above that offset stay, because the topic was created again meanwhile. This does no
        I/O. The deletion is durable when `write_deletions` or any later `save` returns; until then no queue of the
        topic is created.
        """
        queues = self.of_topic(topic)
        deleted = (
            [queue for queue in queues if not has_from(queue, below)] if self._may_have_from(topic, below) else queues
        )
        kept = {queue.queue_id for queue in queues} - {queue.queue_id for queue in deleted}
        ends: dict[int, int] | None = None
        if not restart_at_zero:
            ends = {queue.queue_id: queue.end for queue in deleted}
            ends |= {queue_id: self.by_name[topic, queue_id].first_at(below) for queue_id in kept}
        image = self.records.delete(topic, below, kept, ends)
        self._maps.take_out(deleted)
        for queue in deleted:
            self.drop(queue)
        self._dirty = [queue for queue in self._dirty if queue.topic != topic or queue.queue_id in kept]
        names = {str(queue.queue_id) for queue in deleted} if kept else None
        self.removal.add(topic, names, state=image.number, open_queues=deleted)

    def _may_have_from(self, topic: str, below: int) -> bool:
        """Return whether a queue of the topic may have a record at or above the offset, without checking each."""
        newest = self._tails.of(topic).physical_offset
        return newest >= below or (newest < 0 and below < self.loaded_below)

    def _save_deletion_of(self, topic: str) -> None:
        """Save a deletion before a queue of the topic is created. Otherwise a start could mix old and new messages."""
        if self.removal.state_needed(topic) > self.records.file.written:
            try:
                self.records.save()
            except OSError as error:
                raise StoreFull(f"the deletion of {topic!r} can't be saved: {error}") from error

    def remove_deleted(self) -> None:
        """Remove a bounded number of files of deleted queues; for a thread. Raises OSError."""
        self.removal.run(self.records.file.written)

    def image_without(self, topics: Iterable[str]) -> StateImage | None:
        """Return an image without those topics that have no queue, and no record in the log from before a deletion.

        They are forgotten once the image is written and passed to `records.forget`. Returns None if there are none.
        """
        return self.records.image_without(
            topic
            for topic in topics
            if topic not in self._by_topic and self.deleted_up_to(topic) <= self._log.min_offset
            if not self.removal.is_pending_of(topic)  # a start needs its mark to find what has to be removed
        )

    def drop(self, queue: ConsumeQueue) -> None:
        """Remove a queue from the table; its files stay."""
        del self.by_name[queue.topic, queue.queue_id]
        of_topic = self._by_topic[queue.topic]
        del of_topic[queue.queue_id]
        if not of_topic:
            del self._by_topic[queue.topic]

    def discard(self, queue: ConsumeQueue) -> None:
        """Remove a queue from the table, and close its files, which will be removed."""
        self._maps.take_out([queue])
        queue.close()
        self.drop(queue)

    # -- minimum offsets

    def minimum(self, queue: ConsumeQueue) -> int:
        """Return the lowest offset that the local log has and that is not hidden."""
        return queue.min_offset(max(self._log.min_offset, self.deleted_up_to(queue.topic)))

    def shows(self, topic: str, queue_id: int, offset: int, physical_offset: int) -> bool:
        """Return whether readers may get a message of the local log: the one rule for every request.

        The queue has to exist, and the record must not be of a deleted topic of the same name. The offset has to lie
        between the minimum and the visible end of the queue, outside the erased spans. `reading.read` applies the same
        bounds to ranges of offsets.
        """
        queue = self.get(topic, queue_id)
        return (
            queue is not None
            and physical_offset >= self.deleted_up_to(topic)
            and self.minimum(queue) <= offset < queue.visible
            and erased.behind(queue.erased, offset) == offset
        )

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Return `minimum`, limited to the visible end; 0 of an unknown queue."""
        queue = self.get(topic, queue_id)
        return 0 if queue is None else min(self.minimum(queue), queue.visible)

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset behind the last visible message; 0 of an unknown queue."""
        queue = self.by_name.get((topic, queue_id))
        return 0 if queue is None else queue.visible

    def show_to(self, following: Mapping[str, Mapping[int, int]]) -> None:
        """Raise the visible end of queues to offsets below which no message will come: readers skip the hole."""
        for topic, offsets in following.items():
            for queue_id, offset in offsets.items():
                queue = self.get(topic, queue_id)
                if queue is not None:
                    queue.visible = max(queue.visible, min(offset, queue.end))

    def hide_below(self, topic: str, offsets: Mapping[int, int]) -> bool:
        """Hide the messages of queues below offsets; return whether any are newly hidden.

        Durable once the state is saved.
        """
        found = False
        for queue_id, offset in offsets.items():
            queue = self.get(topic, queue_id)
            if queue is not None and offset > queue.floor:
                self.set_floor(queue, min(offset, queue.visible))
                found = True
        return found

    def show_from(self, topic: str, queue_id: int, offset: int) -> int:
        """Make hidden messages visible again, from an offset on, as far down as the queue has no hole.

        Returns the queue's new minimum.
        """
        queue = self.get(topic, queue_id)
        if queue is not None and offset < queue.floor:
            lowest = queue.floor
            for first, view in reversed(list(queue.slices(offset, queue.floor))):
                if first + len(view) // QUEUE_ENTRY_SIZE != lowest:
                    break
                lowest = first
            if lowest < queue.floor:
                self.set_floor(queue, lowest)
                self.records.save()
        return self.min_offset(topic, queue_id)

    def set_floor(self, queue: ConsumeQueue, floor: int) -> None:
        """Set the requested minimum offset of a queue; durable once the state is saved."""
        assert 0 <= floor <= queue.visible
        queue.floor = floor
        self.records.set_floor(queue.topic, queue.queue_id, floor)

    # -- checkpoints

    def mark_dirty(self, queue: ConsumeQueue) -> None:
        """Mark a queue whose files the next checkpoint has to sync."""
        if not queue.dirty:
            queue.dirty = True
            self._dirty.append(queue)
            self._tails.touched.add(queue.topic)

    def take_dirty(self) -> list[ConsumeQueue]:
        """Return the queues that a checkpoint has to sync, and mark them clean."""
        dirty, self._dirty = self._dirty, []
        for queue in dirty:
            queue.dirty = False
        self._tails.touched.clear()
        return dirty

    @property
    def mapped_files(self) -> int:
        """The number of mapped files of queues."""
        return len(self._maps)


def check_name(topic: str, queue_id: int) -> None:
    """Raise MessageIllegal if a queue of this name can't be stored."""
    if not topic or topic[0] == "." or "/" in topic or "\0" in topic or queue_id < 0 or len(topic.encode()) > 255:
        raise MessageIllegal(f"topic {topic!r}, queue {queue_id}: not a name that can be stored")


def has_from(queue: ConsumeQueue, below: int) -> bool:
    """Return whether the last record of a queue is at or above a physical offset."""
    last = queue.entry(queue.used_end - 1) if queue.used_end else None
    return last is not None and last[0] >= below
