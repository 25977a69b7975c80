"""Interface of the hot store for the lifecycle jobs. The broker passes an adapter, which job threads call."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from tiered.write.offload_plan import HotLog, TopicUnreadable


class LogSegment(Protocol):
    """One CommitLog file: its range, and per topic the last record's offset and the newest store time."""

    @property
    def base(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def sealed(self) -> bool: ...

    @property
    def newest_store_time(self) -> int: ...

    @property
    def topics(self) -> Mapping[str, tuple[int, int]]: ...


class Aged(NamedTuple):
    """The part of a topic that was stored before a time."""

    ends: Mapping[int, int]  # queue -> the first newer offset, for queues with older messages in view
    oldest_ms: int  # no message is older; below 0: unknown


class Hidden(NamedTuple):
    """Result of `hide_erased`."""

    runs: int  # runs of rows that were not hidden before
    failed: Mapping[tuple[str, int], str]  # (topic, queue) -> why its rows could not be hidden


class HotStore(HotLog, Protocol):
    """The hot store as the jobs see it. Called from their threads. Offsets are those of the CommitLog or of a queue.

    An unreadable topic raises TopicUnreadable and affects no other topic; a failed disk operation raises OSError.
    """

    def segments(self) -> Sequence[LogSegment]: ...

    def flush(self) -> int:
        """Make the log durable; returns the CommitLog offset below which it is durable and all entries are visible.

        A limit above the visible entries would let a round skip records that are about to appear. In a broker set, the
        limit is what all electable members have on their disks; the own disk has more.
        """
        ...

    def confirmed_range(self) -> tuple[int, int]:
        """Return the range of CommitLog offsets in which all entries are visible."""
        ...

    def roll(self) -> bool:
        """Seal the active segment, so that it can be archived whole; False if there is no room for the next one."""
        ...

    def evict(self, base: int) -> bool:
        """Delete the oldest segment from the disk; False if a truncation during the call kept it in the log."""
        ...

    def topics(self) -> Sequence[str]:
        """Return the topics with queues, sorted."""
        ...

    def queues_of(self, topic: str) -> Sequence[int]: ...

    def deleted_below(self) -> Mapping[str, Mapping[int, int]]:
        """Return topic -> queue -> its end at the last deletion of the topic; without topics that restarted at 0."""
        ...

    def deleted_topics(self) -> Sequence[str]:
        """Return deleted topics whose queue ends are stored. They may exist again."""
        ...

    def forget_deleted(self, topics: Collection[str]) -> int:
        """Forget where the queues of deleted topics ended, so that they begin at offset 0 if they are created again.

        Skips topics that have a queue or a record here. The change is durable on return. Returns how many topics were
        forgotten; 0 if one of them is being created again meanwhile.
        """
        ...

    def min_offset(self, topic: str, queue: int) -> int: ...

    def first_offsets(self, topic: str, start: int) -> Mapping[int, int]:
        """Return queue -> its first offset at or above a CommitLog offset; the queue's end if there is none."""
        ...

    def expire_below(
        self, rising: Mapping[str, Mapping[int, int]], before: Mapping[str, int]
    ) -> Mapping[str, TopicUnreadable]:
        """Hide messages below these offsets of topics' queues if they were stored before the topic's time.

        Both conditions are checked in one step. One write covers all queues. The messages must be durable (`flush`).
        Returns the topics that could not be hidden, or not completely, each with its error.
        """
        ...

    def show_from(self, topic: str, queue: int, offset: int) -> int:
        """Undo `expire_below` down to an offset, as far as the log has the messages; returns the new minimum."""
        ...

    def hide_erased(self, rows: Iterable[tuple[str, int, int, int]]) -> Hidden:
        """Hide rows from all requests for good: (topic, queue, first offset, last offset) each.

        Covers all rows that the log has, also those of a deleted queue. Durable on return, except for the queues that
        are returned as failed.
        """
        ...

    def log_erased(self, rows: Sequence[tuple[str, int, int, int]]) -> None:
        """Append a record that these rows of internal topics are erased, so that other members hide them, too.

        Raises OSError if the log accepts no record now.
        """
        ...

    def erased(self, topic: str) -> Mapping[int, Sequence[tuple[int, int]]]:
        """Return queue -> (first, last) of the rows hidden by `hide_erased`, in order."""
        ...

    def former_ends(self, topics: Collection[str]) -> Mapping[str, int]:
        """Return topic -> the CommitLog offset below which its records belong to a deleted topic.

        No request returns such records. For a topic without queues it is the end of the log. Contains only topics that
        may have such records in the log.
        """
        ...

    def search_log(self, ranges: Mapping[str, tuple[int, int]], text: bytes) -> Iterator[bytes | None]:
        """Yield the records of topics, each within its range of CommitLog offsets, that contain these bytes.

        Queues are not needed for it. None is yielded between two pieces of the log. Raises TopicUnreadable if a part of
        the log can't be read.
        """
        ...

    def quarantined(self, text: bytes) -> Iterator[tuple[str, bytes]]:
        """Yield the file and the record of each quarantined message that contains these bytes. Raises OSError."""
        ...

    def remove_quarantined(self, name: str) -> None:
        """Delete the file of a quarantined message for good. Raises OSError."""
        ...

    def aged(self, before: Mapping[str, int]) -> Iterator[tuple[str, Aged | TopicUnreadable]]:
        """Yield for each topic the part that was stored before its time."""
        ...

    def pinned_from(self) -> int | None:
        """Return the lowest CommitLog offset that a timer, half message or pop checkpoint needs; None if none does."""
        ...

    def undelivered_from(self) -> int | None:
        """Return the lowest CommitLog offset of an undelivered delayed, timer or half message; None if none waits."""
        ...

    def reappend_waiting(self, below: int) -> None:
        """Append undelivered messages below a CommitLog offset again, so that they no longer pin these segments."""
        ...

    def disk_ratio(self) -> float:
        """Return the used share of the log's disk, 0 to 1."""
        ...
