"""Job that stores the broker's state in its bucket, alternating between two slots, on changes and at a clean stop.

Only the epoch's owner writes: it reads the journal's end first. An owner that is superseded between that read and its
PUT may still overwrite one slot, once. Its lower epoch makes that slot the older one, and the new owner's next state is
written there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from infra import failpoint
from infra.clock import Clock
from neve.archive.format.broker_state import SLOTS, BrokerState, encode_state, newest_slot, read_slots
from neve.archive.format.keys import state_key
from tiered.journal.writer import JournalWriter

log = logging.getLogger(__name__)

REFRESH_MS = 10 * 60_000  # an unchanged state is written again after this time, so that its time stays current


class StateKeeper:
    """Writes the state slots alternately.

    Raises Fenced or the store's error; the newest valid slot remains intact.
    """

    def __init__(self, journal: JournalWriter, clock: Clock) -> None:
        self._journal, self._clock = journal, clock
        self._slot: int | None = None  # the slot to write next; None: not read from the store yet
        self._number = 0
        self._master_epoch: int | None = 0  # the master epoch in which the slot was determined
        self._written: BrokerState | None = None

    def run(self, capture: Callable[[], BrokerState]) -> bool:
        """Run the job; returns whether a slot was written. Raises Fenced or the store's error."""
        self._journal.ownership.confirm()
        known = self._journal.catalog.next_seq  # before the capture, so that a topic deleted meanwhile is seen as such
        return self.write(capture(), known)

    def run_last(self, state: BrokerState) -> bool:
        """Write the state at a clean stop, after which no offset is assigned."""
        self._journal.ownership.confirm()
        state = msgspec.structs.replace(state, clean=True)
        return self.write(state, self._journal.catalog.next_seq)

    def write(self, state: BrokerState, next_seq: int) -> bool:
        now, epoch = self._clock.now_ms(), self._journal.ownership.epoch
        if (master_epoch := self._journal.ownership.master_epoch) != self._master_epoch:
            # This member was a slave in between, and another member has written.
            self._slot, self._written, self._master_epoch = None, None, master_epoch
        state = msgspec.structs.replace(state, epoch=epoch, next_seq=next_seq, log_uuid=self._journal.log_uuid)
        if self._unchanged(state, now):
            return False
        slot = self._next_slot()
        state = msgspec.structs.replace(state, number=self._number + 1, time_ms=now)
        failpoint.hit("state.before_put")
        self._journal.store.put(state_key(self._journal.prefix, self._journal.broker, slot), encode_state(state))
        failpoint.hit("state.after_put")
        self._number, self._slot, self._written = state.number, 1 - slot, state
        return True

    def _unchanged(self, state: BrokerState, now: int) -> bool:
        last = self._written
        if last is None or abs(now - last.time_ms) >= REFRESH_MS:
            return False
        # `next_seq` moves with each round; alone it is no reason to write.
        return msgspec.structs.replace(state, number=last.number, time_ms=last.time_ms, next_seq=last.next_seq) == last

    def _next_slot(self) -> int:
        """Return the slot without the newest state. After a failed PUT it is the same: the other slot is intact."""
        if self._slot is None:
            slots = read_slots(self._journal.store, self._journal.broker, self._journal.prefix)
            newest = newest_slot(slots)
            self._number = max((state.number for state in slots.values()), default=0)
            self._slot = SLOTS[0] if newest is None else 1 - newest
        return self._slot
