"""Queues that continue at higher offsets, behind a hole, because lower ones are archived or belong to another log.

A queue with files gets a new one, which the next checkpoint syncs. A queue without files gets a record, which is saved
first. Recovery accepts a hole only below its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice

from broker.store.consume_queue import ConsumeQueue
from broker.store.queue_table import QueueTable, check_name
from infra.loop.parts import Parts, nothing

# Queues that are compared or changed in memory in one turn of the event loop, about 2 ms.
QUEUES_IN_A_TURN = 250
_FILES_IN_A_TURN = 32  # queues whose file may have to be created, about 5 ms


class QueueRaises:
    """Raises queues of a table."""

    def __init__(self, queues: QueueTable) -> None:
        self._queues, self._records = queues, queues.records

    def begin_at(self, following: Mapping[str, Mapping[int, int]], *, by_image: bool = False) -> Parts[None]:
        """Let queues continue at higher offsets, behind a hole. Recovery accepts a hole only below its checkpoint.

        Queues that end as high or higher are unchanged. If `by_image`, no record of the log sets the offsets, and no
        truncation removes them. Durable with the next checkpoint. If it fails, the queue that failed is unchanged, and
        the call may be repeated.
        """
        yield from self._begin_without_files(following, by_image=by_image)
        for piece in pieces(following, _FILES_IN_A_TURN):
            for topic, queue_id, offset in _each(piece):
                queue = self._queues.get(topic, queue_id)
                if queue is not None and queue.files and queue.end < offset:
                    self._continue_behind_a_hole(queue, offset)
            yield nothing

    def _begins_without_file(self, topic: str, queue_id: int, offset: int) -> bool:
        queue = self._queues.get(topic, queue_id)
        return queue is None or (not queue.files and queue.end < offset)

    def _begin_without_files(self, following: Mapping[str, Mapping[int, int]], *, by_image: bool) -> Parts[None]:
        new: dict[str, dict[int, int]] = {}
        for piece in pieces(following):
            for topic, queue_id, offset in _each(piece):
                if self._begins_without_file(topic, queue_id, offset):
                    check_name(topic, queue_id)
                    new.setdefault(topic, {})[queue_id] = offset
            yield nothing
        if not new:
            return
        undo = self._records.begin(new, by_image=by_image)
        try:
            yield partial(self._records.write, self._records.image())
        except OSError:
            undo()
            raise
        for piece in pieces(new, _FILES_IN_A_TURN):
            for topic, queue_id, offset in _each(piece):
                # A topic that was deleted meanwhile has lost its new begin.
                is_begun = self._records.begin_of(topic, queue_id) == offset
                if is_begun and self._begins_without_file(topic, queue_id, offset):
                    (self._queues.get(topic, queue_id) or self._queues.add(topic, queue_id)).begin_at(offset)
            yield nothing

    def _continue_behind_a_hole(self, queue: ConsumeQueue, next_offset: int) -> None:
        queue.settle()
        next_offset += queue.would_seem_lost(next_offset)
        queue.create(next_offset)
        queue.visible = next_offset
        self._queues.mark_dirty(queue)

    def remember_raised(self, following: Mapping[str, Mapping[int, int]], record_end: int) -> bool:
        """Record that the log, up to the physical offset `record_end`, raises queues; return whether this is new.

        Queues of a topic that was deleted again are skipped: they continue at their former ends. Durable once the
        state is saved.
        """
        new = [
            self._records.raise_by_record(topic, queue_id, offset, record_end)
            for topic, queue_id, offset in _each(following)
            if self._queues.get(topic, queue_id) is not None
        ]
        return any(new)


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
