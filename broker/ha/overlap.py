"""Comparison of the last record of a slave's log with its master's. If they differ, so do the logs. Pure.

It is the only proof with Apache's masters that a slave's bytes are theirs. A master that lost its tail in a power cut
overwrites it under the same epoch. Behind that record there is at most padding of a file, which proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable

#: Returns start and bytes of the last record of a log that ends at or below an offset.
LastRecord = Callable[[int], tuple[int, bytes] | None]


class AnotherLog(Exception):
    """The compared bytes differ."""


class Overlap:
    """Bytes that have to be received again, from `next` up to `end`, which is the end of the slave's log."""

    def __init__(self, start: int, record: bytes, end: int) -> None:
        assert start + len(record) <= end
        self.next, self.end = start, end
        self._record = record

    @property
    def is_over(self) -> bool:
        """Return whether all bytes have been received and were equal."""
        return self.next >= self.end

    def behind(self, body: memoryview) -> memoryview:
        """Compare bytes at `next`, and return those behind `end`, which are new. Raise AnotherLog."""
        again = body[: self.end - self.next]
        expected, self._record = self._record[: len(again)], self._record[len(again) :]
        if again[: len(expected)] != expected:
            raise AnotherLog
        self.next += len(again)
        return body[len(again) :]
