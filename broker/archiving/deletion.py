"""Deletion of topics and groups: which state is deleted in memory, on disk and in the archive, and in which order.

A tombstone in the archive hides the messages of a deleted topic, so that no offset is assigned twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from broker.archiving.environment import InThread
from broker.archiving.restore import RestoredTables
from broker.clients.registration import Registration
from broker.intake.replication import Replication
from broker.long_polling.message_arriving import MessageArriving
from broker.pop.pop_book import PopBook
from broker.store.message_store import MessageStore
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.journal import Journal
from broker.tables.retry_names import RetryNames
from broker.tables.state_file import SyncLog
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from infra.disk.filesystem import Disk
from infra.loop.threads import SYSTEM_THREADS, Threads
from infra.objects.store import ObjectStoreError
from neve.archive.format.journal import Topic
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode
from tiered.journal.errors import Fenced
from tiered.journal.writer import JournalWriter

log = logging.getLogger(__name__)


class Tombstones(Protocol):
    """Interface of the archive to topic deletion."""

    def has_named(self, topic: str) -> bool:
        """Return whether the archive names offsets of a topic, or may soon."""
        ...

    def restart_at_zero(self, topic: str) -> bool:
        """Return whether a topic created again may start at offset 0; the caller deletes it in the same loop step."""
        ...

    async def record(self, topic: str, minimums: Mapping[int, int]) -> None:
        """Record that the archive hides a deleted topic's messages below these offsets.

        All these offsets have to be on the local disk, in the log or as a deleted queue's end. The entry may be written
        even if this fails, and a start that can't read it must not assign any of them again. In a broker set, the
        deletion has to be confirmed. Raises BrokerError if the archive can't record it.
        """
        ...


class NoTombstones:
    """Tombstones of a broker without an archive. If one was switched off, the offsets that it names are unknown."""

    def __init__(self, disk: Disk, local: Path) -> None:
        """Create it; `local` is the directory of an archive's local files, if there is one."""
        self._disk, self._local = disk, local

    def has_named(self, topic: str) -> bool:
        return self._disk.exists(self._local)

    def restart_at_zero(self, topic: str) -> bool:
        return not self.has_named(topic)

    async def record(self, topic: str, minimums: Mapping[int, int]) -> None:
        """Do nothing: there is no journal."""


class JournalTombstones:
    """Tombstones in the journal."""

    def __init__(self, journal: JournalWriter, in_thread: InThread, *, is_member: bool) -> None:
        """Create it.

        `in_thread` runs calls one after the other, in a thread apart from those that save the broker's files: a store
        that hangs blocks a thread for minutes. `is_member`: the broker is a member of a broker set.
        """
        self._journal, self._in_thread, self._is_member = journal, in_thread, is_member

    def has_named(self, topic: str) -> bool:
        return topic in self._journal.named

    def restart_at_zero(self, topic: str) -> bool:
        return self._journal.restart_at_zero(topic)

    async def record(self, topic: str, minimums: Mapping[int, int]) -> None:
        if self._is_member:
            minimums = self._named_of(topic, minimums)
            current = self._journal.catalog.topic_entry(topic)
            if not any(minimums.values()) or (current and current.deleted and current.minimums == minimums):
                return
        entry = Topic(topic=topic, deleted=True, minimums=dict(minimums))
        try:
            await self._in_thread(self._journal.append, entry)
        except (ObjectStoreError, Fenced) as error:
            raise BrokerError(
                ResponseCode.SYSTEM_BUSY, f"topic {topic} can't be deleted now: the archive can't record it: {error}"
            ) from error

    def _named_of(self, topic: str, minimums: Mapping[int, int]) -> dict[int, int]:
        """Limit tombstone offsets in a broker set to those that the archive names.

        Electable members have all messages that the archive names. They may assign higher offsets again, so a tombstone
        must not cover those. The archive's next expiry run adds the rest, once all members have it.
        """
        catalog = self._journal.catalog
        named = catalog.named_offsets(topic)
        return {
            queue: max(min(offset, named.get(queue, -1) + 1), catalog.recorded_minimum(topic, queue))
            for queue, offset in minimums.items()
        }


class PendingDeletions:
    """Topics whose deletion is in the log but not confirmed by the broker set.

    If the log is truncated below the deletion, the topic is unchanged. Deletions that are pending when this broker
    stops being the master are executed by the slave's replay of the log.
    """

    def __init__(self, store: MessageStore, replication: Replication) -> None:
        self._store, self._replication = store, replication
        self._topics: dict[str, int] = {}  # topic → end offset of the log record that deletes it

    @property
    def term(self) -> int:
        """Leadership term in which a deletion begins; see `Replication`."""
        return self._replication.term

    def add(self, topic: str) -> None:
        """Add a topic whose deletion is the log's last record. It is confirmed immediately if no slave has to."""
        self._topics[topic] = self._store.max_physical_offset
        self.confirmed()

    async def deleted(self, term: int) -> None:
        """Wait until all deletions of this term are executed. Raises BrokerError if that is unknown in time."""
        await self._replication.replicated(max(self._topics.values(), default=0), term)
        self.confirmed()  # without slaves to wait for, no other event follows the fsync

    def confirmed(self) -> None:
        """Execute the confirmed deletions. Messages of a topic that was created again since are kept."""
        store = self._store
        for topic, end in [item for item in self._topics.items() if item[1] <= store.visibility.confirmed]:
            del self._topics[topic]
            if store.queues.deleted_up_to(topic) < end:
                store.queue_changes.delete_topic(topic, below=end)

    def forget(self) -> None:
        """Forget all topics: this broker is no longer the master."""
        self._topics.clear()


class TopicDeletion:
    """Deletes topics: for clients immediately, while the archive expires its objects by its own rules.

    A topic that was never archived begins at offset 0 when it is created again, as in RocketMQ. Any other topic resumes
    above its last offset. So does a topic whose deletion was completed by a start after a crash.
    """

    def __init__(
        self,
        *,
        store: MessageStore,
        journal: Journal,
        sync_log: SyncLog,
        tombstones: Callable[[], Tombstones],
        tables: RestoredTables,
        retry_names: RetryNames,
        pops: PopBook,
        arriving: MessageArriving,
        registration: Registration,
        pending_deletions: PendingDeletions | None = None,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        """Create the service.

        `tombstones` is called late, because the archive is attached after this is created. `pending_deletions` is set
        on members of a broker set.
        """
        self._threads = threads
        self._pending = pending_deletions
        self._store, self._journal, self._sync_log, self._tombstones = store, journal, sync_log, tombstones
        self._topics, self._groups, self._offsets = tables
        self._retry_names = retry_names
        self._pops, self._arriving, self._registration = pops, arriving, registration

    async def delete(self, topic: str) -> None:
        """Delete a topic and the retry topics that belong to it alone.

        Returns when the deletion is durable, recorded in the archive and registered with the name servers.
        """
        if self._topics.select(topic) is None:
            return
        # If the disk refuses the queue state, the deletion fails and the topic is unchanged.
        await self._threads.run(self._store.queues.records.write, self._store.queue_changes.image())
        if self._pending is not None:
            await self._delete_in_set(topic, self._pending)
            return
        # Of all its queues, including those of an earlier topic of this name: only the newest tombstone counts.
        tombstones, recorded = self._tombstones(), self._store.queues.following_of(topic)
        retries = [name for group in self._groups.groups for name in self._retry_names.deleted_with(group, topic)]
        named = tombstones.has_named(topic)
        if named:
            await self._record(topic, recorded)
        begins_again = not named and tombstones.restart_at_zero(topic)
        if not named and not begins_again:  # an offload round has named it meanwhile
            await self._record(topic, recorded)
        # No await between restart_at_zero and here: no message may be appended in between.
        ends = self._store.queues.following_of(topic)
        self._delete_now(topic, ends, begins_again=begins_again)
        await self._threads.run(self._store.queue_changes.save_deletions)
        await self._save()
        self._arriving.release_topic(topic)
        for retry in retries:
            await self.delete(retry)
        await self._registration.now()
        # Last, because the topic is deleted already: if this fails, the archive's next expiry run records it.
        if not begins_again and ends != recorded:  # messages arrived meanwhile; a round may have named them
            await tombstones.record(topic, ends)

    async def _delete_in_set(self, topic: str, pending: PendingDeletions) -> None:
        """Delete a topic in a broker set. The archive records the deletion only after it is confirmed.

        A master that is partitioned from its slaves may still reach the store. Its successor would then have the topic
        without its archived messages.
        """
        term, wanted = pending.term, [topic]
        removed: dict[str, Mapping[int, int]] = {}
        for name in wanted:
            if self._topics.select(name) is not None:
                wanted += [
                    retry for group in self._groups.groups for retry in self._retry_names.deleted_with(group, name)
                ]
                removed[name] = self._store.queues.following_of(name)
                self._delete_now(name, removed[name], begins_again=False)
        await self._save()
        for name in removed:
            self._arriving.release_topic(name)
        await self._registration.now()
        await pending.deleted(term)
        await self._threads.run(self._store.queue_changes.save_deletions)
        for name, ends in removed.items():
            try:
                await self._tombstones().record(name, ends)
            except BrokerError as error:
                log.warning("%s is deleted, the next expiry run records it in the archive: %s", name, error)

    async def _save(self) -> None:
        await self._topics.file.save()
        await self._offsets.file.save()

    def _delete_now(self, topic: str, ends: Mapping[int, int], *, begins_again: bool) -> None:
        """Log the deletion in the metadata log and apply it; no I/O but that append.

        No table may be saved with this change before the store has saved the deletion. Otherwise a start would skip the
        record and find the queues. If the store can't save it, this broker ends. The next start then deletes the queues
        by the record, before the archive reads them.
        """
        change = self._topics.deletion(topic, ends, begins_again=begins_again)
        self._journal.record(change)
        if self._pending is None:
            self._store.queue_changes.delete_topic(topic, restart_at_zero=begins_again)
        else:
            self._pending.add(topic)
        self._topics.apply(change)
        self._pops.drop(topic=topic)  # before the offsets, which a start overwrites from the pop book
        self._offsets.apply(change)

    async def _record(self, topic: str, ends: Mapping[int, int]) -> None:
        """Record a tombstone, after fsyncing the log.

        The outcome of the write may stay unknown, and the topic continues then. If its offsets were not on disk, a
        start without the archive would assign them again, and the tombstone would hide those messages.
        """
        await self._sync_log()
        await self._tombstones().record(topic, ends)


class GroupDeletion:
    """Deletes groups: settings and pop state, and their committed offsets only on request."""

    def __init__(
        self,
        *,
        journal: Journal,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        pops: PopBook,
    ) -> None:
        self._journal, self._groups, self._offsets, self._pops = journal, groups, offsets, pops

    async def delete(self, group: str, *, with_offsets: bool) -> None:
        """Delete a group; returns when the deletion is durable."""
        change = self._groups.deletion(group, with_offsets=with_offsets)
        self._journal.record(change)
        self._groups.apply(change)
        self._pops.drop(group=group)  # before the offsets, which a start overwrites from the pop book
        self._offsets.apply(change)
        await self._groups.file.save()
        if with_offsets:
            await self._offsets.file.save()
