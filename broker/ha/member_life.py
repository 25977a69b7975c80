"""Start and end of a member's life, on its disk."""

from __future__ import annotations

import logging

from broker.ha.epoch_file import EpochFileDamaged, StoredEpochs
from broker.ha.member import Member
from broker.ha.member_file import MemberFile, MemberFileDamaged
from broker.ha.member_record import begin_life
from broker.store.message_store import MessageStore
from infra.clock import Clock
from infra.process.startup import EXIT_FAILED, StartupError
from neve.entropy import Entropy, unique_name

log = logging.getLogger(__name__)


class MemberLife:
    """One life of a member: `load`, then the recovery of the log, then `begin`; `end` is optional."""

    def __init__(
        self,
        member: Member,
        file: MemberFile,
        epochs: StoredEpochs,
        store: MessageStore,
        *,
        clock: Clock,
        entropy: Entropy,
    ) -> None:
        self._member, self._file, self._epochs, self._store = member, file, epochs, store
        self._clock, self._entropy = clock, entropy
        self._is_copy = False
        self.end_at_start = 0  # end of the log

    def load(self) -> int:
        """Load the member's files, before the log is opened. Return the stored confirm offset. Raise StartupError."""
        try:
            self._is_copy = self._file.load()
            self._epochs.load()
        except (MemberFileDamaged, EpochFileDamaged) as error:
            raise StartupError(
                f"the identity of this member of a broker set can't be read: {error}", EXIT_FAILED
            ) from error
        return self._file.saved.confirm

    def begin(self) -> None:
        """Begin the life, after recovery of the log."""
        before, member = self._file.saved, self._member
        saved = begin_life(before, unique_name(self._entropy), member.rules, is_copy=self._is_copy)
        self._file.save(saved)
        self.end_at_start = self._store.max_physical_offset
        self._epochs.drop_above(self.end_at_start)
        member.begin(saved, f"{member.address};{self._clock.now_ms()}")
        if self._is_copy and before.broker_id:
            log.warning("this directory is a copy of that of member %d: it registers as a new member", before.broker_id)

    def end(self) -> None:
        """Record a clean end, once the whole log is on the disk. Thread-safe."""
        self._file.save(self._member.end_life())
