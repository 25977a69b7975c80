"""Job that hides erased rows in the local log.

The journal records which rows are erased, so a slave follows its master's erasures and a start repeats earlier ones.
Only rows in gaps that an ERASE entry made are hidden. Rows in other gaps may be in the local log, and are shown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from lifecycle.evict import EVERYTHING
from lifecycle.hot_store import HotStore
from lifecycle.retention import RetentionPolicy
from lifecycle.turns import Turns
from neve.archive.catalog.catalog import Catalog
from neve.archive.policy.erasure import erased_rows
from tiered.journal.writer import JournalWriter

log = logging.getLogger(__name__)

#: (topic, queue, first offset, last offset)
Row = tuple[str, int, int, int]


class HotErasure:
    """The job, and a step of an erasure."""

    def __init__(
        self,
        hot: HotStore,
        journal: JournalWriter,
        policy: Callable[[], RetentionPolicy],
        turns: Turns,
        *,
        described_below: Callable[[], int],
        is_copy: bool,
    ) -> None:
        """`described_below`: returns the CommitLog offset up to which the archive describes this broker's log.

        `is_copy`: whether the log is a copy of an Apache master's.
        """
        self._hot, self._journal, self._policy, self._turns = hot, journal, policy, turns
        self._described_below, self._is_copy = described_below, is_copy
        self._hidden_through = -1  # number of the journal's next entry when all erased rows were hidden
        self._again: list[Row] = []  # rows in no gap that could not be hidden yet
        self.failed: Mapping[tuple[str, int], str] = {}  # (topic, queue) -> why its erased rows are still visible

    def run(self) -> int:
        """Hide newly erased rows; returns the number of runs of rows that were not hidden before."""
        with self._turns:
            return self.hide()

    def hide(self, more: Iterable[Row] = ()) -> int:
        """Hide erased rows, for a caller that has the turn. `more`: further rows, which are in no gap.

        Queues that could not be hidden are in `failed`; each later call tries them again.
        """
        catalog, more = self._journal.catalog, self._again + list(more)
        through = catalog.next_seq
        # A slave may receive erased rows later than their ERASE entry, so it checks each time.
        if not more and through == self._hidden_through and self._journal.ownership.leads:
            return 0
        if self._described_below() < EVERYTHING:  # offsets that the journal calls erased may have other messages here
            return 0
        self._again = more
        runs, failed = self._hot.hide_erased([row for row in (*_rows(catalog), *more) if self._is_ours(row[0])])
        self._again = [row for row in more if row[:2] in failed]
        if failed != self.failed:
            for place, reason in failed.items():
                log.error("erased messages are visible: cannot hide them topic=%s queue=%d: %s", *place, reason)
        self.failed = failed
        if not failed:
            self._hidden_through = through
        if runs:
            log.info("erased messages hidden: runs=%d", runs)
        return runs

    def _is_ours(self, topic: str) -> bool:
        """A topic that an Apache master deleted and made again may have other messages at the same offsets."""
        return not (self._is_copy and self._policy().deleted_up_to(topic))


def _rows(catalog: Catalog) -> list[Row]:
    return erased_rows(catalog.gaps()) if catalog.gap_count else []
