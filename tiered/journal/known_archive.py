"""What this data directory knows of its archive, whatever the store says: its owner, and how far it has named.

Kept by `identity`, synced before what it tells of can stand in the store.
"""

from __future__ import annotations

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import Expire, Intent
from tiered.journal.errors import ArchiveRefused
from tiered.journal.identity import Identity, IdentityFile, Since
from tiered.journal.local_journal import renamed
from tiered.journal.named_topics import NamedTopics


class KnownArchive:
    """By the local identity: the epoch that the last start wanted, and the highest that stood in the store (`heard`).

    A store that has not heard of the latter, or of the one before the former, is another store.
    """

    def __init__(self, file: IdentityFile, catalog: Catalog, broker: str, log_uuid: str) -> None:
        self._file, self._catalog, self.broker = file, catalog, broker
        self.own_uuid = log_uuid  # of the log beside
        self.log_uuid = log_uuid  # by which the archive knows it: a broker set's is the first master's
        self.named = NamedTopics(catalog)
        self.high = 0  # the highest CommitLog offset of any INTENT
        self.heard = 0
        self.offline_from: int | None = None  # the log's end when a start first had to do without the store
        self._wanted = 0

    def load(self) -> Identity | None:
        """None: this directory never had an archive. Raises ArchiveRefused where it is another broker's."""
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
        """The store that holds this archive has at least this one."""
        return max(self._wanted - 1, self.heard)

    def goes_offline_at(self, log_end: int) -> None:
        """What is appended from here on may collide with what an archive out of reach names: checked later."""
        self.offline_from = log_end if self.offline_from is None else min(log_end, self.offline_from)

    def remember(self, entry: Intent | Expire, plan: int | None, epoch: int) -> None:
        """What an entry is about to name; durable when this returns. Raises StalePlan."""
        lasts = self.named.remember(entry, plan)
        if isinstance(entry, Intent):
            self.high = max(self.high, *(name.end for name in entry.names), 0)
        if self._file.takes_more:
            self._file.add(Since(self.high, self.heard, lasts))
        else:
            self.save(epoch)

    def may_have_given_again(self, log_end: int | None) -> bool:
        """Whether offsets that we gave without the store are among those that the archive names and we never knew.

        A log that ends below all of them goes on above (`log_end`: at a start); one that has grown past them can't be
        told apart.
        """
        end = self._catalog.rounds.intent_end
        is_news = self.offline_from is not None and end > max(self.high, self.offline_from)
        return is_news and (log_end is None or log_end >= end)

    def count_what_stands(self) -> None:
        """An EPOCH of ours stands: what was about to be put before it, and does not stand, never will.

        A member of a set must not go on above that when it is the master again: others gave these offsets meanwhile.
        """
        self.high = self._catalog.rounds.intent_end
        self.named.count_what_stands()

    def save(self, epoch: int) -> None:
        """All that is known, and nothing that is not any more; durable when this returns."""
        self.high = max(self.high, self._catalog.rounds.intent_end)
        identity = Identity(
            self.broker,
            self.own_uuid,
            epoch,
            self.high,
            self.named.everything(),
            self.offline_from,
            self.heard,
            "" if self.log_uuid == self.own_uuid else self.log_uuid,
        )
        assert identity.high >= self._catalog.rounds.intent_end, "what stands in the store is known here"
        assert identity.heard <= max(epoch, self._catalog.epoch), "no epoch is heard of that nobody took"
        self._file.write(identity)
