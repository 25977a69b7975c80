"""The archive of the set, reduced to its journal: EPOCH entries and commits, appended by compare-and-swap.

  Epoch    a master takes the archive over; never lower than an existing one
  Commit   records of the log from the end of the last one

A round reaches only records that every in-sync replica has synced, in every mode: no master may lose archived messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tests.simulation.replicas.log import NO_QUEUE, QUEUES, Record
from tests.simulation.replicas.machines import SimulatedProcess, Turns

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


class SharedBucket(SimulatedProcess):
    def __init__(self, turns: Turns) -> None:
        super().__init__(turns, HOST, 0.0)
        self.entries: list[Entry] = []

    def append(self, index: int, entry: Entry) -> bool:
        """Append if no other entry was appended first."""
        if index != len(self.entries):
            return False
        self.entries.append(entry)
        return True

    @property
    def archived(self) -> list[Record]:
        return archived(self.entries)


def archived(entries: Iterable[Entry]) -> list[Record]:
    """Return the archived messages."""
    commits = (entry for entry in entries if isinstance(entry, Commit))
    return [record for commit in commits for record in commit.records if record.queue != NO_QUEUE]


def archived_queue_ends(entries: Iterable[Entry]) -> list[int]:
    """Return the queue ends above every archived offset."""
    ends = [0] * QUEUES
    for record in archived(entries):
        ends[record.queue] = max(ends[record.queue], record.queue_offset + 1)
    return ends


def highest_epoch(entries: tuple[Entry, ...]) -> int:
    return max((entry.master_epoch for entry in entries if isinstance(entry, Epoch)), default=0)


def archived_end(entries: tuple[Entry, ...]) -> int:
    return max((entry.end for entry in entries if isinstance(entry, Commit)), default=0)
