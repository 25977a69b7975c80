"""What the lifecycle asks of the broker's hot store. Called from job threads: the broker passes an adapter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from tiered.write.offload_plan import HotLog, TopicUnreadable


class Segment(Protocol):
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
    """What a topic has from before a time."""

    ends: Mapping[int, int]  # queue -> the first offset that is not; of queues alone that have some in view
    oldest_ms: int  # nothing of it is older; below 0: not known


class Hidden(NamedTuple):
    """Result of `hide_erased`."""

    runs: int  # runs of rows that were not hidden before
    failed: Mapping[tuple[str, int], str]  # (topic, queue) -> why its rows could not be hidden


class HotStore(HotLog, Protocol):
    """The hot store as its owner's jobs see it. Called from their threads; offsets are of the CommitLog or of a queue.

    What can't be read raises TopicUnreadable for the topic alone; what the disk refuses, OSError.
    """

    def segments(self) -> Sequence[Segment]: ...

    def flush(self) -> int:
        """Make the log durable; returns the CommitLog offset below which it is, and all entries are visible.

        A bound above the visible entries would let a round pass over records that are about to appear. In a broker set
        it is what all members that may be elected have on their disks; the own disk has more.
        """
        ...

    def confirmed_range(self) -> tuple[int, int]:
        """The CommitLog offsets that it has, all entries of which are visible."""
        ...

    def roll(self) -> bool:
        """End the active segment, so that it may be archived whole; False: there is no room for the next one."""
        ...

    def evict(self, base: int) -> bool:
        """Take the oldest segment from the disk; False: the log was cut meanwhile, and has it again."""
        ...

    def topics(self) -> Sequence[str]:
        """Those that have queues, sorted."""
        ...

    def queues_of(self, topic: str) -> Sequence[int]: ...

    def deleted_below(self) -> Mapping[str, Mapping[int, int]]:
        """Topic -> queue -> where it ended when the topic was deleted last; not of one that began again at offset 0."""
        ...

    def deleted_topics(self) -> Sequence[str]:
        """Topics that were, and of which something is kept: where they ended. They may have come again."""
        ...

    def forget_deleted(self, topics: Collection[str]) -> int:
        """Where the queues of these deleted topics ended is not kept any more: should they come again, they begin at 0.

        Only of those that have no queue and no record here. Durable when this returns; returns how many. Where one of
        them comes again meanwhile none is forgotten now.
        """
        ...

    def min_offset(self, topic: str, queue: int) -> int: ...

    def first_offsets(self, topic: str, start: int) -> Mapping[int, int]:
        """Queue -> its first offset at or above a CommitLog offset; its end if there is none."""
        ...

    def expire_below(
        self, rising: Mapping[str, Mapping[int, int]], before: Mapping[str, int]
    ) -> Mapping[str, TopicUnreadable]:
        """Hide for good what lies below these offsets of topics' queues and was stored before the topic's time.

        Both are looked at in one step. One write, however many the queues are. All of it is on the disk (`flush`).
        Returns the topics that could not be hidden, or not completely, each with its error.
        """
        ...

    def show_from(self, topic: str, queue: int, offset: int) -> int:
        """Undo `expire_below` down to an offset, as far as the log has the messages; returns the minimum then."""
        ...

    def hide_erased(self, rows: Iterable[tuple[str, int, int, int]]) -> Hidden:
        """No request returns these from here on, whatever is shown: (topic, queue, first offset, last offset) each.

        As far as the log has them, of a queue that is gone, too. On the disk when this returns, but for the queues that
        are returned as failed.
        """
        ...

    def log_erased(self, rows: Sequence[tuple[str, int, int, int]]) -> None:
        """State in the log that these rows of internal topics are erased: the other members of a broker set hide them.

        Raises OSError if the log takes no record now.
        """
        ...

    def erased(self, topic: str) -> Mapping[int, Sequence[tuple[int, int]]]:
        """Queue -> (first, last) of what is hidden so, in order."""
        ...

    def former_ends(self, topics: Collection[str]) -> Mapping[str, int]:
        """Topic -> the CommitLog offset below which its records are of a deleted topic, which no request returns.

        The end of the log for a topic without queues. Only topics that may have such records in the log.
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
        """Of each topic what was stored before its time, in turn."""
        ...

    def pinned_from(self) -> int | None:
        """The lowest CommitLog offset that a timer, half message or pop checkpoint still needs; None: none does."""
        ...

    def undelivered_from(self) -> int | None:
        """The lowest CommitLog offset of a delayed, timer or half message that still waits; None: there is none."""
        ...

    def reappend_waiting(self, below: int) -> None:
        """Append again the messages that wait below a CommitLog offset, so that they no longer need what lies there."""
        ...

    def disk_ratio(self) -> float:
        """The used share of the disk that holds the log, 0 to 1."""
        ...
