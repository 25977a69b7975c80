"""The filters of a query on rows, as far as objects and row groups can apply them."""

from __future__ import annotations

from typing import NamedTuple

from neve.archive.format.journal import CommittedObject, RowGroup
from neve.spark.planning.rows import Rows, rows_of, runs_of


class RequestedRows(NamedTuple):
    """A filter; None accepts every value. Rows that pass it may still be unwanted.

    Args:
        since, until: store time in [since, until), milliseconds.
        first, last: offsets in [first, last].
    """

    since: int | None = None
    until: int | None = None
    first: int | None = None
    last: int | None = None
    topics: frozenset[str] | None = None
    brokers: frozenset[str] | None = None
    days: frozenset[str] | None = None
    queues: frozenset[int] | None = None
    tags: frozenset[str] | None = None
    msg_ids: frozenset[str] | None = None
    key: str | None = None

    def within(self, since: int | None, until: int | None) -> RequestedRows:
        """Return the filter narrowed to a range of store time."""
        low = [one for one in (self.since, since) if one is not None]
        high = [one for one in (self.until, until) if one is not None]
        return self._replace(since=max(low, default=None), until=min(high, default=None))

    def having(self, tags: frozenset[str] | None, key: str | None) -> RequestedRows:
        """Return the filter narrowed to one of these tags, and this key."""
        both = tags if self.tags is None else self.tags if tags is None else self.tags & tags
        return self._replace(tags=both, key=key)

    def may_hold(self, name: CommittedObject, group: RowGroup) -> bool:
        """Return whether a row group may contain such a row; one with unknown times may."""
        if self.days is not None and name.day not in self.days:
            return False
        if self.since is not None and 0 <= group.newest_ms < self.since:
            return False
        return self.until is None or group.oldest_ms < self.until

    def cut(self, rows: Rows) -> Rows:
        """Return the rows of the wanted topics, queues and offsets."""
        return rows_of(
            (topic, queue, max(first, self.first or 0), last if self.last is None else min(last, self.last))
            for topic, queue, first, last in runs_of(rows)
            if (self.topics is None or topic in self.topics) and (self.queues is None or queue in self.queues)
        )
