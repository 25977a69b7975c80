"""Which rows of an object have a key: its bloom filters say in which row groups they may be, those are read whole.

What is found as bytes is decoded, and the caller says what is meant. For who changes the archive: nothing is left out
for time or number, and what can't be read raises.
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


class Rows(Protocol):
    """A row group as records, one behind another: the bytes of all, and where each begins, and the last one ends."""

    @property
    def wire(self) -> memoryview: ...

    @property
    def positions(self) -> npt.NDArray[np.int64]: ...


class Candidates(Protocol):
    """Row groups that may hold something."""

    @property
    def groups(self) -> list[int]: ...


class GroupReader(Protocol):
    """A worker's reading half; each raises its failure."""

    def read_group(self, store_url: str, name: CommittedObject, index: int) -> Rows: ...

    def may_hold(self, store_url: str, name: CommittedObject, groups: list[int], word: bytes) -> Candidates: ...


class KeyRows(NamedTuple):
    """(queue, offset) of the rows that are meant, and of those of which nobody can tell."""

    meant: list[tuple[int, int]]
    unknown: list[tuple[int, int]]


def rows_with_key(
    reader: GroupReader, store_url: str, name: CommittedObject, key: str, judge: Callable[[MessageRecord], Verdict]
) -> KeyRows:
    """Raises what the reader does."""
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


def rows_with(group: Rows, pattern: re.Pattern[bytes]) -> Iterator[tuple[int, bytes]]:
    """(number, record) of those that have the bytes anywhere, in their order."""
    hits = np.fromiter((match.start() for match in pattern.finditer(group.wire)), np.int64)
    for row in np.unique(np.searchsorted(group.positions, hits, "right") - 1).tolist():
        yield row, bytes(group.wire[int(group.positions[row]) : int(group.positions[row + 1])])


def _verdict(raw: bytes, judge: Callable[[MessageRecord], Verdict]) -> Verdict:
    """A damaged record has the bytes somewhere."""
    try:
        return judge(decode_record(raw))
    except MalformedRecord:
        return Verdict.UNKNOWN
