"""The newest record of each topic: what the topic table of a log file is made of.

Invariant: a topic whose tail moved since the queues were last clean is among `touched`, as each dirty queue's is. So a
broker with ten thousand topics looks only at those that may have changed.
"""

from __future__ import annotations

from infra.process import collector

# Rows that are made anew at once, from which on no collection of garbage looks through them.
_MANY = 1_000


class TopicTail:
    """The newest record of one topic; the append writes it itself."""

    __slots__ = ("physical_offset", "store_time")

    def __init__(self) -> None:
        self.physical_offset = -1
        self.store_time = 0


class TopicTails:
    """See the module."""

    def __init__(self) -> None:
        self.touched: set[str] = set()
        self._tails: dict[str, TopicTail] = {}
        # What `since` told last, and of what.
        self._table: dict[str, tuple[int, int]] = {}
        self._table_of = (-1, 0)

    def exchange(self, other: TopicTails) -> None:
        """Take the tails that another one has found, and give it the own ones."""
        self.touched, other.touched = other.touched, self.touched
        self._tails, other._tails = other._tails, self._tails
        self._table, other._table = other._table, self._table
        self._table_of, other._table_of = other._table_of, self._table_of

    def of(self, topic: str) -> TopicTail:
        """The tail of a topic, made if there is none."""
        tail = self._tails.get(topic)
        if tail is None:
            tail = self._tails[topic] = TopicTail()
        return tail

    def touch(self, topic: str, physical_offset: int, store_time: int) -> None:
        """Set a tail (recovery)."""
        tail = self.of(topic)
        tail.physical_offset, tail.store_time = physical_offset, store_time
        self.touched.add(topic)

    def newest(self) -> int:
        """Where the last record of all begins; -1: there is none."""
        return max((tail.physical_offset for tail in self._tails.values()), default=-1)

    def since(self, base: int, high_time: int) -> dict[str, tuple[int, int]]:
        """Topics that have a record at or above an offset: its last record, its newest store time.

        After a step back of the clock, `high_time` is the newest that any record had before it: too late rather than
        too early.
        """
        tails, (known_base, known_high_time) = self._tails, self._table_of
        if not 0 <= known_base <= base or known_high_time != high_time:
            self._table = {}
            self.touched.update(tails)
        elif known_base < base:  # the next file: whose last record lies below has none in it
            self._table = {topic: row for topic, row in self._table.items() if row[0] >= base}
        self._table_of = (base, high_time)
        table, made = self._table, 0
        for topic in self.touched:
            tail = tails[topic]
            row, last = table.get(topic), tail.physical_offset
            if last >= base and (row is None or row[0] != last):
                table[topic] = (last, max(tail.store_time, high_time))
                made += 1
        if made > _MANY:
            collector.freeze_new()
        return self._table.copy()
