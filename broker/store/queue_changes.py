"""Changes of queues other than appends: deletion, hidden and erased messages, and higher offsets.

Invariants: nothing changes during a truncation, because the recovered state would not contain it. A queue continues
behind a hole only below a checkpoint, because recovery accepts no hole above one. A slave accepts only changes that its
master's log or tables contain.

Everything runs on the event loop's thread, except `save_deletions`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from functools import partial

from broker.store.commit_log import CommitLog
from broker.store.erased import Spans
from broker.store.erased_offsets import ErasedOffsets
from broker.store.errors import StoreFull, StoreNotWritable
from broker.store.log_end import LogEnd
from broker.store.queue_raises import QueueRaises, pieces
from broker.store.queue_state import StateImage
from broker.store.queue_table import QueueTable
from broker.store.store_reader import StoreReader
from broker.store.truncation import TruncationState
from broker.store.visibility import Visibility
from infra.disk.filesystem import OutOfDescriptors
from infra.loop.parts import Parts, nothing, run_here


class QueueChanges:
    """The changes of one store's queues that its lifecycle, its archive or its master decides."""

    def __init__(
        self,
        checkpoint: Callable[[], Parts[bool]],
        *,
        log: CommitLog,
        end: LogEnd,
        queues: QueueTable,
        erased_offsets: ErasedOffsets,
        visibility: Visibility,
        reader: StoreReader,
        truncations: TruncationState,
    ) -> None:
        """`checkpoint` flushes and writes a checkpoint, and returns whether it was written."""
        self._checkpoint, self._log, self._end, self._queues = checkpoint, log, end, queues
        self._visibility, self._reader, self._truncations = visibility, reader, truncations
        self._erased_offsets, self._raises = erased_offsets, QueueRaises(queues)
        self._has_uncovered_raises = False  # no checkpoint was written since queues were raised

    def delete_topic(self, topic: str, *, restart_at_zero: bool = False, below: int | None = None) -> None:
        """Drop a topic's queues.

        Its records stay in the log until their files are evicted, but belong to no topic any longer.

        This does no I/O: `save_deletions` makes it durable, and `upkeep` removes the files.

        A slave drops only records `below` the physical offset at which its master deleted the topic: the topic may have
        been created again since.

        If the topic is created again, its queues continue at their end offsets. With `restart_at_zero` they start at 0.
        The caller may allow that only if nothing outside this store knows the offsets that are then assigned again. The
        members of a set know them, so a set never starts at 0.
        """
        self._truncations.check_whole()
        if not self._queues.of_topic(topic):
            return
        restart_at_zero = restart_at_zero and self._visibility.set_has is None
        below = self._end.appended if below is None else min(below, self._end.appended)
        self._queues.delete(topic, below, restart_at_zero=restart_at_zero)

    def save_deletions(self) -> None:
        """Return when all deletions decided so far are durable, so that a start finds none of their queues; any thread.

        Raises StoreNotWritable if that failed. The store then rejects everything until the next start, which finds the
        deletion in the metadata log. Raises OutOfDescriptors if the caller should retry.
        """
        if self._end.failure is not None and self._queues.records.has_unsaved_deletions:
            raise StoreNotWritable(f"a deletion can't be saved, the disk failed: {self._end.failure}")
        try:
            self._queues.records.write_deletions()
        except OutOfDescriptors:
            raise
        except OSError as error:
            self._end.fail(error)
            raise StoreNotWritable(f"a deletion can't be saved: {error}") from error

    def image_without(self, topics: Collection[str]) -> StateImage | None:
        """Return the state without deleted topics that have no data left, here or elsewhere.

        Returns None if there are none. In a broker set there are none, because the other members keep that state.
        """
        self._truncations.check_whole()
        if self._visibility.set_has is not None:
            return None
        return self._queues.image_without(topics)

    def forget_deleted(self, image: StateImage) -> int:
        """Forget the topics omitted from a written `image_without`; return their number.

        If created again they start at 0.
        """
        self._truncations.check_whole()
        return self._queues.records.forget(image)

    def remember_ended(self, ended: Mapping[str, Mapping[int, int]]) -> None:
        """Set the end offsets of deleted topics, as their master has them."""
        self._truncations.check_whole()
        if self._queues.records.remember_ended(ended):
            self._queues.records.save()

    def save(self) -> None:
        """Make the queue state durable on this thread, for example after `hide_below`."""
        self._truncations.check_whole()
        self._queues.records.save()

    def image(self) -> StateImage:
        """Return an image of the queue state, on the event loop; `queues.records.write` may be called on any thread."""
        self._truncations.check_whole()
        return self._queues.records.image()

    def set_min_offset(self, topic: str, queue_id: int, offset: int) -> None:
        """Permanently hide the messages below an offset."""
        if self.hide_below(topic, {queue_id: offset}):
            self.save()

    def hide_below(self, topic: str, offsets: Mapping[int, int]) -> bool:
        """Hide the messages of queues below offsets; return whether any are newly hidden.

        Durable once the state is saved.
        """
        self._truncations.check_whole()
        return self._queues.hide_below(topic, offsets)

    def expire_below(self, topic: str, offsets: Mapping[int, int], timestamp: int) -> Generator[None, None, bool]:
        """Hide as `hide_below`, but only messages that were stored before a time. Yields as `offset_by_time`."""
        hidden = False
        for queue_id, offset in offsets.items():
            if self._queues.get(topic, queue_id) is not None:
                before = yield from self._reader.offset_by_time(topic, queue_id, timestamp, upper=False)
                self._truncations.check_whole()
                hidden |= self._queues.hide_below(topic, {queue_id: min(offset, before)})
        return hidden

    def show_from(self, topic: str, queue_id: int, offset: int) -> int:
        """Make hidden messages visible again, from an offset on, as far down as the queue has no hole.

        Returns the queue's new minimum.
        """
        self._truncations.check_whole()
        return self._queues.show_from(topic, queue_id, offset)

    def set_erased(self, topic: str, queue_id: int, before: Spans, spans: Spans) -> bool:
        """Set the erased offsets of a queue; durable once the state is saved.

        Returns False if they are no longer `before`.

        `entries`, `store_time` and `offset_by_time` still include them for the lifecycle, because the records are in
        the log.
        """
        self._truncations.check_whole()
        return self._erased_offsets.change(topic, queue_id, before, spans)

    def create_queue_at(self, topic: str, queue_id: int, next_offset: int) -> None:
        """Let a queue continue at an offset above those of its archive or of a deleted queue of its name."""
        self.create_queues_at({topic: {queue_id: next_offset}})

    def create_queues_at(self, following: Mapping[str, Mapping[int, int]]) -> None:
        """Do `create_queue_at` for many queues.

        Those that end as high or higher are unchanged. Repeatable after a crash.
        """
        self._end.check_writable()
        run_here(self.create_queues_parts(following))

    def create_queues_parts(self, following: Mapping[str, Mapping[int, int]], *, by_image: bool = False) -> Parts[None]:
        """Do `create_queues_at`, also on a slave; the yielded parts have to run on a thread.

        `by_image` is as in `QueueRaises.begin_at`. Raises StoreFull if a checkpoint can't be written now; repeatable.
        """
        self._truncations.check_whole()
        lower: dict[str, dict[int, int]] = {}
        for piece in pieces(following):
            for topic, offsets in piece.items():
                known = self._queues.by_id(topic)
                for queue_id, offset in offsets.items():
                    if (queue := known.get(queue_id)) is None or queue.end < offset:
                        lower.setdefault(topic, {})[queue_id] = offset
            yield nothing
        if not lower and not self._has_uncovered_raises:
            return
        yield from self._write_checkpoint()  # recovery accepts a hole only below a checkpoint
        self._truncations.check_whole()
        if lower:
            self._has_uncovered_raises = True
            yield from self._raises.begin_at(lower, by_image=by_image)
            yield from self._write_checkpoint()

    def _write_checkpoint(self) -> Parts[None]:
        if not (yield from self._checkpoint()):
            raise StoreFull("no checkpoint can be written now, so no queue continues at a higher offset")
        self._has_uncovered_raises = False

    def restore_queues(
        self, following: Mapping[str, Mapping[int, int]], ended: Mapping[str, Mapping[int, int]]
    ) -> None:
        """Give an empty store the queues of another one: each continues at its offset, with no local messages below.

        `ended` are the end offsets of queues of deleted topics. Repeatable after a crash.
        """
        self._end.check_writable()
        self._queues.records.remember_ended(ended)
        self._queues.records.save()
        run_here(self.create_queues_parts(following, by_image=True))

    def begin_queues(self, ends: Mapping[str, Mapping[int, int]], log_end: int) -> None:
        """Add queues of which a slave's log has no record, so that they continue as at the master and never start at 0.

        `ends` belong to the log end offset `log_end`, up to which this log is confirmed. So all messages that such a
        queue had then are below the first offset of this log. A topic that was deleted since is not changed.
        """
        missing: dict[str, dict[int, int]] = {}
        for topic, queues in ends.items():
            known = self._queues.by_id(topic)
            lacking = {queue_id: end for queue_id, end in queues.items() if end and queue_id not in known}
            if lacking and self._queues.deleted_up_to(topic) <= log_end:
                missing[topic] = lacking
        run_here(self.create_queues_parts(missing, by_image=True))

    def raise_queues(self, following: Mapping[str, Mapping[int, int]], *, record_end: int | None = None) -> None:
        """Let queues continue at offsets above those that the archive may have assigned; hide lower local messages.

        On a slave a record of the master sets the offsets; it ends at `record_end`. Messages from these offsets on
        stay visible. Repeatable.
        """
        run_here(self.raise_queues_parts(following, record_end=record_end))

    def raise_queues_parts(
        self, following: Mapping[str, Mapping[int, int]], *, record_end: int | None = None
    ) -> Parts[None]:
        """Do `raise_queues`; the yielded parts have to run on a thread."""
        yield from self.create_queues_parts(following)
        has_changed = False
        for piece in pieces(following):
            self._truncations.check_whole()
            self._queues.show_to(piece)
            for topic, offsets in piece.items():
                has_changed |= self._queues.hide_below(topic, offsets)
            if record_end is not None:
                has_changed |= self.remember_raised(piece, record_end)
            yield nothing
        if has_changed:
            yield partial(self._queues.records.write, self._queues.records.image())

    def remember_raised(self, following: Mapping[str, Mapping[int, int]], record_end: int) -> bool:
        """Record that the log raises queues, in a record that ends at `record_end`; return whether this is new.

        Nothing lowers them while the log has the record. Durable once the state is saved.
        """
        self._truncations.check_whole()
        return self._raises.remember_raised(following, record_end)
