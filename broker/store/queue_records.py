"""Facts about queues that their own files do not contain, with the decisions about them and their state file.

    floor      requested minimum offset: messages below it are permanently hidden
    ended      end offset of a deleted queue, where it continues if it is created again: no offset is assigned twice
    begins     first offset of a queue whose messages are all elsewhere; it has no file before its first local message
    deleted    physical offset below which a topic's records belong to a deleted topic of the same name
    raised     minimum end offset of a queue that its master raised; it holds while the log has the record that sets
               it, or permanently if a state image set it
    erased     offsets that no request returns although they are above the minimum; permanent

No decision here does I/O or knows a queue's files. A change is durable once the state is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import TypeVar

from broker.store import erased
from broker.store.erased import Spans
from broker.store.queue_state import QueueState, QueueStateFile, StateImage

T = TypeVar("T")


class QueueRecords:
    """Persistent state of all queues of one store."""

    def __init__(self, file: QueueStateFile) -> None:
        self.file = file
        self._state = QueueState()
        # deleted topics that the state file may already lack, although they are not forgotten yet
        self._forgetting: set[str] = set()
        self._left_out: set[str] = set()  # topics omitted from the last `image_without`
        self._deletions: StateImage | None = None  # the state image of the last deletion, which has to become durable

    def load(self) -> None:
        """Read the state file; call it before the queues' files are read."""
        self._state = self.file.read()

    def adopt(self, other: QueueRecords) -> None:
        """Adopt the state of an object that has loaded the same directory."""
        assert self.file is other.file, "an older state of one would replace a newer state of the other"
        self._state = other._state
        self._forgetting, self._left_out, self._deletions = set(), set(), None

    # -- lookup

    def floor_of(self, topic: str, queue_id: int) -> int:
        """Return the requested minimum offset of a queue."""
        return self._state.floors.get(topic, {}).get(str(queue_id), 0)

    def begin_of(self, topic: str, queue_id: int) -> int:
        """Return the first offset of a queue without local messages; 0 if it has none."""
        return self._state.begins.get(topic, {}).get(str(queue_id), 0)

    def begins(self) -> list[tuple[str, int, int]]:
        """Return topic, queue and first offset of the queues without local messages."""
        begins = self._state.begins
        return [(topic, int(name), offset) for topic, queues in begins.items() for name, offset in queues.items()]

    def raised_to(self, topic: str, queue_id: int) -> int:
        """Return the highest offset to which records of the log, or a state image, raise a queue."""
        records = self._state.raised.get(topic, {}).get(str(queue_id), [])
        return max((offset for offset, _ in records), default=0)

    @property
    def deletion_marks(self) -> Mapping[str, int]:
        """`deleted_up_to` of all topics with a deleted predecessor."""
        return self._state.deleted

    def deleted_up_to(self, topic: str) -> int:
        """Return the physical offset below which a topic's records belong to a deleted topic of its name; 0 if none."""
        return self._state.deleted.get(topic, 0)

    def ended_at(self, topic: str, queue_id: int) -> int:
        """Return the end of the queue at the last deletion of its topic; 0 if none.

        Lower offsets belong to the deleted topic.
        """
        ended = self._state.ended.get(topic)
        return 0 if ended is None else ended.get(str(queue_id), 0)

    def ended_of(self, topic: str) -> dict[int, int]:
        """Return `ended_at` of the deleted queues of one topic."""
        return {int(name): end for name, end in self._state.ended.get(topic, {}).items()}

    def ended(self) -> dict[str, dict[int, int]]:
        """Return topic -> queue -> its end at the last deletion of the topic, unless it restarted at 0."""
        return {topic: self.ended_of(topic) for topic in self._state.ended}

    def ended_topics(self) -> Set[str]:
        """Return the topics of `ended`."""
        return self._state.ended.keys()

    def deleted(self) -> list[str]:
        """Return the deleted topics that still have state here; they may exist again."""
        return sorted(self._state.ended.keys() | self._state.deleted.keys())

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

    # -- changes

    def set_floor(self, topic: str, queue_id: int, floor: int) -> None:
        """Set the requested minimum offset of a queue."""
        self._state.floors.setdefault(topic, {})[str(queue_id)] = floor

    def set_erased(self, topic: str, queue_id: int, spans: Spans) -> None:
        """Set the erased offsets of a queue."""
        of_topic = self._state.erased.setdefault(topic, {})
        of_topic[str(queue_id)] = spans
        if not spans:
            del of_topic[str(queue_id)]
        if not of_topic:
            del self._state.erased[topic]

    def begin(self, begins: Mapping[str, Mapping[int, int]], *, by_image: bool) -> Callable[[], None]:
        """Set first offsets of queues, and return a function that undoes that.

        If `by_image`, no record of the log sets the offsets, and no truncation removes them.
        """
        before, new = self._state.begins, dict(self._state.begins)
        for topic, offsets in begins.items():
            named = {str(queue_id): offset for queue_id, offset in offsets.items()}
            new[topic] = before.get(topic, {}) | named
            if by_image:
                raised = self._state.raised.setdefault(topic, {})
                for name, offset in named.items():
                    raised[name] = [(offset, 0), *(one for one in raised.get(name, ()) if one[0] > offset and one[1])]
        self._state.begins = new

        def undo() -> None:
            if self._state.begins is new:  # no topic was deleted meanwhile
                self._state.begins = before

        return undo

    def lower_begin(self, topic: str, queue_id: int, to: int) -> None:
        """Lower the first offset of a queue, or drop it if it is 0."""
        if to:
            self._state.begins[topic][str(queue_id)] = to
        else:
            del self._state.begins[topic][str(queue_id)]

    def keep_begins(self, kept: Collection[tuple[str, int]]) -> None:
        """Drop the first offsets of all other queues, because their files have entries."""
        begins: dict[str, dict[str, int]] = {}
        for topic, queue_id in kept:
            begins.setdefault(topic, {})[str(queue_id)] = self.begin_of(topic, queue_id)
        self._state.begins = begins

    def drop_floor(self, topic: str, queue_id: int) -> None:
        """Drop the requested minimum offset of a queue that no longer exists."""
        self._state.floors.get(topic, {}).pop(str(queue_id), None)

    def raise_by_record(self, topic: str, queue_id: int, offset: int, record_end: int) -> bool:
        """Record that the log, up to the physical offset `record_end`, raises a queue; return whether this is new.

        Only offsets higher than all earlier ones are kept: a lower one is redundant, because every truncation that
        removes the higher one removes it too.
        """
        records = self._state.raised.get(topic, {}).get(str(queue_id), [])
        if any(to >= offset and at <= record_end for to, at in records):
            return False
        below = [one for one in records if one[1] < record_end]
        above = [one for one in records if one[1] > record_end and one[0] > offset]
        self._state.raised.setdefault(topic, {})[str(queue_id)] = [*below, (offset, record_end), *above]
        return True

    def remember_ended(self, ended: Mapping[str, Mapping[int, int]]) -> bool:
        """Set the end offsets of deleted topics of another store; return whether anything changed."""
        named = {topic: {str(queue_id): end for queue_id, end in ends.items()} for topic, ends in ended.items()}
        if all(self._state.ended.get(topic) == ends for topic, ends in named.items()):
            return False
        self._state.ended.update(named)
        return True

    def lower_marks(self, end: int) -> bool:
        """Lower deletion marks above the end of a log that lost its tail, because new records will come there.

        Also drop raises by lost records, because different records may replace those. Return whether anything changed.
        """
        above = [topic for topic, mark in self._state.deleted.items() if mark > end]
        raised = {
            topic: left
            for topic, queues in self._state.raised.items()
            if (left := _raises_in(queues, lambda at: at <= end))
        }
        has_changed = bool(above) or raised != self._state.raised
        self._state.deleted.update(dict.fromkeys(above, end))
        self._state.raised = raised
        return has_changed

    # -- deletion

    def delete(self, topic: str, below: int, kept: Set[int], ends: Mapping[int, int] | None) -> StateImage:
        """Delete the queues of a topic except those in `kept`; return the image that has to become durable.

        Args:
            topic: the topic.
            below: the physical offset below which its records must not reappear.
            kept: queues with messages from above that offset, because the topic was created again meanwhile.
            ends: the ends of the deleted queues, and the first offsets of the kept ones; None: they begin again at 0.
        """
        state, names = self._state, {str(queue_id) for queue_id in kept}
        raised = {name: queues for name, queues in state.raised.items() if name != topic}
        of_kept = {name: records for name, records in state.raised.get(topic, {}).items() if name in names}
        if left := _raises_in(of_kept, lambda at: at > below):
            raised[topic] = left
        ended = {name: queues for name, queues in state.ended.items() if name != topic}
        erased_offsets = dict(state.erased)
        if ends is not None:
            ended[topic] = state.ended.get(topic, {}) | {str(queue_id): end for queue_id, end in ends.items()}
        else:
            # The offsets will be assigned to other messages. Only topics of an Apache master have erased offsets here.
            erased_offsets = _without(erased_offsets, topic, names)
        self._state = QueueState(
            floors=_without(state.floors, topic, names),
            begins=_without(state.begins, topic, names),
            deleted=state.deleted | {topic: below},
            ended=ended,
            raised=raised,
            erased=erased_offsets,
        )
        self._deletions = self.image()
        return self._deletions

    def image_without(self, topics: Iterable[str]) -> StateImage | None:
        """Return an image without those topics that were deleted; None if there are none.

        They are forgotten once the image is written and passed to `forget`.
        """
        state = self._state
        gone = {topic for topic in topics if topic in state.ended or topic in state.deleted}
        if not gone:
            return None
        self._left_out = gone
        self._forgetting |= gone
        return self.file.image_of(_without_topics(state, gone))

    def forget(self, image: StateImage) -> int:
        """Forget the topics omitted from a written image; return their number.

        None are forgotten if a newer image exists, because it contains them: a topic may have been created again.
        """
        if not self.file.is_newest(image):
            return 0
        self._state = _without_topics(self._state, self._left_out)
        self._forgetting = set()
        return len(self._left_out)

    def keep(self, topic: str) -> None:
        """Save the state before a queue of the topic is created, if the file may lack the ends of deleted ones."""
        if topic in self._forgetting:
            self.save()
            self._forgetting = set()

    # -- saving

    def image(self) -> StateImage:
        """Return an image of the current state, for `write`."""
        return self.file.image_of(self._state)

    def save(self) -> None:
        """Make all changes so far durable, on the calling thread."""
        self.file.write(self.image())

    def write(self, image: StateImage) -> None:
        """Write an image; any thread. An older image never replaces a newer one."""
        self.file.write(image)

    @property
    def has_unsaved_deletions(self) -> bool:
        """Whether a deletion is not durable yet."""
        return self._deletions is not None and self._deletions.number > self.file.written

    def write_deletions(self) -> None:
        """Make all deletions decided so far durable; any thread."""
        image = self._deletions
        if image is not None:
            self.file.write(image)


def _without(table: Mapping[str, dict[str, T]], topic: str, kept: Set[str]) -> dict[str, dict[str, T]]:
    """Return the table with only the queues `kept` of one topic."""
    found = {name: queues for name, queues in table.items() if name != topic}
    left = {name: value for name, value in table.get(topic, {}).items() if name in kept}
    return found | {topic: left} if left else found


def _without_topics(state: QueueState, gone: Set[str]) -> QueueState:
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


def _raises_in(
    queues: Mapping[str, Sequence[tuple[int, int]]], is_there: Callable[[int], bool]
) -> dict[str, list[tuple[int, int]]]:
    """Return the entries of `raised` whose records still exist; queues without any are omitted."""
    found = {name: [one for one in records if is_there(one[1])] for name, records in queues.items()}
    return {name: records for name, records in found.items() if records}
