"""What was erased from the archive leaves the view of the local log, too: its readers get none of it from then on.

The journal says what that is, so a slave follows its master's erasures, and a start goes on with those of before. A row
is hidden that lies in a gap which an ERASE has told: what another gap speaks of may be here, and is shown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from lifecycle.evict import EVERYTHING
from lifecycle.hot_store import HotStore
from lifecycle.retention import Policy
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
        policy: Callable[[], Policy],
        turns: Turns,
        *,
        is_of: Callable[[], int],
        is_copy: bool,
    ) -> None:
        """`is_of`: the CommitLog offset up to which the archive is of this log. `is_copy`: of an Apache master's."""
        self._hot, self._journal, self._policy, self._turns = hot, journal, policy, turns
        self._is_of, self._is_copy = is_of, is_copy
        self._hidden_through = -1  # entries, of an own journal: all that they tell is hidden
        self._again: list[Row] = []  # rows of which no gap speaks and that could not be hidden
        self.failed: Mapping[tuple[str, int], str] = {}  # (topic, queue) -> why its erased rows are still visible

    def run(self) -> int:
        """How many runs of rows are hidden that were not."""
        with self._turns:
            return self.hide()

    def hide(self, more: Iterable[Row] = ()) -> int:
        """For a caller that has the turn. `more`: rows of which no gap speaks.

        Queues that could not be hidden are in `failed`; each later call tries them again.
        """
        catalog, more = self._journal.catalog, self._again + list(more)
        through = catalog.next_seq
        # A slave's log still gets what its master has erased.
        if not more and through == self._hidden_through and self._journal.leads:
            return 0
        if self._is_of() < EVERYTHING:  # what it calls erased may be other messages here
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
        return not (self._is_copy and self._policy().gone_below(topic))


def _rows(catalog: Catalog) -> list[Row]:
    return erased_rows(catalog.gaps()) if catalog.gap_count else []
