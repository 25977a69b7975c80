"""What was erased from the archive leaves the view of the local log, too: its readers get none of it from then on.

The journal says what that is, so a slave follows its master's erasures, and a start goes on with those of before. A row
is hidden that lies in a gap which an ERASE has told: what another gap speaks of may be here, and is shown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from lifecycle.evict import EVERYTHING
from lifecycle.hot_store import HotStore
from lifecycle.retention import Policy
from lifecycle.turns import Turns
from neve.archive.catalog import Catalog
from neve.archive.erasure import erased_rows
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

    def run(self) -> int:
        """How many runs of rows are hidden that were not."""
        with self._turns:
            return self.hide()

    def hide(self, more: Iterable[Row] = ()) -> int:
        """For who has the turn. `more`: rows of which no gap speaks."""
        catalog, more = self._journal.catalog, list(more)
        through = catalog.next_seq
        # A slave's log still gets what its master has erased.
        if not more and through == self._hidden_through and self._journal.leads:
            return 0
        if self._is_of() < EVERYTHING:  # what it calls erased may be other messages here
            return 0
        hidden = self._hot.hide_erased([row for row in (*_rows(catalog), *more) if self._is_ours(row[0])])
        self._hidden_through = through
        if hidden:
            log.info("of the local log %d runs of messages that were erased are not returned any more", hidden)
        return hidden

    def _is_ours(self, topic: str) -> bool:
        """A topic that an Apache master deleted and made again may have other messages at the same offsets."""
        return not (self._is_copy and self._policy().gone_below(topic))


def _rows(catalog: Catalog) -> list[Row]:
    return erased_rows(catalog.gaps()) if catalog.gap_count else []
