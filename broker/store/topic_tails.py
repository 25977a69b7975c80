"""Newest record of each topic, from which the topic table of a log file is built.

Invariant: `touched` contains every topic whose tail moved since the queues were last marked clean, in particular the
topic of each dirty queue. So a broker with ten thousand topics examines only those that may have changed.
"""

from __future__ import annotations

from infra.process import collector

# New rows of a table from which on they are excluded from garbage collection.
_MANY = 1_000


class TopicTail:
    """Newest record of one topic; the append sets the fields directly."""

    __slots__ = ("physical_offset", "store_time")

    def __init__(self) -> None:
        self.physical_offset = -1
        self.store_time = 0


class TopicTails:
    """The newest record of each topic, and the last table built from them."""

    def __init__(self) -> None:
        self.touched: set[str] = set()
        self._tails: dict[str, TopicTail] = {}
        # The last result of `since`, and its arguments.
        self._table: dict[str, tuple[int, int]] = {}
        self._table_of = (-1, 0)

    def exchange(self, other: TopicTails) -> None:
        """Exchange the tails with another object that has scanned the same log."""
        self.touched, other.touched = other.touched, self.touched
        self._tails, other._tails = other._tails, self._tails
        self._table, other._table = other._table, self._table
        self._table_of, other._table_of = other._table_of, self._table_of

    def of(self, topic: str) -> TopicTail:
        """Return the tail of a topic; create it if missing."""
        tail = self._tails.get(topic)
        if tail is None:
            tail = self._tails[topic] = TopicTail()
        return tail

    def touch(self, topic: str, physical_offset: int, store_time: int) -> None:
        """Set a tail, for recovery and replication."""
        tail = self.of(topic)
        tail.physical_offset, tail.store_time = physical_offset, store_time
        self.touched.add(topic)

    def newest(self) -> int:
        """Return the physical offset of the newest record; -1 if there is none."""
        return max((tail.physical_offset for tail in self._tails.values()), default=-1)

    def since(self, base: int, high_time: int) -> dict[str, tuple[int, int]]:
        """Return, for topics with a record at or above `base`, the offset of the last one and the newest store time.

        After a step back of the clock, `high_time` is the newest store time from before it. It is used for all later
        records, because a time that is too late is safe.
        """
        tails, (known_base, known_high_time) = self._tails, self._table_of
        if not 0 <= known_base <= base or known_high_time != high_time:
            self._table = {}
            self.touched.update(tails)
        elif known_base < base:  # the next file: topics whose last record is below it have none in it
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
