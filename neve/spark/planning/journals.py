"""The journals of an archive as a query follows them: the catalog of each broker, and the rows that entries added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import CheckpointsDeleted, JournalSource, entries, following, read_catalog
from neve.archive.format.journal import AnyEntry, Commit, EntriesDeleted, anchor
from neve.spark.planning.rows import Rows, rows_of

T = TypeVar("T")

Wants = Callable[[str], bool]

_PENDING_MAX_BYTES = 16 << 20  # of entries as they are stored; several times as much in memory


class JournalBeginsLater(Exception):
    """Entries behind a position were deleted, so the rows that they added are unknown."""


class BrokerJournal:
    """The journal of one broker: the catalog at the newest entry that was read, and the rows that each entry added.

    Args:
        wants: whether rows of a topic are kept.
    """

    def __init__(self, source: JournalSource, broker: str, wants: Wants) -> None:
        self._source, self.broker, self._wants = source, broker, wants
        self._added: dict[int, Rows] = {}  # of consecutive entries, up to the newest
        self._last: frozenset[str] = frozenset()  # keys that the entry read last commits
        self._pending_bytes = 0
        self.catalog = self._read_catalog()

    @property
    def end(self) -> int:
        """The number of the newest entry."""
        return self.catalog.next_seq - 1

    def refresh(self) -> None:
        """Read new entries. The catalog is read again if they exceed a limit, so that memory is bounded."""
        catalog = self.catalog
        try:
            for seq, entry, data in following(self._source, self.broker, first=catalog.next_seq, before=catalog.anchor):
                catalog.apply(seq, entry, anchor(data))
                self._added[seq] = self._rows_of(entry)
                self._pending_bytes += len(data)
        except EntriesDeleted:  # a checkpoint contains the deleted entries
            self.reset()
        else:
            if self._pending_bytes > _PENDING_MAX_BYTES:
                self.reset()

    def reset(self) -> None:
        """Read the catalog from the present checkpoints. Raises CheckpointsGone; the catalog is unchanged then."""
        self.catalog = self._read_catalog()
        self._added.clear()
        self._pending_bytes = 0

    def added(self, after: int, through: int) -> list[tuple[int, Rows]]:
        """Return the rows of the entries behind `after` up to `through`. Raises JournalBeginsLater."""
        if through <= after:
            return []
        if after + 1 not in self._added or through not in self._added:
            self._read_again(after)
        return [(seq, self._added[seq]) for seq in range(after + 1, through + 1)]

    def forget(self, through: int) -> None:
        """Drop the rows of entries that are in the checkpoint of the stream."""
        for seq in [seq for seq in self._added if seq <= through]:
            del self._added[seq]

    def _read_catalog(self) -> Catalog:
        catalog = read_catalog(self._source, self.broker)
        for _, entry in entries(self._source, self.broker, first=max(catalog.next_seq - 1, 0)):
            self._rows_of(entry)
            break
        return catalog

    def _read_again(self, after: int) -> None:
        # Entry `after` itself is read, too: the one behind it may be a repetition of its COMMIT.
        found: dict[int, Rows] = {}
        first = max(after, 0)
        for seq, entry in entries(self._source, self.broker, first=first):
            if seq != first + len(found) or seq > self.end:
                break
            found[seq] = self._rows_of(entry)
        if first + len(found) <= self.end:
            raise JournalBeginsLater(f"broker {self.broker}: the entries of its journal behind {after} were deleted")
        self._added = found

    def _rows_of(self, entry: AnyEntry) -> Rows:
        """Return the rows that an entry adds; a repetition of a COMMIT, whose answer was lost, adds none."""
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


def retry_with_new_catalogs(journals: Mapping[str, BrokerJournal], plan: Callable[[], T]) -> T:
    """Call `plan`, once more if the checkpoints from which the catalogs were read have been deleted."""
    try:
        return plan()
    except CheckpointsDeleted:
        for journal in journals.values():
            journal.reset()
        return plan()
