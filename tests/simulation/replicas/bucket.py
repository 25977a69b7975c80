"""The archive of the set, as its journal alone: EPOCH entries and what was committed, appended densely by compare.

  Epoch    a master takes the archive over; never below one that is there
  Commit   records of the log from where the last one ended

A round reaches what is synced by every member of the SSS, in every mode: no master may lose what the archive holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tests.simulation.replicas.log import NO_QUEUE, QUEUES, Record
from tests.simulation.replicas.machines import Process, Turns

HOST = "bucket"


@dataclass(frozen=True, slots=True)
class Epoch:
    master_epoch: int


@dataclass(frozen=True, slots=True)
class Commit:
    start: int
    end: int
    records: tuple[Record, ...]


Entry = Epoch | Commit


class Bucket(Process):
    def __init__(self, turns: Turns) -> None:
        super().__init__(turns, HOST, 0.0)
        self.entries: list[Entry] = []

    def append(self, index: int, entry: Entry) -> bool:
        """If nobody else was there first."""
        if index != len(self.entries):
            return False
        self.entries.append(entry)
        return True

    @property
    def archived(self) -> list[Record]:
        return archived(self.entries)


def archived(entries: Iterable[Entry]) -> list[Record]:
    """The messages."""
    commits = (entry for entry in entries if isinstance(entry, Commit))
    return [record for commit in commits for record in commit.records if record.queue != NO_QUEUE]


def archived_queue_ends(entries: Iterable[Entry]) -> list[int]:
    """Above every offset that is in it."""
    ends = [0] * QUEUES
    for record in archived(entries):
        ends[record.queue] = max(ends[record.queue], record.queue_offset + 1)
    return ends


def highest_epoch(entries: tuple[Entry, ...]) -> int:
    return max((entry.master_epoch for entry in entries if isinstance(entry, Epoch)), default=0)


def archived_end(entries: tuple[Entry, ...]) -> int:
    return max((entry.end for entry in entries if isinstance(entry, Commit)), default=0)
