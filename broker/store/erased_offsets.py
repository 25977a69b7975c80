"""Erased offsets of the local queues: no request returns them, although their records are still in the log."""

from __future__ import annotations

from broker.store import erased
from broker.store.commit_log import CommitLog
from broker.store.erased import Spans
from broker.store.queue_table import QueueTable


class ErasedOffsets:
    """Changes of the erased offsets. Those of a queue are below its last record; they are durable once saved."""

    def __init__(self, log: CommitLog, queues: QueueTable) -> None:
        self._log, self._queues, self._records = log, queues, queues.records

    def erasable(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return the range [low, end) of offsets whose local records may be erased; later ones may be reassigned.

        For a queue that was deleted, alone or with its topic, `low` is 0 while the log has records of that time.
        """
        queue = self._queues.get(topic, queue_id)
        was_deleted = self._records.deleted_up_to(topic) > self._log.min_offset
        end = self._last_end(topic, queue_id)
        if queue is None:
            return 0, end if was_deleted else 0
        return 0 if was_deleted else queue.first_here(self._log.min_offset), end

    def _last_end(self, topic: str, queue_id: int) -> int:
        """Return the offset behind the last record that is or was here; a raised queue continues higher."""
        queue, ended = self._queues.get(topic, queue_id), self._records.ended_at(topic, queue_id)
        return ended if queue is None else max(queue.used_end, ended)

    def change(self, topic: str, queue_id: int, before: Spans, spans: Spans) -> bool:
        """Set the erased offsets of a queue.

        Returns False and changes nothing if they are no longer `before`, or if the new ones reach above the last
        record.
        """
        is_above = bool(spans) and spans[-1][1] >= self._last_end(topic, queue_id)
        if is_above or self._records.erased_of(topic, queue_id) is not before:
            return False
        self._set(topic, queue_id, spans)
        return True

    def _set(self, topic: str, queue_id: int, spans: Spans) -> None:
        self._records.set_erased(topic, queue_id, spans)
        queue = self._queues.get(topic, queue_id)
        if queue is not None:
            queue.erased = spans

    def cut(self) -> None:
        """Limit erased offsets to those below the last record: a lost offset may be assigned to another message.

        Only archived messages are erased, and archiving waits for confirmation. So this changes something only after
        a loss of durable data, or after an operator truncated below the confirmed offset.
        """
        is_cut = False
        for topic, queue_id in self._records.erased_places():
            spans = self._records.erased_of(topic, queue_id)
            left = erased.within(spans, 0, self._last_end(topic, queue_id))
            if left is not spans:
                self._set(topic, queue_id, left)
                is_cut = True
        if is_cut:
            self._records.save()
