"""Table of the store's queues, and the state of existing and deleted queues that their files do not contain.

    floor      requested minimum offset: messages below it are permanently hidden
    ended      end offset of a deleted queue, where it continues if it is created again: no offset is assigned twice
    begins     first offset of a queue whose messages are all elsewhere; it has no file before its first local message
    deleted    physical offset below which a topic's records belong to a deleted topic of the same name
    raised     minimum end offset of a queue that its master raised; it holds while the log has the record that sets
               it, or permanently if a state image set it
    erased     offsets that no request returns although they are above the minimum; permanent
    dirty      queues whose files the next checkpoint has to sync

Invariants: `by_name` and the table by topic contain the same queues. A queue that was appended to since the last
`take_dirty` is dirty. Erased offsets of a queue are below its end. A change is durable once the state is saved.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import islice
from typing import TypeVar

from broker.store import erased
from broker.store.commit_log import CommitLog
from broker.store.config import StoreConfig
from broker.store.consume_queue import ConsumeQueue, MappedFiles
from broker.store.erased import Spans
from broker.store.errors import MessageIllegal, StoreFull
from broker.store.layout import QUEUE_ENTRY_SIZE
from broker.store.queue_removal import QueueRemoval
from broker.store.queue_state import QueueState, QueueStateFile, StateImage
from broker.store.topic_tails import TopicTails
from infra.disk.filesystem import Disk
from infra.loop.locks import NewLock, new_lock
from infra.loop.parts import Parts, nothing

T = TypeVar("T")
# Queues that are compared or changed in memory in one turn of the event loop, about 2 ms.
QUEUES_IN_A_TURN = 250
_FILES_IN_A_TURN = 32  # queues whose file may have to be created, about 5 ms


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
        self.rooms = self._maps.rooms
        self._file = file or QueueStateFile(config.root, disk, new_lock)
        self._state = QueueState()
        # deleted topics that the state file may already lack, although they are not forgotten yet
        self._forgetting: set[str] = set()
        self._left_out: set[str] = set()  # topics omitted from the last `image_without`
        self._loaded_below = 0  # the records of all topics without a known tail are below this physical offset
        self._deletions: StateImage | None = None  # the state image of the last deletion, which has to become durable
        self._by_topic: dict[str, dict[int, ConsumeQueue]] = {}
        self._dirty: list[ConsumeQueue] = []
        self.by_name: dict[tuple[str, int], ConsumeQueue] = {}

    @property
    def state_file(self) -> QueueStateFile:
        """File of the queue state."""
        return self._file

    # -- start

    def take_maps(self) -> list[mmap.mmap]:
        """Remove and return all maps, so that a thread can unmap them before another table maps the files."""
        return self._maps.take_all()

    def exchange(self, other: QueueTable) -> None:
        """Exchange the queues with a table that has loaded the same directory.

        Queue objects obtained before become invalid.
        """
        assert self._file is other._file, "an older state of one would replace a newer of the other"
        self.removal, other.removal = other.removal, self.removal
        self._maps, other._maps = other._maps, self._maps
        self._maps.rooms = self.rooms
        self._state, self._loaded_below = other._state, other._loaded_below
        self._forgetting, self._left_out, self._deletions = set(), set(), None
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

    def load(self, below: int, *, scrub: bool, unsynced: bool) -> None:
        """Load the entries of records below a physical offset from the files.

        If `unsynced`, the content read may not be durable, so the next checkpoint syncs all queues.
        """
        self._disk.make_dirs(self._root)
        self.removal.load()
        self._loaded_below = below
        for topic in self._disk.list_dir(self._root):
            deleted: set[str] = set()
            for name in self._disk.list_dir(self._root / topic):
                if name.isdigit() and self._load(topic, name, below, scrub=scrub, unsynced=unsynced):
                    deleted.add(name)
            if deleted:
                self.removal.add(topic, deleted if topic in self._by_topic else None, state=0)
        self._load_begins()

    def _load(self, topic: str, name: str, below: int, *, scrub: bool, unsynced: bool) -> bool:
        """Load one queue; return whether it was deleted and its removal was interrupted by a stop."""
        queue = self.add(topic, int(name))
        queue.load(below, scrub=scrub)
        queue.dirty |= unsynced
        is_deleted = self._is_left_over(queue)
        if is_deleted:
            self._maps.take_out([queue])
            queue.close()
        if not queue.files:
            self._drop(queue)
        elif queue.dirty:
            self._dirty.append(queue)
        return is_deleted

    def _is_left_over(self, queue: ConsumeQueue) -> bool:
        """Return whether all loaded entries belong to a deleted topic; the log still has any that came since."""
        mark = self.gone_below(queue.topic)
        if not mark:
            return False
        if queue.used_end:
            return not _has_from(queue, mark)
        return queue.end <= self.ended_at(queue.topic, queue.queue_id)

    def _load_begins(self) -> None:
        """Add the queues without a file.

        A queue with entries from below the checkpoint no longer needs its `begins`.
        """
        begins: dict[str, dict[str, int]] = {}
        for topic, offsets in self._state.begins.items():
            for name, offset in offsets.items():
                queue = self.get(topic, int(name))
                if queue is None:
                    self.add(topic, int(name)).begin_at(offset)
                if queue is None or not queue.used_end:
                    begins.setdefault(topic, {})[name] = offset
        self._state.begins = begins

    def load_state(self) -> None:
        """Read the state file; call it before the queues' files are read."""
        self._state = self._file.read()

    def lower_marks(self, end: int) -> None:
        """Lower deletion marks that are above the end of a log that lost its tail, because new records will come there.

        Also drop `raised` offsets set by lost records, because different records may replace those.
        """
        above = [topic for topic, mark in self._state.deleted.items() if mark > end]
        raised = {
            topic: left
            for topic, queues in self._state.raised.items()
            if (left := _said_in(queues, lambda at: at <= end))
        }
        if above or raised != self._state.raised:
            self._state.deleted.update(dict.fromkeys(above, end))
            self._state.raised = raised
            self.save()

    def lower_all(self) -> None:
        """Undo effects of a master's lost records: raised queues, empty files at high offsets, too high minimums.

        Call it after `lower_marks`. Where the record that raised a queue still exists, the queue stays raised.
        """
        lowered = False
        for queue in list(self.by_name.values()):
            used_end = queue.used_end
            end = max(used_end, self._raised_to(queue))
            if end > used_end:
                end += queue.would_look_lost(end)
            if used_end and queue.end != end:
                queue.go_to(end)
                queue.visible = queue.end
                self.mark_dirty(queue)
            if not used_end and end < queue.end == self._begin_of(queue):
                self._lower_begin(queue, end)
                lowered = True
            if queue.floor > queue.end:
                self._set_floor(queue, queue.end)
                lowered = True
        if lowered:
            self.save()

    def _begin_of(self, queue: ConsumeQueue) -> int:
        return self._state.begins.get(queue.topic, {}).get(str(queue.queue_id), 0)

    def _lower_begin(self, queue: ConsumeQueue, to: int) -> None:
        """Lower the first offset of a queue: no remaining record justifies it, and its messages were truncated."""
        topic, name, state = queue.topic, str(queue.queue_id), self._state
        if queue.files:
            queue.go_to(to)
            self.mark_dirty(queue)
        queue.end = queue.visible = to
        if to:
            state.begins[topic][name] = to
            return
        del state.begins[topic][name]
        if not queue.files:
            self._drop(queue)
            state.floors.get(topic, {}).pop(name, None)

    def _raised_to(self, queue: ConsumeQueue) -> int:
        said = self._state.raised.get(queue.topic, {}).get(str(queue.queue_id), [])
        return max((offset for offset, _ in said), default=0)

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

    @property
    def gone(self) -> Mapping[str, int]:
        """`gone_below` of all topics with a deleted predecessor."""
        return self._state.deleted

    def gone_below(self, topic: str) -> int:
        """Return the physical offset below which a topic's records belong to a deleted topic of its name; 0 if none."""
        return self._state.deleted.get(topic, 0)

    # -- end offsets

    def next_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of the queue's next message; for a deleted queue, the one it would get if created again."""
        queue = self.get(topic, queue_id)
        return queue.end if queue is not None else self._state.ended.get(topic, {}).get(str(queue_id), 0)

    def continues_higher(self, topic: str, queue_id: int) -> bool:
        """Return whether a queue continues above its last record: raised or restored, without a message since."""
        queue = self.get(topic, queue_id)
        return queue is not None and queue.used_end < queue.end

    def ends(self) -> dict[str, dict[int, int]]:
        """Return topic -> queue -> the offset of the next message, confirmed or not, for existing queues."""
        return {
            topic: {queue_id: queue.end for queue_id, queue in queues.items()}
            for topic, queues in self._by_topic.items()
        }

    def following_topics(self) -> list[str]:
        """Return the topics that have or had queues here."""
        return list(self._state.ended.keys() | self._by_topic.keys())

    def following_of(self, topic: str) -> dict[int, int]:
        """Return queue -> the offset of the next message, confirmed or not; includes deleted queues."""
        ended = {int(name): end for name, end in self._state.ended.get(topic, {}).items()}
        return ended | {queue_id: queue.end for queue_id, queue in self._by_topic.get(topic, {}).items()}

    def following(self) -> dict[str, dict[int, int]]:
        """Return `following_of` of each of the `following_topics`."""
        return {topic: self.following_of(topic) for topic in self.following_topics()}

    def ended_at(self, topic: str, queue_id: int) -> int:
        """Return the end of the queue at the last deletion of its topic; 0 if none.

        Lower offsets belong to the deleted topic.
        """
        ended = self._state.ended.get(topic)
        return 0 if ended is None else ended.get(str(queue_id), 0)

    def deleted(self) -> list[str]:
        """Return the deleted topics that still have state here; they may exist again."""
        return sorted(self._state.ended.keys() | self._state.deleted.keys())

    def ended(self) -> dict[str, dict[int, int]]:
        """Return topic -> queue -> its end at the last deletion of the topic, unless it restarted at 0."""
        return {
            topic: {int(queue_id): end for queue_id, end in ends.items()} for topic, ends in self._state.ended.items()
        }

    # -- creation

    def create(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Create the queue of a first message, above the end of a deleted one. Raises as a put does, or NotThisTurn."""
        self.rooms.take()
        if topic in self._forgetting:  # the queue continues above its former end, so the disk must know that end
            self.save()
            self._forgetting = set()
        self._save_deletion_of(topic)
        first = self._state.ended.get(topic, {}).get(str(queue_id), 0)
        queue = self.add(topic, queue_id)
        try:
            queue.create(first)
        except StoreFull:
            self._drop(queue)
            raise
        queue.visible = first
        return queue

    def add(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Add an empty queue without a file to the table."""
        _check_name(topic, queue_id)
        assert (topic, queue_id) not in self.by_name
        queue = ConsumeQueue(self._config, self._maps, topic, queue_id, self._tails.of(topic))
        queue.floor = self._state.floors.get(topic, {}).get(str(queue_id), 0)
        queue.erased = self.erased_of(topic, queue_id)
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
                self._drop(queue)
                raise
            queue.visible = offset
        elif queue.end != offset:
            if offset < queue.used_end:
                return None
            queue.go_to(offset)
        return queue

    def begin_again(self, topic: str, queue_id: int) -> None:
        """Drop the queues of a topic that an Apache master deleted, after this queue's last record, and created again.

        Other queues of the topic are dropped too, unless they have records from above that one. Those restart on their
        own, or have done so already, because no record of a new topic is below one of the deleted topic.
        """
        queue = self.by_name[topic, queue_id]
        last = queue.entry(queue.used_end - 1)
        assert last is not None, "a queue that ends above 0 has a last entry"
        self.delete(topic, max(last[0] + last[1], self.gone_below(topic)), begin_again=True)

    def begin_at(self, following: Mapping[str, Mapping[int, int]], *, by_image: bool = False) -> Parts[None]:
        """Let queues continue at higher offsets, behind a hole. Recovery accepts a hole only below its checkpoint.

        Queues that end as high or higher are unchanged. If `by_image`, no record of the log sets the offsets, and no
        truncation removes them. Durable with the next checkpoint. If it fails, the queue that failed is unchanged, and
        the call may be repeated.
        """
        yield from self._begin_without_files(following, by_image=by_image)
        for piece in pieces(following, _FILES_IN_A_TURN):
            for topic, queue_id, offset in _each(piece):
                queue = self.get(topic, queue_id)
                if queue is not None and queue.files and queue.end < offset:
                    self._go_on_behind_a_hole(queue, offset)
            yield nothing

    def _begins_without_file(self, topic: str, queue_id: int, offset: int) -> bool:
        queue = self.get(topic, queue_id)
        return queue is None or (not queue.files and queue.end < offset)

    def _begin_without_files(self, following: Mapping[str, Mapping[int, int]], *, by_image: bool) -> Parts[None]:
        new: dict[str, dict[str, int]] = {}
        for piece in pieces(following):
            for topic, queue_id, offset in _each(piece):
                if self._begins_without_file(topic, queue_id, offset):
                    _check_name(topic, queue_id)
                    new.setdefault(topic, {})[str(queue_id)] = offset
            yield nothing
        if not new:
            return
        before = self._state.begins
        begins = before | {topic: before.get(topic, {}) | offsets for topic, offsets in new.items()}
        self._state.begins = begins
        if by_image:
            self._set_by_image(new)
        try:
            yield partial(self._file.write, self.image())
        except OSError:
            if self._state.begins is begins:
                self._state.begins = before
            raise
        for piece in pieces(following, _FILES_IN_A_TURN):
            for topic, queue_id, offset in _each(piece):
                # A topic that was deleted meanwhile has lost its new begin.
                is_begun = self._state.begins.get(topic, {}).get(str(queue_id)) == offset
                if is_begun and self._begins_without_file(topic, queue_id, offset):
                    (self.get(topic, queue_id) or self.add(topic, queue_id)).begin_at(offset)
            yield nothing

    def _set_by_image(self, begins: Mapping[str, Mapping[str, int]]) -> None:
        for topic, offsets in begins.items():
            raised = self._state.raised.setdefault(topic, {})
            for name, offset in offsets.items():
                raised[name] = [(offset, 0), *(one for one in raised.get(name, ()) if one[0] > offset and one[1])]

    def _go_on_behind_a_hole(self, queue: ConsumeQueue, next_offset: int) -> None:
        queue.settle()
        next_offset += queue.would_look_lost(next_offset)
        queue.create(next_offset)
        queue.visible = next_offset
        self.mark_dirty(queue)

    def remember_raised(self, following: Mapping[str, Mapping[int, int]], said_at: int) -> bool:
        """Record that the log, up to the physical offset `said_at`, raises queues; return whether this is new.

        Durable once the state is saved. Of each queue, only offsets higher than all earlier ones are kept: a lower one
        is redundant, because every truncation that removes the higher one removes it too.
        """
        is_new = False
        for topic, offsets in following.items():
            for queue_id, offset in offsets.items():
                if self.get(topic, queue_id) is None:
                    continue  # its topic was deleted again: the queue continues at its former end
                said = self._state.raised.get(topic, {}).get(str(queue_id), [])
                if any(to >= offset and at <= said_at for to, at in said):
                    continue
                below = [one for one in said if one[1] < said_at]
                above = [one for one in said if one[1] > said_at and one[0] > offset]
                self._state.raised.setdefault(topic, {})[str(queue_id)] = [*below, (offset, said_at), *above]
                is_new = True
        return is_new

    def remember_ended(self, ended: Mapping[str, Mapping[int, int]]) -> bool:
        """Set the end offsets of deleted topics of another store; return whether anything changed.

        Durable once the state is saved.
        """
        named = {topic: {str(queue_id): end for queue_id, end in ends.items()} for topic, ends in ended.items()}
        if all(self._state.ended.get(topic) == ends for topic, ends in named.items()):
            return False
        self._state.ended.update(named)
        return True

    # -- deletion

    def delete(self, topic: str, below: int, *, begin_again: bool) -> None:
        """Drop the queues of a topic, whose records below a physical offset no longer belong to it.

        Queues with messages from above that offset stay, because the topic was created again meanwhile. This does no
        I/O. The deletion is durable when `write_deletions` or any later `save` returns; until then no queue of the
        topic is created.
        """
        queues = self.of_topic(topic)
        gone = (
            [queue for queue in queues if not _has_from(queue, below)] if self._may_have_from(topic, below) else queues
        )
        kept: set[str] = set()
        if len(gone) < len(queues):
            kept = {str(queue.queue_id) for queue in set(queues).difference(gone)}
        state = self._without(topic, below, kept)
        if not begin_again:
            ends = {str(queue.queue_id): queue.end for queue in gone}
            ends |= {name: self.by_name[topic, int(name)].first_at(below) for name in kept}
            state.ended[topic] = self._state.ended.get(topic, {}) | ends
        elif gone:
            # The offsets will be assigned to other messages. Only topics of an Apache master have erased offsets here.
            state.erased = _without(state.erased, topic, kept)
        self._state = state
        self._deletions = image = self._file.image_of(state)
        self._maps.take_out(gone)
        for queue in gone:
            self._drop(queue)
        self._dirty = [queue for queue in self._dirty if queue.topic != topic or str(queue.queue_id) in kept]
        names = {str(queue.queue_id) for queue in gone} if kept else None
        self.removal.add(topic, names, state=image.number, open_queues=gone)

    def _may_have_from(self, topic: str, below: int) -> bool:
        """Return whether a queue of the topic may have a record at or above the offset, without checking each."""
        newest = self._tails.of(topic).physical_offset
        return newest >= below or (newest < 0 and below < self._loaded_below)

    @property
    def has_unsaved_deletions(self) -> bool:
        """Whether a deletion is not durable yet."""
        return self._deletions is not None and self._deletions.number > self._file.written

    def write_deletions(self) -> None:
        """Make all deletions decided so far durable; any thread."""
        image = self._deletions
        if image is not None:
            self._file.write(image)

    def _save_deletion_of(self, topic: str) -> None:
        """Save a deletion before a queue of the topic is created. Otherwise a start could mix old and new messages."""
        if self.removal.state_needed(topic) > self._file.written:
            try:
                self.save()
            except OSError as error:
                raise StoreFull(f"the deletion of {topic!r} can't be saved: {error}") from error

    def remove_deleted(self) -> None:
        """Remove a bounded number of files of deleted queues; for a thread. Raises OSError."""
        self.removal.run(self._file.written)

    def _without(self, topic: str, below: int, kept: Set[str]) -> QueueState:
        """Return the state without a topic, whose records below a physical offset must not reappear."""
        state = self._state
        return QueueState(
            floors=_without(state.floors, topic, kept),
            begins=_without(state.begins, topic, kept),
            deleted=state.deleted | {topic: below},
            ended={name: queues for name, queues in state.ended.items() if name != topic},
            raised=self._raised_without(topic, below, kept),
            erased=dict(state.erased),
        )

    def _raised_without(self, topic: str, below: int, kept: Set[str]) -> dict[str, dict[str, list[tuple[int, int]]]]:
        found = {name: queues for name, queues in self._state.raised.items() if name != topic}
        of_kept = {name: said for name, said in self._state.raised.get(topic, {}).items() if name in kept}
        left = _said_in(of_kept, lambda at: at > below)
        return found | {topic: left} if left else found

    def image_without(self, topics: Iterable[str], log_begin: int) -> StateImage | None:
        """Return an image without those topics that have no queue, and no record in the log from before a deletion.

        They are forgotten once the image is written and passed to `forget_deleted`. Returns None if there are none.
        """
        state = self._state
        gone = {
            topic
            for topic in topics
            if topic not in self._by_topic and self.gone_below(topic) <= log_begin
            if not self.removal.is_pending_of(topic)  # a start needs its mark to find what has to be removed
            if topic in state.ended or topic in state.deleted
        }
        if not gone:
            return None
        self._left_out = gone
        self._forgetting |= gone
        return self._file.image_of(_without_names(state, gone))

    def forget_deleted(self, image: StateImage) -> int:
        """Forget the topics omitted from a written image; return their number.

        None are forgotten if a newer image exists, because it contains them: a topic may have been created again.
        """
        if not self._file.is_newest(image):
            return 0
        self._state = _without_names(self._state, self._left_out)
        self._forgetting = set()
        return len(self._left_out)

    def _drop(self, queue: ConsumeQueue) -> None:
        del self.by_name[queue.topic, queue.queue_id]
        of_topic = self._by_topic[queue.topic]
        del of_topic[queue.queue_id]
        if not of_topic:
            del self._by_topic[queue.topic]

    # -- minimum offsets

    def minimum(self, queue: ConsumeQueue) -> int:
        """Return the lowest offset that the local log has and that is not hidden."""
        return queue.min_offset(max(self._log.min_offset, self.gone_below(queue.topic)))

    def shows(self, topic: str, queue_id: int, offset: int, physical_offset: int) -> bool:
        """Return whether readers may get a message of the local log: the one rule for every request.

        The queue has to exist, and the record must not be of a deleted topic of the same name. The offset has to lie
        between the minimum and the visible end of the queue, outside the erased spans. `reading.read` applies the same
        bounds to ranges of offsets.
        """
        queue = self.get(topic, queue_id)
        return (
            queue is not None
            and physical_offset >= self.gone_below(topic)
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
                self._set_floor(queue, min(offset, queue.visible))
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
                self._set_floor(queue, lowest)
                self.save()
        return self.min_offset(topic, queue_id)

    def _set_floor(self, queue: ConsumeQueue, floor: int) -> None:
        assert 0 <= floor <= queue.visible
        queue.floor = floor
        self._state.floors.setdefault(queue.topic, {})[str(queue.queue_id)] = floor

    # -- erased offsets

    @property
    def has_erased(self) -> bool:
        """Whether the store has erased offsets."""
        return bool(self._state.erased)

    def erased_places(self) -> list[tuple[str, int]]:
        """Return the topics and queues with erased offsets."""
        return [(topic, int(name)) for topic, queues in self._state.erased.items() for name in queues]

    def erased_of(self, topic: str, queue_id: int) -> Spans:
        """Return the erased offsets of a queue, also of a deleted one while the log has its records."""
        of_topic = self._state.erased.get(topic)
        return erased.NONE if of_topic is None else of_topic.get(str(queue_id), erased.NONE)

    def erasable(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return the range [low, end) of offsets whose local records may be erased; later ones may be reassigned.

        For a queue that was deleted, alone or with its topic, `low` is 0 while the log has records of that time.
        """
        queue, was_gone = self.get(topic, queue_id), self.gone_below(topic) > self._log.min_offset
        end = self._last_end(topic, queue_id)
        if queue is None:
            return 0, end if was_gone else 0
        return 0 if was_gone else queue.first_here(self._log.min_offset), end

    def _last_end(self, topic: str, queue_id: int) -> int:
        """Return the offset behind the last record that is or was here; a raised queue continues higher."""
        queue, ended = self.get(topic, queue_id), self.ended_at(topic, queue_id)
        return ended if queue is None else max(queue.used_end, ended)

    def set_erased(self, topic: str, queue_id: int, before: Spans, spans: Spans) -> bool:
        """Set the erased offsets of a queue; durable once the state is saved.

        Returns False and changes nothing if they are no longer `before`, or if the new ones reach above the last
        record.
        """
        is_above = bool(spans) and spans[-1][1] >= self._last_end(topic, queue_id)
        if is_above or self.erased_of(topic, queue_id) is not before:
            return False
        self._put_erased(topic, queue_id, spans)
        return True

    def _put_erased(self, topic: str, queue_id: int, spans: Spans) -> None:
        queue, of_topic = self.get(topic, queue_id), self._state.erased.setdefault(topic, {})
        of_topic[str(queue_id)] = spans
        if not spans:
            del of_topic[str(queue_id)]
        if not of_topic:
            del self._state.erased[topic]
        if queue is not None:
            queue.erased = spans

    def cut_erased(self) -> None:
        """Limit erased offsets to those below the last record: a lost offset may be assigned to another message.

        Only archived messages are erased, and archiving waits for confirmation. So this changes something only after
        a loss of durable data, or after an operator truncated below the confirmed offset.
        """
        is_cut = False
        for topic, queue_id in self.erased_places():
            spans = self.erased_of(topic, queue_id)
            left = erased.within(spans, 0, self._last_end(topic, queue_id))
            if left is not spans:
                self._put_erased(topic, queue_id, left)
                is_cut = True
        if is_cut:
            self.save()

    # -- saving

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

    def dirty_topics(self) -> set[str]:
        """Return the topics of the queues that the next checkpoint syncs."""
        return {queue.topic for queue in self._dirty}

    def save(self) -> None:
        """Make all changes so far durable, on the calling thread."""
        self._file.write(self.image())

    def image(self) -> StateImage:
        """Return an image of the current state, for `write`."""
        return self._file.image_of(self._state)

    def write(self, image: StateImage) -> None:
        """Write an image; any thread. An older image never replaces a newer one."""
        self._file.write(image)

    @property
    def mapped_files(self) -> int:
        """The number of mapped files of queues."""
        return len(self._maps)


def pieces(ends: Mapping[str, Mapping[int, int]], most: int = QUEUES_IN_A_TURN) -> Iterator[dict[str, dict[int, int]]]:
    """Yield a table of offsets by topic and queue in pieces of at most `most` queues, for turns of the event loop."""
    rest = _each(ends)
    while some := list(islice(rest, most)):
        piece: dict[str, dict[int, int]] = {}
        for topic, queue_id, end in some:
            piece.setdefault(topic, {})[queue_id] = end
        yield piece


def _each(ends: Mapping[str, Mapping[int, int]]) -> Iterator[tuple[str, int, int]]:
    return ((topic, queue_id, end) for topic, queues in ends.items() for queue_id, end in queues.items())


def _check_name(topic: str, queue_id: int) -> None:
    if not topic or topic[0] == "." or "/" in topic or "\0" in topic or queue_id < 0 or len(topic.encode()) > 255:
        raise MessageIllegal(f"topic {topic!r}, queue {queue_id}: not a name that can be stored")


def _without(table: Mapping[str, dict[str, T]], topic: str, kept: Set[str]) -> dict[str, dict[str, T]]:
    """Return the table with only the queues `kept` of one topic."""
    found = {name: queues for name, queues in table.items() if name != topic}
    left = {name: value for name, value in table.get(topic, {}).items() if name in kept}
    return found | {topic: left} if left else found


def _without_names(state: QueueState, gone: Set[str]) -> QueueState:
    return QueueState(
        floors=_without_all(state.floors, gone),
        begins=_without_all(state.begins, gone),
        deleted=_without_all(state.deleted, gone),
        ended=_without_all(state.ended, gone),
        raised=_without_all(state.raised, gone),
        erased=_without_all(state.erased, gone),
    )


def _without_all(table: Mapping[str, T], gone: Set[str]) -> dict[str, T]:
    return {name: value for name, value in table.items() if name not in gone}


def _said_in(
    queues: Mapping[str, Sequence[tuple[int, int]]], is_there: Callable[[int], bool]
) -> dict[str, list[tuple[int, int]]]:
    """Return the entries of `raised` whose records still exist; queues without any are omitted."""
    found = {name: [one for one in said if is_there(one[1])] for name, said in queues.items()}
    return {name: said for name, said in found.items() if said}


def _has_from(queue: ConsumeQueue, below: int) -> bool:
    last = queue.entry(queue.used_end - 1) if queue.used_end else None
    return last is not None and last[0] >= below
