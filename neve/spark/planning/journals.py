"""The journals of an archive as a query follows them: the catalog of each broker, and which rows each entry brought."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import CheckpointsGone, JournalSource, entries, following, read_catalog
from neve.archive.format.journal import AnyEntry, Commit, EntriesDeleted, anchor
from neve.spark.planning.rows import Rows, rows_of

T = TypeVar("T")

Wants = Callable[[str], bool]


_WAITING_MAX = 16 << 20  # of entries as they lie in the store; several times that in memory


class JournalBeginsLater(Exception):
    """Entries that a stream has not seen have been deleted: its position is older than what the journal still says."""


class Journal:
    """One broker's: the catalog as of its newest entry that was read, and what each entry brought of some topics."""

    def __init__(self, source: JournalSource, broker: str, wants: Wants) -> None:
        self._source, self.broker, self._wants = source, broker, wants
        self._brought: dict[int, Rows] = {}  # of consecutive entries, up to the newest
        self._last: frozenset[str] = frozenset()  # keys that the entry read last commits
        self._waiting_bytes = 0
        self.catalog = self._read_catalog()

    @property
    def end(self) -> int:
        """The number of the newest entry."""
        return self.catalog.next_seq - 1

    def refresh(self) -> None:
        """Reads what is new. What it says waits beside the checkpoint that the catalog was begun by, not for ever."""
        catalog = self.catalog
        try:
            for seq, entry, data in following(self._source, self.broker, first=catalog.next_seq, before=catalog.anchor):
                catalog.apply(seq, entry, anchor(data))
                self._brought[seq] = self._rows_of(entry)
                self._waiting_bytes += len(data)
        except EntriesDeleted:  # a checkpoint has it
            self.begin_again()
        else:
            if self._waiting_bytes > _WAITING_MAX:
                self.begin_again()

    def begin_again(self) -> None:
        """By what is kept now. Raises CheckpointsGone: nothing that can be read; the catalog is as it was then."""
        self.catalog = self._read_catalog()
        self._brought.clear()
        self._waiting_bytes = 0

    def brought(self, after: int, through: int) -> list[tuple[int, Rows]]:
        """Of the entries behind one up to another. Raises JournalBeginsLater."""
        if through <= after:
            return []
        if after + 1 not in self._brought or through not in self._brought:
            self._read_again(after)
        return [(seq, self._brought[seq]) for seq in range(after + 1, through + 1)]

    def forget(self, through: int) -> None:
        """Nobody asks for what these entries brought any more."""
        for seq in [seq for seq in self._brought if seq <= through]:
            del self._brought[seq]

    def _read_catalog(self) -> Catalog:
        catalog = read_catalog(self._source, self.broker)
        for _, entry in entries(self._source, self.broker, first=max(catalog.next_seq - 1, 0)):
            self._rows_of(entry)
            break
        return catalog

    def _read_again(self, after: int) -> None:
        """From the entry `after` itself on: what follows it may be the same COMMIT once more."""
        found: dict[int, Rows] = {}
        first = max(after, 0)
        for seq, entry in entries(self._source, self.broker, first=first):
            if seq != first + len(found) or seq > self.end:
                break
            found[seq] = self._rows_of(entry)
        if first + len(found) <= self.end:
            raise JournalBeginsLater(
                f"the journal of broker {self.broker} no longer says what came after its entry {after}"
            )
        self._brought = found

    def _rows_of(self, entry: AnyEntry) -> Rows:
        """A COMMIT whose answer was lost may stand twice, one behind the other: the second brings nothing."""
        before, self._last = self._last, frozenset()
        if not isinstance(entry, Commit):
            return {}
        self._last = frozenset(name.key for name in entry.names)
        return rows_of(
            (name.topic, *run)
            for name in entry.names
            if name.key not in before and self._wants(name.topic)
            for group in name.row_groups
            for run in group.runs
        )


def by_what_is_kept(journals: Mapping[str, Journal], plan: Callable[[], T]) -> T:
    """A stream outlives the checkpoints that its catalogs were begun by: then it begins at those that are there."""
    try:
        return plan()
    except CheckpointsGone:
        for journal in journals.values():
            journal.begin_again()
        return plan()
