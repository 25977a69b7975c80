"""The knowledge of a data directory about its archive without the store: its owner, and the offsets named so far.

`identity` stores it; it is synced before the entry that it describes can be in the store.
"""

from __future__ import annotations

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import Expire, Intent
from tiered.journal.errors import ArchiveRefused
from tiered.journal.identity import ArchiveIdentity, IdentityFile, Since
from tiered.journal.local_journal import renamed
from tiered.journal.named_topics import NamedTopics


class KnownArchive:
    """The local identity: the epoch that the last start tried to take, and the highest one seen in the store (`heard`).

    A store with a lower epoch than `least_epoch` is another store.
    """

    def __init__(self, file: IdentityFile, catalog: Catalog, broker: str, log_uuid: str) -> None:
        self._file, self._catalog, self.broker = file, catalog, broker
        self.own_uuid = log_uuid  # of the local log
        self.log_uuid = log_uuid  # the log's name in the archive: in a broker set, that of the first master
        self.named = NamedTopics(catalog)
        self.high = 0  # the highest CommitLog offset of any INTENT
        self.heard = 0
        self.offline_from: int | None = None  # the log's end at the first start without a reachable store
        self._wanted = 0

    def load(self) -> ArchiveIdentity | None:
        """Load the identity; None if there never was one. Raises ArchiveRefused if it is another broker's."""
        identity = self._file.read()
        if identity is None:
            return None
        if identity.broker != self.broker:
            raise ArchiveRefused(renamed(identity.broker, self.broker))
        self._wanted, self.heard = identity.epoch, identity.heard
        self.high, self.offline_from = identity.high, identity.offline_from
        self.named.load(identity.named)
        if identity.log_uuid == self.own_uuid:
            self.log_uuid = identity.archive_uuid or self.own_uuid
        return identity

    @property
    def least_epoch(self) -> int:
        """The lowest epoch that the store of this archive can have."""
        return max(self._wanted - 1, self.heard)

    def start_offline(self, log_end: int) -> None:
        """Record that the log continues from `log_end` without the store; collisions are checked later."""
        self.offline_from = log_end if self.offline_from is None else min(log_end, self.offline_from)

    def remember(self, entry: Intent | Expire, plan: int | None, epoch: int) -> None:
        """Record the offsets of an entry before it is put; durable on return. Raises StalePlan."""
        lasts = self.named.remember(entry, plan)
        if isinstance(entry, Intent):
            self.high = max(self.high, *(name.end for name in entry.names), 0)
        if self._file.takes_more:
            self._file.add(Since(self.high, self.heard, lasts))
        else:
            self.save(epoch)

    def may_have_reassigned(self, log_end: int | None) -> bool:
        """Return whether offsets assigned without the store may be among those that the archive names.

        A log that ends below all of them (`log_end`, at a start) resumes above them. For a log that has grown past them
        the answer is True, because collisions cannot be detected.
        """
        end = self._catalog.rounds.intent_end
        is_new = self.offline_from is not None and end > max(self.high, self.offline_from)
        return is_new and (log_end is None or log_end >= end)

    def forget_pending(self) -> None:
        """Forget the offsets of entries that are not in the journal; after our EPOCH, they never will be.

        A member of a broker set must not skip them when it becomes master again: others have assigned these offsets.
        """
        self.high = self._catalog.rounds.intent_end
        self.named.forget_pending()

    def save(self, epoch: int) -> None:
        """Write a snapshot of the current knowledge; durable on return."""
        self.high = max(self.high, self._catalog.rounds.intent_end)
        identity = ArchiveIdentity(
            self.broker,
            self.own_uuid,
            epoch,
            self.high,
            self.named.everything(),
            self.offline_from,
            self.heard,
            "" if self.log_uuid == self.own_uuid else self.log_uuid,
        )
        assert identity.high >= self._catalog.rounds.intent_end, "the directory knows all that the journal names"
        assert identity.heard <= max(epoch, self._catalog.epoch), "every epoch that was seen is ours or in the journal"
        self._file.write(identity)
