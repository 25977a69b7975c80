"""Syncs of the log before a table file is saved."""

from __future__ import annotations

from broker.intake.flusher import Flusher
from broker.intake.replication import Replication
from broker.store.message_store import MessageStore
from infra.loop.threads import Threads


class LogSync:
    """Makes durable the part of the log that a table file assumes."""

    def __init__(self, store: MessageStore, flusher: Flusher, replication: Replication, threads: Threads) -> None:
        self._store, self._flusher, self._replication, self._threads = store, flusher, replication, threads

    async def positions(self) -> None:
        """Sync the log before positions are saved, in a set on all in-sync replicas.

        Saved positions assume that the log has the records below them. A member whose log was truncated would
        otherwise, as master again, have positions of lost records.
        """
        term, end, leads = self._replication.term, self._store.max_physical_offset, not self._store.end.is_following
        await self._flusher.flush_now()
        if leads:
            await self._replication.replicated(end, term)
        await self.deletions()

    async def deletions(self) -> None:
        """Save deletions of topics before a table that contains one: later starts do not read its record."""
        if self._store.queues.records.has_unsaved_deletions:
            await self._threads.run(self._store.queue_changes.save_deletions)
