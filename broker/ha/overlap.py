"""The last record of a slave's log, asked of its master once more: where it is another one, so is the log. Pure.

Apache's masters prove by nothing else that what a slave has is theirs: one that lost its tail in a power cut goes on
over it under the same name. Behind that record lies at most the rest of a file, which says nothing.
"""

from __future__ import annotations

from collections.abc import Callable

#: Of a log's records the last one that ends at or below an offset: where it begins, and its bytes.
LastRecord = Callable[[int], tuple[int, bytes] | None]


class AnotherLog(Exception):
    """What has to be equal is not."""


class Overlap:
    """What has to come again first, from `next` on, up to `end`: where the slave's log ends."""

    def __init__(self, start: int, record: bytes, end: int) -> None:
        assert start + len(record) <= end
        self.next, self.end = start, end
        self._record = record

    @property
    def is_over(self) -> bool:
        """All of it has come, and was equal."""
        return self.next >= self.end

    def behind(self, body: memoryview) -> memoryview:
        """What is new of the bytes at `next`. Raises AnotherLog."""
        again = body[: self.end - self.next]
        expected, self._record = self._record[: len(again)], self._record[len(again) :]
        if again[: len(expected)] != expected:
            raise AnotherLog
        self.next += len(again)
        return body[len(again) :]
