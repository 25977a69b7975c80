"""Search for the rows of an object with a key: row groups that pass the bloom filters are read whole.

Records with the key's bytes are decoded, and the caller judges them. The search is for changes of the archive: it has
no limit of time or number, and raises if something can't be read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from neve.archive.format.journal import CommittedObject
from neve.archive.policy.erasure import Verdict
from neve.record.codec import MalformedRecord, MessageRecord, decode_record


class GroupRows(Protocol):
    """A row group's concatenated records: their bytes, the start of each record and the end of the last."""

    @property
    def wire(self) -> memoryview: ...

    @property
    def positions(self) -> npt.NDArray[np.int64]: ...


class Candidates(Protocol):
    """Row groups that may have a match."""

    @property
    def groups(self) -> list[int]: ...


class GroupReader(Protocol):
    """The reading methods of a worker; each raises its errors."""

    def read_group(self, store_url: str, name: CommittedObject, index: int) -> GroupRows: ...

    def may_hold(self, store_url: str, name: CommittedObject, groups: list[int], word: bytes) -> Candidates: ...


class KeyRows(NamedTuple):
    """(queue, offset) of the matching rows, and of those that can't be judged."""

    meant: list[tuple[int, int]]
    unknown: list[tuple[int, int]]


def rows_with_key(
    reader: GroupReader, store_url: str, name: CommittedObject, key: str, judge: Callable[[MessageRecord], Verdict]
) -> KeyRows:
    """Return the rows of an object that `judge` accepts. Raises the reader's errors."""
    word = key.encode("utf-8", "surrogatepass")
    pattern = re.compile(re.escape(word))
    found = KeyRows([], [])
    for index in reader.may_hold(store_url, name, list(range(len(name.row_groups))), word).groups:
        group = reader.read_group(store_url, name, index)
        places = [(queue, at) for queue, first, last in name.row_groups[index].runs for at in range(first, last + 1)]
        for row, raw in rows_with(group, pattern):
            verdict = _verdict(raw, judge)
            if verdict is Verdict.YES:
                found.meant.append(places[row])
            elif verdict is Verdict.UNKNOWN:
                found.unknown.append(places[row])
    return found


def rows_with(group: GroupRows, pattern: re.Pattern[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (row number, record) of the records that contain the bytes anywhere, in order."""
    hits = np.fromiter((match.start() for match in pattern.finditer(group.wire)), np.int64)
    for row in np.unique(np.searchsorted(group.positions, hits, "right") - 1).tolist():
        yield row, bytes(group.wire[int(group.positions[row]) : int(group.positions[row + 1])])


def _verdict(raw: bytes, judge: Callable[[MessageRecord], Verdict]) -> Verdict:
    """Judge a record; a damaged one is unknown, because it has the bytes but can't be decoded."""
    try:
        return judge(decode_record(raw))
    except MalformedRecord:
        return Verdict.UNKNOWN
