"""A journal whose objects do not exist, since planning does not open them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import (
    AnyEntry,
    Commit,
    CommittedObject,
    Deleted,
    Epoch,
    Erase,
    Expire,
    Replace,
    RowGroup,
    Topic,
    encode_entry,
)
from neve.archive.format.keys import data_key, journal_key
from neve.spark.planning.planner import Task
from tests.kit.store.memory_store import MemoryStore

Row = tuple[str, int, int]  # topic, queue, offset
Run = tuple[int, int, int]


class JournalOnPaper:
    """The journal of one broker, with the rows of every object that it has named."""

    def __init__(self, store: MemoryStore, broker: str = "a") -> None:
        self.store, self.broker = store, broker
        self.catalog = Catalog()
        self.names: dict[str, CommittedObject] = {}
        self.log_end = 0
        self.append(Epoch(epoch=1, owner="o", log_uuid="l", broker=broker))

    def append(self, entry: AnyEntry) -> int:
        seq = self.catalog.next_seq
        self.store.put(journal_key("", self.broker, seq), encode_entry(entry), if_absent=True)
        self.catalog.apply(seq, entry)
        return seq

    def name(
        self, topic: str, runs: Sequence[Run], *, start: int, end: int, rewrite: int = 0, at: int = 1000
    ) -> CommittedObject:
        """Return an object with one row group per run."""
        key = data_key("", topic, "2026-01-01", self.broker, start=start, end=end, epoch=1, rewrite=rewrite)
        groups: list[RowGroup] = []
        queues: dict[int, tuple[int, int, int]] = {}
        row = 0
        for queue, first, last in runs:
            count = last - first + 1
            groups.append(RowGroup(row, count, 4, 10, at, at, count * 100, [(queue, first, last)]))
            low, _, begin = queues.get(queue, (first, last, row))
            queues[queue] = (low, last, begin)
            row += count
        made = CommittedObject(
            key=key, topic=topic, day="2026-01-01", start=start, end=end, size=1000, footer=10, etag="",
            checksum=("", ""), sha256="", rows=row, wire_bytes=row * 100, min_time=at, max_time=at, queues=queues,
            row_groups=groups,
        )  # fmt: skip
        self.names[key] = made
        return made

    def commit(self, topic: str, runs: Sequence[Run], *, twice: bool = False, at: int = 1000) -> CommittedObject:
        made = self.name(topic, runs, start=self.log_end, end=self.log_end + 100, at=at)
        self.log_end += 100
        for _ in range(2 if twice else 1):
            self.append(Commit(round=self.catalog.next_seq, names=[made]))
        return made

    def replace(self, old: Sequence[CommittedObject]) -> None:
        """Replace objects by one with all their row groups."""
        runs = sorted(run for name in old for group in name.row_groups for run in group.runs)
        made = self.name(
            old[0].topic, runs, start=old[0].start, end=old[-1].end, rewrite=self.catalog.next_seq, at=old[-1].max_time
        )
        self.append(Replace(old=[name.key for name in old], new=[made], delete_after_ms=10))

    def erase(self, old: CommittedObject, queue: int, offset: int) -> None:
        runs: list[Run] = []
        for of, first, last in (run for group in old.row_groups for run in group.runs):
            if of != queue or not first <= offset <= last:
                runs.append((of, first, last))
                continue
            runs += [(of, low, high) for low, high in ((first, offset - 1), (offset + 1, last)) if low <= high]
        new = (
            [self.name(old.topic, runs, start=old.start, end=old.end, rewrite=self.catalog.next_seq, at=old.max_time)]
            if runs
            else []
        )
        rows = [(old.topic, queue, offset, offset)]
        self.append(Erase(id="e", old=[old.key], new=new, rows=rows, delete_after_ms=5))

    def expire(self, names: Iterable[CommittedObject], minimums: dict[str, dict[int, int]]) -> None:
        self.append(Expire(keys=[name.key for name in names], delete_after_ms=10, minimums=minimums))

    def delete(self, names: Iterable[CommittedObject]) -> None:
        self.append(Deleted(keys=[name.key for name in names]))

    def tell(self, topic: str) -> None:
        self.append(Topic(topic=topic))

    def rows(self, tasks: Iterable[Task]) -> list[Row]:
        """Return the rows that tasks read, by the runs of the objects."""
        found: list[Row] = []
        for piece in (piece for task in tasks for piece in task if piece.broker == self.broker):
            name = self.names[piece.key]
            for cut in piece.cuts:
                offsets = [
                    (piece.topic, queue, offset)
                    for queue, first, last in name.row_groups[cut.group].runs
                    for offset in range(first, last + 1)
                ]
                for first, last in cut.spans:
                    found += offsets[first : last + 1]
        return found
